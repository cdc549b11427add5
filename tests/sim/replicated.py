"""`SteppedJob` in which each server has a standby, and leaders die at any point of what they do.

A point is each message of a leader, each record for its standby and the bytes before it. The servers, their standbys and all links are the
real ones, and so is the fleet. The death is an exception that nobody catches, and what a process had not read is lost with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias, TypeGuard
from unittest.mock import patch

from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub
from tests.sim.with_fleet import ServerProcess, WithFleet
from tests.support.memory_network import MemoryConnection

from offbeat.journal.records import Record
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
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

    def worker_settings(self, number: WorkerId) -> WorkerSettings:
        standbys = self.fleet.standbys_at()
        assert standbys is not None
        return replace(super().worker_settings(number), standbys=tuple(standbys))

    def leads_at(self, address: Address) -> bool:
        """Whether the process at this address leads a server."""
        return address in self.fleet.addresses()

    def connected(self, connection: MemoryConnection, address: Address, number: WorkerId) -> None:
        """Every second worker is on the machine of the standbys."""
        super().connected(connection, address, number)
        for end in (connection, connection.other):
            assert end is not None
            end.within_host = bool(number % 2) and not self.leads_at(address)

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
