"""ZipLine: where to put the next barrier, given when each worker is expected to push. Pure arithmetic over predicted times.

It decides nothing about a job: the rule that predicts, asks and then holds workers is ElasticBSP's. Two exact forms give one answer, and
`zipline` takes the faster: a heap of one pointer per worker for a handful of points, a sliding window in NumPy from there on. The
searches that the paper compares with, and its listing as printed, are in ``experiments/zipline_table2``: they are slower or inexact.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain, pairwise
from math import inf, isfinite
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.types import Seconds

Times: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]
Objective: TypeAlias = Literal["range", "sum"]

OBJECTIVES: Final = ("range", "sum")
SMALL: Final = 64
"""Up to so many points in all the heap is the faster form: NumPy's calls cost about 20 microseconds however little there is to do."""


class ZipLine(NamedTuple):
    """A barrier: one predicted push of each worker, after which it waits for the others."""

    range: Seconds
    """How long the first to arrive waits: ``max(Z) - min(Z)``."""
    barrier: Seconds
    """When the last one arrives: ``max(Z)``."""
    choice: tuple[int, ...]
    """For each worker the index, from 0, of the chosen point in its list: its last one that is not after the barrier."""


def zipline(
    ends: Sequence[Sequence[float]] | Times, *, objective: Objective = "range", length_penalty: bool = False, now: Seconds = 0.0
) -> ZipLine:
    """Choose one predicted push of each worker so that they wait least for each other; the earliest barrier among equals.

    With Z holding one point of each worker, the default minimises ``max(Z) - min(Z)``: the smallest range that has a point of every
    list. Up to 64 points a heap finds it in O(N log n) for N points of n workers; from there on the N windows are
    compared at once, after a sort: 15 ms where 1,000 workers have 150 points each. Both forms are exact.

    Source: Zhao et al. 2019, "Elastic Bulk Synchronous Parallel Model for Distributed Deep Learning", sections III and IV. Departures:
    Algorithm 2 as printed also compares sets that lack a worker; and of the points of a worker between ``min(Z)`` and the
    barrier the last is chosen, which changes neither and leaves less waiting.

    Args:
        ends: for each worker, in ascending order, when it is predicted to push, in seconds (any unit will do); at least one point
            each. Lists may differ in length; an array has a row per worker.
        objective: ``range``, the paper's, looks at the first to arrive only; ``sum`` adds up what everybody waits,
            ``sum over p of max(Z) - z_p``, to the precision of a running sum.
        length_penalty: divide by how far off the barrier is, ``max(Z) - now``, so that a small gain does not put it
            many iterations away; a barrier at or before ``now`` is taken only if nobody waits for it.
        now: used by ``length_penalty`` only, in the unit of ``ends``.

    Raises:
        ConfigurationError: no worker, a worker without points, a list that is not ascending or not finite, an unknown objective.

    >>> zipline([[1.0, 2.0, 3.0], [2.5, 5.0], [2.9]])
    ZipLine(range=0.5, barrier=3.0, choice=(2, 0, 0))
    >>> ends = [[2.0, 10.0], [2.0, 14.0], [5.0, 14.0]]
    >>> zipline(ends)  # the first two wait for 3 s each
    ZipLine(range=3.0, barrier=5.0, choice=(0, 0, 0))
    >>> zipline(ends, objective="sum")  # the first alone waits, for 4 s
    ZipLine(range=4.0, barrier=14.0, choice=(1, 1, 1))
    """
    if objective not in OBJECTIVES:
        raise ConfigurationError(f"zipline(objective={objective!r}): the objectives are {' and '.join(OBJECTIVES)}")
    lengths = [len(row) for row in ends]
    if 0 in lengths or not lengths:
        who = f"worker {lengths.index(0)} of {len(lengths)} has none" if lengths else "there are no workers"
        raise ConfigurationError(f"zipline: every worker needs at least one predicted push, and {who}")
    if objective == "range" and not length_penalty and sum(lengths) <= SMALL:
        return by_heap([[float(end) for end in row] for row in ends])
    return by_windows(ends, objective=objective, length_penalty=length_penalty, now=now)


def by_heap(rows: Sequence[Sequence[float]]) -> ZipLine:
    """The smallest range with one pointer per list: again and again advance the one at the least time, until its list is at its end.

    A window that starts at the least time cannot be bettered without giving that point up, so every candidate is looked at.
    """
    for worker, row in enumerate(rows):
        if not all(a <= b for a, b in pairwise(row)) or not (isfinite(row[0]) and isfinite(row[-1])):
            raise _disordered(worker, row)
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
            return ZipLine(least, barrier, tuple(bisect_right(row, barrier) - 1 for row in rows))
        end = rows[worker][at[worker]]
        latest = max(latest, end)
        heapq.heapreplace(heap, (end, worker))


def by_windows(
    ends: Sequence[Sequence[float]] | Times, *, objective: Objective = "range", length_penalty: bool = False, now: Seconds = 0.0
) -> ZipLine:
    """All windows at once: for each point as the barrier the others' last points before it, then the best of them."""
    time, first = _flat(ends)
    order = np.argsort(time, kind="stable")  # equal times in the order of workers; the rows are runs, which this sort merges
    sorted_time = time[order]
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    complete = int(rank[first].max())  # from this point on every worker has been seen
    left = _leftmost(rank, first)[complete:]
    barriers = sorted_time[complete:]
    ranges = barriers - sorted_time[left]
    cost = ranges if objective == "range" else _total_wait(time, first, order)[complete:]
    if length_penalty:
        length = barriers - now
        cost = np.where(length > 0.0, cost / np.where(length > 0.0, length, 1.0), np.where(cost > 0.0, inf, 0.0))
    barrier = float(barriers[int(np.argmin(cost))])
    chosen = np.add.reduceat(time <= barrier, first, dtype=np.intp) - 1
    return ZipLine(barrier - float(time[first + chosen].min()), barrier, tuple(chosen.tolist()))


def _flat(ends: Sequence[Sequence[float]] | Times) -> tuple[Times, Indices]:
    """All points, worker after worker, and where each worker's begin; checked."""
    lengths = np.fromiter(map(len, ends), np.intp, len(ends))
    first = np.cumsum(lengths) - lengths
    if isinstance(ends, np.ndarray):
        time = np.ascontiguousarray(ends, dtype=np.float64).reshape(-1)
    else:
        time = np.fromiter(chain.from_iterable(ends), np.float64, int(lengths.sum()))
    rising = np.empty(len(time), dtype=np.bool_)
    rising[1:] = time[:-1] <= time[1:]
    rising[first] = True
    if not (rising.all() and np.isfinite(time).all()):
        wrong = int(np.argmin(rising & np.isfinite(time)))
        worker = int(np.searchsorted(first, wrong, "right")) - 1
        raise _disordered(worker, ends[worker])
    return time, first


def _leftmost(rank: Indices, first: Indices) -> Indices:
    """For each place i of the sorted order where the window that ends there begins: at the least place of all workers' last points.

    A point leaves the window at its worker's next one, so the places that have left by i are those whose ``gone`` is at most i;
    and as none before the window's begin is in it, it begins at their running maximum's count.
    """
    count = len(rank)
    gone = np.full(count, count, dtype=np.intp)
    follows = np.ones(count, dtype=np.bool_)
    follows[first] = False
    gone[rank[:-1][follows[1:]]] = rank[1:][follows[1:]]
    begun = np.maximum.accumulate(gone)
    return np.cumsum(np.bincount(begun, minlength=count + 1)[:count]).astype(np.intp, copy=False)


def _total_wait(time: Times, first: Indices, order: Indices) -> Times:
    """For each place of the sorted order as the barrier, what all workers wait for it: ``n * t - sum of their last points``."""
    base = float(time.min())  # small numbers add up more precisely, and the same whatever the clock's origin
    step = np.diff(time, prepend=base)
    step[first] = time[first] - base
    total: Times = len(first) * (time[order] - base) - np.cumsum(step[order])
    return total


def _disordered(worker: int, row: Sequence[float] | Times) -> ConfigurationError:
    found = ", ".join(f"{end:g}" for end in row[:5])
    return ConfigurationError(
        f"zipline: the points of worker {worker} ({found}{', ...' if len(row) > 5 else ''}) must be finite and in ascending order"
    )
