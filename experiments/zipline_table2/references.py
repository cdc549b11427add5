"""What ZipLine is measured against: a heap, the paper's naive search, GridScan, FullGridScan, and Algorithm 2 as printed and mended.

All but the heap are the paper's steps, not the library's: the naive search is impossible beyond a few workers, the scans are heuristics,
the listing as printed compares sets that lack a worker. Each takes one row of ascending times per worker and gives the range it found and
the barrier that belongs to it. Steps over all points at once are NumPy's, so that the operations are as many as in the paper and none costs
what an interpreter takes for it.
"""

from __future__ import annotations

import heapq
from itertools import product
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Matrix: TypeAlias = NDArray[np.float64]
"""(workers, points): ascending times, in milliseconds."""


class Found(NamedTuple):
    """What a search found."""

    range: float
    """Milliseconds between the first and the last point of the set."""
    barrier: float
    """The last point of the set, in milliseconds."""
    points: int
    """How many workers the set has; fewer than there are is an error of the search."""


def naive(ends: Matrix) -> Found:
    """All R**n combinations: the definition itself."""
    least, barrier = min((max(z) - min(z), max(z)) for z in product(*ends.tolist()))
    return Found(least, barrier, len(ends))


def every_window(ends: Matrix) -> Found:
    """The definition again, for any size: with each point as the first of the set, of each worker the next point from there on.

    No other point of a worker can do better with that first point, so the least of these ranges is the least of all. O(R n^2);
    shares no step with the library's form, and so can judge them.
    """
    first = np.sort(ends.reshape(-1))
    last = np.full_like(first, -np.inf)
    for row in ends:
        until = np.searchsorted(first, row, side="right")  # each point of the row is the next one for those up to there
        np.maximum(last, np.repeat(np.append(row, np.inf), np.diff(until, prepend=0, append=len(first))), out=last)
    best = int(np.argmin(last - first))
    return Found(float(last[best] - first[best]), float(last[best]), len(ends))


def by_heap(ends: Matrix) -> Found:
    """One pointer per worker: repeatedly advance the pointer at the least time, until its row ends. O(N log n) for N points of n workers.

    A window that starts at the least time can only be improved by giving up that point, so that every candidate is examined.
    """
    rows = ends.tolist()
    at = [0] * len(rows)
    heap = [(row[0], worker) for worker, row in enumerate(rows)]
    heapq.heapify(heap)
    latest = max(row[0] for row in rows)
    least, barrier = inf, latest
    while True:
        earliest, worker = heap[0]
        if latest - earliest < least:
            least, barrier = latest - earliest, latest
        at[worker] += 1
        if at[worker] == len(rows[worker]):
            return Found(least, barrier, len(rows))
        end = rows[worker][at[worker]]
        latest = max(latest, end)
        heapq.heapreplace(heap, (end, worker))


def grid_scan(ends: Matrix) -> Found:
    """Algorithm 1: for each point of the row that begins first, the nearest point of each other row. O(R^2 n)."""
    return _scan(ends, int(np.argmin(ends[:, 0])))


def full_grid_scan(ends: Matrix) -> Found:
    """Algorithm 1 from every row in turn, and the best of them. O(R^2 n^2)."""
    return min((_scan(ends, row) for row in range(len(ends))), key=lambda found: found.range)


def _scan(ends: Matrix, designated: int) -> Found:
    """One round of Algorithm 1, lines 5 to 14; the set is judged when it is complete, not as it grows."""
    best = Found(np.inf, np.inf, len(ends))
    distance = np.empty_like(ends)
    rows = np.arange(len(ends))
    for point in ends[designated]:
        np.abs(np.subtract(ends, point, out=distance), out=distance)
        chosen = ends[rows, distance.argmin(axis=1)]
        last = float(chosen.max())
        width = last - float(chosen.min())
        if width < best.range:
            best = Found(width, last, len(ends))
    return best


def listing_as_printed(ends: Matrix) -> Found:
    """Algorithm 2 line by line: lines 16 to 18 stand inside the loop that fills Z again, and so judge sets that lack a worker."""
    return _listing(ends, mended=False)


def listing_mended(ends: Matrix) -> Found:
    """Algorithm 2 with lines 16 to 18 where they belong: a set is judged once it has all workers. O(R n^2), as Table I says."""
    return _listing(ends, mended=True)


def _listing(ends: Matrix, *, mended: bool) -> Found:
    """Where the merged set runs out in the inner loop, which the listing does not foresee, the search is over."""
    workers, points = ends.shape
    flat = ends.reshape(-1)
    order = np.argsort(flat, kind="stable")
    times, owners = flat[order].tolist(), (order // points).tolist()
    times_Z: list[float] = []
    owners_Z: list[int] = []
    best = Found(np.inf, np.inf, 0)
    full = False
    for time, owner in zip(times, owners, strict=True):
        if full:
            del times_Z[0], owners_Z[0]  # line 11
        if owner in owners_Z:  # the older point of the worker makes room: a walk through Z, the n^2 of Table I
            duplicate = owners_Z.index(owner)
            del times_Z[duplicate], owners_Z[duplicate]
        times_Z.append(time)
        owners_Z.append(owner)
        complete = len(owners_Z) == workers
        if best.points == 0 and not complete:
            continue  # lines 4 to 9 judge each growing set too, but only the last of them, which is complete, stays
        width = time - times_Z[0]
        if width < best.range and (complete or not mended):
            best = Found(width, time, len(owners_Z))
        full = complete
    return best
