"""`SteppedJob` in which each server has a standby, and leaders die at any point of what they do.

A point is each message of a leader, each record for its standby and the bytes before it. The servers, their standbys and all links are the
real ones; the supervisor is a stub that does what ``launch/standbys.py`` does. The death is an exception that nobody catches, and what a
process had not read is lost with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.sim.dying_servers import Death, LinkedHub, deadly, on_links
from tests.sim.stepped import SteppedJob, Timings
from tests.sim.stepped_network import SteppedHub

from offbeat.journal.records import Record
from offbeat.launch.lasting import LastingServer
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.recovery.replica import Replica, StreamRecorder
from offbeat.runtime.replicated_server import ReplicatedServer
from offbeat.runtime.serving import ServingEnded
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.link import Link
from offbeat.types import Seconds, WorkerId

KEY: Final = "key"
POINTS: Final = {"flush": StreamRecorder, "_send": Replica, "send": Link}
"""The record of what was handled, bytes of memory for the standby, and a message."""


@dataclass(eq=False)
class Process:
    """One process of a server."""

    number: int
    server: ReplicatedServer
    hub: SteppedHub
    address: Address
    connection: Connection | None = None
    """The supervisor's end."""
    awaited: bool = False
    """True once it is to look whether a gradient that it lacks has come in time."""

    @property
    def where(self) -> str:
        return json.dumps([self.address])


class Leader:
    """The process that leads a server, as the job drives it."""

    def __init__(self, job: ReplicatedServers, number: int) -> None:
        self._job, self._number = job, number

    def hear(self, timeout_s: Seconds) -> None:
        raise AssertionError("each process hears by itself")

    def tick(self) -> None:
        self._job.lives(self._job.leaders[self._number], lambda server: server.tick())

    def wake_at(self) -> Seconds | None:
        server = self._job.leaders[self._number].server
        # While it lacks a gradient it does nothing else that is due, and looks every `TICK_S`.
        return server._return_until if server._lacking else server.wake_at()


class ReplicatedServers(SteppedJob):
    """One live run.

    Args:
        script, journal: as for `SteppedJob`.
        deaths: at which kind of point, and at the how manieth of this kind since the last death, a leader dies, whichever it is. One dies
            only if its standby could lead.
    """

    def __init__(self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]]) -> None:
        super().__init__(replace(script, shares_memory=False), journal)
        self.network.as_sent = True
        self._deaths = list(deaths)
        self._passed: Counter[str] = Counter()
        self._living: Process | None = None
        """The process that does something."""
        self.died: Counter[str] = Counter()
        self.leaders: list[Process] = []
        self.standbys: dict[int, Process] = {}
        self._ready: set[int] = set()
        """Servers whose standby could lead."""
        self._terms: Counter[int] = Counter()
        self._lasting = [LastingServer(number) for number in range(script.cluster.servers)]

    def run(self) -> list[Record]:
        with deadly(POINTS, self.point):
            return super().run()

    def hub(self, turn: Callable[[], None], worker: WorkerId) -> SteppedHub:
        return ReplicatedHub(self, turn, worker)

    def process(self, number: WorkerId, iteration: int) -> Any:
        process = super().process(number, iteration)
        on_links(process, self._lasting[0])
        return process

    def standby_of(self, address: Address) -> Address | None:
        """Where the standby listens that could take over from the process at this address."""
        number = next(process.number for process in self.leaders if process.address == address)
        return self.standbys[number].address if number in self._ready else None

    def settle(self) -> None:
        super().settle()
        while self.deliver() or any(self._reaches_again(process) for process in self.leaders[1:]):
            super().settle()  # what a tick has sent is handled at the same instant
        for process in self.leaders[1:]:
            self._await_gradient(process)

    def _await_gradient(self, process: Process) -> None:
        """Let a server that lacks a gradient end the job if it has waited for long enough. Only server 0 is driven by `wake_at`."""
        until = process.server._return_until
        if process.server._lacking and until is not None and not process.awaited:
            process.awaited = True
            self.at(max(until, self.now), lambda: self.lives(process, lambda server: server.tick()))

    def _reaches_again(self, process: Process) -> bool:
        """Let a server connect to server 0 again, if it is cut off."""
        if not process.server._cut_off:
            return False
        self.lives(process, lambda server: server.tick())
        return True

    # The servers' processes.

    def lives(self, process: Process, does: Callable[[ReplicatedServer], None]) -> None:
        """Let a process do something, which may be the last."""
        before, self._living = self._living, process
        try:
            does(process.server)
        except Death:
            self._living = None
            self._take_over(process)
        except ServingEnded:
            self._ended.add(process.number)
        finally:
            self._living = before

    def point(self, kind: str) -> None:
        """A leader may die here."""
        living = self._living
        if living is None or living not in self.leaders or living.number not in self._ready:
            return
        self._passed[kind] += 1
        if self._deaths and (kind, self._passed[kind]) == self._deaths[0]:
            self._passed.clear()
            del self._deaths[0]
            self.died[kind] += 1
            raise Death

    def _turn_of(self, process: Process) -> None:
        def turn(server: ReplicatedServer) -> None:
            server.hear(0.0)
            if server._stands_by:
                server.tick()  # it handles what has come

        self.lives(process, turn)

    def _start_process(self, number: int, *, stands_by: bool) -> Process:
        hub = SteppedHub(self.network, lambda: self._turn_of(process))
        self.network.is_server(hub, number)
        supervisor, address = hub.connect(self._at), hub.listen()
        server = ReplicatedServer(number, hub, supervisor, stands_by=stands_by, clock=self._now, computed=self._now)
        process = Process(number, server, hub, address, supervisor.other)  # type: ignore[attr-defined]
        supervisor.send({"kind": "listening", "number": number})
        return process

    # The supervisor's part.

    def _open(self) -> None:
        self._at = self._supervisor.listen()
        count = len(self._lasting)
        self._servers = [Leader(self, number) for number in range(count)]  # type: ignore[misc]
        self._links = [lasting.link for lasting in self._lasting]
        self.leaders = [self._start_process(number, stands_by=False) for number in range(count)]
        self.addresses = [process.address for process in self.leaders]
        self.standbys = {number: self._start_process(number, stands_by=True) for number in range(count)}
        job = {"settings": self._settings().to_wire(), "servers": json.dumps(self.addresses), "key": KEY}
        for process in self.standbys.values():
            self._tell(process, {**job, "kind": "stand_by", "address": process.where, "runs": False})
        for process in self.leaders:
            self._tell(process, {**job, "kind": "job"})
        self.settle()
        assert self._ready == set(range(count))

    def _settings(self) -> JobSettings:
        return replace(super()._settings(), replicas=1)

    def _tell(self, process: Process, header: dict[str, Any]) -> None:
        assert process.connection is not None
        process.connection.send(header)

    def _supervise(self) -> None:
        for connection, item in self._supervisor.poll(0.0):
            leading = next((process for process in self.leaders if process.connection is connection), None)
            if isinstance(item, Closed) or leading is None:
                assert isinstance(item, Closed) or item.header["kind"] != "failed", f"a standby fails: {item.header}"
                continue
            lasting = self._lasting[leading.number]
            if (message := lasting.take(connection, item)) is not None:
                self._on_message(leading, message)

    def _on_message(self, leading: Process, message: Message) -> None:
        header = message.header
        assert header["kind"] not in ("failed", "standby_gone"), f"the server fails: {header}"
        if header["kind"] == "followed":
            assert header["address"] == self.standbys[leading.number].where
            self._ready.add(leading.number)
        self.summary = header.get("summary", self.summary)

    def _take_over(self, dead: Process) -> None:
        """The process is dead: its connections close, its standby leads, and a new one is started."""
        number, lasting = dead.number, self._lasting[dead.number]
        dead.hub.receive = lambda item: None  # type: ignore[method-assign]
        dead.hub.close()
        standby = self.standbys.pop(number)
        self._ready.discard(number)
        self._terms[number] += 1
        lasting.returns(self.now)
        self.leaders[number] = standby
        self.addresses[number] = standby.address
        where = json.dumps(self.addresses)
        self._tell(standby, {"kind": "lead", "term": 1 + self._terms[number], "servers": where})
        for other in [*self.leaders, *self.standbys.values()]:
            if other is not standby:
                self._tell(other, {"kind": "moved", "servers": where})
        self.standbys[number] = new = self._start_process(number, stands_by=True)
        job = {"settings": self._settings().to_wire(), "servers": where, "key": KEY}
        self._tell(new, {**job, "kind": "stand_by", "address": new.where, "runs": True})

    def _close(self) -> None:
        for process in self.standbys.values():
            self._tell(process, {"kind": "finish", "ok": True, "reason": "the script is over"})
        super()._close()


class ReplicatedHub(LinkedHub):
    """The hub of a worker's process, whose links go over to standbys."""

    def __init__(self, job: ReplicatedServers, turn: Callable[[], None], worker: WorkerId) -> None:
        super().__init__(job.network, turn, worker)
        self._job = job

    def connect(self, address: Address) -> Connection:
        return self.links.connect_replicated(address, self._job.standby_of(address))

    def poll(self, timeout_s: Seconds | None) -> Any:
        if self.process is not None and self.process.gone:
            return SteppedHub.poll(self, 0.0)
        return self.links.poll(0.0)
