"""Predict how long the k-th gradient of a version takes to arrive, from a table of measured times, for DBW.

This file keeps the samples and discounts old ones; `bimonotone` fits the table. A round's duration depends on how many gradients the
previous round waited for: workers for which it did not wait still compute from the old version, and begin late.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offbeat.policies.bimonotone import Table, fitted_row
from offbeat.types import Seconds

FORGOTTEN = 1e-3
"""The weight below which a cell counts as empty again."""
STEPS = 16
"""The number of rows that are fitted; with more values of h neighbouring ones are pooled. A round that follows one of 99 gradients lasts
as long as one that follows 100, and the time of a fit is proportional to the number of rows."""
SHORTEST: Seconds = 1e-9
"""The least estimate, so that rates are finite."""


class ArrivalTimes:
    """Weighted means of the samples t[h, k]: the arrival time of the k-th gradient in a round that follows a round of h gradients.

    Args:
        gamma: the factor by which each round reduces all weights; a sample counts half after ``log(0.5) / log(gamma)`` rounds.
        pooled: the times do not depend on h, because workers abort obsolete work and all begin a round together.

    >>> times = ArrivalTimes(gamma=1.0, pooled=True)
    >>> times.add(3, [1.0, 2.0, 6.0])
    >>> times.add(3, [3.0, 2.0])
    >>> times.estimate(2, most=4, optimism=0.5)  # the first two are pooled, the fourth is not before the third
    array([2., 2., 6., 6.])
    """

    def __init__(self, gamma: float, *, pooled: bool) -> None:
        self._gamma = gamma
        self._pooled = pooled
        self._mean: Table = np.zeros((0, 0))
        """Indexed by (h - 1, k - 1)."""
        self._weight: Table = np.zeros((0, 0))

    def add(self, h: int, times_s: Sequence[Seconds]) -> None:
        """Discount all samples, then add one sample to each of the cells (h, 1), (h, 2), ... for a round that has ended.

        Args:
            h: the number of gradients for which the previous round waited, at least 1.
            times_s: the arrival times of this round's gradients, in seconds after the publication of their version, ascending.
        """
        self._weight *= self._gamma
        self._weight[self._weight < FORGOTTEN] = 0.0
        self._sample(h, 1, times_s)

    def add_late(self, h: int, k: int, time_s: Seconds) -> None:
        """Add a sample to cell (h, k) for a gradient that arrived after the end of its round."""
        self._sample(h, k, [time_s])

    def _sample(self, h: int, first: int, times_s: Sequence[Seconds]) -> None:
        last = first - 1 + len(times_s)
        self._grow(max(h, last))
        cells = h - 1, slice(first - 1, last)
        self._weight[cells] += 1.0
        self._mean[cells] += (np.asarray(times_s) - self._mean[cells]) / self._weight[cells]

    def estimate(self, h: int, most: int, optimism: float) -> Table:
        """Return the expected arrival times of the next round's gradients 1 .. most, in seconds, ascending.

        Args:
            h: the number of gradients for which the round before it waited.
            most: the number of gradients, at least 1.
            optimism: the position of a cell without samples between the bounds set by its neighbours: 0 at the upper bound, 1 at the lower
                one, which favours untried k. With one bound only, the cell has its value; with none, the mean of all samples.
        """
        self._grow(max(h, most))
        size = len(self._weight)
        width = size if self._pooled else -(-size // STEPS)
        first = np.arange(0, size, width)
        weight = np.add.reduceat(self._weight, first, axis=0)
        total = np.add.reduceat(self._weight * self._mean, first, axis=0)
        lower, upper = fitted_row(np.divide(total, weight, out=total, where=weight > 0.0), weight, (h - 1) // width)
        below, above = np.isfinite(lower), np.isfinite(upper)
        between = np.where(below, lower, np.where(above, upper, self._average()))
        both = below & above
        between[both] = upper[both] - optimism * (upper[both] - lower[both])
        # A cell between two bounds may exceed a later cell that has only a lower bound.
        ascending: Table = np.maximum(np.maximum.accumulate(between), SHORTEST)
        return ascending[:most]

    def _average(self) -> Seconds:
        weight = float(self._weight.sum())
        return float((self._weight * self._mean).sum()) / weight if weight else SHORTEST

    def _grow(self, size: int) -> None:
        """Make room for up to ``size`` workers."""
        known = len(self._mean)
        if size > known:
            self._mean, self._weight = (np.pad(table, (0, size - known)) for table in (self._mean, self._weight))
