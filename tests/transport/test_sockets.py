"""Peers that die, lie, stay silent or speak something else, on real sockets; memory blocks; and what is left afterwards: nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import resource
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offbeat.errors import ConfigurationError, JobError
from offbeat.transport import hub as hub_module
from offbeat.transport import shm, tcp, wire
from offbeat.transport.base import Address, Arrivals, Closed, Message
from offbeat.transport.handshake import ClientHandshake, channel
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.transport.stream import StreamConnection

DEADLINE_S = 30.0
MB = 1 << 20
pytestmark = pytest.mark.skipif(not shm.AVAILABLE, reason="the local half of these needs Linux")


def pump(hubs: list[SocketHub], until: Callable[[list[Arrivals]], bool]) -> list[Arrivals]:
    deadline = time.monotonic() + DEADLINE_S
    arrived: list[Arrivals] = [[] for _ in hubs]
    while not until(arrived):
        assert time.monotonic() < deadline, f"nothing more came after {[part[-1:] for part in arrived]}"
        for hub, part in zip(hubs, arrived, strict=True):
            part.extend(hub.poll(0.002))
    return arrived


class Raw:
    """A peer made by hand, on a blocking socket."""

    def __init__(self, address: Address, kind: str) -> None:
        if kind == "shm":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(f"\0{address.local}")
            self.channel = channel("local", address.local, os.geteuid(), os.geteuid())
        else:
            self.sock = socket.create_connection(address.tcp)
            self.channel = channel("tcp")
        self.sock.settimeout(DEADLINE_S)

    def hear(self, hub: SocketHub) -> bytes:
        """What the server says next."""
        self.sock.setblocking(False)
        deadline = time.monotonic() + DEADLINE_S
        try:
            while time.monotonic() < deadline:
                assert hub.poll(0.002) == []
                with contextlib.suppress(BlockingIOError):
                    return self.sock.recv(1 << 16)
        finally:
            self.sock.settimeout(DEADLINE_S)
        raise AssertionError("the server said nothing")

    def hear_header(self, hub: SocketHub) -> wire.Header:
        return wire.decode_header(self.hear(hub)[20:])

    def pass_gate(self, hub: SocketHub, token: str = "secret") -> None:
        gate = ClientHandshake(token, lambda: self.channel)
        shown = gate.answer(self.hear_header(hub))
        assert shown is not None
        self.sock.sendall(wire.encode(shown))
        gate.answer(self.hear_header(hub))
        assert gate.open


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server() -> Iterator[SocketHub]:
    hub = SocketHub("secret")
    yield hub
    hub.close()


def open_files() -> list[str]:
    gc.collect()
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{entry}").split(":")[0])
    return sorted(found)


# Peers that die.


@pytest.mark.parametrize("cut", ["prefix", "header", "payload", "region"])
def test_a_peer_that_dies_in_the_middle_of_a_message(server: SocketHub, kind: str, cut: str) -> None:
    raw = Raw(server.listen(), kind)
    raw.pass_gate(server)
    raw.sock.sendall(wire.encode({"n": 1}))
    [[(connection, _)]] = pump([server], lambda arrived: bool(arrived[0]))
    memory = bytearray(b"7" * 100_000)
    connection.bind("gradient", memoryview(memory))
    header = {"n": 2, "_region": ["gradient", 100_000]} if cut == "region" and kind == "tcp" else {"n": 2}
    whole = wire.encode(header, 100_000) + b"x" * 100_000
    raw.sock.sendall(wire.encode({"n": "whole"}) + whole[: {"prefix": 9, "header": 24}.get(cut, 50_000)])
    raw.sock.close()
    [arrived] = pump([server], lambda arrived: len(arrived[0]) >= 2)
    assert isinstance(arrived[0][1], Message)
    assert arrived[0][1].header == {"n": "whole"}
    assert arrived[1:] == [(connection, Closed("end of stream in the middle of a message"))]
    assert server.poll(0) == []


# Peers that are not ours.


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(5000),
        wire.MAGIC + b"\x63" * 40,
        wire.encode({"kind": "push"}),
        wire.encode({}, 1 << 40),
        b"\0" * 5,
    ],
    ids=["http", "noise", "version", "no proof", "payload", "zeros"],
)
def test_what_a_stranger_says_is_not_heard(server: SocketHub, kind: str, said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    address = server.listen()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            raw = Raw(address, kind)
            raw.hear(server)
            raw.sock.sendall(said)
            refusal = raw.hear_header(server)
            assert len(refusal["_refused"]) > 10
            assert raw.hear(server) == b""
            raw.sock.close()
    assert len(caplog.records) == 1, "one warning for each address"
    assert "closed the connection of" in caplog.text


def test_silent_peers_hold_up_nobody_and_are_dropped(server: SocketHub, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = server.listen()
    silent = [Raw(address, kind) for _ in range(40)]
    worker = SocketHub("secret", local=kind == "shm")
    connection = worker.connect(address)
    connection.send({"n": 1})
    [arrived, _] = pump([server, worker], lambda arrived: bool(arrived[0]))
    assert [message.header for _, message in arrived if isinstance(message, Message)] == [{"n": 1}]
    worker.connect(address).send({"n": 2})
    pump([server, worker], lambda arrived: bool(arrived[0]))
    monkeypatch.setattr(hub_module, "HANDSHAKE_TIMEOUT_S", 0.0)
    pump([server, worker], lambda _: not any(server._unverified.values()))
    for raw in silent:
        while raw.sock.recv(1000):
            pass  # The nonce, then the end: a server that kept it would run into the deadline.
        raw.sock.close()
    connection.send({"n": 3})
    pump([server, worker], lambda arrived: bool(arrived[0]))
    worker.close()


def test_a_storm_is_let_in_slowly_and_bounded_and_a_worker_gets_in(
    server: SocketHub, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "HANDSHAKES_MAX", 8)
    monkeypatch.setattr(hub_module, "RETRY_PAUSE_S", 0.001)
    address = server.listen()
    worker = SocketHub("secret", local=kind == "shm")
    connection = worker.connect(address)
    connection.send({"n": 1})  # before the handshake, which the storm ends once or more
    storm = [Raw(address, kind) for _ in range(60)]
    server.poll(0)
    assert len(server._connections) <= min(8, hub_module.ACCEPTS_PER_TURN), "a turn accepts a bounded number"
    deadline = time.monotonic() + DEADLINE_S
    for raw in storm[:20]:
        with contextlib.suppress(OSError):  # some have been put off by now
            raw.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    while server._paused or len(server._unverified[kind == "shm"]) < 8:
        assert time.monotonic() < deadline
        server.poll(0.001)
    [arrived, _] = pump([server, worker], lambda arrived: bool(arrived[0]))
    assert [message.header for _, message in arrived if isinstance(message, Message)] == [{"n": 1}]
    assert len(server._connections) <= 8 + 1
    for raw in storm:
        raw.sock.close()
    worker.close()


def test_a_stranger_has_little_memory_here(server: SocketHub, kind: str) -> None:
    raw = Raw(server.listen(), kind)
    raw.hear(server)
    [connection] = server._connections
    assert len(connection._reader._stage) < 2048
    raw.sock.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak"),
        (wire.MAGIC + b"\x09" + b"\0" * 30, "version 9"),
        (b"", "end of stream before the token"),
    ],
)
def test_a_server_of_another_kind_is_named_so(said: bytes, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker = SocketHub("secret")
        connection = worker.connect(Address("elsewhere", listener.getsockname(), ""))
        accepted, _ = listener.accept()
        accepted.sendall(said)
        accepted.close()
        [[(which, closed)]] = pump([worker], lambda arrived: bool(arrived[0]))
        assert which is connection
        assert isinstance(closed, Closed)
        assert why in closed.reason
        worker.close()


def test_a_member_that_breaks_the_wire_is_closed_after_what_it_said_before(server: SocketHub, kind: str) -> None:
    raw = Raw(server.listen(), kind)
    raw.pass_gate(server)
    raw.sock.sendall(wire.encode({"n": 1}) + wire.encode({"n": 2}, (1 << 30) + 1))
    [arrived] = pump([server], lambda arrived: len(arrived[0]) >= 2)
    assert isinstance(arrived[0][1], Message)
    assert isinstance(arrived[1][1], Closed)
    assert "payload of 1073741825 bytes is over the limit" in arrived[1][1].reason
    assert "1073741825" in wire.decode_header(raw.sock.recv(1000)[20:])["_refused"]
    raw.sock.close()


def test_announced_memory_that_does_not_come(server: SocketHub) -> None:
    raw = Raw(server.listen(), "shm")
    raw.pass_gate(server)
    raw.sock.sendall(wire.encode({"n": 1}, 0, 2))
    [[(_, closed)]] = pump([server], lambda arrived: bool(arrived[0]))
    assert closed == Closed("2 blocks of memory were announced, 0 came")
    raw.sock.close()


def test_a_server_out_of_descriptors_serves_those_it_has(server: SocketHub, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    address = server.listen()
    worker = SocketHub("secret", local=kind == "shm")
    connection = worker.connect(address)
    connection.send({"n": 1})
    pump([server, worker], lambda arrived: bool(arrived[0]))
    waiting = socket.socket(socket.AF_UNIX if kind == "shm" else socket.AF_INET)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as fillers:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.enter_context(open(os.devnull))
            waiting.connect(f"\0{address.local}" if kind == "shm" else address.tcp)
            assert server.poll(0.01) == []
            connection.send({"n": 2})
            pump([server, worker], lambda arrived: bool(arrived[0]))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "ulimit -n" in caplog.text
    waiting.setblocking(False)
    with pytest.raises(BlockingIOError):
        waiting.recv(1000)
    readable = select.poll()  # its descriptor may be beyond what select.select takes
    readable.register(waiting, select.POLLIN)
    pump([server], lambda _: bool(readable.poll(0)))  # no connection has ended, but there are descriptors again
    assert b"_nonce" in waiting.recv(1000)
    waiting.close()
    worker.close()


# Which way, and what is left.


@pytest.mark.parametrize(("hosts", "shares"), [(("a", "a"), True), (("a", "b"), False), ((None, None), True), (("a", None), False)])
def test_the_host_identity_chooses_the_way(hosts: tuple[str | None, str | None], shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hubs = []
    for host in hosts:
        if host is None:
            monkeypatch.delenv(shm.HOST_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(shm.HOST_VARIABLE, host)
        hubs.append(SocketHub("secret"))
    up = hubs[1].connect(hubs[0].listen())
    up.send({"n": 1})
    [[(down, _)], _] = pump(hubs, lambda arrived: bool(arrived[0]))
    assert up.shares_memory == down.shares_memory == shares
    for hub in hubs:
        hub.close()


def test_processes_whose_numbers_mean_others_share_no_memory() -> None:
    """A lock's holder that stands still is killed by its number, which in another container is that of a stranger."""
    words = [sys.executable, "-c", "from offbeat.transport.shm import host_identity; print(host_identity())"]
    here, there = (subprocess.run([*before, *words], capture_output=True, text=True) for before in ([], ["unshare", "--pid", "--fork"]))
    if there.returncode:
        pytest.skip(f"this user may not make process namespaces: {there.stderr.strip()}")
    assert here.stdout.strip() == shm.host_identity() != there.stdout.strip()


def test_one_hub_serves_both_kinds_and_falls_back_to_tcp(server: SocketHub) -> None:
    address = server.listen()
    workers = [SocketHub("secret"), SocketHub("secret", local=False), SocketHub("secret")]
    addresses = [address, address, address._replace(local="offbeat-of-a-namesake")]
    connections = [worker.connect(where) for worker, where in zip(workers, addresses, strict=True)]
    assert [connection.shares_memory for connection in connections] == [True, False, False]
    for connection in connections:
        connection.send({"n": 1})
    pump([server, *workers], lambda arrived: len(arrived[0]) == 3)
    for worker in workers:
        worker.close()


def test_a_name_that_another_has_taken_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server comes back at its port, and another user's process has the name of its local socket."""
    squatter, name = tcp.listen_local()
    same_user = tcp.same_user
    server, worker = SocketHub("secret", local_name=name), SocketHub("secret")
    address = server.listen()
    assert address.local not in ("", name)

    def is_ours(sock: socket.socket) -> bool:
        return sock.getpeername() != f"\0{name}".encode() and same_user(sock)

    monkeypatch.setattr(tcp, "same_user", is_ours)
    assert not worker.connect(address._replace(local=name)).shares_memory
    pump([server, worker], lambda _: bool(worker._renamed))
    again = worker.connect(address._replace(local=name))
    assert again.shares_memory
    again.send({"n": 1})
    [arrived, _] = pump([server, worker], lambda arrived: bool(arrived[0]))
    assert [item.header for _, item in arrived if isinstance(item, Message)] == [{"n": 1}]
    for hub in (server, worker):
        hub.close()
    squatter.close()


def test_a_server_that_begins_to_listen_between_two_attempts_is_reached_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its two sockets it is the local one that listens first: a worker that came over TCP would count as one of another host."""
    earlier = SocketHub("secret")
    address = earlier.listen()
    earlier.close()
    server, worker = SocketHub("secret", local_name=address.local), SocketHub("secret")
    connect_tcp, listen_local = tcp.connect_tcp, tcp.listen_local

    def connect(*at: Any) -> socket.socket:
        server.listen(port=address.tcp[1])
        return connect_tcp(*at)

    def listen(name: str = "") -> tuple[socket.socket, str]:
        with pytest.raises(JobError):
            connect_tcp(*address.tcp)
        return listen_local(name)

    monkeypatch.setattr(tcp, "connect_tcp", connect)
    monkeypatch.setattr(tcp, "listen_local", listen)
    assert worker.connect(address).shares_memory
    for hub in (server, worker):
        hub.close()


def test_one_port_does_not_answer_for_another_on_one_machine() -> None:
    """Somebody who has taken the port of a process that has ended passes the handshake on to another process of the job."""
    server, worker = SocketHub("secret", local=False), SocketHub("secret", local=False)
    address = server.listen()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        worker.connect(address._replace(tcp=listener.getsockname()[:2]))
        outer, _ = listener.accept()
    inner = socket.create_connection(address.tcp)
    for sock in (outer, inner):
        sock.setblocking(False)
    closed: list[Closed] = []
    deadline = time.monotonic() + DEADLINE_S
    while not closed:
        assert time.monotonic() < deadline
        assert server.poll(0.002) == []
        closed += [item for _, item in worker.poll(0.002) if isinstance(item, Closed)]
        for one, other in ((outer, inner), (inner, outer)):
            with contextlib.suppress(BlockingIOError):
                other.sendall(one.recv(1 << 16))
    assert "passed the handshake on over another one" in closed[0].reason
    for each in (outer, inner, server, worker):
        each.close()


def test_a_wildcard_address_can_be_connected_to(server: SocketHub) -> None:
    address = server.listen("0.0.0.0")
    assert address.tcp[0] not in {"", "0.0.0.0"}


def test_an_address_of_another_machine_is_refused(server: SocketHub) -> None:
    with pytest.raises(ConfigurationError, match=r"'192\.0\.2\.7' is not an address of this machine"):
        server.listen("192.0.2.7", 4444)


def test_an_empty_token_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="token is empty"):
        SocketHub("")


def test_nothing_is_left_behind(kind: str) -> None:
    files, shared = open_files(), set(os.listdir("/dev/shm"))
    server, worker = SocketHub("secret"), SocketHub("secret", local=kind == "shm")
    address = server.listen()
    up = worker.connect(address)
    blocks = [MemoryBlock.allocate(MB, "left"), MemoryBlock.allocate(0, "left")]
    up.send({"n": 1}, memory=blocks if kind == "shm" else [])
    [arrived, _] = pump([server, worker], lambda arrived: bool(arrived[0]))
    up.send({"n": "never received"}, memory=blocks if kind == "shm" else [], payload=[bytes(3 * MB)])
    silent = Raw(address, kind)
    assert len(open_files()) > len(files)
    for hub in (server, worker, server):
        hub.close()
    for _, message in arrived:
        assert isinstance(message, Message)
        for block in (*blocks, *message.memory):
            block.close()
    silent.sock.close()
    del arrived, message
    assert open_files() == files
    # Semaphores come and go there with the DataLoaders of tests that run beside this one.
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")} <= shared


def test_descriptors_of_an_unfinished_message_are_closed(server: SocketHub) -> None:
    raw = Raw(server.listen(), "shm")
    raw.pass_gate(server)
    files = open_files()
    block = MemoryBlock.allocate(MB, "unfinished")
    socket.send_fds(raw.sock, [wire.encode({"n": 1}, 0, 1)[:-1]], [block.descriptor])
    block.close()
    assert server.poll(0.01) == []
    raw.sock.close()
    [arrived] = pump([server], lambda arrived: bool(arrived[0]))
    assert isinstance(arrived[0][1], Closed)
    for _ in range(2):
        files.remove("socket")  # Both ends of the connection.
    assert open_files() == files


# Memory.


def test_a_block_larger_than_the_machine_is_refused_in_words() -> None:
    for block in (MemoryBlock, PrivateBlock):
        with pytest.raises(ConfigurationError, match=r"1,125,899,906,842,624 bytes of memory for 'gradients'.*are available.*OFFBEAT_HOST"):
            block.allocate(1 << 50, "gradients")


def test_a_block_outlives_its_closing_while_somebody_looks_at_it() -> None:
    for block in (MemoryBlock.allocate(100, "kept"), PrivateBlock.allocate(100, "kept")):
        part = block.view[10:20]
        part[0] = 3
        block.close()
        assert part[0] == 3


def test_a_descriptor_closed_behind_our_back_ends_the_wait(server: SocketHub, kind: str) -> None:
    worker = SocketHub("secret", local=kind == "shm")
    connection = worker.connect(server.listen())
    connection.send({"n": 1})
    pump([server, worker], lambda arrived: bool(arrived[0]))
    assert isinstance(connection, StreamConnection)
    os.close(connection.sock.fileno())
    threading.Timer(0.1, lambda: connection.send({"kind": "heard"})).start()  # as the heartbeat does
    [(which, closed)] = worker.poll(DEADLINE_S)
    assert which is connection
    assert isinstance(closed, Closed)
    assert "descriptor of its socket was closed by this process" in closed.reason
    connection.send({"kind": "heard"})
    assert worker.poll(0.0) == []
    worker.close()


def test_what_the_network_gives_up_was_not_closed_by_this_process(server: SocketHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ETIMEDOUT the socket is there, though it cannot be shut down any more."""

    class GivenUp:
        def __getattr__(self, name: str) -> Any:
            if name == "shutdown":
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            return getattr(real, name)

    def timed_out() -> bool:
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    worker = SocketHub("secret", local=False)
    connection: Any = worker.connect(server.listen())
    pump([server, worker], lambda arrived: True)
    real = connection.sock
    with monkeypatch.context() as patch:
        patch.setattr(connection, "sock", GivenUp())
        patch.setattr(connection._outbox, "flush", timed_out)
        patch.setattr(connection._gatebox, "flush", timed_out)
        connection._flush()
    assert connection.closed_by_others is None
    worker.close()


def test_a_peer_that_ends_in_the_moment_of_the_connection_counts_as_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that tries to reach a dying server again and again comes to this; its thread must go on."""
    listener = socket.create_server(("127.0.0.1", 0))
    create = socket.create_connection

    def connected_and_reset(address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        sock = create(address, timeout)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        return sock

    monkeypatch.setattr(socket, "create_connection", connected_and_reset)
    hub = SocketHub("secret", local=False)
    with listener, contextlib.closing(hub), pytest.raises(JobError, match=r"nobody listens at 127\.0\.0\.1"):
        hub.connect(Address("another", listener.getsockname()[:2], ""))
