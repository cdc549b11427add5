"""How long the k-th gradient of a version will take to arrive: DBW's table of what was measured, and what it says of a next round.

It owns the samples and their forgetting; the fit is `bimonotone`'s, and what to do with the answer is the rule's. A round's duration
depends on how many gradients the round before waited for: those it did not wait for are still at the old version, and begin late.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offbeat.policies.bimonotone import Table, fitted_row
from offbeat.types import Seconds

FORGOTTEN = 1e-3
"""A cell whose samples weigh less than this is empty again."""
STEPS = 16
"""So many values of h are told apart; with more workers neighbours are pooled. A round after one of 99 lasts as long as after one of
100, and the fit takes a time in proportion."""
SHORTEST: Seconds = 1e-9
"""No estimate is shorter, so that a rate is finite."""


class ArrivalTimes:
    """Weighted means of the samples t[h, k]: when the k-th gradient came, in a round before which h gradients had been waited for.

    Args:
        gamma: each round multiplies the weight of all that is known by this; a sample counts half after ``log(0.5) / log(gamma)`` rounds.
        pooled: the times do not depend on h: workers break off obsolete work, so that all begin a round together.

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
        """(h, k), from 0."""
        self._weight: Table = np.zeros((0, 0))

    def add(self, h: int, times_s: Sequence[Seconds]) -> None:
        """One round is over: one sample for each of the cells (h, 1), (h, 2), ..., after everything before has lost some weight.

        Args:
            h: how many gradients the round before had waited for, from 1.
            times_s: when this round's gradients came, in seconds from the publication of their version, in the order of arrival.
        """
        self._weight *= self._gamma
        self._weight[self._weight < FORGOTTEN] = 0.0
        self._sample(h, 1, times_s)

    def add_late(self, h: int, k: int, time_s: Seconds) -> None:
        """One more sample of cell (h, k), of a gradient that came when the round was over."""
        self._sample(h, k, [time_s])

    def _sample(self, h: int, first: int, times_s: Sequence[Seconds]) -> None:
        last = first - 1 + len(times_s)
        self._grow(max(h, last))
        cells = h - 1, slice(first - 1, last)
        self._weight[cells] += 1.0
        self._mean[cells] += (np.asarray(times_s) - self._mean[cells]) / self._weight[cells]

    def estimate(self, h: int, most: int, optimism: float) -> Table:
        """When the 1st, 2nd, ... gradient of the next round will come, in seconds: (most,), in ascending order.

        Args:
            h: how many gradients the round before that has waited for.
            most: for how many gradients, at least 1.
            optimism: where nothing is known of a cell, between the bounds that its neighbours set: 0 is the upper one, 1 the lower,
                which makes what is untried attractive. Where there is only one bound, that is it; where there is none, the mean of all.
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
        # A cell between two bounds may be above the lower bound, all that is known, of a later one.
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
