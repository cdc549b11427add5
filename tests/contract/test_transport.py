"""One suite for every transport: what `transport/base.py` promises, over memory, shared memory, TCP and TLS alike.

What only sockets can do (die half-way, speak nonsense) is in `tests/transport/test_sockets.py`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.support.memory_network import MemoryHub, MemoryNetwork

from offbeat.errors import ConfigurationError, JobError
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Hub, Message, SharedMemory
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.transport.tls import Tls

DEADLINE_S = 30.0
MB = 1 << 20


class World:
    """Makes hubs of one kind and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.shares_memory = kind in {"shm", "memory"}
        self.network = MemoryNetwork(shares_memory=self.shares_memory)
        self.hubs: list[Hub] = []

    def hub(self, token: str = "secret") -> Hub:
        memory = self.kind.startswith("memory")
        hub = (
            MemoryHub(self.network, token)
            if memory
            else SocketHub(token, local=self.kind == "shm", tls=Tls(everywhere=True) if self.kind == "tls" else None)
        )
        self.hubs.append(hub)
        return hub

    def block(self, nbytes: int) -> SharedMemory:
        return MemoryBlock.allocate(nbytes, "test") if self.kind == "shm" else PrivateBlock.allocate(nbytes, "test")

    def pump(self, until: Callable[[dict[Hub, Arrivals]], bool]) -> dict[Hub, Arrivals]:
        """Poll all hubs in turn until this is true of what has arrived."""
        deadline = time.monotonic() + DEADLINE_S
        arrived: dict[Hub, Arrivals] = {hub: [] for hub in self.hubs}
        while not until(arrived):
            assert time.monotonic() < deadline, f"nothing more came after {[part[-1:] for part in arrived.values()]}"
            for hub in self.hubs:
                arrived[hub] += hub.poll(0.002)
        return arrived

    def pump_one(self, hub: Hub, count: int = 1) -> list[tuple[Connection, Message | Closed]]:
        return self.pump(lambda arrived: len(arrived[hub]) >= count)[hub]


@pytest.fixture(params=["memory", "memory-copying", "shm", "tcp", "tls"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    for hub in made.hubs:
        hub.close()


class Pair:
    """A server and a worker that have met."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.server, self.worker = world.hub(), world.hub()
        self.address = self.server.listen()
        self.up = self.worker.connect(self.address)
        self.up.send({"kind": "hello"})
        [(self.down, message)] = world.pump_one(self.server)
        assert isinstance(message, Message)
        assert message.header == {"kind": "hello"}


@pytest.fixture
def pair(world: World) -> Pair:
    return Pair(world)


def headers(arrived: Arrivals) -> list[object]:
    return [message.header["n"] for _, message in arrived if isinstance(message, Message)]


def test_both_ends_say_whether_they_share_memory(pair: Pair) -> None:
    assert pair.up.shares_memory == pair.down.shares_memory == pair.world.shares_memory
    assert pair.up.peer
    assert pair.down.peer


def test_many_messages_keep_their_order_both_ways(pair: Pair) -> None:
    for n in range(3000):
        pair.up.send({"n": n})
        pair.down.send({"n": -n, "text": "x" * (n % 50)})
    arrived = pair.world.pump(lambda arrived: all(len(part) >= 3000 for part in arrived.values()))
    assert headers(arrived[pair.server]) == list(range(3000))
    assert headers(arrived[pair.worker]) == [-n for n in range(3000)]


def test_headers_arrive_as_msgpack_reads_them(pair: Pair) -> None:
    pair.up.send({"a": (1, 2.5, None, True), "b": {"c": b"\x00\xff", "d": "ü"}, "ids": {"3": "three"}, "n": 2**63})
    [(connection, message)] = pair.world.pump_one(pair.server)
    assert connection is pair.down
    assert isinstance(message, Message)
    assert message.header == {"a": [1, 2.5, None, True], "b": {"c": b"\x00\xff", "d": "ü"}, "ids": {"3": "three"}, "n": 2**63}
    assert len(message.payload) == 0
    assert message.memory == ()


def test_a_header_larger_than_any_buffer_arrives(pair: Pair) -> None:
    pair.up.send({"n": 1, "names": ["layer"] * 200_000})
    pair.up.send({"n": 2})
    arrived = pair.world.pump_one(pair.server, 2)
    assert headers(arrived) == [1, 2]


def test_large_regions_and_payloads_cross_in_both_directions(pair: Pair) -> None:
    nbytes = 8 * MB
    ends = {pair.up: pair.worker, pair.down: pair.server}
    shared = {f"{side}{i}": bytearray(nbytes) for side in "ud" for i in range(2)} if pair.world.shares_memory else {}
    regions: dict[tuple[Connection, str], bytearray] = {}
    for end, side in ((pair.up, "u"), (pair.down, "d")):
        for name in ("u0", "u1", "d0", "d1"):
            region = shared.get(name, bytearray(nbytes))
            regions[end, name] = region
            end.bind(name, memoryview(region))
            if name[0] == side:
                region[:] = bytes([ord(side), int(name[1]), 7, 9]) * (nbytes // 4)
    for i in range(2):
        for end, side in ((pair.up, "u"), (pair.down, "d")):
            end.send({"n": 2 * i}, carry=f"{side}{i}")
            end.send({"n": 2 * i + 1}, payload=[bytes([i]) * nbytes, b"", bytearray(b"tail")])
    arrived = pair.world.pump(lambda arrived: all(len(part) >= 4 for part in arrived.values()))
    for end, other in ((pair.up, "d"), (pair.down, "u")):
        assert headers(arrived[ends[end]]) == [0, 1, 2, 3]
        for i in range(2):
            assert regions[end, f"{other}{i}"] == bytes([ord(other), i, 7, 9]) * (nbytes // 4)
            message = arrived[ends[end]][2 * i + 1][1]
            assert isinstance(message, Message)
            assert message.payload == bytes([i]) * nbytes + b"tail"
    assert pair.world.shares_memory or pair.down.bytes_received > 4 * nbytes


def test_parts_of_a_region_are_sent_ahead_of_a_message(pair: Pair) -> None:
    """Here they are larger than any buffer, and cross while neither end polls; a part that has changed is sent again."""
    if pair.world.shares_memory:
        return
    ours, theirs = bytearray(b"a" * (8 * MB)), bytearray(8 * MB)
    pair.up.bind("gradient", memoryview(ours))
    pair.down.bind("gradient", memoryview(theirs))
    pair.up.send_ahead("gradient", 4 * MB, 8 * MB)
    pair.up.send_ahead("gradient", 0, 4 * MB)
    ours[MB : 5 * MB] = b"b" * (4 * MB)
    pair.up.send_ahead("gradient", MB, 5 * MB)
    pair.up.send({"n": 1})
    assert headers(pair.world.pump_one(pair.server)) == [1]
    assert theirs == ours


def test_an_end_learns_of_each_part_when_the_part_has_arrived(pair: Pair) -> None:
    if pair.world.shares_memory:
        return
    ours, theirs, seen = bytearray(range(200)), bytearray(200), []
    pair.up.bind("gradient", memoryview(ours))
    pair.down.bind("gradient", memoryview(theirs), lambda start, stop: seen.append((start, stop, bytes(theirs[start:stop]))))
    for start, stop in ((100, 200), (0, 100), (50, 150)):
        pair.up.send_ahead("gradient", start, stop)
    pair.up.send({"n": 1}, carry="gradient")
    assert headers(pair.world.pump_one(pair.server)) == [1]
    assert seen == [(start, stop, bytes(ours[start:stop])) for start, stop in ((100, 200), (0, 100), (50, 150))]


@pytest.mark.parametrize(("name", "start", "stop"), [("unbound", 0, 1), ("short", 5, 9), ("read only", 0, 8)])
def test_a_part_that_has_no_place_ends_the_connection(pair: Pair, name: str, start: int, stop: int) -> None:
    if pair.world.shares_memory:
        return
    pair.up.bind(name, memoryview(bytearray(16)))
    for bound, region in (("short", memoryview(bytearray(8))), ("read only", memoryview(bytes(8)))):
        pair.down.bind(bound, region)
    pair.up.send_ahead(name, start, stop)
    [(_, closed)] = pair.world.pump_one(pair.server)
    assert isinstance(closed, Closed)
    assert repr(name) in closed.reason


def test_an_empty_region_and_one_of_another_format_are_carried(pair: Pair) -> None:
    same = memoryview(bytearray(16)).cast("I")
    for end in (pair.up, pair.down):
        end.bind("empty", memoryview(bytearray()))
        end.bind("words", same if pair.world.shares_memory or end is pair.up else memoryview(bytearray(16)).cast("B", (4, 4)))
    pair.up.send({"n": 1}, carry="empty")
    pair.up.send({"n": 2}, carry="words")
    assert headers(pair.world.pump_one(pair.server, 2)) == [1, 2]


def test_a_payload_may_be_changed_once_send_returns(pair: Pair) -> None:
    buffer = bytearray(b"a" * (8 * MB))
    pair.up.send({"n": 1}, payload=[buffer])
    buffer[:] = b"b" * len(buffer)
    [(_, message)] = pair.world.pump_one(pair.server)
    assert isinstance(message, Message)
    assert message.payload == b"a" * (8 * MB)


@pytest.mark.parametrize("sizes", [(1000, 999), (1000, 1001), (1000, None), (0, 10)])
def test_a_region_of_another_size_is_refused_before_a_byte_is_written(pair: Pair, sizes: tuple[int, int | None]) -> None:
    sent, bound = sizes
    pair.up.bind("gradient", memoryview(bytearray(b"x" * sent)))
    memory = bytearray(b"7" * (bound or 0))
    if bound is not None:
        pair.down.bind("gradient", memoryview(memory))
    pair.up.send({"n": 1})
    pair.up.send({"n": 2}, carry="gradient")
    pair.up.send({"n": 3})
    arrived = pair.world.pump(lambda arrived: len(arrived[pair.server]) >= 2 and len(arrived[pair.worker]) >= 1)
    assert headers(arrived[pair.server]) == [1]
    closed = arrived[pair.server][-1][1]
    assert isinstance(closed, Closed)
    assert "'gradient'" in closed.reason
    assert str(sent) in closed.reason
    assert (str(bound) if bound is not None else "not bound") in closed.reason
    assert memory == b"7" * (bound or 0)
    assert isinstance(arrived[pair.worker][-1][1], Closed)


def test_memory_handed_over_is_the_same_memory(pair: Pair) -> None:
    if not pair.world.shares_memory:
        with pytest.raises(AssertionError, match="do not share memory"):
            pair.up.send({"n": 1}, memory=[pair.world.block(10)])
        return
    blocks = [pair.world.block(nbytes) for nbytes in (100_000, 0, 1)]
    pair.up.send({"n": 1}, memory=blocks)
    [(_, message)] = pair.world.pump_one(pair.server)
    assert isinstance(message, Message)
    assert [block.nbytes for block in message.memory] == [100_000, 0, 1]
    assert [len(block.view) for block in message.memory] == [100_000, 0, 1]
    blocks[0].view[5] = 55
    message.memory[0].view[6] = 66
    assert bytes(message.memory[0].view[4:8]) == bytes(blocks[0].view[4:8]) == b"\0\x37\x42\0"
    for block in blocks:
        block.close()
        block.close()
    assert message.memory[0].view[5] == 55
    for block in message.memory:
        block.close()


def test_memory_stays_with_the_message_it_was_sent_with(pair: Pair) -> None:
    if not pair.world.shares_memory:
        return
    for n in range(60):
        blocks = [pair.world.block(1000 + n) for _ in range(n % 4)]
        pair.up.send({"n": n, "padding": "x" * 100_000}, memory=blocks)  # More than any buffer takes at once.
        for block in blocks:
            block.close()
    arrived = pair.world.pump_one(pair.server, 60)
    assert headers(arrived) == list(range(60))
    for n, (_, message) in enumerate(arrived):
        assert isinstance(message, Message)
        assert [block.nbytes for block in message.memory] == [1000 + n] * (n % 4)
        for block in message.memory:
            block.close()


def test_what_was_sent_before_closing_arrives_before_closed(pair: Pair) -> None:
    for n in range(20):
        pair.up.send({"n": n})
    pair.up.close()
    pair.up.send({"n": "too late"})
    arrived = pair.world.pump_one(pair.server, 21)
    assert headers(arrived) == list(range(20))
    assert arrived[-1] == (pair.down, Closed("end of stream"))
    pair.down.send({"n": "to nobody"})
    assert pair.server.poll(0) == []
    assert pair.worker.poll(0) == []


def test_closing_a_hub_is_seen_by_all_its_peers(world: World) -> None:
    server, workers = world.hub(), [world.hub() for _ in range(3)]
    address = server.listen()
    for worker in workers:
        worker.connect(address).send({"n": 0})
    world.pump_one(server, 3)
    server.close()
    world.hubs.remove(server)
    arrived = world.pump(lambda arrived: all(arrived[worker] for worker in workers))
    assert all(isinstance(arrived[worker][0][1], Closed) for worker in workers)
    with pytest.raises(JobError, match=f"port {address.tcp[1]}"):
        workers[0].connect(address)


def test_a_hub_may_listen_after_a_connection_of_its_own_has_ended(world: World) -> None:
    first, second = world.hub(), world.hub()
    second.connect(first.listen()).send({"n": 1})
    [(connection, _)] = world.pump_one(first)
    connection.close()
    world.pump_one(second)
    first.connect(second.listen()).send({"n": 2})
    assert headers(world.pump_one(second)) == [2]


def test_messages_sent_before_the_token_is_checked_are_kept_in_order(world: World) -> None:
    server, worker = world.hub(), world.hub()
    connection = worker.connect(server.listen())
    for n in range(10):
        connection.send({"n": n}, payload=[bytes(n)])
    arrived = world.pump_one(server, 10)
    assert headers(arrived) == list(range(10))


def test_a_wrong_token_is_refused_and_the_server_hears_nothing(world: World) -> None:
    server, stranger, worker = world.hub(), world.hub("guessed"), world.hub()
    address = server.listen()
    stranger.connect(address).send({"n": "stranger"})
    worker.connect(address).send({"n": "worker"})
    arrived = world.pump(lambda arrived: bool(arrived[stranger] and arrived[server]))
    [(_, closed)] = arrived[stranger]
    assert isinstance(closed, Closed)
    assert closed.reason.startswith("refused:")
    assert "token" in closed.reason
    assert headers(arrived[server]) == ["worker"]
    assert server.poll(0) == []


def test_threads_send_while_the_main_thread_polls(pair: Pair) -> None:
    regions = [memoryview(bytearray(2 * MB)) for _ in range(2)]
    pair.up.bind("gradient", regions[0])
    pair.down.bind("gradient", regions[0] if pair.world.shares_memory else regions[1])

    def send(thread: int) -> None:
        for n in range(400):
            carry = "gradient" if n % 50 == 1 else None
            payload = [bytes([thread]) * 3000] if n % 3 == 0 and not carry else []
            pair.up.send({"n": (thread, n)}, payload=payload, carry=carry)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    arrived = pair.world.pump_one(pair.server, 800)
    for thread in threads:
        thread.join(DEADLINE_S)
    sent = [[[thread, n] for n in range(400)] for thread in range(2)]
    for which in range(2):
        assert [header for header in headers(arrived) if header in sent[which]] == sent[which]


def test_poll_returns_when_its_time_is_over(pair: Pair) -> None:
    started = time.monotonic()
    assert pair.server.poll(0.02) == []
    assert time.monotonic() - started < DEADLINE_S


def test_wake_ends_a_poll_in_another_thread_and_the_next_one(world: World) -> None:
    world.network.blocking = True
    hub = world.hub()
    hub.listen()
    hub.wake()
    assert hub.poll(None) == []
    returned: list[Arrivals] = []
    thread = threading.Thread(target=lambda: returned.append(hub.poll(DEADLINE_S)))
    started = time.monotonic()
    thread.start()
    hub.wake()
    thread.join(DEADLINE_S)
    assert returned == [[]]
    assert time.monotonic() - started < DEADLINE_S / 2


def test_a_signal_handler_may_wake(world: World) -> None:
    world.network.blocking = True
    hub = world.hub()
    previous = signal.signal(signal.SIGALRM, lambda *_: hub.wake())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert hub.poll(DEADLINE_S) == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_message_from_another_thread_ends_a_poll(world: World) -> None:
    world.network.blocking = True
    pair = Pair(world)
    thread = threading.Thread(target=pair.up.send, args=({"n": 1},))
    thread.start()
    assert headers(pair.server.poll(DEADLINE_S)) == [1]
    thread.join(DEADLINE_S)


def test_what_another_thread_sends_is_flushed_by_a_poll_that_waits_already(world: World) -> None:
    world.network.blocking = True
    pair = Pair(world)
    done = threading.Event()

    def poll() -> None:
        while not done.is_set():
            pair.worker.poll(DEADLINE_S)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        for n in range(5):
            pair.up.send({"n": n}, payload=[bytes(16 * MB)])
            started = time.monotonic()
            assert headers(pair.server.poll(DEADLINE_S)) == [n]
            assert time.monotonic() - started < DEADLINE_S / 2
    finally:
        done.set()
        pair.worker.wake()
        thread.join(DEADLINE_S)


def test_a_taken_port_is_named(world: World) -> None:
    port = world.hub().listen().tcp[1]
    with pytest.raises(ConfigurationError, match=f"port {port}"):
        world.hub().listen(port=port)


def test_nobody_listening_is_an_error_of_the_job(world: World) -> None:
    hub = world.hub()
    address = hub.listen()
    hub.close()
    world.hubs.remove(hub)
    with pytest.raises(JobError, match=f"nobody listens at 127.0.0.1, port {address.tcp[1]}"):
        world.hub().connect(Address(address.host, address.tcp, address.local))
