"""Who works on which samples. Positions of an epoch's order are leased out a batch at a time; a dead worker's come back.

Only positions 0 .. size-1 are dealt with here; what sample stands at a position is each worker's own computation from the job's
seed. There is one pool for each sampler that a script makes, and one epoch of a pool is under way at a time. A position is *settled*
with the fate of the contribution computed over it. When an epoch ends, its report accounts for every position:

``folded + dropped + rejected + unused == indices``

``folded`` are the positions used once, as they should be. The others are its exceptions, listed with the reason: the rule dropped the
gradient, the gradient was not finite, or nobody took the position (the script left its loop early, or no worker was left).
``returned`` counts positions that were dealt out again because their holder died or gave them up before they were settled.

A pool may be *open-ended*: of a stream nobody knows the length before somebody has read to its end. Then positions are dealt out without
end until a worker says how many there are (`Leases.bound`); what was dealt beyond that is taken back. Each epoch may have another length.

A job that goes on from a checkpoint opens its first epoch with the ranges that were left of it; ``indices`` is their number then.

Where each worker has a split of its own (`core.partitions`), a pool is dealt out from several decks, one for each worker. Then a report
adds up over all of them: ``indices`` is the sum of their sizes, more than the data set has if they overlap, ``splits`` lists them, and
an exception names its worker, its positions being those in that worker's split. What a worker leaves undone when it dies stays so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offbeat.core.partitions import Parts, size_of
from offbeat.types import Epoch, Fate, LeaseId, WorkerId


class Lease(NamedTuple):
    """A range of positions that one worker holds."""

    id: LeaseId
    worker: WorkerId
    pool: int
    epoch: Epoch
    start: int
    stop: int


@dataclass(slots=True)
class _Deck:
    """Positions that are dealt out one after the other: the whole epoch's, or one worker's split."""

    size: int | None
    """None: nobody knows yet."""
    parts: Parts = ()
    dealt: int = 0
    """Positions below this have been leased at least once."""
    back: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges that came back unsettled."""
    before: int = 0
    """How many positions were settled before this job began, by the one whose checkpoint it goes on from."""
    closed: bool = False
    """Its worker is gone: nothing more is dealt from it in this epoch."""

    @property
    def done(self) -> bool:
        return self.closed or (self.dealt == self.size and not self.back)

    def draw(self, batch: int) -> tuple[int, int] | None:
        """The next range of at most ``batch`` positions; None: nothing is left to deal, for now."""
        if self.closed:
            return None
        if self.back:
            start, stop = self.back.popleft()
            if stop - start > batch:
                self.back.appendleft((start + batch, stop))
            return start, min(start + batch, stop)
        if self.dealt == self.size:
            return None
        start, self.dealt = self.dealt, self.dealt + batch if self.size is None else min(self.dealt + batch, self.size)
        return start, self.dealt

    @property
    def extent(self) -> int:
        """How many positions there are, or have been dealt of those that nobody has counted."""
        return self.dealt if self.size is None else self.size

    def left(self) -> list[tuple[int, int]]:
        """The ranges that nobody holds and nobody has settled."""
        return [*self.back, *([(self.dealt, self.extent)] if self.dealt < self.extent else [])]


@dataclass(slots=True)
class _Pool:
    epoch: Epoch = 0
    size: int | None = 0
    """As announced; None: the pool is open-ended."""
    decks: dict[WorkerId | None, _Deck] = field(default_factory=dict)
    """One for everybody, under None, or one for each worker that has a split."""
    open: int = 0
    """Leases held now."""
    begun: bool = False
    """Whether any lease of this epoch has been dealt."""
    rest: tuple[tuple[int, int], ...] | None = None
    """Where the epoch goes on from a checkpoint: the ranges that were not settled then. None: it begins."""
    returned: int = 0
    settled: dict[Fate, int] = field(default_factory=dict)
    exceptions: list[dict[str, Any]] = field(default_factory=list)

    def deck(self, worker: WorkerId) -> _Deck | None:
        return self.decks.get(None) or self.decks.get(worker)

    def except_for(self, owner: WorkerId | None, start: int, stop: int, why: str) -> None:
        whose = {} if owner is None else {"worker": owner}
        self.exceptions.append({**whose, "start": start, "stop": stop, "why": why})


class Leases:
    """The sample pools of one job."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._held: dict[WorkerId, dict[LeaseId, Lease]] = {}
        self._next_id: LeaseId = 0

    def epoch(self, pool: int) -> Epoch:
        """The epoch of this pool that is under way, or the next one between two epochs."""
        return self._pools[pool].epoch if pool in self._pools else 0

    def begun(self, pool: int) -> bool:
        """Whether any lease of the epoch under way has been dealt."""
        return pool in self._pools and self._pools[pool].begun

    def open(
        self,
        pool: int,
        epoch: Epoch,
        size: int | None,
        splits: Mapping[WorkerId, Parts] | None = None,
        rest: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Announce an epoch and its number of samples. A pool that has not dealt anything yet moves on to that epoch.

        Args:
            size: how many; None: nobody knows yet.
            splits: whose split is what; None: all positions are dealt out from one deck, to whoever asks.
            rest: the ranges that are left of this epoch, as `place` gave them before a checkpoint; None: as was said of this epoch before,
                or all. Splits begin anew.

        Raises:
            ValueError: a range of ``rest`` is empty, overlaps another, or reaches beyond ``size``.
        """
        state = self._pools.setdefault(pool, _Pool())
        if not state.begun:
            if epoch > state.epoch:
                state.rest = None
            if rest is not None and size is not None and epoch >= state.epoch:
                state.rest = checked_ranges(rest, size)
            state.epoch = max(state.epoch, epoch)
            state.size = size
            state.decks = {None: _Deck(size)}
            if state.rest is not None and size is not None:
                left = sum(stop - start for start, stop in state.rest)
                state.decks = {None: _Deck(size, dealt=size, back=deque(state.rest), before=size - left)}
            if splits is not None:
                state.decks = {worker: _Deck(size_of(parts), parts) for worker, parts in splits.items()}

    def bound(self, pool: int, size: int | None) -> None:
        """A worker has read to the end of an open-ended epoch: it has ``size`` positions. The first word counts; None: no word.

        Leases that reach beyond the end become shorter, those that begin there are gone, whoever holds them.
        """
        state = self._pools[pool]
        deck = state.decks.get(None)
        if size is None or state.size is not None or deck is None or deck.size is not None:
            return
        deck.size, deck.dealt = size, min(deck.dealt, size)
        deck.back = deque((start, min(stop, size)) for start, stop in deck.back if start < size)
        for lease in [lease for lease in self._leases.values() if lease.pool == pool and lease.stop > size]:
            if lease.start >= size:
                self._remove(lease.id)
                continue
            self._leases[lease.id] = shorter = lease._replace(stop=size)
            if lease.id in self._held[lease.worker]:
                self._held[lease.worker][lease.id] = shorter

    def place(self, pool: int) -> dict[str, Any] | None:
        """Return where this pool stands, for a checkpoint: the epoch, its size, and the ranges without a fate (``rest``) for `open`.

        None: nobody has asked for samples of it. Where workers have splits of their own, and of a stream without a known end, ``rest`` is
        None: the epoch begins anew.
        """
        state = self._pools.get(pool)
        if state is None:
            return None
        deck = state.decks.get(None)
        if deck is None or deck.size is None:
            return {"epoch": state.epoch, "size": state.size, "rest": None}
        held = [(lease.start, lease.stop) for lease in self._leases.values() if lease.pool == pool]
        rest: list[list[int]] = []
        for start, stop in sorted([*deck.left(), *held]):
            if rest and rest[-1][1] == start:
                rest[-1][1] = stop
            else:
                rest.append([start, stop])
        return {"epoch": state.epoch, "size": state.size, "rest": rest}

    def take(self, worker: WorkerId, pool: int, batch: int) -> Lease | None:
        """Lease out the next range of at most ``batch`` positions; None: nothing is left to deal, for now."""
        state = self._pools[pool]
        deck = state.deck(worker)
        drawn = deck.draw(batch) if deck is not None else None
        if drawn is None:
            return None
        lease = Lease(self._next_id, worker, pool, state.epoch, *drawn)
        self._next_id += 1
        state.open += 1
        state.begun = True
        self._leases[lease.id] = lease
        self._held.setdefault(worker, {})[lease.id] = lease
        return lease

    def parts(self, worker: WorkerId, pool: int) -> Parts:
        """The worker's split in the epoch under way; empty where there is one deck for all, or no split for this worker."""
        deck = self._pools[pool].deck(worker)
        return deck.parts if deck is not None else ()

    def holds(self, worker: WorkerId, pool: int) -> bool:
        """Whether the worker holds leases of this pool."""
        return any(lease.pool == pool for lease in self._held.get(worker, {}).values())

    def valid(self, worker: WorkerId, leases: tuple[LeaseId, ...]) -> bool:
        """Whether the worker holds all of these."""
        held = self._held.get(worker, {})
        return all(lease in held for lease in leases)

    def submit(self, leases: tuple[LeaseId, ...]) -> None:
        """A contribution over these leases has arrived: they now go with it, not with its worker."""
        for id in leases:
            lease = self._leases[id]
            del self._held[lease.worker][id]

    def settle(self, leases: tuple[LeaseId, ...], fate: Fate, reason: str) -> None:
        """The contribution computed over these leases has met its fate."""
        for id in leases:
            lease = self._remove(id)
            if lease is None:
                continue
            state = self._pools[lease.pool]
            state.settled[fate] = state.settled.get(fate, 0) + lease.stop - lease.start
            if fate is not Fate.FOLDED:
                owner = None if None in state.decks else lease.worker
                state.except_for(owner, lease.start, lease.stop, f"{fate.value}: {reason}")

    def give_back(self, worker: WorkerId, pool: int | None = None) -> None:
        """Return to their pools all leases that the worker holds (of one pool, if given)."""
        self.withdraw(tuple(lease.id for lease in self._held.get(worker, {}).values() if pool in (None, lease.pool)))

    def withdraw(self, leases: tuple[LeaseId, ...]) -> None:
        """Return these to where they were dealt from: the work done on them is lost, somebody else is to do it."""
        for id in leases:
            lease = self._remove(id)
            if lease is not None:
                state = self._pools[lease.pool]
                deck = state.deck(lease.worker)
                assert deck is not None, f"a lease from no deck: {lease}"
                deck.back.append((lease.start, lease.stop))
                state.returned += 0 if deck.closed else lease.stop - lease.start

    def close(self, worker: WorkerId) -> None:
        """A worker is gone: what it holds goes back, and the rest of its own splits, if it has such, is nobody's until the next epoch."""
        for state in self._pools.values():
            if worker in state.decks:
                state.decks[worker].closed = True
        self.give_back(worker)

    def accounted(self, pool: int) -> bool:
        """Whether every position of the epoch under way is settled, or can no longer be."""
        state = self._pools.get(pool)
        return state is not None and state.size != 0 and state.open == 0 and all(deck.done for deck in state.decks.values())

    def quiet(self, pool: int) -> bool:
        """Whether nobody works on this pool: no lease is held, and no contribution over one waits for its fate."""
        return pool not in self._pools or self._pools[pool].open == 0

    def end(self, pool: int) -> dict[str, Any]:
        """Close the epoch under way, whatever is left of it, and report on it; the pool moves on to the next epoch."""
        state = self._pools[pool]
        assert state.open == 0, "leases are settled or given back before an epoch ends"
        unused = 0
        for owner, deck in state.decks.items():
            why = "unused: its worker died or left before" if deck.closed else "unused: no worker took it"
            for start, stop in deck.left():
                state.except_for(owner, start, stop, why)
                unused += stop - start
        report: dict[str, Any] = {
            "indices": sum(deck.extent - deck.before for deck in state.decks.values()),
            **{fate.value: state.settled.get(fate, 0) for fate in (Fate.FOLDED, Fate.DROPPED, Fate.REJECTED)},
            "unused": unused,
            "returned": state.returned,
            "exceptions": state.exceptions,
        }
        if None not in state.decks:
            report["splits"] = [{"worker": owner, "indices": deck.extent, "parts": deck.parts} for owner, deck in state.decks.items()]
        self._pools[pool] = _Pool(state.epoch + 1, state.size)
        return report

    def size(self, pool: int) -> int | None:
        """The number of samples in the data set, as announced; None: the pool is open-ended."""
        return self._pools[pool].size

    def pools(self) -> list[int]:
        """The pools that somebody has asked for samples of."""
        return list(self._pools)

    def under_way(self) -> list[int]:
        """The pools of which an epoch has begun and not ended."""
        return [number for number, state in self._pools.items() if state.begun]

    def between(self) -> list[int]:
        """The pools that stand between two epochs."""
        return [number for number, state in self._pools.items() if not state.begun]

    def _remove(self, id: LeaseId) -> Lease | None:
        lease = self._leases.pop(id, None)
        if lease is not None:
            self._held[lease.worker].pop(id, None)
            self._pools[lease.pool].open -= 1
        return lease


def checked_ranges(rest: Sequence[Sequence[int]], size: int) -> tuple[tuple[int, int], ...]:
    """Return these ranges of positions in order.

    Raises:
        ValueError: one is empty, overlaps another, or reaches beyond ``size``.
    """
    ranges = sorted((int(start), int(stop)) for start, stop in rest)
    reached = 0
    for start, stop in ranges:
        if not reached <= start < stop <= size:
            raise ValueError(f"the rest of an epoch of {size} samples has the range {start} to {stop} after position {reached}")
        reached = stop
    return tuple(ranges)
