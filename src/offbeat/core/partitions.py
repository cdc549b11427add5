"""Assign parts of the data to workers that have splits of their own: a common part for all workers, and a private part for each.

A split is a set of ranges of positions. The sample at each position is the same in every epoch, so that a worker sees its own samples again
and again. For each epoch this file assigns the private parts of absent workers anew; `core.leases` deals a split out in batches.

An equal share of an epoch's order (`shares`, where the script wants each worker to have a known number of batches) is a split, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from offbeat.types import WorkerId, worker_ids

Parts: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of positions, start and stop. A position *in* a split is one in the concatenation of its parts."""


def size_of(parts: Parts) -> int:
    """Return the number of these positions.

    >>> size_of(((0, 10), (25, 30)))
    15
    """
    return sum(stop - start for start, stop in parts)


class Splits(NamedTuple):
    """Cut the data into fixed splits with overlap: of N positions the first ``f*N`` are common, the rest is cut into M private parts.

    Each worker's split has ``f*N + (1 - f)*N/M`` positions while all M workers are alive. The private parts of absent workers go round
    robin to the living ones, and back to their owners once these have returned.

    Source: EnsembleSync, sections 3.3 and 4.1. Two workers with 37,500 of 50,000 examples that "share 50 %": half of the *data* is in both.

    >>> Splits(50_000, workers=2, overlap=0.5).among([0, 1])
    {0: ((0, 37500),), 1: ((0, 25000), (37500, 50000))}
    >>> Splits(50_000, workers=2, overlap=0.5).among([1])
    {1: ((0, 50000),)}
    """

    size: int
    """N, the number of samples in the data set."""
    workers: int
    """M, the number of private parts; worker i owns the i-th."""
    overlap: float
    """f, from 0 (no common data) to 1 (all data are common)."""

    def private(self, owner: WorkerId) -> tuple[int, int]:
        """Return the private part of a worker, as start and stop."""
        common = self.common
        rest = self.size - common
        return common + owner * rest // self.workers, common + (owner + 1) * rest // self.workers

    @property
    def common(self) -> int:
        """Number of common positions."""
        return round(self.overlap * self.size)

    def among(self, living: Collection[WorkerId]) -> dict[WorkerId, Parts]:
        """The split of each living worker. One without a private part, numbered M or higher, has the common pool and what it inherits."""
        present = sorted(living)
        parts = {worker: [(0, self.common)] for worker in present}
        for worker in present:
            if worker < self.workers:
                parts[worker].append(self.private(worker))
        orphans = [owner for owner in worker_ids(self.workers) if owner not in parts]
        for number, owner in enumerate(orphans if present else ()):
            parts[present[number % len(present)]].append(self.private(owner))
        return {worker: _joined(ranges) for worker, ranges in parts.items()}


def shares(size: int, living: Collection[WorkerId], unit: int = 1, sizes: Sequence[int] = ()) -> dict[WorkerId, Parts]:
    """Cut the positions of an epoch into equal shares, one for each living worker, whose bounds are multiples of ``unit``.

    Two shares differ by one unit at most, but for the last, in which the rest of a unit may be.

    ``sizes`` are the workers' batches, where these differ: shares are then in proportion to them, so that all workers have the same number
    of whole batches. What is left of the epoch is cut in the same proportion, or with a ``unit`` of more than 1 dealt in whole batches, as
    far as it goes.

    >>> shares(10, [0, 1, 4])
    {0: ((0, 3),), 1: ((3, 6),), 4: ((6, 10),)}
    >>> shares(32, [0, 1], unit=8)
    {0: ((0, 16),), 1: ((16, 32),)}
    >>> shares(100, [0, 1], sizes=(24, 8))
    {0: ((0, 75),), 1: ((75, 100),)}
    >>> shares(88, [0, 1], unit=8, sizes=(24, 8))
    {0: ((0, 72),), 1: ((72, 88),)}
    """
    present, units = sorted(living), -(-size // unit)
    bounds = [min(size, number * units // max(1, len(present)) * unit) for number in range(len(present) + 1)]
    if sizes and present:
        batches = [sizes[worker] if worker < len(sizes) else max(sizes) for worker in present]
        if unit == 1:
            bounds = [size * part // sum(batches) for part in accumulate(batches, initial=0)]
        else:
            each, left = divmod(size, sum(batches))
            counts = [each * batch for batch in batches]
            for number, batch in enumerate(batches):
                more = batch if batch <= left else 0
                counts[number], left = counts[number] + more, left - more
            counts[-1] += left
            bounds = list(accumulate(counts, initial=0))
    return {worker: _joined([(bounds[number], bounds[number + 1])]) for number, worker in enumerate(present)}


def _joined(ranges: list[tuple[int, int]]) -> Parts:
    """In order, neighbours made one, empty ones left out."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return tuple(joined)
