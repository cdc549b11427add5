"""`SteppedJob` in which each server has a standby, and leaders die at any point of what they do.

A point is each message of a leader, each record for its standby and the bytes before it. The servers, their standbys and all links are the
real ones, and so is the fleet. The death is an exception that nobody catches, and what a process had not read is lost with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, cast
from unittest.mock import patch

from tests.sim.dying_servers import Death, deadly
from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub
from tests.sim.with_fleet import LinkedHub, ServerProcess, WithFleet

from offbeat.journal.records import Record
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.leading_server import LeadingServer
from offbeat.runtime.recovery.replica import Replica, StreamRecorder
from offbeat.runtime.serving import ServingEnded
from offbeat.runtime.standby_server import StandbyServer
from offbeat.transport.base import Address, Connection
from offbeat.transport.link import Link
from offbeat.types import Seconds, WorkerId

POINTS: Final = {"flush": StreamRecorder, "_send": Replica, "send_ahead": Replica, "send": Link}
"""The record of what was handled, bytes of memory for the standby, the first bytes of a sum in the making, and a message."""
PIECE_NBYTES: Final = 8
"""So that a sum comes in several messages, although the model is small."""


Process: TypeAlias = LeadingServer | StandbyServer


class Leader:
    """The process that leads a server, as the job drives it."""

    def __init__(self, job: ReplicatedServers, number: int) -> None:
        self._job, self._number = job, number

    def hear(self, timeout_s: Seconds) -> None:
        raise AssertionError("each process hears by itself")

    def tick(self) -> None:
        self._job.lives(self._job.process_of(self._number), lambda server: server.tick())

    def wake_at(self) -> Seconds | None:
        server: Process = self._job.process_of(self._number).server
        # While it lacks a gradient it does nothing else that is due, and looks every `TICK_S`.
        return server._return_until if isinstance(server, LeadingServer) and server._lacking else server.wake_at()


class ReplicatedServers(WithFleet):
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
        self._living: ServerProcess | None = None
        """The process that does something."""
        self.died: Counter[str] = Counter()
        self.make_fleet(self._settings())

    @property
    def leaders(self) -> list[ServerProcess]:
        return cast(list[ServerProcess], self.fleet.leaders())

    def run(self) -> list[Record]:
        with deadly(POINTS, self.point), patch("offbeat.runtime.recovery.replica.PIECE_NBYTES", PIECE_NBYTES):
            return super().run()

    def hub(self, turn: Callable[[], None], worker: WorkerId) -> SteppedHub:
        return ReplicatedHub(self, turn, worker)

    def standby_of(self, address: Address) -> Address | None:
        """Where the standby listens that could take over from the process at this address."""
        standbys = self.fleet.standbys_at()
        assert standbys is not None
        return standbys[self.fleet.addresses().index(address)]

    def leads_at(self, address: Address) -> bool:
        """Whether the process at this address leads a server."""
        return address in self.fleet.addresses()

    def settle(self) -> None:
        super().settle()
        while self.deliver() or any(self._reaches_again(process) for process in self.leaders[1:]):
            super().settle()  # what a tick has sent is handled at the same instant
        for process in self.leaders[1:]:
            self._await_gradient(process)

    def _await_gradient(self, process: ServerProcess) -> None:
        """Let a server that lacks a gradient end the job if it has waited for long enough. Only server 0 is driven by `wake_at`."""
        server = process.server
        if isinstance(server, LeadingServer) and server._lacking and server._return_until is not None and not process.awaited:
            process.awaited = True
            self.at(max(server._return_until, self.now), lambda: self.lives(process, lambda server: server.tick()))

    def _reaches_again(self, process: ServerProcess) -> bool:
        """Let a server connect to server 0 again, if it is cut off."""
        if not isinstance(process.server, LeadingServer) or not process.server._cut_off:
            return False
        self.lives(process, lambda server: server.tick())
        return True

    # The servers' processes.

    def lives(self, process: ServerProcess, does: Callable[[Process], None]) -> None:
        """Let a process do something, which may be the last."""
        before, self._living = self._living, process
        try:
            does(process.server)
        except Death:
            self._living = None
            self.dies(process)
        except ServingEnded:
            self._ended.add(process.number)
        finally:
            self._living = before

    def point(self, kind: str) -> None:
        """A leader may die here."""
        living = self._living
        if living is None or living not in self.leaders or not self.fleet.fleet.ready(living.number):
            return
        self._passed[kind] += 1
        if self._deaths and (kind, self._passed[kind]) == self._deaths[0]:
            self._passed.clear()
            del self._deaths[0]
            self.died[kind] += 1
            raise Death

    def turn_of(self, process: ServerProcess) -> None:
        def turn(server: Process) -> None:
            server.hear(0.0)
            if isinstance(server, StandbyServer):
                server.tick()  # it handles what has come
                process.server = server.leads or server

        self.lives(process, turn)

    def make_server(self, number: int, hub: SteppedHub, supervisor: Connection, *, stands_by: bool) -> Process:
        process = StandbyServer if stands_by else LeadingServer
        return process(number, hub, supervisor, clock=self._now, computed=self._now)

    def _open(self) -> None:
        self._servers = [Leader(self, number) for number in range(self.script.cluster.servers)]  # type: ignore[misc]
        super()._open()

    def _settings(self) -> JobSettings:
        return replace(super()._settings(), replicas=1)

    def _close(self) -> None:
        self.fleet.finish(ok=True, reason="the script is over")
        super()._close()


class ReplicatedHub(LinkedHub):
    """The hub of a worker's process, whose links go over to standbys."""

    def __init__(self, job: ReplicatedServers, turn: Callable[[], None], worker: WorkerId) -> None:
        super().__init__(job.network, turn, worker)
        self._job = job

    def plain(self, address: Address) -> Connection:
        """Connect to whoever listens there now. Every second worker is on the machine of the standbys."""
        connection = super().plain(address)
        assert self.worker is not None
        connection.within_host = connection.other.within_host = bool(self.worker % 2) and not self._job.leads_at(address)  # type: ignore[attr-defined]
        return connection

    def connect(self, address: Address) -> Connection:
        return self.links.connect_replicated(address, self._job.standby_of(address))

    def poll(self, timeout_s: Seconds | None) -> Any:
        if self.process is not None and self.process.gone:
            return SteppedHub.poll(self, 0.0)
        return self.links.poll(0.0)
