"""`SteppedJob` and `SteppedRanks` in which servers' processes die again and again, at any point, and are made anew from what is left.

What is left is what the supervisor holds: the log of each server and its memory, and that of the workers or ranks. A point is each record
of a log, each change of memory and each message, before and after it. The servers and their logs, the links and the memory are the real
ones, and so is the fleet; the death is an exception that nobody catches. What a process had not read is lost with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final
from unittest.mock import patch

from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.with_fleet import ServerProcess, WithFleet

from offbeat.core.fleet import State
from offbeat.journal.records import Record
from offbeat.runtime.lasting_server import Server
from offbeat.runtime.recovery import input_log, keeper, recorder
from offbeat.runtime.recovery.answers import Answers
from offbeat.runtime.recovery.input_log import InputLog
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.runtime.recovery.recorder import Recorder
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.tensors.halves import Halves
from offbeat.tensors.shard_memory import ShardMemory
from offbeat.transport.base import Connection
from offbeat.transport.link import Link

POINTS: Final = {"append": InputLog, "begin": InputLog, "change": SharedState, "send": Link, "note_lost": Answers}
"""A record, a snapshot, a change of the ranks' memory, a message; and what is lost with a rank, noted in the middle of a change."""
OF_SERVERS: Final = {
    "append": InputLog,
    "begin": InputLog,
    "once": ShardMemory,
    "turn": Halves,
    "adopt": ShardMemory,
    "keep": Keeper,
    "send": Link,
}
"""A record, a snapshot, a change of a shard's memory, the turn before it, the state of each block, a block of memory that outlives the
process, a message."""


def let_go(server: Server) -> None:
    """Close the descriptors of a process that is gone, as the kernel does."""
    if server.service.links is not None:
        assert isinstance(server.service.links, Recorder)
        for block in server.service.links.survival._blocks.values():
            block.close()
    if server.service.state.job is not None:
        server.service.state.job.journal._release()


class DyingServers(WithFleet):
    """One live run.

    Args:
        script, journal, deaths: as for `WithFleet`.
        records: after how many records a snapshot is due.
        apart: more bytes than so many are kept in a block of their own.
    """

    points = OF_SERVERS

    def __init__(
        self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]], records: int = 20, apart: int = keeper.APART_NBYTES
    ) -> None:
        self._records, self._apart = records, apart
        super().__init__(script, journal, deaths)

    def run(self) -> list[Record]:
        try:
            with ExitStack() as stack:
                stack.enter_context(patch.object(input_log, "RECORDS_MAX", self._records))
                stack.enter_context(patch.object(keeper, "APART_NBYTES", self._apart))
                stack.enter_context(patch.object(recorder, "APART_NBYTES", self._apart))
                stack.enter_context(patch.object(keeper, "APART_MAX_NBYTES", 20 * self._apart))
                return super().run()
        finally:
            for process in self.leaders:
                let_go(process.server)
            for block in (block for kept in self.fleet.kept.values() for block in kept.values()):
                block.close()

    def is_cut_off(self, process: ServerProcess) -> bool:
        """Whether a server has lost its connection to server 0, and has taken up the messages of the process before it."""
        fleet = self.fleet.fleet
        return bool(process.server._cut_off) and fleet.processes[fleet.servers[process.number].leader].state is State.LEADING

    def dies(self, process: ServerProcess) -> None:
        let_go(process.server)
        super().dies(process)

    def make_server(self, number: int, hub: SteppedHub, supervisor: Connection, *, stands_by: bool) -> Server:
        return Server(number, hub, supervisor, clock=self._now, computed=self._now)


class DyingCoordinator(DyingServers, SteppedRanks):
    """One live run of a job without servers, whose coordinator's process dies. Arguments as for `DyingServers`."""

    points = POINTS
