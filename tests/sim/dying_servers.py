"""`SteppedJob` and `SteppedRanks` in which servers' processes die again and again, at any point, and are made anew from what is left.

What is left is what the supervisor holds: the log of each server and its memory, and that of the workers or ranks. A point is each record
of a log, each change of memory and each message, before and after it. The servers and their logs, the links and the memory are the real
ones, and so is the fleet; the death is an exception that nobody catches. What a process had not read is lost with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.with_fleet import LinkedHub, ServerProcess, WithFleet

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
from offbeat.types import Seconds, WorkerId

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


class Death(BaseException):
    """Ends a server's process."""


@contextmanager
def deadly(points: Mapping[str, Any], point: Callable[[str], None]) -> Iterator[None]:
    """Call ``point`` before and after each of these methods: a process may die there. ``points``: the class of each, by name."""

    def around(owner: Any, name: str) -> Any:
        plain: Callable[..., Any] = getattr(owner, name)

        def changed(one: Any, *arguments: Any, **named: Any) -> Any:
            point(name)
            result = plain(one, *arguments, **named)
            point(name)
            return result

        return patch.object(owner, name, changed)

    with ExitStack() as stack:
        for name, owner in points.items():
            stack.enter_context(around(owner, name))
        yield


def let_go(server: Server) -> None:
    """Close the descriptors of a process that is gone, as the kernel does."""
    if server.service.links is not None:
        assert isinstance(server.service.links, Recorder)
        for block in server.service.links.survival._blocks.values():
            block.close()
    if server.service.state.job is not None:
        server.service.state.job.journal._release()


class Mortal:
    """A server's process, as the job drives it: it may die in whatever it does."""

    def __init__(self, job: DyingServers, number: int) -> None:
        self._job, self._number = job, number

    @property
    def server(self) -> Server:
        server = self._job.process_of(self._number).server
        assert isinstance(server, Server)
        return server

    def hear(self, timeout_s: Seconds) -> None:
        self._job.lives(self._number, lambda server: server.hear(timeout_s))

    def tick(self) -> None:
        self._job.lives(self._number, lambda server: server.tick())

    def wake_at(self) -> Seconds | None:
        return self.server.wake_at()


class DyingServers(WithFleet):
    """One live run.

    Args:
        script, journal: as for `SteppedJob`.
        deaths: of what kind, and at the how manieth point of this kind since the last death, a server's process dies, whichever it is: one
            of `points`. None dies after the last of them.
        records: after how many records a snapshot is due.
        apart: more bytes than so many are kept in a block of their own.
    """

    points: ClassVar[Mapping[str, Any]] = OF_SERVERS

    def __init__(
        self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]], records: int = 20, apart: int = keeper.APART_NBYTES
    ) -> None:
        super().__init__(script, journal)
        self.network.as_sent = True
        self._deaths, self._records, self._apart = list(deaths), records, apart
        self._passed: Counter[str] = Counter()
        """Points since the last death, by kind."""
        self._lives = False
        """True while a server's process does something."""
        self.died: Counter[str] = Counter()
        """How often one has died, by what it was about to do, or had done."""
        self.died_at: Counter[int] = Counter()
        """How often one has died, by server."""
        self.make_fleet(self._settings())

    def run(self) -> list[Record]:
        try:
            with self._deadly():
                return super().run()
        finally:
            for number in range(len(self.addresses)):
                let_go(self.process_of(number).server)
            for block in (block for kept in self.fleet.kept.values() for block in kept.values()):
                block.close()

    def hub(self, turn: Callable[[], None], worker: WorkerId) -> SteppedHub:
        return LinkedHub(self.network, turn, worker)

    def settle(self) -> None:
        super().settle()
        while self.deliver() or any(self._reaches_again(number) for number in range(1, len(self.addresses))):
            super().settle()  # where the last tick was a process's end, the next one goes on at the same instant

    def _reaches_again(self, number: int) -> bool:
        """Let a server connect to server 0 again, if it is cut off."""
        if not self.process_of(number).server._cut_off or not self.goes_on(number):
            return False
        self._servers[number].tick()
        return True

    # The servers' processes.

    def lives(self, number: int, does: Callable[[Server], None]) -> None:
        """Let a server's process do something, which may be the last."""
        before, self._lives = self._lives, True
        process = self.process_of(number)
        try:
            does(process.server)
        except Death:
            self._lives = False
            self.died_at[number] += 1
            let_go(process.server)
            self.dies(process)
        finally:
            self._lives = before

    def point(self, kind: str) -> None:
        """A server's process may die here."""
        if not self._lives:
            return
        self._passed[kind] += 1
        if self._deaths and (kind, self._passed[kind]) == self._deaths[0]:
            self._passed.clear()
            del self._deaths[0]
            self.died[kind] += 1
            raise Death

    def make_server(self, number: int, hub: SteppedHub, supervisor: Connection, *, stands_by: bool) -> Server:
        return Server(number, hub, supervisor, clock=self._now, computed=self._now)

    def turn_of(self, process: ServerProcess) -> None:
        self._turn(process.number)

    def _open(self) -> None:
        self._servers = [Mortal(self, number) for number in range(self.script.cluster.servers)]  # type: ignore[misc]
        super()._open()

    @contextmanager
    def _deadly(self) -> Iterator[None]:
        """Let a process die before and after each point."""
        with ExitStack() as stack:
            stack.enter_context(deadly(self.points, self.point))
            stack.enter_context(patch.object(input_log, "RECORDS_MAX", self._records))
            stack.enter_context(patch.object(keeper, "APART_NBYTES", self._apart))
            stack.enter_context(patch.object(recorder, "APART_NBYTES", self._apart))
            stack.enter_context(patch.object(keeper, "APART_MAX_NBYTES", 20 * self._apart))
            yield


class DyingCoordinator(DyingServers, SteppedRanks):
    """One live run of a job without servers, whose coordinator's process dies. Arguments as for `DyingServers`."""

    points = POINTS
