"""When workers are expected to push, from the intervals measured so far, and where these pushes lie closest together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from offbeat.policies.zipline import Times, ZipLine, zipline
from offbeat.types import Seconds

if TYPE_CHECKING:
    from offbeat.policies.elastic import ElasticBSP

LEAST: Final = 1e-6
"""The shortest interval in seconds: two pushes may arrive at what the clock calls the same time."""


def averaged(rule: ElasticBSP, before: Seconds | None, measured: Seconds) -> Seconds:
    """A worker's interval after one more measurement: ``before + 2 / (history + 1) * (measured - before)``.

    >>> from offbeat.policies.elastic import ElasticBSP
    >>> averaged(ElasticBSP(), 4.0, 8.0), averaged(ElasticBSP(history=3), 4.0, 8.0), averaged(ElasticBSP(history=3), None, 8.0)
    (8.0, 6.0, 8.0)
    """
    measured = max(LEAST, measured)
    return measured if before is None else before + 2.0 / (rule.history + 1) * (measured - before)


def meet(rule: ElasticBSP, elapsed: Sequence[Seconds] | Times, interval: Sequence[Seconds] | Times) -> tuple[Times, ZipLine]:
    """Predict the next R pushes of each worker, in seconds from now, and choose where they are to meet.

    ``ends[p, j] = (i0 + j) * interval[p] - elapsed[p]`` with ``i0 = max(1, ceil(elapsed / interval))``, j = 0 .. R-1: nothing in the past.

    Args:
        rule: its R, objective and penalty.
        elapsed: how long each worker has been computing, in seconds.
        interval: how long each is expected to take, in seconds.
    """
    step, late = np.asarray(interval)[:, None], np.asarray(elapsed)[:, None]
    first = np.maximum(1.0, np.ceil(late / step))
    ends: Times = step * (first + np.arange(rule.R)) - late
    return ends, zipline(ends, objective=rule.objective, length_penalty=rule.length_penalty)
