"""Real gradients of a small network on scikit-learn's digits, by hand in NumPy: thousands of them in a second."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.sim.latency.registry import derived
from offbeat.sim.training.workload import Handed, Workload
from offbeat.types import Seconds, Version, WorkerId

Array: TypeAlias = NDArray[np.float32]
Key: TypeAlias = tuple[WorkerId, int, int]
HIDDEN: Final = 32
MOMENTUM: Final = 0.9
KEPT: Final = 512
"""Versions of which the parameters are kept for stale gradients."""


@cache
def digits() -> tuple[Array, NDArray[np.int64]]:
    """Return 1,797 images of 64 pixels, and which digits they are.

    Raises:
        ConfigurationError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigurationError(f'the digits come with scikit-learn ({error}); pip install "offbeat[examples]"') from error
    found = load_digits()
    return np.asarray(found.data, dtype=np.float32) / 16.0, np.asarray(found.target, dtype=np.int64)


class Digits(Workload):
    """An MLP 64-32-10, SGD with momentum. The batch of an iteration is drawn by its worker and number.

    Args:
        lr: the learning rate.
        batch: samples of a gradient.
        target: the loss over all digits that ends the run.
        every: the loss is computed after so many versions.
    """

    empty = False

    def __init__(self, lr: float, batch: int, target: float, every: int) -> None:
        self._lr, self._batch, self._target, self._every = lr, batch, target, every
        self._x, self._y = digits()
        self._versions: dict[Version, list[Array]] = {}
        self._handed: dict[Key, Handed] = {}
        self._seed = 0

    def start(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        draw = np.random.default_rng(derived(seed, "parameters"))
        shapes = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
        bound = {64: 64**-0.5, HIDDEN: HIDDEN**-0.5, 10: 0.0}
        self._versions[0] = [draw.uniform(-bound[shape[0]], bound[shape[0]], shape).astype(np.float32) for shape in shapes]
        self._momentum = [np.zeros_like(part) for part in self._versions[0]]
        self._seed = derived(seed, "batches")

    def handed_in(self, push: Handed) -> float | None:
        self._handed[push.worker, push.incarnation, push.clock] = push
        return None

    def settled(self, effect: Settle) -> None:
        self._handed.pop((effect.worker, effect.incarnation, effect.clock), None)

    def fold(self, effect: Fold) -> Folded:
        before = effect.version - 1
        mean = [np.zeros_like(part) for part in self._versions[before]]
        for part in effect.parts:
            push = self._handed[part.worker, part.incarnation, part.clock]
            rows = np.random.default_rng((self._seed, push.worker, push.steps[0].number)).integers(len(self._y), size=self._batch)
            for total, one in zip(mean, self._gradient(self._versions[before - part.staleness], rows), strict=True):
                total += np.float32(part.weight) * one
        lr = np.float32(self._lr * effect.scale)
        new = []
        for old, momentum, gradient in zip(self._versions[before], self._momentum, mean, strict=True):
            momentum *= MOMENTUM
            momentum += gradient
            new.append(old - lr * momentum)
        self._versions[effect.version] = new
        self._versions.pop(effect.version - KEPT, None)
        return Folded(effect.version, (), 0.0, float(lr))

    def _forward(self, parameters: list[Array], x: Array) -> tuple[Array, Array]:
        """Return the hidden layer and the logarithms of the probabilities."""
        first, bias, second, other = parameters
        hidden = np.maximum(x @ first + bias, 0.0)
        logits = hidden @ second + other
        logits -= logits.max(axis=1, keepdims=True)
        return hidden, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    def _gradient(self, parameters: list[Array], rows: NDArray[np.int64]) -> list[Array]:
        x, y = self._x[rows], self._y[rows]
        hidden, logs = self._forward(parameters, x)
        error = np.exp(logs)
        error[np.arange(len(y)), y] -= 1.0
        error /= len(y)
        below = (error @ parameters[2].T) * (hidden > 0.0)
        return [x.T @ below, below.sum(axis=0), hidden.T @ error, error.sum(axis=0)]

    def evaluate(self, version: Version, now: Seconds) -> Mapping[str, float] | None:
        if version % self._every:
            return None
        _, logs = self._forward(self._versions[version], self._x)
        loss = float(-logs[np.arange(len(self._y)), self._y].mean())
        return {"loss": loss if np.isfinite(loss) else float("inf")}

    def reached(self, values: Mapping[str, float]) -> bool:
        return values["loss"] <= self._target
