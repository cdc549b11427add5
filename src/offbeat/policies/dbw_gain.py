"""What a fold of k gradients is expected to gain: DBW's estimates of the full gradient's norm and of the gradients' variance.

It owns what the norms of the last folds say; that they are weighed against time is the rule's part. Nothing but norms is needed: with
``s = sum(weight * |g_j|^2)`` and ``m = |g|^2``, the variance of one worker's gradient, summed over its coordinates, is estimated without
bias by ``(s - m) * k / (k - 1)``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, sqrt
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.events import Folded
from offbeat.types import Version

MEMORY = 0.9
"""The weight of what was known before in the running mean of the smoothness."""
STEEPEST, FLATTEST = 1.9, 0.1
"""Estimates of the smoothness L are clipped to these, over eta: from 2 on no step gains anything, however little the variance."""


class MeasuredFold(NamedTuple):
    """One fold."""

    version: Version
    k: int
    total: float
    """|g|^2, g the mean gradient that was stepped with."""
    variance: float
    """Of one worker's gradient, summed over the coordinates."""
    lr: float
    """Of its step, as if there were no momentum."""


class GainEstimator:
    """``gain(k) = (eta - L*eta^2/2) * N - (L*eta^2/2) * V/k``, N the squared norm of the full gradient, V the variance of one worker's.

    Means over the last D folds: ``V = mean(V_t)``, ``N = mean(max(|g_t|^2 - V_t/k_t, 0))``. The maximum makes N biased upwards where
    the gradient is small beside its noise. A fold of one gradient says nothing of V; V's estimate then serves for N.

    Args:
        history: D.
        smoothness: L; None: 1/eta, the paper's assumption, under which ``gain(k) = eta/2 * (N - V/k)``; auto: estimated, see below.
        momentum: of a heavy ball; the step is then eta / (1 - momentum).

    ``auto``: ``L = sqrt(|g_t - g_{t-1}|^2 - V_t/k_t - V_{t-1}/k_{t-1}) / (eta_{t-1} * |g_{t-1}|)``, the noise of both gradients
    taken off and never below 0; a running mean of that, clipped to 0.1/eta and 1.9/eta.

    >>> estimate = GainEstimator(history=5, smoothness=None, momentum=0.0)
    >>> estimate.add(Folded(1, squares=(25.0, 1.0), total=9.0, lr=2.0), weights=(0.5, 0.5), scale=1.0)
    True
    >>> estimate.norm, estimate.variance, estimate.gains([1.0, 1.0])
    (5.0, 8.0, array([-3.,  1.]))
    """

    def __init__(self, *, history: int, smoothness: float | Literal["auto"] | None, momentum: float) -> None:
        self._measured: deque[MeasuredFold] = deque(maxlen=history)
        self._variances: deque[float] = deque(maxlen=history)
        """Of folds of more than one gradient."""
        self._smoothness = smoothness
        self._estimated: float | None = None
        self._heavier = 1.0 / (1.0 - momentum)
        self._lr = 0.0

    @property
    def norm(self) -> float | None:
        """N; None: nothing is known yet."""
        if not self._measured:
            return None
        return sum(max(m.total - m.variance / m.k, 0.0) for m in self._measured) / len(self._measured)

    @property
    def variance(self) -> float | None:
        """V; None: there has been no fold of more than one gradient yet."""
        return sum(self._variances) / len(self._variances) if self._variances else None

    def add(self, event: Folded, weights: Sequence[float], scale: float) -> bool:
        """The norms of one more fold; returns whether they are of use.

        Args:
            event: what the shards have measured.
            weights: of the gradients in the fold, adding up to 1, each in proportion to its samples.
            scale: the factor of the learning rate that is in ``event.lr``.
        """
        if len(event.squares) != len(weights) or not isfinite(sum(event.squares) + event.total):
            return False
        k = len(weights)
        if k > 1:
            spread = sum(weight * square for weight, square in zip(weights, event.squares, strict=True)) - event.total
            self._variances.append(max(spread, 0.0) * k / (k - 1))
        variance = self._variances[-1] if k > 1 else self.variance
        if variance is None:
            return False
        lr = event.lr * self._heavier
        self._lr = lr / scale
        if event.difference is not None and self._measured and self._measured[-1].version == event.version - 1:
            self._look_at_curvature(event.difference - variance / k, self._measured[-1])
        self._measured.append(MeasuredFold(event.version, k, event.total, variance, lr))
        return True

    def gains(self, scales: Sequence[float]) -> NDArray[np.float64] | None:
        """The gain of a fold of 1, 2, ... gradients, in units of the loss; None: too little is known.

        Args:
            scales: for each k the factor of the learning rate.
        """
        norm, variance = self.norm, self.variance
        if norm is None or variance is None:
            return None
        lr = self._lr * np.asarray(scales)
        k = np.arange(1, len(scales) + 1)
        curved = self._curvature(lr) * lr * lr / 2.0
        gains: NDArray[np.float64] = (lr - curved) * norm - curved * variance / k
        return gains

    def _curvature(self, lr: NDArray[np.float64]) -> NDArray[np.float64] | float:
        if self._smoothness is None or (self._smoothness == "auto" and self._estimated is None):
            return 1.0 / np.maximum(lr, np.finfo(float).tiny)
        if self._smoothness == "auto":
            assert self._estimated is not None
            highest = max(float(lr.max()), np.finfo(float).tiny)
            return min(max(self._estimated, FLATTEST / highest), STEEPEST / highest)
        return float(self._smoothness)

    def _look_at_curvature(self, difference: float, before: MeasuredFold) -> None:
        """``difference``: |g_t - g_{t-1}|^2 without the noise of g_t."""
        moved = before.lr * sqrt(before.total)
        found = sqrt(max(difference - before.variance / before.k, 0.0)) / moved if moved > 0.0 else inf
        if isfinite(found):
            self._estimated = found if self._estimated is None else MEMORY * self._estimated + (1.0 - MEMORY) * found
