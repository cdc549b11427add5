"""Estimate the gain of a fold of k gradients for DBW, from the norm of the full gradient and the variance of the workers' gradients.

Both are estimated from the norms measured in the last folds: with ``s = sum(weight * |g_j|^2)`` and ``m = |g|^2``,
``(s - m) * k / (k - 1)`` is an unbiased estimate of the variance of one worker's gradient, summed over its coordinates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import isfinite
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.core.events import Folded
from offbeat.types import Version

MEMORY = 0.9
"""The factor by which each fold reduces the earlier terms of the estimate of L."""
STEEPEST, FLATTEST = 1.9, 0.01
"""Estimates of L * eta are clipped to this range: from 2 on no step has a positive gain, even without variance; an estimate of at most 0 is
one that the noise hides."""


class MeasuredFold(NamedTuple):
    """The measurements of one fold."""

    version: Version
    k: int
    total: float
    """|g|^2, g being the mean gradient of the step."""
    variance: float
    """The variance of one worker's gradient, summed over the coordinates."""
    lr: float
    """The optimizer's learning rate at the step."""


class GainEstimator:
    """``gain(k) = (eta - L*eta^2/2) * N - (L*eta^2/2) * V/k``, N the squared norm of the full gradient, V the variance of one worker's.

    Means over the last D folds: ``V = mean(V_t)``, ``N = mean(max(|g_t|^2 - V_t/k_t, 0))``. The maximum biases N upwards where the
    gradient is small compared with its noise. A fold of one gradient has no estimate V_t; the mean V replaces it in N.

    Args:
        history: D.
        smoothness: L; None: 1/eta, the paper's assumption, under which ``gain(k) = eta/2 * (N - V/k)``; auto: estimated, see below.
        momentum: heavy-ball momentum; the effective step is eta / (1 - momentum).

    ``auto``: L is the curvature along the steps, ``g^T H g / |g|^2`` for a Hessian H. The step from version t - 1 changes the gradient by
    ``-eta H g``, g = g_{t-1}, so that ``E<g, g - g_t> = eta g^T H g + v``: the noise of g is in the step and in the difference, that of g_t
    is not in g; v = V/k is its variance. Therefore ``L = sum(<g, g - g_t> - v) / sum(eta |g|^2)``, sums over folds of more than one
    gradient, each with 0.9 of the weight of the next one. Both sums are unbiased; a ratio or a root of each step would not be.
    With momentum m the signal moves by ``eta / (1 - m)`` times itself, but the noise of one gradient by eta only at first; the
    denominator has ``eta / (1 - m) * (|g|^2 - v) + eta v``. L is clipped to 0.01/eta and 1.9/eta.

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
        self._turned, self._moved = 0.0, 0.0
        """The sums of the estimate of L: the change of the gradients along the steps, less the noise, and the steps' lengths."""
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

    @property
    def smoothness(self) -> float | None:
        """The estimate of L, at times below 0 where the noise hides it; None: not estimated, or not yet."""
        return self._turned / self._moved if self._moved > 0.0 else None

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
        self._lr = event.lr * self._heavier / scale
        if event.difference is not None and self._measured and self._measured[-1].version == event.version - 1:
            self._update_curvature(event.total, event.difference, self._measured[-1])
        self._measured.append(MeasuredFold(event.version, k, event.total, variance, event.lr))
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
        if isinstance(self._smoothness, float | int):
            return float(self._smoothness)
        estimated = self.smoothness if self._smoothness == "auto" else None
        if estimated is None:
            return 1.0 / np.maximum(lr, np.finfo(float).tiny)
        highest = max(float(lr.max()), np.finfo(float).tiny)
        return min(max(estimated, FLATTEST / highest), STEEPEST / highest)

    def _update_curvature(self, total: float, difference: float, before: MeasuredFold) -> None:
        """Add the step from the fold ``before`` to the estimate of L.

        Args:
            total: |g_t|^2.
            difference: |g_t - g_{t-1}|^2.
        """
        if before.k == 1 or not isfinite(difference):
            return  # one gradient: the variance is that of earlier folds, and its change since then would be taken for curvature
        noise = before.variance / before.k
        turned = (before.total - total + difference) / 2.0  # <g_{t-1}, g_{t-1} - g_t>
        self._turned = MEMORY * self._turned + turned - noise
        self._moved = MEMORY * self._moved + before.lr * (self._heavier * (before.total - noise) + noise)
