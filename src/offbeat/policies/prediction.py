"""Predict the next pushes of workers from their measured intervals, and choose the pushes that lie closest together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from offbeat.policies.zipline import Times, ZipLine
from offbeat.types import Seconds

if TYPE_CHECKING:
    from offbeat.policies.elastic import ElasticBSP

LEAST: Final = 1e-6
"""The shortest interval in seconds: two pushes of a worker may arrive at the same reading of the clock."""


def averaged(rule: ElasticBSP, before: Seconds | None, measured: Seconds) -> Seconds:
    """Return a worker's interval after one more measurement: ``before + 2 / (history + 1) * (measured - before)``.

    >>> from offbeat.policies.elastic import ElasticBSP
    >>> averaged(ElasticBSP(), 4.0, 8.0), averaged(ElasticBSP(history=3), 4.0, 8.0), averaged(ElasticBSP(history=3), None, 8.0)
    (8.0, 6.0, 8.0)
    """
    measured = max(LEAST, measured)
    return measured if before is None else before + 2.0 / (rule.history + 1) * (measured - before)


def meet(rule: ElasticBSP, elapsed: Sequence[Seconds] | Times, interval: Sequence[Seconds] | Times) -> tuple[Times, ZipLine]:
    """Predict the next R pushes of each worker, in seconds from now, and choose the barrier among them.

    ``ends[p, j] = (i0 + j) * interval[p] - elapsed[p]``, j = 0 .. R-1, with ``i0 = max(1, ceil(elapsed / interval))``, so that no push is
    predicted in the past.

    Args:
        rule: gives R, and chooses the barrier.
        elapsed: the seconds for which each worker has been computing.
        interval: the seconds that each worker is expected to take.

    Returns:
        The predicted pushes (workers x R), and the barrier.
    """
    step, late = np.asarray(interval)[:, None], np.asarray(elapsed)[:, None]
    first = np.maximum(1.0, np.ceil(late / step))
    ends: Times = step * (first + np.arange(rule.R)) - late
    return ends, rule.barrier(ends)
