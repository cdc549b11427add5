"""A live job without servers in one thread, with a clock that is moved by hand: `SteppedJob` with ranks in the place of workers.

The coordinator's process, the ranks' sessions and the memory that they share are the real ones. Memory tells nobody that it has changed:
after whatever happens, all ranks that wait for others look, in the order in which they have begun to wait, until nothing happens any more.
The mean of the replicas, for which a rank waits for the slowest, is never due: the simulator's ranks do not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.sim.stepped import SteppedJob, Timings
from tests.sim.stepped_rank import SourceEnd, SteppedRank, WentOn

from offbeat.core.allreduce.rounds import Arrival
from offbeat.journal.records import Record
from offbeat.runtime.allreduce import round_member
from offbeat.runtime.allreduce.model_means import ModelMeans
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.gossip.one_host import OneHostGossip
from offbeat.runtime.ranks import plane
from offbeat.runtime.shared_memory import log
from offbeat.types import Incarnation, Seconds, Version, WorkerId

LOOK_S: Seconds = 1.0
"""How often the coordinator looks at the log by itself; it looks with each message too, and each arrival is announced by one."""


class SteppedRanks(SteppedJob):
    """One live run; arguments as for `SteppedJob`."""

    def __init__(self, script: Timings, journal: Path) -> None:
        super().__init__(script, journal)
        self.waiting: list[SteppedRank] = []
        """Ranks that wait for others, in the order in which they have begun to."""
        self.went_on: list[WentOn] = []
        self.source_ends: deque[str | None] = deque()
        """How the process of the next source ends, once it has admitted a joiner and before it sends its replica: ``seen``, where its
        connections close, ``silent``, where they do not, or None: it goes on. Where the deque is empty all go on."""
        self.ended: list[SourceEnd] = []
        self.waits: dict[WorkerId, Seconds] = {}
        """Since when ranks wait for others."""
        self.waited: list[tuple[Seconds, Seconds]] = []
        """From when to when ranks have waited for others."""
        self.alone_from: Seconds = inf
        """When a rank that waited for others has first found out from memory, and not from the coordinator, that it was declared dead. From
        then on a simulated worker, which can only be told, is behind."""

    def run(self) -> list[Record]:
        with self._virtual():
            return super().run()

    def process(self, number: WorkerId, iteration: int) -> SteppedRank:
        return SteppedRank(self, number, iteration)

    def knows(self, number: WorkerId, incarnation: Incarnation) -> bool:
        """Whether what a rank goes on with counts."""
        return True

    @property
    def journal_time(self) -> Seconds:
        """The time, as the journal writes it."""
        return round(self.now, 6)

    def waited_at(self, t: Seconds) -> bool:
        """Whether any rank waited for others then."""
        over = [(since, inf) for since in self.waits.values()]
        return any(since < t <= until for since, until in (*self.waited, *over))

    def ends_source(self, source: SteppedRank, joiner: WorkerId, version: Version) -> bool:
        """End the process of a rank that has just admitted a joiner, if that is due. Returns whether it did."""
        if all(rank.gone or rank.number in (source.number, joiner) for rank in self._workers.values()):
            return False  # the parameters would be lost with it
        how = self.source_ends.popleft() if self.source_ends else None
        if how is None:
            return False
        self.ended.append(SourceEnd(source.number, joiner, version, how))
        source.die("killed after it has admitted a joiner", seen=how == "seen")
        return True

    def finds_out(self) -> None:
        """A rank that waits for others does not take part any more."""
        self.alone_from = min(self.alone_from, self.journal_time)

    def settle(self) -> None:
        super().settle()
        while self.deliver():
            super().settle()
        for rank in self._workers.values():
            assert isinstance(rank, SteppedRank)
            rank.idle()

    def deliver(self) -> bool:
        """Let ranks go on that have what they wait for in memory; if there are none, let somebody handle one message."""
        return self._look() or super().deliver()

    def _look(self) -> bool:
        looking, self.waiting = self.waiting, []
        went = False
        for rank in looking:
            if not rank.waits_for_others:
                continue
            if rank.look():
                went = True
            elif rank not in self.waiting:
                self.waiting.append(rank)
        self.waiting.sort(key=lambda rank: rank.moves_on)
        for rank in self.waiting:
            rank.moves_on = False
        return went

    @contextmanager
    def _virtual(self) -> Iterator[None]:
        """Let nobody sleep, and give entries of the log this job's time: up to a nanosecond late, so that it is not before it."""

        def monotonic_ns() -> int:
            return int(self.now * 1e9) + 1

        plain = OneHostRounds.arrive

        def arrive(rounds: OneHostRounds, *arguments: Any) -> Arrival:
            """Whoever closes a round has its result after those who wait for it."""
            arrival = plain(rounds, *arguments)
            if rounds.meanwhile is not None:
                rounds.meanwhile()
            return arrival

        with ExitStack() as stack:
            stack.enter_context(patch.object(plane, "LOOK_S", LOOK_S))
            stack.enter_context(patch.object(log, "monotonic_ns", monotonic_ns))
            stack.enter_context(patch.object(round_member, "LOOK_S", 0.0))
            stack.enter_context(patch.object(ModelMeans, "due", lambda means, version: False))
            stack.enter_context(patch.object(OneHostRounds, "arrive", arrive))
            stack.enter_context(patch.object(OneHostGossip, "_sleep", lambda rank, told: None))
            yield
