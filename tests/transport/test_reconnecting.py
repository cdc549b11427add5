"""A connection whose socket breaks while both processes live goes on over another: nothing is lost, doubled, or seen by anybody above."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from tests.contract.test_transport import Pair as Ends
from tests.contract.test_transport import World, headers
from tests.transport.test_sockets import DEADLINE_S, MB, pump

from offbeat.transport import hub as hub_module
from offbeat.transport import stream, tcp, wire
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.stream import StreamConnection

CUTS: dict[str, Callable[[socket.socket], None]] = {
    "both ways": lambda sock: sock.shutdown(socket.SHUT_RDWR),
    "sending": lambda sock: sock.shutdown(socket.SHUT_WR),
    "receiving": lambda sock: sock.shutdown(socket.SHUT_RD),
}


class Pair(Ends):
    """A server and a worker that have met; `cut` ends the socket of one of them as something on the way would."""

    server: SocketHub
    worker: SocketHub
    up: StreamConnection
    down: StreamConnection

    def cut(self, end: Connection, how: str = "both ways") -> None:
        assert isinstance(end, StreamConnection)
        with contextlib.suppress(OSError):  # its present socket has ended already
            descriptor = os.dup(end.sock.fileno())
            with socket.socket(fileno=descriptor) as sock:
                CUTS[how](sock)


@pytest.fixture(params=["shm", "tcp", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    world = World(request.param)
    yield Pair(world)
    for hub in world.hubs:
        hub.close()


@pytest.mark.parametrize("how", CUTS)
@pytest.mark.parametrize("of", ["up", "down"])
def test_whichever_end_breaks_the_connection_goes_on_at_once(pair: Pair, how: str, of: str) -> None:
    broken, began = pair.up.sock, time.monotonic()
    pair.cut(getattr(pair, of), how)
    pair.up.send({"n": 1})
    pair.down.send({"n": 2})
    arrived = pair.world.pump(lambda arrived: all(arrived.values()) and pair.up.sock is not broken)
    assert arrived == {pair.server: [(pair.down, arrived[pair.server][0][1])], pair.worker: [(pair.up, arrived[pair.worker][0][1])]}
    assert headers(arrived[pair.server]) == [1] and headers(arrived[pair.worker]) == [2]
    assert time.monotonic() - began < 1.0


def test_messages_payloads_regions_and_memory_cross_many_breaks_once_and_in_order(pair: Pair) -> None:
    draw, nbytes, local = random.Random(7), 3 * MB, pair.up.shares_memory
    ours, theirs = bytearray(nbytes), bytearray(nbytes)
    for end, region in ((pair.up, ours), (pair.down, ours if local else theirs)):
        end.bind("gradient", memoryview(region))
    seen: dict[Connection, list[int]] = {pair.up: [], pair.down: []}
    sent, cuts = {pair.up: 0, pair.down: 0}, 0
    deadline = time.monotonic() + DEADLINE_S
    while any(len(seen[end]) < 120 for end in seen):
        assert time.monotonic() < deadline, f"{seen[pair.up][-1:]} and {seen[pair.down][-1:]} came last, after {cuts} breaks"
        for end in (pair.up, pair.down):
            if sent[end] < 120:
                n = sent[end]
                buffer = bytearray([n]) * draw.choice([1, 5000, 400_000])
                blocks = [MemoryBlock.allocate(4096 + n, "crossing")] if local and n % 5 == 0 else []
                end.send({"n": n, "size": len(buffer)}, payload=[buffer], memory=blocks)
                buffer[:] = bytes(len(buffer))
                for sent_block in blocks:
                    sent_block.close()
                sent[end] += 1
        if sent[pair.up] == 60 and not local:
            ours[:] = b"g" * nbytes
            pair.up.send_ahead("gradient", 0, MB)
            pair.up.send({"n": -1}, carry="gradient")
        if draw.random() < 0.2:
            pair.cut(draw.choice([pair.up, pair.down]), draw.choice(list(CUTS)))
            cuts += 1
        for hub, end in ((pair.server, pair.down), (pair.worker, pair.up)):
            for which, item in hub.poll(0.002):
                assert which is end and isinstance(item, Message), item
                n = item.header["n"]
                if n == -1:
                    assert theirs == ours
                    continue
                assert item.payload == bytes([n]) * item.header["size"]
                assert [block.nbytes for block in item.memory] == ([4096 + n] if local and n % 5 == 0 else [])
                for block in item.memory:
                    block.close()
                seen[end].append(n)
    assert seen == {pair.up: list(range(120)), pair.down: list(range(120))}
    assert cuts >= 5


def test_what_the_other_end_has_is_not_kept(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEPT_FRAMES", 16)
    for n in range(40):  # four times what is kept at most
        pair.up.send({"n": n}, payload=[bytes(100_000)])
        pair.world.pump_one(pair.server)
    pair.worker.poll(0.0)
    assert sum(len(piece.view) for piece in pair.up._outbox._all()) <= stream.KEPT_NBYTES + 2 * 100_000
    for n in range(4 * stream.KEPT_FRAMES):
        pair.up.send({"n": n})
        pair.world.pump_one(pair.server)
    pair.worker.poll(0.0)
    assert sum(1 for _ in pair.up._outbox._all()) <= 2 * stream.KEPT_FRAMES


def test_a_large_message_is_confirmed_once_and_a_region_not_by_itself(pair: Pair) -> None:
    """Each answer wakes the other end, and the view of a region that it keeps costs nothing."""
    before = pair.up.bytes_received
    nbytes = 6 * stream.KEPT_NBYTES
    for end in (pair.up, pair.down):
        end.bind("gradient", memoryview(bytearray(nbytes)))
    pair.up.send({"n": 0}, carry="gradient")
    if not pair.up.shares_memory:
        pair.up.send_ahead("gradient", 0, nbytes)
        pair.up.send({"n": 1})
    pair.world.pump(lambda come: headers(come[pair.server])[-1:] == [0 if pair.up.shares_memory else 1])
    assert not pair.worker.poll(0.0) and pair.up.bytes_received == before

    pair.up.send({"n": 2}, payload=[bytes(nbytes)])
    pair.world.pump_one(pair.server)
    assert not pair.worker.poll(0.0) and pair.up.bytes_received - before < 2 * len(wire.encode({"_got": 10 * nbytes}))
    assert not list(pair.up._outbox._all()), "what has come whole is not kept"


def test_what_one_end_has_closed_does_not_begin_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its farewell is lost with the socket."""
    pair.cut(pair.down)
    pair.server._forget(pair.down)
    pair.up.send({"n": "again"})
    [(which, closed)] = pair.world.pump_one(pair.worker)
    assert which is pair.up and isinstance(closed, Closed)
    assert pair.server.poll(0.0) == []


ENDING = """
import sys
from offbeat.transport.base import Address
from offbeat.transport.hub import SocketHub
host, name, port, local, kind = sys.argv[1:]
hub = SocketHub("secret", host=host, local=kind == "shm")
address = hub.listen()
hub.connect(Address(host, (name, int(port)), local)).send({"at": address})
while True:
    for connection, message in hub.poll(None):
        connection.send({"n": 1})
"""


@pytest.mark.parametrize("of", ["server", "client"])
@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_the_end_of_a_process_is_seen_at_once(kind: str, of: str) -> None:
    """Not after the time that a living one has to come back, at either end."""
    ours = SocketHub("secret", local=kind == "shm")
    address = ours.listen()
    arguments = [address.host, address.tcp[0], str(address.tcp[1]), address.local, kind]
    process = subprocess.Popen([sys.executable, "-c", ENDING, *arguments])
    try:
        [[(connection, hello)]] = pump([ours], lambda arrived: bool(arrived[0]))
        assert isinstance(hello, Message)
        if of == "server":
            connection.close()
            host, at, local = hello.header["at"]
            connection = ours.connect(Address(host, tuple(at), local))
            connection.send({"n": 0})
            pump([ours], lambda arrived: bool(arrived[0]))
        process.kill()
        began = time.monotonic()
        [[(which, closed)]] = pump([ours], lambda arrived: bool(arrived[0]))
        assert which is connection and isinstance(closed, Closed)
        assert time.monotonic() - began < hub_module.RETURN_S / 2
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        ours.close()


@pytest.mark.parametrize("known", [True, False])
def test_an_end_that_does_not_come_back_is_given_up_in_time(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process lives, as far as that is known, and does not poll; or has closed the connection, and could not say so."""
    monkeypatch.setattr(hub_module, "RETURN_S", 0.1)
    monkeypatch.setattr(hub_module, "RETURN_LIVING_S", 0.1 if known else DEADLINE_S)
    if not known:
        monkeypatch.setattr(tcp, "process_identity", lambda: "another-machine-1")
    world = World("tcp")
    pair = Pair(world)
    pair.cut(pair.down)
    [[(which, closed)]] = pump([pair.server], lambda arrived: bool(arrived[0]))
    assert which is pair.down and isinstance(closed, Closed)
    assert not pair.server._streams and not pair.server._pending
    for each in world.hubs:
        each.close()


def test_a_connection_that_is_closed_while_it_has_no_socket_is_not_heard_of_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.worker, "_connected", lambda address: None)
    pair.cut(pair.up)
    pump([pair.worker], lambda _: pair.up.broken is not None)
    pair.up.close()
    assert pair.worker.poll(0.05) == []
    assert pair.up not in pair.worker._connections and not pair.worker._pending


def test_a_process_without_descriptors_connects_again_once_it_has_some(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as without:
        without.setattr(tcp, "connect_local", none)
        without.setattr(tcp, "connect_tcp", none)
        pair.up.sock.shutdown(socket.SHUT_RDWR)
        pump([pair.worker, pair.server], lambda _: pair.up.broken is not None)
        assert pair.worker.poll(0.1) == []
    pair.up.send({"n": 1})
    assert headers(pair.world.pump_one(pair.server)) == [1]
