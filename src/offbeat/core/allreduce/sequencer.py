"""Order the rounds of ranks on several hosts. One sequencer per job is told of arrivals, closes rounds, and says which hosts sum them.

The sequencer sees no gradient and sends nothing: each method returns the orders to send. Its decisions are those of `Rounds` on one host,
with one difference: a round counts as done as soon as it is closed, since the sequencer cannot know when the last host has the sum. A rank
that is given the result waits for it on its own host.

Each host has a *leader*, the rank that has been there longest; the leaders execute the schedules. When a rank enters or leaves, unfinished
rounds continue in a new *view*: every rank halts, reports which results it holds, and receives new orders. If any rank holds a result, the
others copy it; the remaining rounds are recomputed from the surviving gradients. Lost are the gradients of a dead host, and those that a
rank had overwritten after it received a result that no living rank holds. A rank that leaves gracefully stays until the other ranks have
every result that it may have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from offbeat.core.allreduce.commands import Allocate, Answer, Exclude, Order, Prepare, ReportProgress, Start
from offbeat.core.allreduce.policy import ABSENT, RoundRule
from offbeat.core.allreduce.rounds import RoundPart, Rounds
from offbeat.core.allreduce.view_change import ViewChange
from offbeat.core.rank_log import EntryKind, Fenced, RankLog, TooOld
from offbeat.types import NO_WORKER, Version, WorkerId, worker_ids


class _Sent(NamedTuple):
    """A gradient that is not summed yet."""

    rank: WorkerId
    buffer: int
    factor: float
    """The factor of the gradient in the sum. In a closed round its weight by samples is in it."""
    writes: int
    """Number of gradients that had been written to its buffer, this one included."""


@dataclass
class _Going:
    """A closed round that some host may not have summed yet."""

    parts: list[_Sent]
    divisor: int
    """1 where gradients weigh by their samples."""
    slot: int
    gone: set[WorkerId] = field(default_factory=set)
    """Ranks whose buffers are gone: their host has left, or a new process owns them."""


@dataclass
class _Parting:
    """Describe a rank that is leaving gracefully."""

    through: Version
    missing: set[WorkerId]
    """Ranks that may still lack results of rounds before ``through``."""
    answered: bool = False


class Sequencer:
    """Close the rounds of one job and order their sums.

    Args:
        rule: decides when a round closes.
        ranks: the greatest number of ranks.
        log: receives what happens.
        seed: seed of the rule's draws.
        slots: how many results are kept for ranks that are behind; None: all.

    >>> from offbeat.policies import rule
    >>> sequencer = Sequencer(rule("solo"), 2, RankLog(lambda: 0.0))
    >>> sequencer.begin({0: "a", 1: "b"})
    >>> start, answer = sequencer.arrive(1, 0)
    >>> start.parts, start.divisor, start.leaders
    (((1, 1, 0, 1.0),), 2, (0, 1))
    >>> answer
    Answer(rank=1, number=0, late=False, closed=True, through=1)
    """

    def __init__(self, rule: RoundRule, ranks: int, log: RankLog, *, seed: int = 0, slots: int | None = None) -> None:
        self._rounds = Rounds(rule, ranks, seed, slots=slots)
        self._log = log
        self._hosts = [f"rank {rank}" for rank in worker_ids(ranks)]
        """The name of each rank's host; ranks of one host share memory. A rank that has not come yet is alone on its host."""
        self._pending: dict[RoundPart, _Sent] = {}
        self._going: dict[Version, _Going] = {}
        self._change: ViewChange | None = None
        self._present: list[WorkerId] = []
        """Ranks that take part, in the order in which they entered."""
        self._entering: dict[WorkerId, bool] = {}
        """Ranks that have entered since the last view was under way. True: the rank gets an `Answer` when the next one is."""
        self._came_with: dict[WorkerId, Version] = {}
        self._parting: dict[WorkerId, _Parting] = {}
        self.view = 0

    @property
    def number(self) -> Version:
        """Return the number of the open round."""
        return self._rounds.number

    @property
    def present(self) -> tuple[WorkerId, ...]:
        """Return the ranks that take part, in the order in which they entered."""
        return tuple(self._present)

    def refuses(self, rank: WorkerId, buffer: int | None = None) -> str | None:
        """Return why a rank that takes part cannot arrive with this buffer, or catch up, now; None if it can."""
        return self._rounds.refuses(rank, buffer)

    # What happened. Each method returns the orders to send.

    def begin(self, hosts: Mapping[WorkerId, str]) -> None:
        """Enter the ranks that the job starts with, at version 0; by rank: the name of its host."""
        for rank in sorted(hosts):
            self._hosts[rank] = hosts[rank]
            self._rounds.enter(rank, 0)
            self._present.append(rank)
            self._came_with[rank] = 0
            self._wrote(EntryKind.ENTER, rank, 0)

    def arrive(self, rank: WorkerId, buffer: int | None, factor: float = 1.0, writes: int = 0, samples: int = 0) -> list[Order]:
        """Take note that a rank has arrived in the open round.

        Args:
            rank: takes part and does not wait.
            buffer: the buffer that holds its gradient; None if it has no gradient that can be used.
            factor: scale of the gradient if it is late; one that is on time is not scaled.
            writes: how often the buffer has been written, this gradient included. If `report` gives more, the gradient was overwritten.
            samples: see `Rounds.arrive`.

        Raises:
            Fenced: the rank does not take part.
        """
        self._check(rank)
        version = self._rounds.version(rank)
        arrival = self._rounds.arrive(rank, buffer, samples=samples)
        if buffer is not None:
            self._pending[RoundPart(rank, buffer)] = _Sent(rank, buffer, factor if arrival.late else 1.0, writes)
        self._wrote(EntryKind.ARRIVE, rank, version, arrival.closed, buffer)
        return [*self._settled(), Answer(rank, *arrival)]

    def catch_up(self, rank: WorkerId, upto: Version | None = None) -> list[Order]:
        """Give a rank that has no gradient all results up to now, of the rounds before ``upto``.

        A rank that is entering (see `enter`) is given none, and gets its `Answer` when a new view is under way.

        Raises `Fenced` if the rank does not take part.
        """
        self._check(rank)
        if rank in self._entering:
            self._entering[rank] = True
            return []
        given = self._rounds.catch_up(rank, upto)
        self._wrote(EntryKind.CATCH_UP, rank, given.stop)
        return [Answer(rank, self.number, True, False, self.number if upto is None else given.stop)]

    def read(self, rank: WorkerId, version: Version = 0) -> list[Order]:
        """Take note that a rank needs the results that it was given no more, nor, while it waits to leave, those before ``version``."""
        self._check(rank)
        closed = self._rounds.read(rank, version)
        self._wrote(EntryKind.READ, rank, self._rounds.version(rank), closed)
        return self._settled()

    def pause(self, rank: WorkerId) -> list[Order]:
        """Let no round wait for a rank that has no samples until the epoch ends."""
        orders = self.read(rank)
        self._wrote(EntryKind.PAUSE, rank, self._rounds.version(rank), self._rounds.pause(rank))
        return orders + self._settled()

    def resume(self, rank: WorkerId, *, asks: bool = False) -> list[Order]:
        """Let rounds wait for a rank again. It gets an `Answer` if the rank itself asks for this (``asks``)."""
        self._check(rank)
        if rank in self._parting and not asks:
            return []  # the rank is leaving; the sender of this message did not know
        self._parting.pop(rank, None)
        self._rounds.resume(rank)
        version = self._rounds.version(rank)
        self._wrote(EntryKind.RESUME, rank, version)
        return [Answer(rank, self.number, True, False, version)] if asks else []

    def enter(self, rank: WorkerId, version: Version, host: str) -> list[Order]:
        """Admit a rank that holds the parameters of ``version``.

        It begins with an `Answer`, for which it asks with `catch_up` once it has the parameters of its last admission, and which comes when
        a new view is under way. Before that it must not write into its buffers: another rank may still be reading a gradient that the
        process before it left there.

        Args:
            rank: does not take part yet; or has not begun, since the rank that admitted it died before the parameters for it had come.
            version: the version of its parameters.
            host: the name of its host.

        Raises:
            TooOld: results that the rank would have to apply are gone; it must come with newer parameters.
        """
        again = self._rounds.state(rank) != ABSENT
        if again and version == self._came_with[rank]:
            return []
        if version < self._rounds.free_from():
            raise TooOld(f"rank {rank} comes with version {version}, and results are kept from {self._rounds.free_from()} on")
        # Its predecessor's buffers, if they are still in memory, are its own now.
        self._lose([rank], self.number)
        for going in self._going.values():
            going.gone.add(rank)
        self._hosts[rank] = host
        self._rounds.enter(rank, version)
        if not again:
            self._present.append(rank)
        self._came_with[rank] = version
        self._wrote(EntryKind.ENTER, rank, version)
        self._entering.setdefault(rank, False)
        for parting in self._parting.values():
            parting.missing.add(rank)
        return [*self._new_view(), *(ReportProgress((rank,), parting.through) for parting in self._parting.values())]

    def part(self, rank: WorkerId) -> list[Order]:
        """Let a rank leave gracefully. Its `Answer` comes once the other ranks have every result that this rank may have.

        If its host goes with it, they must also have a result that contains the pending gradients of that host: otherwise they would sum
        a round without gradients that are in the leaving rank's result.
        """
        orders, host = self.pause(rank), self._hosts[rank]
        others = set(self._present) - {rank}
        goes = all(self._hosts[other] != host for other in others.difference(self._parting))
        through = self.number + (goes and any(self._hosts[part.rank] == host for part in self._pending))
        self._parting[rank] = _Parting(through, others)
        return [*orders, ReportProgress(tuple(sorted(others)), through), *self._parted()]

    def has(self, rank: WorkerId, through: Version) -> list[Order]:
        """Take note that a rank has the results of all rounds before ``through``."""
        for parting in self._parting.values():
            if parting.through <= through:
                parting.missing.discard(rank)
        return self._parted()

    def leave(self, rank: WorkerId, why: str = "it was declared dead, or has left") -> list[Order]:
        """Exclude a rank, and its host's gradients if no other rank is left on that host. ``why`` is for the rank's error message."""
        if self._rounds.state(rank) == ABSENT:
            return []
        self._parting.pop(rank, None)
        for parting in self._parting.values():
            parting.missing.discard(rank)
        self._present.remove(rank)
        self._entering.pop(rank, None)
        version, number = self._rounds.version(rank), self.number
        self._wrote(EntryKind.LEAVE, rank, version, self._rounds.leave(rank))
        host = self._hosts[rank]
        if all(self._hosts[other] != host for other in self._present):
            its_ranks = [other for other, name in zip(worker_ids(len(self._hosts)), self._hosts, strict=True) if name == host]
            self._lose(its_ranks, number)
            for going in self._going.values():
                going.gone.update(its_ranks)
        # Always a new view, also if it led nobody: it may have been about to pass a result on.
        fence = Exclude(rank, f"rank {rank} does not take part any more: {why}")
        return [fence, *self._new_view(), *self._settled(), *self._parted()]

    def report(self, rank: WorkerId, view: int, upto: Version, held: Iterable[Version], writes: Sequence[int] | None = ()) -> list[Order]:
        """Take note of the report of a rank that has halted for a view. The last report puts the view under way.

        From its report on, the rank accepts no memory from a rank that is not in this view. Reports for other views are ignored.

        Args:
            rank: a rank of the view.
            view: the view that it has halted for.
            upto: it has received the results of all rounds before this one.
            held: the rounds whose results it can still hand to others.
            writes: how often each buffer of its host has been written, `BUFFERS` numbers for each rank; None: it has not received
                the memory that its host's ranks share.
        """
        change = self._change
        if change is None or view != change.view or rank not in change.missing:
            return []
        change.report(rank, self._hosts[rank], upto, held, writes)
        return self._under_way(change) if not change.missing else []

    # How rounds come to an end.

    def _parted(self) -> list[Order]:
        """Answer the leaving ranks that no other rank needs any more."""
        ready = {rank: parting for rank, parting in self._parting.items() if not parting.missing and not parting.answered}
        for parting in ready.values():
            parting.answered = True
        return [Answer(rank, self.number, True, False, parting.through) for rank, parting in ready.items()]

    def _wrote(self, kind: EntryKind, rank: WorkerId, version: Version, closed: bool = False, buffer: int | None = None) -> None:
        self._log.write(kind, rank, version, buffer, self.number - closed, closed)

    def _check(self, rank: WorkerId) -> None:
        if self._rounds.state(rank) == ABSENT:
            raise Fenced(f"rank {rank} does not take part: it was declared dead, or has left; let it enter again with a newer version")

    def _settled(self) -> list[Order]:
        """Order the sums of rounds that have been closed."""
        orders: list[Order] = []
        while (round_ := self._rounds.closed()) is not None:
            weights = dict(zip(round_.parts, round_.weights, strict=True)) if round_.weights else {}
            found = [(part, self._pending.pop(part)) for part in round_.parts if part in self._pending]
            parts = [sent._replace(factor=sent.factor * weights[part]) if weights else sent for part, sent in found]
            self._going[round_.number] = _Going(parts, 1 if weights else round_.divisor, self._free_slot())
            self._wrote(EntryKind.FOLD_DONE, NO_WORKER, round_.number + 1, self._rounds.fold_done())
            if self._change is None:
                orders.append(self._go(round_.number))
        return orders

    def _leader_of(self) -> dict[str, WorkerId]:
        first: dict[str, WorkerId] = {}
        for rank in self._present:
            first.setdefault(self._hosts[rank], rank)
        return first

    def _go(self, number: Version) -> Start:
        going, leader_of = self._going[number], self._leader_of()
        leaders = tuple(sorted(leader_of.values()))
        floor = self._rounds.free_from()
        for old in [old for old in self._going if old < floor]:
            del self._going[old]
        parts = tuple((leader_of[self._hosts[sent.rank]], sent.rank, sent.buffer, sent.factor) for sent in going.parts)
        return Start(number, self.view, parts, going.divisor, leaders, floor, going.slot)

    def _free_slot(self) -> int:
        """Return the lowest slot whose result is not needed any more: its memory has been used before, and is still in the cache."""
        floor = self._rounds.free_from()
        busy = {going.slot for number, going in self._going.items() if number >= floor}
        return next(slot for slot in count() if slot not in busy)

    def _lose(self, ranks: Sequence[WorkerId], number: Version) -> None:
        """Drop the pending gradients of these ranks. They were for this round, which may be closed, and is not summed yet."""
        for part in [part for part in self._pending if part.rank in ranks]:
            del self._pending[part]
            self._wrote(EntryKind.LOST, part.rank, number, buffer=part.buffer)

    def _new_view(self) -> list[Order]:
        self.view += 1
        self._change = ViewChange(self.view, self._present, self._rounds.free_from())
        starts = tuple(self._came_with[rank] for rank in self._present)
        return [Prepare(self.view, tuple(self._present), starts, self._change.floor)] if self._present else []

    def _under_way(self, change: ViewChange) -> list[Order]:
        """Put a view under way that all ranks have reported for: hand on the results that are held, recompute the others."""
        host_of, leader_of = {rank: self._hosts[rank] for rank in self._present}, self._leader_of()
        if bare := change.without_memory(host_of):  # possible only for hosts of ranks that the job started with
            return [*(Allocate(rank) for host, rank in leader_of.items() if host in bare), *self._new_view()]
        lacked = [number for number in sorted(self._going) if number >= change.floor and change.lacking(number)]
        anew = [number for number in lacked if not change.is_held(number)]
        stranded = [rank for rank in self._present if any(number < self._came_with[rank] for number in anew)]
        if stranded:
            # Its parameters, copied from a rank that has died, contain a result that no living rank holds and that would now come out
            # different.
            return [order for rank in stranded for order in self.leave(rank)]
        self._change = None
        orders: list[Order] = []
        for number in lacked:
            if number in anew:
                self._lose_of(number, change)
                orders.append(self._go(number))
            else:
                orders += change.handed(number, host_of)
        entering, self._entering = self._entering, {}
        return orders + [Answer(rank, self.number, True, False, self._rounds.version(rank)) for rank, asks in entering.items() if asks]

    def _lose_of(self, number: Version, change: ViewChange) -> None:
        """Remove the lost gradients from a round that is recomputed: those of hosts that are gone, and those that were overwritten by a
        rank that had the result and has died."""
        going, kept = self._going[number], []
        for sent in going.parts:
            if sent.rank in going.gone or change.written_over(self._hosts[sent.rank], sent.rank, sent.buffer, sent.writes):
                self._wrote(EntryKind.LOST, sent.rank, number, buffer=sent.buffer)
            else:
                kept.append(sent)
        going.parts = kept
