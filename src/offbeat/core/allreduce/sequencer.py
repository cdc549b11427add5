"""Across hosts: the one place that decides. It hears of arrivals, closes rounds, and says who sums them; it sees no gradient.

The decisions are those of one host (`core.allreduce.rounds.Rounds`), with one difference. A round counts as done when it is closed: nobody
can know when the last host has its sum, and whoever is given its result waits for it at his own host.

The ranks of one host have a *leader*; leaders run the schedules. When the leaders change, because one is dead or new, the rounds that are
under way begin again in a new *view*: all ranks halt, say which results they have, and hear what is next. A round whose result anybody
has is taken from him; the others are summed once more, among those that are there, from the same gradients. A dead host's gradients are
lost with it, and so is what a dead rank has written over: it had the result, and nobody else has. A rank that leaves in peace does so
only when the others have all that it has. Pure: what is to be sent is returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.core.allreduce.commands import Allocate, Answer, Exclude, Order, Prepare, ReportProgress, Start
from offbeat.core.allreduce.policy import ABSENT, RoundRule
from offbeat.core.allreduce.rounds import RoundPart, Rounds
from offbeat.core.allreduce.view_change import ViewChange
from offbeat.core.rank_log import Entry, EntryKind, Fenced, TooOld
from offbeat.types import Version, WorkerId

LOG_ENTRIES = 1 << 14
"""How many events are kept if nobody follows."""


class _Sent(NamedTuple):
    """A gradient that waits to be summed."""

    rank: WorkerId
    buffer: int
    factor: float
    """What it is scaled by."""
    writes: int
    """How often its buffer had been written when it was there."""


@dataclass
class _Going:
    """A round that is closed, and may not be summed everywhere."""

    parts: list[_Sent]
    divisor: int
    initiator: WorkerId | None
    gone: set[WorkerId] = field(default_factory=set)
    """Ranks whose buffers are somebody else's by now."""


@dataclass
class _Parting:
    """A rank that is about to leave."""

    through: Version
    missing: set[WorkerId]
    """Ranks that may still lack results of rounds before that one."""
    answered: bool = False


class Sequencer:
    """The decisions of one job.

    Args:
        rule: when a round closes.
        hosts: of each rank, by name; ranks of one host share memory.
        clock_ns: of the log's entries.
        seed: of what the rule draws.
        slots: how many results are kept for ranks that are behind.
        followed: whether somebody calls `follow`: nothing is forgotten before he has had it.

    >>> from offbeat.policies import rule
    >>> decider = Sequencer(rule("solo"), ["a", "b"], clock_ns=lambda: 0)
    >>> decider.begin([0, 1])
    >>> go, answer = decider.arrive(1, 0)
    >>> go.parts, go.divisor, go.leaders
    (((1, 1, 0, 1.0),), 2, (0, 1))
    >>> answer
    Answer(rank=1, number=0, late=False, closed=True, through=1)
    """

    def __init__(
        self,
        rule: RoundRule,
        hosts: Sequence[str],
        *,
        clock_ns: Callable[[], int],
        seed: int = 0,
        slots: int | None = None,
        followed: bool = False,
    ) -> None:
        self._rounds = Rounds(rule, len(hosts), seed, slots=slots)
        self._hosts = list(hosts)
        self._clock_ns = clock_ns
        self._followed = followed
        self._log: deque[Entry] = deque(maxlen=None if followed else LOG_ENTRIES)
        self._seq = 0
        self._pending: dict[RoundPart, _Sent] = {}
        self._going: dict[Version, _Going] = {}
        self._change: ViewChange | None = None
        self._present: list[WorkerId] = []
        """The longest here first."""
        self._entering: list[WorkerId] = []
        self._came_with: dict[WorkerId, Version] = {}
        self._parting: dict[WorkerId, _Parting] = {}
        self.view = 0

    @property
    def number(self) -> Version:
        """Of the open round."""
        return self._rounds.number

    @property
    def present(self) -> tuple[WorkerId, ...]:
        """Who takes part, the longest there first."""
        return tuple(self._present)

    @property
    def leaders(self) -> tuple[WorkerId, ...]:
        """Of each host the rank that has been there for the longest time, in order of rank."""
        return tuple(sorted(self._leader_of().values()))

    def refuses(self, rank: WorkerId, buffer: int | None = None) -> str | None:
        """Why a rank that takes part cannot arrive with this buffer, or catch up, now; None: it can."""
        return self._rounds.refuses(rank, buffer)

    def follow(self, start: int) -> list[Entry]:
        """What has happened from entry ``start`` of the log on, as far as it is kept; who follows has dealt with what was before."""
        while self._followed and self._log and self._log[0].seq < start:
            self._log.popleft()
        return [entry for entry in self._log if entry.seq >= start]

    # What happens. Each returns what is to be sent.

    def begin(self, ranks: Iterable[WorkerId]) -> None:
        """These are there from the beginning."""
        for rank in ranks:
            self._rounds.enter(rank, 0)
            self._present.append(rank)
            self._came_with[rank] = 0
            self._wrote(EntryKind.ENTER, rank, 0)

    def arrive(self, rank: WorkerId, buffer: int | None, factor: float = 1.0, writes: int = 0) -> list[Order]:
        """A rank has a gradient in this buffer, or none. If it comes late, it is to be scaled by this.

        Args:
            writes: how often the buffer has been written, with this gradient; if `report` says more, it is no more there.
        """
        self._check(rank)
        version = self._rounds.version(rank)
        arrival = self._rounds.arrive(rank, buffer)
        if buffer is not None:
            self._pending[RoundPart(rank, buffer)] = _Sent(rank, buffer, factor if arrival.late else 1.0, writes)
        self._wrote(EntryKind.ARRIVE, rank, version, arrival.closed, buffer)
        return [*self._settled(), Answer(rank, *arrival)]

    def catch_up(self, rank: WorkerId) -> list[Order]:
        """A rank wants what there is, and has no gradient."""
        self._check(rank)
        self._wrote(EntryKind.CATCH_UP, rank, self._rounds.catch_up(rank).stop)
        return [Answer(rank, self.number, True, False, self.number)]

    def read(self, rank: WorkerId, version: Version = 0) -> list[Order]:
        """A rank has done with what it was given; and with all before this version, if it took that while it waits to leave."""
        self._check(rank)
        closed = self._rounds.read(rank, version)
        self._wrote(EntryKind.READ, rank, self._rounds.version(rank), closed)
        return self._settled()

    def pause(self, rank: WorkerId) -> list[Order]:
        """A rank has nothing to compute until the epoch ends."""
        orders = self.read(rank)
        self._wrote(EntryKind.PAUSE, rank, self._rounds.version(rank), self._rounds.pause(rank))
        return orders + self._settled()

    def resume(self, rank: WorkerId, *, asks: bool = False) -> list[Order]:
        """A rank computes again. If it is itself that says so (``asks``) it is answered."""
        self._check(rank)
        if rank in self._parting and not asks:
            return []  # it is on its way out, of which whoever says so has not heard
        self._parting.pop(rank, None)
        self._rounds.resume(rank)
        version = self._rounds.version(rank)
        self._wrote(EntryKind.RESUME, rank, version)
        return [Answer(rank, self.number, True, False, version)] if asks else []

    def enter(self, rank: WorkerId, version: Version, host: str | None = None) -> list[Order]:
        """A rank takes part from now on, with the parameters of this version; at this host, if it has moved.

        It has its answer, and may write into its buffers, once nobody reads any more what its predecessor has left there: in a new view.

        Raises:
            TooOld: results that it would need are gone; it must come with newer parameters.
        """
        assert self._rounds.state(rank) == ABSENT, f"rank {rank} enters, and is there"
        if version < self._rounds.free_from():
            raise TooOld(f"rank {rank} comes with version {version}, and results are kept from {self._rounds.free_from()} on")
        # Its predecessor's buffers, if they are still in memory, are its own now.
        self._lose([rank])
        for going in self._going.values():
            going.gone.add(rank)
        if host is not None:
            self._hosts[rank] = host
        self._rounds.enter(rank, version)
        self._present.append(rank)
        self._came_with[rank] = version
        self._wrote(EntryKind.ENTER, rank, version)
        self._entering.append(rank)
        for parting in self._parting.values():
            parting.missing.add(rank)
        return [*self._new_view(), *(ReportProgress((rank,), parting.through) for parting in self._parting.values())]

    def part(self, rank: WorkerId) -> list[Order]:
        """A rank is about to leave. It is answered when all others have the results that it may have, and what would go with its host is
        in one of them: else they would sum a round without it of which it has had the result."""
        orders, host = self.pause(rank), self._hosts[rank]
        others = set(self._present) - {rank}
        goes = all(self._hosts[other] != host for other in others.difference(self._parting))
        through = self.number + (goes and any(self._hosts[part.rank] == host for part in self._pending))
        self._parting[rank] = _Parting(through, others)
        return [*orders, ReportProgress(tuple(sorted(others)), through), *self._parted()]

    def has(self, rank: WorkerId, through: Version) -> list[Order]:
        """A rank has the results of all rounds before this one."""
        for parting in self._parting.values():
            if parting.through <= through:
                parting.missing.discard(rank)
        return self._parted()

    def leave(self, rank: WorkerId, why: str = "it was declared dead, or has left") -> list[Order]:
        """A rank is gone, and its host with it if it was the only one there."""
        if self._rounds.state(rank) == ABSENT:
            return []
        self._parting.pop(rank, None)
        for parting in self._parting.values():
            parting.missing.discard(rank)
        self._present.remove(rank)
        self._entering = [other for other in self._entering if other != rank]
        version = self._rounds.version(rank)
        self._wrote(EntryKind.LEAVE, rank, version, self._rounds.leave(rank))
        host = self._hosts[rank]
        if all(self._hosts[other] != host for other in self._present):
            self._lose([other for other, name in enumerate(self._hosts) if name == host])
            for going in self._going.values():
                going.gone.update(other for other, name in enumerate(self._hosts) if name == host)
        # Always a new view, also if it led nobody: it may have been about to pass a result on.
        fence = Exclude(rank, f"rank {rank} does not take part any more: {why}")
        return [fence, *self._new_view(), *self._settled(), *self._parted()]

    def report(self, rank: WorkerId, view: int, upto: Version, held: Iterable[Version], writes: Sequence[int] | None = ()) -> list[Order]:
        """A rank has halted for this view: it has had the results of all rounds before ``upto``, and holds those of ``held``.

        From here on it takes no memory from a rank that is not in this view.

        Args:
            writes: how often each buffer of its host has been written, `BUFFERS` numbers for each rank; None: it is without that memory.
        """
        change = self._change
        if change is None or view != change.view or rank not in change.missing:
            return []
        change.report(rank, self._hosts[rank], upto, held, writes)
        return self._under_way(change) if not change.missing else []

    # How rounds come to an end.

    def _parted(self) -> list[Order]:
        """Nobody needs these any more."""
        ready = {rank: parting for rank, parting in self._parting.items() if not parting.missing and not parting.answered}
        for parting in ready.values():
            parting.answered = True
        return [Answer(rank, self.number, True, False, parting.through) for rank, parting in ready.items()]

    def _wrote(self, kind: EntryKind, rank: WorkerId, version: Version, closed: bool = False, buffer: int | None = None) -> None:
        self._log.append(Entry(self._seq, kind, rank, version, buffer, self.number - closed, closed, self._clock_ns()))
        self._seq += 1

    def _check(self, rank: WorkerId) -> None:
        if self._rounds.state(rank) == ABSENT:
            raise Fenced(f"rank {rank} does not take part: it was declared dead, or has left; let it enter again with a newer version")

    def _settled(self) -> list[Order]:
        """Rounds that have been closed begin to be summed."""
        orders: list[Order] = []
        while (round_ := self._rounds.closed()) is not None:
            parts = [self._pending.pop(part) for part in round_.parts if part in self._pending]
            self._going[round_.number] = _Going(parts, round_.divisor, round_.initiator)
            self._wrote(EntryKind.FOLD_DONE, -1, round_.number + 1, self._rounds.fold_done())
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
        start = leaders[0] if going.initiator is None else leader_of.get(self._hosts[going.initiator], leaders[0])
        return Start(number, self.view, parts, going.divisor, start, leaders, floor)

    def _lose(self, ranks: Sequence[WorkerId]) -> None:
        """What these have in their buffers is gone."""
        for part in [part for part in self._pending if part.rank in ranks]:
            del self._pending[part]
            self._wrote(EntryKind.LOST, part.rank, self.number, buffer=part.buffer)

    def _new_view(self) -> list[Order]:
        self.view += 1
        self._change = ViewChange(self.view, self._present, self._rounds.free_from())
        starts = tuple(self._came_with[rank] for rank in self._present)
        return [Prepare(self.view, tuple(self._present), starts, self._change.floor)] if self._present else []

    def _under_way(self, change: ViewChange) -> list[Order]:
        """All have reported: what anybody has is handed on, the rest begins again."""
        host_of, leader_of = {rank: self._hosts[rank] for rank in self._present}, self._leader_of()
        if bare := change.without_memory(host_of):  # only who is there from the beginning may be without
            return [*(Allocate(rank) for host, rank in leader_of.items() if host in bare), *self._new_view()]
        lacked = [number for number in sorted(self._going) if number >= change.floor and change.lacking(number)]
        anew = [number for number in lacked if not change.is_held(number)]
        stranded = [rank for rank in self._present if any(number < self._came_with[rank] for number in anew)]
        if stranded:
            # It has come with the parameters of a rank that has died since, the last to have had a result that these contain.
            return [order for rank in stranded for order in self.leave(rank)]
        self._change = None
        orders: list[Order] = []
        for number in lacked:
            if number in anew:
                self._lose_of(number, change)
                orders.append(self._go(number))
            else:
                orders += change.handed(number, host_of)
        entering, self._entering = self._entering, []
        return orders + [Answer(rank, self.number, True, False, self._rounds.version(rank)) for rank in entering]

    def _lose_of(self, number: Version, change: ViewChange) -> None:
        """A round is summed anew. Not there any more are gradients of hosts that are gone, and those that a rank has written over: it had
        the result, and has died since."""
        going, kept = self._going[number], []
        for sent in going.parts:
            if sent.rank in going.gone or change.written_over(self._hosts[sent.rank], sent.rank, sent.buffer, sent.writes):
                self._wrote(EntryKind.LOST, sent.rank, number, buffer=sent.buffer)
            else:
                kept.append(sent)
        going.parts = kept
