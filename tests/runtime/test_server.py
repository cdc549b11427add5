"""A server's process, without a process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.malformed import FAILING
from tests.support.hand_driven_coordinator import EMPTY, Line, Worker, coordinator
from tests.support.memory_network import MemoryHub, MemoryNetwork

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime import server
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.lasting_server import Server
from offbeat.runtime.worker.links import Links
from offbeat.transport.base import Address, Closed, Message, SharedMemory
from offbeat.transport.hub import SocketHub
from offbeat.transport.tcp import listen_tcp
from offbeat.types import WorkerState


class Coordinator:
    """Refuses everything."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.closed = 0

    def on_message(self, connection: Any, message: Message, now: float) -> None:
        self.heard.append(message.header["kind"])
        raise ProtocolError("no")

    def on_closed(self, connection: Any, reason: str, now: float) -> None:
        self.closed += 1


def begun(job: Any, **more: Any) -> tuple[Server, MemoryHub, Address]:
    """A server with this job, the hub of its peers, and its address."""
    network = MemoryNetwork()
    hub, peers = MemoryHub(network, "token"), MemoryHub(network, "token")
    address = hub.listen()
    server = Server(0, hub, peers.connect(address), **more)
    server.service.state.job = job
    return server, peers, address


def test_what_came_with_a_refused_message_is_not_heard() -> None:
    """It was in the same batch. A hello would enter a process whose end nobody hears of, since this end has closed the connection."""
    server, peers, address = begun(coordinator := Coordinator())
    line = peers.connect(address)
    line.send({"kind": "ready"})
    line.send({"kind": "hello"})
    server.hear(0.0)
    assert coordinator.heard == ["ready"] and coordinator.closed == 1
    ((_, refused), (_, end)) = peers.poll(0.0)
    assert isinstance(refused, Message) and refused.header["kind"] == "refused"
    assert isinstance(end, Closed)


def test_what_came_over_a_link_with_a_refused_message_does_not_keep_the_next_process_from_going_on() -> None:
    """It is not in the log: the link has ended there."""
    network = MemoryNetwork()
    supervisor, links = MemoryHub(network, "token"), Links(MemoryHub(network, "token"))
    supervisor_at, kept = supervisor.listen(), dict[str, SharedMemory]()

    def start() -> tuple[Server, MemoryHub, Address]:
        hub = MemoryHub(network, "token")
        address, launcher = hub.listen(), hub.connect(supervisor_at)
        server, orders = Server(0, hub, launcher), launcher.other  # type: ignore[attr-defined]
        for name, block in kept.items():
            orders.send({"kind": "kept", "name": name}, memory=(block,))
        settings = JobSettings(workers=1).to_wire()
        orders.send({"kind": "job", "settings": settings, "servers": json.dumps([address]), "outlives": True})
        server.hear(0.0)
        for _, item in supervisor.poll(0.0):
            if isinstance(item, Message) and item.header["kind"] == "keep":
                kept[item.header["name"]] = item.memory[0]
        return server, hub, address

    server, hub, address = start()
    link = links.connect(address, lasting=True, anywhere=True)
    server.hear(0.0)
    links.poll(0.0)
    for _ in range(2):
        link.send({"kind": "nonsense"})
    server.hear(0.0)
    assert [item.header["kind"] for _, item in links.poll(0.0) if isinstance(item, Message)] == ["refused"]
    hub.close()
    start()


def test_a_bug_is_the_same_exception_at_the_same_line() -> None:
    service = Server(0, MemoryHub(MemoryNetwork(), "token"), supervisor := Line("supervisor")).service

    def fails(worker: int, type: str, place: str | None) -> Any:
        said = {**FAILING["failing"], "kind": "failing", "worker": worker, "type": type, "place": place}
        service.handle(0.0, line := Line(f"worker {worker}"), Message(said, EMPTY, ()))
        assert line.got("noted")[0]["before"] == supervisor.got("failing")[-1]["before"]
        return line.got("noted")[0]["before"]

    accidents = [("ValueError", "a.py:1"), ("KeyError", "a.py:1"), ("ValueError", "a.py:2"), ("JobError", None), ("JobError", None)]
    assert [fails(worker, *accident) for worker, accident in enumerate(accidents)] == [None] * 5
    assert (fails(0, "ValueError", "a.py:1"), fails(5, "ValueError", "a.py:2")) == (0, 2)


class Listening(Coordinator):
    """Knows one worker, the one that has spoken."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []

    def on_message(self, connection: Any, message: Message, now: float) -> None:
        self.heard.append(message.header["kind"])
        self.connection = connection

    def on_dead(self, worker: int) -> list[Any]:
        return [self.connection]

    def has_replaced(self, worker: int, pid: int) -> bool:
        return False

    def on_lost(self, worker: int, reason: str, now: float) -> None:
        self.lost.append(reason)


@pytest.mark.parametrize(("dead", "heard"), [(True, ["hello"]), (False, ["hello", "heartbeat"])])
def test_what_an_ended_process_has_sent_before_is_no_sign_of_life(dead: bool, heard: list[str]) -> None:
    """The supervisor's word may overtake it. A process whose machine was cut off lives, and is heard: it must join again."""
    server, peers, address = begun(coordinator := Listening())
    line = peers.connect(address)
    line.send({"kind": "hello"})
    server.hear(0.0)
    line.send({"kind": "heartbeat"})
    line.close()
    lost = {"kind": "lost", "worker": 1, "reason": "it was killed", "dead": dead}
    server.service.handle(0.0, server.service.supervisor, Message(lost, memoryview(b""), ()))
    server.hear(0.0)
    assert coordinator.heard == heard and coordinator.lost == ["it was killed"]
    assert coordinator.closed == 1, "its connection ends as any other"


def test_the_last_bytes_of_an_ended_process_revive_nobody() -> None:
    """They may have come since the tick before; the processes of its DataLoader keep its connection open meanwhile."""
    host = coordinator(JobSettings(workers=1))
    service = begun(host)[0].service
    worker = Worker(host, 0)
    worker.join(0.0)
    worker.provide(0.0)
    worker.line.bytes_received += 100
    lost = {"kind": "lost", "worker": 0, "reason": "its process killed by SIGKILL", "dead": True}
    service.handle(1.0, service.supervisor, Message(lost, memoryview(b""), ()))
    for now in (1.1, 100.0):  # the second one comes late, as of a server that stood still
        host.tick(now)
        assert host.first.driver.core.membership[0].state is WorkerState.DEAD
    host.close(True, "enough", 101.0)
    host.release_memory()


@pytest.mark.parametrize("kind", ["lost", "ended"])
def test_the_end_of_a_process_that_comes_after_its_successors_hello_is_no_news(kind: str) -> None:
    """While a server stands still or is replaced, the supervisor's word and a worker's new process wait for it, in any order."""
    host = coordinator(JobSettings(workers=1))
    service = begun(host)[0].service
    first, second = Worker(host, 0, pid=7), Worker(host, 0, pid=8)
    first.join(0.0)
    first.provide(0.0)
    second.join(1.0)
    job = host.first.driver.core
    for pid, state in ((7, WorkerState.ALIVE), (8, WorkerState.DEAD if kind == "lost" else WorkerState.FINISHED)):
        reason = {"reason": "it was killed", "dead": True} if kind == "lost" else {}
        host.first.returned = True
        service.handle(2.0, service.supervisor, Message({"kind": kind, "worker": 0, "pid": pid, **reason}, memoryview(b""), ()))
        assert job.membership[0].state is state
        assert (second.line in service.refused) == (kind == "lost" and pid == 8)


def test_a_server_that_stood_still_says_so_and_one_that_waits_or_computes_does_not() -> None:
    clock, computed, stood_still = [0.0], [0.0], []
    coordinator: Any = Coordinator()
    coordinator.stood_still = lambda seconds, now: stood_still.append((seconds, now))
    server, *_ = begun(coordinator, clock=lambda: clock[0], computed=lambda: computed[0])
    for passed_s, waits_s, computed_s in ((5.0, 5.0, 0.0), (0.5, 0.2, 0.0), (8.0, 0.2, 0.0), (0.2, 0.2, 0.0), (8.0, 0.2, 7.0)):
        clock[0] += passed_s
        computed[0] += computed_s
        server.hear(waits_s)
    ((seconds, now),) = stood_still
    assert 7.0 < seconds <= 7.8 and now == 13.5


@pytest.mark.parametrize("leaves", [True, False])
def test_a_server_waits_for_the_port_of_its_earlier_process(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """Where the process that started it was killed, nobody could wait for the end of the earlier one."""
    earlier, hub = listen_tcp("127.0.0.1", 0), SocketHub("token", local=False)
    port, waits = earlier.getsockname()[1], 0

    def wait(seconds: float) -> None:
        nonlocal waits
        waits += 1
        if leaves:
            earlier.close()

    monkeypatch.setattr("offbeat.runtime.server.time.sleep", wait)
    monkeypatch.setattr(server, "LEAVES_S", 0.2)
    try:
        if leaves:
            assert server._listen(hub, "127.0.0.1", port).tcp[1] == port
        else:
            with pytest.raises(ConfigurationError, match=f"port {port} of 127.0.0.1 is taken"):
                server._listen(hub, "127.0.0.1", port)
        assert waits
    finally:
        earlier.close()
        hub.close()
