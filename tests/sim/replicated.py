"""`SteppedJob` in which each server has a standby, and leaders die at any point of what they do.

A point is each message of a leader, each record for its standby and the bytes before it. The servers, their standbys and all links are the
real ones, and so is the fleet. The death is an exception that nobody catches, and what a process had not read is lost with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeGuard
from unittest.mock import patch

from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub
from tests.sim.with_fleet import LinkedHub, ServerProcess, WithFleet

from offbeat.journal.records import Record
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.leading_server import LeadingServer
from offbeat.runtime.recovery.replica import Replica, StreamRecorder
from offbeat.runtime.standby_server import StandbyServer
from offbeat.transport.base import Address, Connection
from offbeat.transport.link import Link
from offbeat.types import Seconds, WorkerId

POINTS: Final = {"flush": StreamRecorder, "_send": Replica, "send_ahead": Replica, "send": Link}
"""The record of what was handled, bytes of memory for the standby, the first bytes of a sum in the making, and a message."""
PIECE_NBYTES: Final = 32
"""So that a sum comes in several messages, although the model is small: it has 64 bytes at least. The state for a standby has 20,000."""


Process: TypeAlias = LeadingServer | StandbyServer


class ReplicatedServers(WithFleet):
    """One live run. Arguments as for `WithFleet`; a leader dies only if its standby could lead."""

    points = POINTS

    def __init__(self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]]) -> None:
        super().__init__(replace(script, shares_memory=False), journal, deaths)

    def run(self) -> list[Record]:
        with patch("offbeat.runtime.recovery.replica.PIECE_NBYTES", PIECE_NBYTES):
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
        for process in self.leaders[1:]:
            self._await_gradient(process)

    def _await_gradient(self, process: ServerProcess) -> None:
        """Let a server that lacks a gradient end the job if it has waited for long enough. Only server 0 is driven by `wake_at`."""
        server = process.server
        if lacks_gradient(server) and server._return_until is not None and not process.awaited:
            process.awaited = True
            self.at(max(server._return_until, self.now), lambda: self.ticks(process))

    def wake_at(self, server: Process) -> Seconds | None:
        # While it lacks a gradient it does nothing else that is due, and looks every `TICK_S`.
        return server._return_until if lacks_gradient(server) else server.wake_at()

    def is_cut_off(self, process: ServerProcess) -> bool:
        return isinstance(process.server, LeadingServer) and process.server._cut_off

    def may_die(self, process: ServerProcess) -> bool:
        return process in self.leaders and self.fleet.fleet.ready(process.number)

    def hears(self, process: ServerProcess) -> None:
        server: Process = process.server
        server.hear(0.0)
        if isinstance(server, StandbyServer):
            server.tick()  # it handles what has come
            process.server = server.leads or server

    def make_server(self, number: int, hub: SteppedHub, supervisor: Connection, *, stands_by: bool) -> Process:
        process = StandbyServer if stands_by else LeadingServer
        return process(number, hub, supervisor, clock=self._now, computed=self._now)

    def _settings(self) -> JobSettings:
        return replace(super()._settings(), replicas=1)

    def _close(self) -> None:
        self.fleet.finish(ok=True, reason="the script is over")
        super()._close()


def lacks_gradient(server: Process) -> TypeGuard[LeadingServer]:
    """Whether a server leads, and waits for a gradient that was lost with the leader before."""
    return isinstance(server, LeadingServer) and server._lacking


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
