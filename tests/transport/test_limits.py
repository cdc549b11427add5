"""How much a peer may ask of this process: each limit of SECURITY.md, on the decoder or on real sockets."""

from __future__ import annotations

import ctypes.util
import logging
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from tests.malformed import nested
from tests.transport.test_sockets import DEADLINE_S, Raw, open_files, pump

from offbeat.errors import ProtocolError
from offbeat.transport import shm, stream, tcp, wire
from offbeat.transport.base import Closed, Message
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.tls import Tls

pytestmark = pytest.mark.skipif(not shm.AVAILABLE, reason="the local half of these needs Linux")


@pytest.fixture
def server() -> Iterator[SocketHub]:
    hub = SocketHub("secret")
    yield hub
    hub.close()


def decoded(header: Any) -> wire.Header:
    return wire.decode_header(msgpack.packb(header))


# The header.


def test_a_header_may_be_nested_only_so_deep() -> None:
    most = {"kind": nested(wire.DEPTH_MAX - 2)}
    assert decoded(most) == most
    for depth in (wire.DEPTH_MAX - 1, 200, 480):
        with pytest.raises(ProtocolError, match=rf"nested more than {wire.DEPTH_MAX} deep"):
            decoded({"kind": nested(depth)})
    with pytest.raises(ProtocolError, match="StackError"):
        wire.decode_header(b"\x81\xa1k" + b"\x91" * 5000 + b"\x90")


def test_a_list_that_announces_millions_of_items_gets_no_memory_for_them() -> None:
    bomb = b"\x81\xa1k" + (b"\xdd" + struct.pack("!I", 1 << 20)) * 200 + b"\xc0" * (1 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ProtocolError, match="not msgpack"):
        wire.decode_header(bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "in KiB"


@pytest.mark.parametrize("packed", [b"\x81\xa1k\x81\x01\x02", b"\x81\xa1k\x81\xcb\x7f\xf8\0\0\0\0\0\0\x02"], ids=["integer", "nan"])
def test_keys_of_maps_are_texts_at_every_depth(packed: bytes) -> None:
    with pytest.raises(ProtocolError, match="text keys"):
        wire.decode_header(packed)


@pytest.mark.parametrize("value", [msgpack.ExtType(5, b"abc"), msgpack.Timestamp(3)])
def test_extension_types_are_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="exceeds max_ext_len"):
        decoded({"kind": value})


def test_an_error_names_no_bytes_of_the_header() -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.decode_header(b"\xa6secret\xa6secret")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_memory_that_there_is_not_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object, **others: object) -> None:
        raise MemoryError

    monkeypatch.setattr("offbeat.transport.wire.np.empty", none)
    with pytest.raises(ProtocolError, match="no memory for a message of 7 bytes"):
        wire.fresh(7)
    monkeypatch.setattr("offbeat.transport.wire.msgpack.unpackb", none)
    with pytest.raises(ProtocolError, match="no memory for the values in a header of 1 bytes"):
        wire.decode_header(b"\x80")


# Before the token.


def test_a_stranger_may_send_only_so_many_bytes(server: SocketHub) -> None:
    raw = Raw(server.listen(), "tcp")
    raw.hear(server)
    frame = wire.encode({"_clear": True})  # means nothing, and is no offence
    raw.sock.sendall(frame * (stream.UNVERIFIED_NBYTES // len(frame) + 20))
    assert "has not proved the token" in raw.hear_header(server)["_refused"]
    assert not server._connections
    raw.sock.close()


def test_a_stranger_may_send_no_descriptors(server: SocketHub) -> None:
    raw = Raw(server.listen(), "shm")
    raw.hear(server)
    before = open_files()
    reading, writing = os.pipe()
    socket.send_fds(raw.sock, [b"o"], [reading] * 7)
    assert "7 file descriptors that no message announces (expected none" in raw.hear_header(server)["_refused"]
    os.close(reading)
    os.close(writing)
    assert not server._connections
    assert len(open_files()) == len(before) - 1, "the connection's own"
    raw.sock.close()


CHANGES_KEYS = """
import ctypes, socket, sys
ssl = ctypes.CDLL(sys.argv[1])
for function in (ssl.TLS_client_method, ssl.SSL_CTX_new, ssl.SSL_new):
    function.restype = ctypes.c_void_p
sock = socket.create_connection((sys.argv[2], int(sys.argv[3])))
stranger = ctypes.c_void_p(ssl.SSL_new(ctypes.c_void_p(ssl.SSL_CTX_new(ctypes.c_void_p(ssl.TLS_client_method())))))
ssl.SSL_set_fd(stranger, sock.fileno())
assert ssl.SSL_connect(stranger) == 1
while ssl.SSL_key_update(stranger, 0) == 1 and ssl.SSL_do_handshake(stranger) == 1:
    pass
"""


@pytest.mark.skipif(ctypes.util.find_library("ssl") is None, reason="needs OpenSSL's library, which can change keys")
def test_a_stranger_that_changes_keys_without_end_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The records have no content, so that OpenSSL would read on and on: what counts is the bytes as they come."""
    tls = Tls(everywhere=True)
    server, worker = SocketHub("secret", local=False, tls=tls), SocketHub("secret", local=False, tls=tls)
    address = server.listen()
    connection = worker.connect(address)
    connection.send({"n": 1})
    pump([server, worker], lambda arrived: bool(arrived[0]))
    command = [sys.executable, "-c", CHANGES_KEYS, str(ctypes.util.find_library("ssl")), *map(str, address.tcp)]
    with subprocess.Popen(command) as stranger, caplog.at_level(logging.WARNING):
        longest, deadline = 0.0, time.monotonic() + DEADLINE_S
        while "has not proved the token" not in caplog.text:
            assert time.monotonic() < deadline and len(server._connections) <= 2
            began = time.process_time()
            server.poll(0.01)
            longest = max(longest, time.process_time() - began)
        assert stranger.wait(DEADLINE_S) == 0
    assert longest < 0.1, "seconds of the thread in one poll"
    connection.send({"n": 2})
    pump([server, worker], lambda arrived: bool(arrived[0]))
    for hub in (server, worker):
        hub.close()


def test_strangers_get_a_share_of_the_time(server: SocketHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for their turn come first, and the server is not woken by them meanwhile."""
    address = server.listen()
    strangers = [Raw(address, "tcp") for _ in range(4)]
    for raw in strangers:
        raw.hear(server)
    for raw in strangers:
        raw.sock.sendall(wire.encode({"_clear": True}))
    monkeypatch.setattr(server._share, "left", lambda now: -0.2)  # so that their turn comes in a second
    assert server.poll(0.05) == []
    assert len(server._resting) == 4 and all(stranger._gate_nbytes == 0 for stranger in server._resting)
    monkeypatch.undo()
    pump([server], lambda _: not server._resting and all(stranger._gate_nbytes for stranger in server._connections))
    for raw in strangers:
        raw.sock.close()


# With the token.


def test_descriptors_that_no_message_announces_do_not_pile_up(server: SocketHub) -> None:
    raw = Raw(server.listen(), "shm")
    raw.pass_gate(server)
    before = open_files()
    reading, writing = os.pipe()
    for number in range(5):
        socket.send_fds(raw.sock, [wire.encode({"n": number})], [reading] * 60)
    [arrived] = pump([server], lambda arrived: any(isinstance(item, Closed) for _, item in arrived[0]))
    assert [item.header for _, item in arrived if isinstance(item, Message)] == [{"n": 0}, {"n": 1}]
    end = arrived[-1][1]
    assert isinstance(end, Closed)
    assert "180 file descriptors that no message announces (expected at most 128)" in end.reason
    os.close(reading)
    os.close(writing)
    assert len(open_files()) == len(before) - 1
    raw.sock.close()


def test_memory_that_is_refused_is_closed() -> None:
    before = open_files()
    unsealed = os.memfd_create("unsealed")
    os.truncate(unsealed, 4096)
    with pytest.raises(ProtocolError, match="not sealed"):
        MemoryBlock.receive(unsealed)
    sealed = MemoryBlock.allocate(4096, "read only")
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        MemoryBlock.receive(os.open(f"/proc/self/fd/{sealed.descriptor}", os.O_RDONLY))
    sealed.close()
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(ProtocolError, match="cannot be mapped"):
        MemoryBlock.receive(reading)
    assert open_files() == before


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_only_so_many_connections_at_a_time(server: SocketHub, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CONNECTIONS_MAX", 2)
    address = server.listen()
    worker = SocketHub("secret", local=kind == "shm")
    first, second = worker.connect(address), worker.connect(address)
    for connection in (first, second):
        connection.send({"n": 1})
    pump([server, worker], lambda arrived: len(arrived[0]) == 2)
    third = worker.connect(address)
    third.send({"n": 3})
    [arrived, answers] = pump([server, worker], lambda arrived: bool(arrived[1]))
    assert arrived == []
    [(which, closed)] = answers
    assert which is third
    assert isinstance(closed, Closed)
    assert "refused: this process has 2 connections, and takes no more" in closed.reason
    first.close()
    pump([server, worker], lambda arrived: bool(arrived[0]))
    fourth = worker.connect(address)
    fourth.send({"n": 4})
    [arrived, _] = pump([server, worker], lambda arrived: bool(arrived[0]))
    assert [item.header for _, item in arrived if isinstance(item, Message)] == [{"n": 4}]
    second.send({"n": 2})
    pump([server, worker], lambda arrived: bool(arrived[0]))
    worker.close()


def test_connections_leave_descriptors_to_the_process() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
        assert tcp.connections_max() == 500 - tcp.SPARE_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert tcp.connections_max() <= tcp.CONNECTIONS_MAX
