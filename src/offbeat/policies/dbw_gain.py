"""Estimate the gain of a fold of k gradients for DBW, from the norm of the full gradient and the variance of the workers' gradients.

Both are estimated from the norms measured in the last folds: with ``s = sum(weight * |g_j|^2)`` and ``m = |g|^2``,
``(s - m) * k / (k - 1)`` is an unbiased estimate of the variance of one worker's gradient, summed over its coordinates.
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
"""The weight of the earlier estimate in the running mean of the smoothness."""
STEEPEST, FLATTEST = 1.9, 0.1
"""Estimates of L * eta are clipped to this range: from 2 on no step has a positive gain, even without variance."""


class MeasuredFold(NamedTuple):
    """The measurements of one fold."""

    version: Version
    k: int
    total: float
    """|g|^2, g being the mean gradient of the step."""
    variance: float
    """The variance of one worker's gradient, summed over the coordinates."""
    lr: float
    """The effective learning rate of the step: that of the optimizer over 1 - momentum."""


class GainEstimator:
    """``gain(k) = (eta - L*eta^2/2) * N - (L*eta^2/2) * V/k``, N the squared norm of the full gradient, V the variance of one worker's.

    Means over the last D folds: ``V = mean(V_t)``, ``N = mean(max(|g_t|^2 - V_t/k_t, 0))``. The maximum biases N upwards where the
    gradient is small compared with its noise. A fold of one gradient has no estimate V_t; the mean V replaces it in N.

    Args:
        history: D.
        smoothness: L; None: 1/eta, the paper's assumption, under which ``gain(k) = eta/2 * (N - V/k)``; auto: estimated, see below.
        momentum: heavy-ball momentum; the effective step is eta / (1 - momentum).

    ``auto``: the running mean of ``L = sqrt(|g_t - g_{t-1}|^2 - V_t/k_t - V_{t-1}/k_{t-1}) / (eta_{t-1} * |g_{t-1}|)``, in which the
    noise of both gradients is subtracted, but not below 0; clipped to 0.1/eta and 1.9/eta.

    >>> estimate = GainEstimator(history=5, smoothness=None, momentum=0.0)
    >>> estimate.add(Folded(1, squares=(25.0, 1.0), total=9.0, lr=2.0), weights=(0.5, 0.5), scale=1.0)
    True
    >>> estimate.norm, estimate.variance, estimate.gains([1.0, 1.0])
    (5.0, 8.0, array([-3.,  1.]))
    """

    def __init__(self, *, history: int, smoothness: float | Literal["auto"] | None, momentum: float) -> None:
        self._measured: deque[MeasuredFold] = deque(maxlen=history)
        self._variances: deque[float] = deque(maxlen=history)
        """The estimates of V from the last D folds of more than one gradient."""
        self._smoothness = smoothness
        self._estimated: float | None = None
        self._heavier = 1.0 / (1.0 - momentum)
        self._lr = 0.0

    @property
    def norm(self) -> float | None:
        """N; None before the first measurement."""
        if not self._measured:
            return None
        return sum(max(m.total - m.variance / m.k, 0.0) for m in self._measured) / len(self._measured)

    @property
    def variance(self) -> float | None:
        """V; None before the first fold of more than one gradient."""
        return sum(self._variances) / len(self._variances) if self._variances else None

    def add(self, event: Folded, weights: Sequence[float], scale: float) -> bool:
        """Add the norms of one more fold; return whether they were complete and finite.

        Args:
            event: the shards' measurements.
            weights: the weights of the fold's gradients, which add up to 1, in proportion to their samples.
            scale: the factor of the learning rate that ``event.lr`` includes.
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
            self._update_curvature(event.difference - variance / k, self._measured[-1])
        self._measured.append(MeasuredFold(event.version, k, event.total, variance, lr))
        return True

    def gains(self, scales: Sequence[float]) -> NDArray[np.float64] | None:
        """Return the gain of a fold of 1, 2, ... gradients, in units of the loss; None without enough measurements.

        Args:
            scales: the factor of the learning rate for each k.
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

    def _update_curvature(self, difference: float, before: MeasuredFold) -> None:
        """Update the estimate of L. ``difference`` is |g_t - g_{t-1}|^2 less the noise of g_t."""
        moved = before.lr * sqrt(before.total)
        found = sqrt(max(difference - before.variance / before.k, 0.0)) / moved if moved > 0.0 else inf
        if isfinite(found):
            self._estimated = found if self._estimated is None else MEMORY * self._estimated + (1.0 - MEMORY) * found
