"""Sample leases: which worker works on which samples. Positions of an epoch's order are leased a batch at a time; a dead worker's return.

This module handles positions 0 .. size-1 only; each worker computes the sample at a position from the job's seed. There is one pool for
each sampler that a script makes, and one epoch of a pool is under way at a time. A position is *settled*
with the fate of the contribution computed over it. When an epoch ends, its report accounts for every position:

``folded + dropped + rejected + skipped + unused == indices``

``folded`` counts the positions used once. The others are exceptions, listed with the reason: the rule dropped the gradient, the gradient
was not finite, the script left the samples out, or no worker took the position (the script left its loop early, or no worker was left).

A worker may *keep* a gradient over the epoch's end, for a step in the next one. The epoch ends without waiting for its positions; they get
their fate in a later epoch, in whose report they are counted. Where there are such positions, the reports have two more fields: ``kept``,
those that are still without a fate, and ``brought``, those of earlier epochs that have got theirs. Then

``folded + dropped + rejected + skipped + unused + kept == indices + brought``

Exceptions among them name their ``epoch``. Kept positions of a worker that dies are ``unused``: their epoch's order is gone.
An epoch with more than a thousand exceptions lists those, and counts the positions of the others as ``unlisted``: each has its fate in the
journal. ``returned`` counts positions that were dealt out again because their holder died or gave them up before they were settled.

A pool may be *open-ended*: the length of a stream is unknown until a worker has read to its end. Positions are then dealt out without a
limit until a worker reports the length (`Leases.bound`); positions dealt beyond it are taken back. Epochs may differ in length.

A job that resumes from a checkpoint opens its first epoch with the ranges left of it; ``indices`` is then the number of their positions.

Where each worker has a split of its own (`core.partitions`), a pool is dealt out from several decks, one per worker. Then a report
adds up over all of them: ``indices`` is the sum of their sizes, more than the data set has if they overlap, ``splits`` lists them, and
an exception names its worker, its positions being those in that worker's split. The rest of a dead worker's split stays unused, unless
the worker comes back in the same epoch and the pool `reopens` its deck.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from offbeat.core.partitions import Parts, size_of
from offbeat.errors import ConfigurationError
from offbeat.types import Epoch, Fate, LeaseId, WorkerId

EXCEPTIONS_LISTED: Final = 1_000
"""Exceptions of an epoch that its report lists, the first ones; of the others it counts the positions (``unlisted``). An epoch may have a
million batches, and a rule may drop every third.
"""


def unaccounted(report: Mapping[str, Any]) -> int:
    """Return how many positions an epoch's report does not account for; less than 0: some are counted twice.

    >>> unaccounted({"indices": 9, "folded": 8, "dropped": 0, "rejected": 0, "skipped": 0, "unused": 0})
    1
    """
    fates = sum(report.get(name, 0) for name in ("folded", "dropped", "rejected", "skipped", "unused", "kept"))
    return int(report["indices"] + report.get("brought", 0) - fates)


def adds_up(report: Mapping[str, Any]) -> bool:
    """Return whether an epoch's report accounts for every position, once."""
    return unaccounted(report) == 0


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
    """A range of positions that are dealt out in order: the whole epoch, or one worker's split."""

    size: int | None
    """None: not known yet."""
    parts: Parts = ()
    dealt: int = 0
    """Positions below this have been leased at least once."""
    back: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges that came back unsettled."""
    before: int = 0
    """The number of positions that were settled before the checkpoint from which this job resumes."""
    closed: bool = False
    """True if the worker of this split is dead or has left: nothing more is dealt from this deck in this epoch."""

    @property
    def done(self) -> bool:
        return self.closed or (self.dealt == self.size and not self.back)

    def draw(self, batch: int) -> tuple[int, int] | None:
        """Remove and return the next range of at most ``batch`` positions; None: nothing is left to deal for now."""
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
        """The number of positions; if it is unknown, the number dealt so far."""
        return self.dealt if self.size is None else self.size

    def left(self) -> list[tuple[int, int]]:
        """Return the ranges that are neither held by a worker nor settled."""
        return [*self.back, *([(self.dealt, self.extent)] if self.dealt < self.extent else [])]


@dataclass(slots=True)
class _Pool:
    epoch: Epoch = 0
    size: int | None = 0
    """The announced number of samples; None: the pool is open-ended."""
    decks: dict[WorkerId | None, _Deck] = field(default_factory=dict)
    """One deck for all workers, under None, or one for each worker with a split."""
    open: int = 0
    """Leases held now."""
    begun: bool = False
    """True if a lease of this epoch has been dealt."""
    rest: tuple[tuple[int, int], ...] | None = None
    """If the epoch resumes from a checkpoint, the ranges that were not settled in it; None: the epoch is complete."""
    resumed: Mapping[str, Any] | None = None
    """What `Leases.begin_at` was given, until the epoch is over; its counts are part of ``settled`` and so on."""
    reopens: bool = False
    """True if a worker that comes back goes on with the rest of its own deck."""
    returned: int = 0
    kept: int = 0
    """Positions in gradients that workers take along into the next epoch."""
    brought: int = 0
    """Positions of earlier epochs, kept until now, that have got their fate in this epoch."""
    lost: int = 0
    """Those among them that nobody has used."""
    settled: dict[Fate, int] = field(default_factory=dict)
    exceptions: list[dict[str, Any]] = field(default_factory=list)
    unlisted: int = 0
    """Positions that were not used and are not among the exceptions."""

    def deck(self, worker: WorkerId) -> _Deck | None:
        return self.decks.get(None) or self.decks.get(worker)

    def except_for(self, owner: WorkerId | None, start: int, stop: int, why: str, epoch: Epoch | None = None) -> None:
        if len(self.exceptions) == EXCEPTIONS_LISTED:
            self.unlisted += stop - start
            return
        whose: dict[str, Any] = {} if owner is None else {"worker": owner}
        if epoch is not None:
            whose["epoch"] = epoch
        self.exceptions.append({**whose, "start": start, "stop": stop, "why": why})


class Leases:
    """The sample pools of one job."""

    def __init__(self) -> None:
        self._pools: dict[int, _Pool] = {}
        self._leases: dict[LeaseId, Lease] = {}
        self._held: dict[WorkerId, dict[LeaseId, Lease]] = {}
        self._kept: set[LeaseId] = set()
        """Leases whose worker keeps their gradient over the epoch's end. No epoch waits for them."""
        self._next_id = 0

    def epoch(self, pool: int) -> Epoch:
        """Return the current epoch of this pool, or the next one between two epochs."""
        return self._pools[pool].epoch if pool in self._pools else 0

    def begun(self, pool: int) -> bool:
        """Return whether any lease of the current epoch has been dealt."""
        return pool in self._pools and self._pools[pool].begun

    def open(
        self,
        pool: int,
        epoch: Epoch,
        size: int | None,
        splits: Mapping[WorkerId, Parts] | None = None,
        rest: Sequence[Sequence[int]] | None = None,
        *,
        reopens: bool = False,
    ) -> None:
        """Announce an epoch and its number of samples. A pool that has not dealt anything yet moves on to that epoch.

        Args:
            size: the number of samples; None: not known yet.
            splits: the split of each worker; None: all positions are dealt out from one deck, to any worker.
            rest: the ranges left of this epoch, as `place` returned them for a checkpoint; None: those of an earlier call for this epoch,
            or all. Splits ignore it and begin again.
            reopens: with splits, a worker that dies and comes back in the same epoch goes on with the rest of its own.

        Raises:
            ValueError: a range of ``rest`` is empty, overlaps another, or reaches beyond ``size``.
        """
        state = self._pools.setdefault(pool, _Pool())
        if not state.begun:
            if state.resumed is not None and (epoch > state.epoch or size != state.resumed["size"]):
                self._forget_counts(state, size)
            if epoch > state.epoch:
                state.rest = None
            if rest is not None and size is not None and epoch >= state.epoch:
                state.rest = checked_ranges(rest, size)
            state.epoch = max(state.epoch, epoch)
            state.size, state.reopens = size, reopens
            state.decks = {None: _Deck(size)}
            if state.rest is not None and size is not None:
                left = sum(stop - start for start, stop in state.rest)
                before = size - left if state.resumed is None else 0
                state.decks = {None: _Deck(size, dealt=size, back=deque(state.rest), before=before)}
            if splits is not None:
                state.decks = {worker: _Deck(size_of(parts), parts) for worker, parts in splits.items()}
                if state.resumed is not None:
                    self._resume_splits(state, state.resumed)

    def bound(self, pool: int, size: int | None) -> None:
        """Set the length of an open-ended epoch, reported by a worker at its end. The first report counts; None: no report.

        Leases that reach beyond the end become shorter; leases that begin at or after the end are removed.
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
        """Return the position of this pool for a checkpoint: the epoch, its size, and the ranges without a fate (``rest``) for `open`.

        None: no worker has asked for its samples. With splits, and for a stream of unknown length, ``rest`` is None: the epoch begins
        again.
        """
        state = self._pools.get(pool)
        if state is None:
            return None
        if state.resumed is not None and not state.decks:  # no worker has asked for these samples since the job was resumed
            return {name: state.resumed[name] for name in ("epoch", "size", "rest")}
        deck = state.decks.get(None)
        if deck is None or deck.size is None:
            return {"epoch": state.epoch, "size": state.size, "rest": None}
        return {"epoch": state.epoch, "size": state.size, "rest": self._unsettled(pool, None, deck)}

    def progress(self, pool: int) -> dict[str, Any] | None:
        """Return the position of this pool as `place` does, with the counts of its epoch so far, for `begin_at`: plain data."""
        place = self.place(pool)
        if place is None:
            return None
        state = self._pools[pool]
        if state.resumed is not None and not state.decks:
            return dict(state.resumed)
        counts = {fate.value: count for fate, count in state.settled.items()}
        kept = [one for one in self._leases.values() if one.pool == pool and one.epoch != state.epoch]  # their gradients will be gone
        why = "unused: the job stopped with the gradient in hand"
        lost = [{"epoch": one.epoch, "start": one.start, "stop": one.stop, "why": why} for one in kept]
        positions = sum(one.stop - one.start for one in kept)
        progress = {
            **place,
            "settled": counts,
            "returned": state.returned,
            "brought": state.brought + positions,
            "lost": state.lost + positions,
            "exceptions": [*state.exceptions, *lost],
            "unlisted": state.unlisted,
        }
        if None not in state.decks:
            decks = state.decks.items()
            progress["splits"] = [[owner, [list(part) for part in deck.parts], self._unsettled(pool, owner, deck)] for owner, deck in decks]
        return progress

    def begin_at(self, pool: int, progress: Mapping[str, Any]) -> None:
        """Begin at what `progress` has returned. The epoch's report then has the counts of the whole epoch.

        A stream of unknown length begins its epoch again, and so does an epoch with splits if `open` gives the workers other ones.
        """
        size, rest = progress["size"], progress["rest"]
        state = self._pools[pool] = _Pool(progress["epoch"], size, resumed=progress)
        if rest is not None:
            state.rest = checked_ranges(rest, size)
        if rest is not None or progress.get("splits"):
            state.settled = {Fate(name): count for name, count in progress["settled"].items()}
            state.returned, state.unlisted = progress["returned"], progress["unlisted"]
            state.brought, state.lost = progress["brought"], progress["lost"]
            state.exceptions = list(progress["exceptions"])

    def _resume_splits(self, state: _Pool, progress: Mapping[str, Any]) -> None:
        """Go on in the splits of a checkpoint, if the workers have the same ones again; else the epoch begins anew."""
        before = {owner: [tuple(part) for part in parts] for owner, parts, _ in progress.get("splits", ())}
        if before != {owner: list(deck.parts) for owner, deck in state.decks.items()}:
            self._forget_counts(state, state.size)
            return
        for owner, _, left in progress["splits"]:
            deck = state.decks[owner]
            deck.dealt, deck.back = deck.extent, deque((start, stop) for start, stop in left)

    def _forget_counts(self, state: _Pool, size: int | None) -> None:
        """Forget what a checkpoint has counted of an epoch that begins anew, or is left out.

        Raises:
            ConfigurationError: the data set has another size than in the checkpoint.
        """
        assert state.resumed is not None
        before = state.resumed["size"]
        if None not in (size, before) and size != before:
            raise ConfigurationError(
                f"the checkpoint's sampler is of a data set of {before} samples, this one has {size}: resume with the same data"
            )
        state.resumed, state.settled, state.returned, state.unlisted, state.exceptions = None, {}, 0, 0, []
        state.brought = state.lost = 0

    def _unsettled(self, pool: int, owner: WorkerId | None, deck: _Deck) -> list[list[int]]:
        """Return the ranges of a deck without a fate, in order: those left, and those that are held or wait in a contribution."""
        now = self._pools[pool].epoch
        leases = [one for one in self._leases.values() if one.pool == pool and one.epoch == now]
        held = [(one.start, one.stop) for one in leases if owner in (None, one.worker)]
        rest: list[list[int]] = []
        for start, stop in sorted([*deck.left(), *held]):
            if rest and rest[-1][1] == start:
                rest[-1][1] = stop
            else:
                rest.append([start, stop])
        return rest

    def take(self, worker: WorkerId, pool: int, batch: int) -> Lease | None:
        """Lease the next range of at most ``batch`` positions to the worker; None: nothing is left to deal for now."""
        state = self._pools[pool]
        deck = state.deck(worker)
        if deck is not None and state.reopens:
            deck.closed = False
        drawn = deck.draw(batch) if deck is not None else None
        if drawn is None:
            return None
        lease = Lease(LeaseId(self._next_id), worker, pool, state.epoch, *drawn)
        self._next_id += 1
        state.open += 1
        state.begun = True
        self._leases[lease.id] = lease
        self._held.setdefault(worker, {})[lease.id] = lease
        return lease

    def parts(self, worker: WorkerId, pool: int) -> Parts:
        """Return the worker's split in the current epoch; empty where there is one deck for all, or no split for this worker."""
        deck = self._pools[pool].deck(worker)
        return deck.parts if deck is not None else ()

    def holds(self, worker: WorkerId, pool: int) -> bool:
        """Return whether the worker holds leases of this pool, other than those that it keeps over the epoch's end."""
        return any(lease.pool == pool and lease.id not in self._kept for lease in self._held.get(worker, {}).values())

    def valid(self, worker: WorkerId, leases: tuple[LeaseId, ...]) -> bool:
        """Return whether the worker holds all of these leases."""
        held = self._held.get(worker, {})
        return all(lease in held for lease in leases)

    def most_of_a_pool(self, leases: Iterable[LeaseId]) -> int:
        """Return how many of these leases are of one sampler, of that with the most."""
        return max(Counter(self._leases[id].pool for id in leases if id in self._leases).values(), default=0)

    def submit(self, leases: tuple[LeaseId, ...]) -> None:
        """Move these leases from their worker to its contribution, which has arrived: the worker's death no longer returns them."""
        for id in leases:
            lease = self._leases[id]
            del self._held[lease.worker][id]

    def settle(self, leases: tuple[LeaseId, ...], fate: Fate, reason: str) -> None:
        """Count the positions of these leases under the fate of their contribution."""
        for id in leases:
            lease = self._remove(id)
            if lease is None:
                continue
            state = self._pools[lease.pool]
            state.settled[fate] = state.settled.get(fate, 0) + lease.stop - lease.start
            if fate is not Fate.FOLDED:
                self._except_for(state, lease, f"{fate.value}: {reason}")

    def leave_out(self, worker: WorkerId, leases: tuple[LeaseId, ...]) -> None:
        """Count the positions of these leases, as far as the worker holds them, as left out by its script."""
        held = self._held.get(worker, {})
        self.settle(tuple(id for id in leases if id in held), Fate.SKIPPED, "the script made no step with them")

    def keep(self, worker: WorkerId, leases: tuple[LeaseId, ...]) -> None:
        """Let the worker take these leases along into the next epoch: its gradient contains their samples, and its step comes later."""
        held = self._held.get(worker, {})
        for id in leases:
            lease = held.get(id)
            if lease is not None and id not in self._kept:
                state = self._pools[lease.pool]
                self._kept.add(id)
                state.open -= 1
                state.kept += lease.stop - lease.start

    def _except_for(self, state: _Pool, lease: Lease, why: str) -> None:
        owner = None if None in state.decks else lease.worker
        state.except_for(owner, lease.start, lease.stop, why, lease.epoch if lease.epoch != state.epoch else None)

    def give_back(self, worker: WorkerId, pool: int | None = None, but: tuple[LeaseId, ...] = ()) -> None:
        """Return to their pools all leases that the worker holds (of one pool, if given) except those in ``but``."""
        held = self._held.get(worker, {}).values()
        self.withdraw(tuple(lease.id for lease in held if pool in (None, lease.pool) and lease.id not in but))

    def withdraw(self, leases: tuple[LeaseId, ...]) -> None:
        """Return these leases to their decks, to be dealt out again: the work done on them is lost."""
        for id in leases:
            lease = self._remove(id)
            if lease is not None:
                state = self._pools[lease.pool]
                if lease.epoch != state.epoch:
                    state.lost += lease.stop - lease.start
                    self._except_for(state, lease, "unused: its worker died or left with the gradient in hand")
                    continue
                deck = state.deck(lease.worker)
                assert deck is not None, f"a lease from no deck: {lease}"
                deck.back.append((lease.start, lease.stop))
                state.returned += 0 if deck.closed and not state.reopens else lease.stop - lease.start

    def close(self, worker: WorkerId) -> None:
        """Return the leases of a dead worker, and close its splits, if it has any, until the next epoch."""
        for state in self._pools.values():
            if worker in state.decks:
                state.decks[worker].closed = True
        self.give_back(worker)

    def accounted(self, pool: int) -> bool:
        """Return whether every position of the current epoch is settled, or can no longer be."""
        state = self._pools.get(pool)
        return state is not None and state.size != 0 and state.open == 0 and all(deck.done for deck in state.decks.values())

    def quiet(self, pool: int) -> bool:
        """Return whether no lease of this pool is held, and no contribution over one waits for its fate."""
        return pool not in self._pools or self._pools[pool].open == 0

    def end(self, pool: int) -> dict[str, Any]:
        """Close the current epoch, whatever is left of it, and return its report; the pool moves on to the next epoch.

        The report of a pool that is `owing` is of samples that were kept over the end of an earlier epoch, without an index of its own.
        """
        state = self._pools[pool]
        assert state.open == 0, "leases are settled or given back before an epoch ends"
        unused = 0
        if pool in self.owing():
            state.decks = {None: _Deck(0)}
        for owner, deck in state.decks.items():
            why = "unused: its worker died or left before" if deck.closed else "unused: no worker took it"
            for start, stop in deck.left():
                state.except_for(owner, start, stop, why)
                unused += stop - start
        report: dict[str, Any] = {
            "indices": sum(deck.extent - deck.before for deck in state.decks.values()),
            **{fate.value: state.settled.get(fate, 0) for fate in (Fate.FOLDED, Fate.DROPPED, Fate.REJECTED, Fate.SKIPPED)},
            "unused": unused + state.lost,
            "returned": state.returned,
            "exceptions": state.exceptions,
        }
        report.update({name: count for name in ("kept", "brought", "unlisted") if (count := getattr(state, name))})
        if None not in state.decks:
            report["splits"] = [{"worker": owner, "indices": deck.extent, "parts": deck.parts} for owner, deck in state.decks.items()]
        self._pools[pool] = _Pool(state.epoch + 1, state.size)
        return report

    def size(self, pool: int) -> int | None:
        """Return the announced number of samples in the data set; None: the pool is open-ended."""
        return self._pools[pool].size

    def pools(self) -> list[int]:
        """Return the pools from which a worker has asked for samples."""
        return list(self._pools)

    def under_way(self) -> list[int]:
        """Return the pools with an epoch that has begun and not ended."""
        return [number for number, state in self._pools.items() if state.begun]

    def owing(self) -> list[int]:
        """Return the pools between two epochs in which samples of an earlier epoch have got their fate since the last report."""
        return [number for number, state in self._pools.items() if state.brought and not state.begun and state.resumed is None]

    def between(self) -> list[int]:
        """Return the pools that are between two epochs."""
        return [number for number, state in self._pools.items() if not state.begun]

    def _remove(self, id: LeaseId) -> Lease | None:
        lease = self._leases.pop(id, None)
        if lease is None:
            return None
        self._held[lease.worker].pop(id, None)
        state, positions = self._pools[lease.pool], lease.stop - lease.start
        if id not in self._kept:
            state.open -= 1
            return lease
        self._kept.discard(id)
        if lease.epoch == state.epoch:
            state.kept -= positions
        else:
            state.brought += positions
        return lease


def checked_ranges(rest: Sequence[Sequence[int]], size: int) -> tuple[tuple[int, int], ...]:
    """Return these ranges of positions, sorted.

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
