"""Who works on which samples. Positions of an epoch's order are leased out a batch at a time; a dead worker's come back.

Only positions 0 .. size-1 are dealt with here; what sample stands at a position is each worker's own computation from the job's
seed. There is one pool for each sampler that a script makes, and one epoch of a pool is under way at a time. A position is *settled*
with the fate of the contribution computed over it. When an epoch ends, its report accounts for every position:

``folded + dropped + rejected + unused == indices``

``folded`` are the positions used once, as they should be. The others are its exceptions, listed with the reason: the rule dropped the
gradient, the gradient was not finite, or nobody took the position (the script left its loop early, or no worker was left).
``returned`` counts positions that were dealt out again because their holder died or gave them up before they were settled.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
class _Pool:
    epoch: Epoch = 0
    size: int = 0
    dealt: int = 0
    """Positions below this have been leased at least once."""
    back: deque[tuple[int, int]] = field(default_factory=deque)
    """Ranges that came back unsettled."""
    open: int = 0
    """Leases held now."""
    returned: int = 0
    settled: dict[Fate, int] = field(default_factory=dict)
    exceptions: list[dict[str, Any]] = field(default_factory=list)


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

    def open(self, pool: int, epoch: Epoch, size: int) -> None:
        """Announce an epoch and its number of samples. A pool that has not dealt anything yet moves on to that epoch."""
        state = self._pools.setdefault(pool, _Pool())
        if state.dealt == 0:
            state.epoch = max(state.epoch, epoch)
            state.size = size

    def take(self, worker: WorkerId, pool: int, batch: int) -> Lease | None:
        """Lease out the next range of at most ``batch`` positions; None: nothing is left to deal, for now."""
        state = self._pools[pool]
        if state.back:
            start, stop = state.back.popleft()
            if stop - start > batch:
                state.back.appendleft((start + batch, stop))
                stop = start + batch
        elif state.dealt < state.size:
            start, stop = state.dealt, min(state.dealt + batch, state.size)
            state.dealt = stop
        else:
            return None
        lease = Lease(self._next_id, worker, pool, state.epoch, start, stop)
        self._next_id += 1
        state.open += 1
        self._leases[lease.id] = lease
        self._held.setdefault(worker, {})[lease.id] = lease
        return lease

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
                state.exceptions.append({"start": lease.start, "stop": lease.stop, "why": f"{fate.value}: {reason}"})

    def give_back(self, worker: WorkerId, pool: int | None = None) -> None:
        """Return to their pools all leases that the worker holds (of one pool, if given)."""
        self.withdraw(tuple(lease.id for lease in self._held.get(worker, {}).values() if pool in (None, lease.pool)))

    def withdraw(self, leases: tuple[LeaseId, ...]) -> None:
        """Return these to their pools: the work done on them is lost, somebody else is to do it."""
        for id in leases:
            lease = self._remove(id)
            if lease is not None:
                state = self._pools[lease.pool]
                state.back.append((lease.start, lease.stop))
                state.returned += lease.stop - lease.start

    def accounted(self, pool: int) -> bool:
        """Whether every position of the epoch under way is settled."""
        state = self._pools.get(pool)
        return state is not None and state.dealt == state.size > 0 and not state.back and state.open == 0

    def quiet(self, pool: int) -> bool:
        """Whether nobody works on this pool: no lease is held, and no contribution over one waits for its fate."""
        return pool not in self._pools or self._pools[pool].open == 0

    def end(self, pool: int) -> dict[str, Any]:
        """Close the epoch under way, whatever is left of it, and report on it; the pool moves on to the next epoch."""
        state = self._pools[pool]
        assert state.open == 0, "leases are settled or given back before an epoch ends"
        left = [*state.back, *([(state.dealt, state.size)] if state.dealt < state.size else [])]
        state.exceptions += [{"start": start, "stop": stop, "why": "unused: no worker took it"} for start, stop in left]
        counts = {fate.value: state.settled.get(fate, 0) for fate in (Fate.FOLDED, Fate.DROPPED, Fate.REJECTED)}
        report = {
            "indices": state.size,
            **counts,
            "unused": sum(stop - start for start, stop in left),
            "returned": state.returned,
            "exceptions": state.exceptions,
        }
        self._pools[pool] = _Pool(epoch=state.epoch + 1, size=state.size)
        return report

    def under_way(self) -> list[int]:
        """The pools of which an epoch has begun and not ended."""
        return [number for number, state in self._pools.items() if state.dealt]

    def _remove(self, id: LeaseId) -> Lease | None:
        lease = self._leases.pop(id, None)
        if lease is not None:
            self._held[lease.worker].pop(id, None)
            self._pools[lease.pool].open -= 1
        return lease
