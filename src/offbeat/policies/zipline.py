"""ZipLine: choose the next barrier of ElasticBSP from the predicted times of the workers' pushes.

A sliding window over all points at once, in NumPy. The searches that the paper compares with, and its listing as printed, are slower or
inexact; they are in ``experiments/zipline_table2``, with a heap of one pointer per worker, which is exact too and faster for few points.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.types import Seconds

Times: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.intp]
Objective: TypeAlias = Literal["range", "sum"]

OBJECTIVES: Final = ("range", "sum")


class ZipLine(NamedTuple):
    """A barrier: one predicted push of each worker, after which the worker waits for the others."""

    range: Seconds
    """How long the first worker to arrive waits: ``max(Z) - min(Z)``."""
    barrier: Seconds
    """When the last worker arrives: ``max(Z)``."""
    choice: tuple[int, ...]
    """For each worker the index, from 0, of the chosen point in its list: the last point that is not after the barrier."""


def zipline(ends: Sequence[Sequence[float]] | Times, *, objective: Objective = "range", length_penalty: bool = False) -> ZipLine:
    """Choose one predicted push of each worker such that they wait least for each other; the earliest barrier among equals.

    With Z the set of chosen points, one per worker, the default minimises ``max(Z) - min(Z)``: the smallest range with a point of every
    list. The windows of all points as the barrier are compared at once, after a sort: 0.1 ms for few points, 15 ms for 1,000 workers with
    150 points each. The answer is exact.

    Source: Zhao et al. 2019, "Elastic Bulk Synchronous Parallel Model for Distributed Deep Learning", sections III and IV. Departures:
    Algorithm 2 as printed also compares sets that lack a worker; and of a worker's points between ``min(Z)`` and the barrier the last is
    chosen, which changes neither of the two and leaves less waiting.

    Args:
        ends: for each worker the predicted times of its pushes from now, in ascending order, in seconds or any other unit; at least one
            point each. Lists may differ in length; an array has a row per worker.
        objective: ``range``, the paper's, is the waiting time of the first to arrive; ``sum`` is that of all workers,
            ``sum over p of max(Z) - z_p``, to the precision of a running sum.
        length_penalty: divide by the time to the barrier, ``max(Z)``, so that a small gain does not delay the barrier by many iterations;
            a barrier at or before 0 is chosen only if no worker waits for it.

    Raises:
        ConfigurationError: there is no worker, a worker has no points, a list is not ascending or not finite, or the objective is unknown.

    >>> zipline([[1.0, 2.0, 3.0], [2.5, 5.0], [2.9]])
    ZipLine(range=0.5, barrier=3.0, choice=(2, 0, 0))
    >>> ends = [[2.0, 10.0], [2.0, 14.0], [5.0, 14.0]]
    >>> zipline(ends)  # the first two wait for 3 s each
    ZipLine(range=3.0, barrier=5.0, choice=(0, 0, 0))
    >>> zipline(ends, objective="sum")  # the first alone waits, for 4 s
    ZipLine(range=4.0, barrier=14.0, choice=(1, 1, 1))
    """
    if objective not in OBJECTIVES:
        raise ConfigurationError(f"zipline(objective={objective!r}): objective must be {' or '.join(OBJECTIVES)}")
    lengths = [len(row) for row in ends]
    if 0 in lengths or not lengths:
        found = f"worker {lengths.index(0)} of {len(lengths)} has none" if lengths else "there are no workers"
        raise ConfigurationError(f"zipline: every worker needs at least one predicted push, but {found}")
    time, first = _flat(ends)
    order = np.argsort(time, kind="stable")  # keeps equal times in the order of workers; fast, since it merges the sorted rows
    sorted_time = time[order]
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    # For each point as the barrier, the window of all workers' last points up to it.
    complete = int(rank[first].max())  # from this place on the window has a point of every worker
    left = _leftmost(rank, first)[complete:]
    barriers = sorted_time[complete:]
    ranges = barriers - sorted_time[left]
    cost = ranges if objective == "range" else _total_wait(time, first, order)[complete:]
    if length_penalty:
        cost = np.where(barriers > 0.0, cost / np.where(barriers > 0.0, barriers, 1.0), np.where(cost > 0.0, inf, 0.0))
    barrier = float(barriers[int(np.argmin(cost))])
    chosen = np.add.reduceat(time <= barrier, first, dtype=np.intp) - 1
    return ZipLine(barrier - float(time[first + chosen].min()), barrier, tuple(chosen.tolist()))


def _flat(ends: Sequence[Sequence[float]] | Times) -> tuple[Times, Indices]:
    """Check the points; return them in one array, worker after worker, and the index at which each worker's points begin."""
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
    """Return for each place i of the sorted order where the window that ends at i begins: the least place of all workers' last points.

    The point at a place leaves the window at ``gone``, the place of its worker's next point. The window begins at the first place that has
    not left, so at the number of places at which the running maximum of ``gone`` is at most i.
    """
    count = len(rank)
    gone = np.full(count, count, dtype=np.intp)
    follows = np.ones(count, dtype=np.bool_)
    follows[first] = False
    gone[rank[:-1][follows[1:]]] = rank[1:][follows[1:]]
    begun = np.maximum.accumulate(gone)
    return np.cumsum(np.bincount(begun, minlength=count + 1)[:count]).astype(np.intp, copy=False)


def _total_wait(time: Times, first: Indices, order: Indices) -> Times:
    """Return for each place of the sorted order as the barrier the workers' total wait: ``n * t - sum of their last points``."""
    base = float(time.min())  # small numbers add up more precisely, and independently of the clock's origin
    step = np.diff(time, prepend=base)
    step[first] = time[first] - base
    total: Times = len(first) * (time[order] - base) - np.cumsum(step[order])
    return total


def _disordered(worker: int, row: Sequence[float] | Times) -> ConfigurationError:
    found = ", ".join(f"{end:g}" for end in row[:5])
    return ConfigurationError(
        f"zipline: the points of worker {worker} ({found}{', ...' if len(row) > 5 else ''}) must be finite and in ascending order"
    )
