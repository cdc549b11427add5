"""A quadratic loss with noisy gradients as the content of a simulation: fast, and all that rules estimate is known."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.core.policy import Policy
from offbeat.sim.latency.registry import derived
from offbeat.sim.training.workload import Handed, Workload
from offbeat.types import Seconds, Version

Vector = NDArray[np.float64]


class Quadratic(Workload):
    """The loss ``sum(h * w^2) / 2``; the gradient of a contribution is ``h * w`` of its version plus Gaussian noise.

    Args:
        curvatures: h, the eigenvalues of the Hessian.
        variance: V, the variance of one contribution's gradient, summed over the coordinates.
        lr: the learning rate.
        loss: the loss at the beginning, to which all coordinates contribute the same.
        target: the loss that ends the run; 0: none does.
    """

    empty = False

    def __init__(self, curvatures: Vector, *, variance: float, lr: float, loss: float = 1.0, target: float = 0.0) -> None:
        self._curvatures, self._lr, self._target = curvatures, lr, target
        self._deviation = np.sqrt(variance / len(curvatures))
        self._versions = [np.sqrt(2.0 * loss / len(curvatures) / curvatures)]
        """The parameters of each version."""
        self._before: Vector | None = None
        self._draw = np.random.default_rng()
        self.folds: list[Fold] = []
        """What the rule has folded, by version."""

    @cached_property
    def norms(self) -> list[float]:
        """The squared norm of the full gradient at each version that a fold has read; to be asked for after the run."""
        return [float(np.sum((self._curvatures * w) ** 2)) for w in self._versions[:-1]]

    @property
    def k(self) -> list[int]:
        """The number of gradients in each fold."""
        return [len(fold.parts) for fold in self.folds]

    @property
    def staleness(self) -> list[int]:
        """The staleness of each gradient that was folded."""
        return [part.staleness for fold in self.folds for part in fold.parts]

    def loss(self, version: Version) -> float:
        """Return the loss of a version, without noise."""
        return float(np.sum(self._curvatures * self._versions[version] ** 2)) / 2.0

    def start(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        self._draw = np.random.default_rng(derived(seed, "gradients"))

    def handed_in(self, push: Handed) -> float:
        return self.loss(push.version)

    def fold(self, effect: Fold) -> Folded:
        noise = self._draw.normal(scale=self._deviation, size=(len(effect.parts), len(self._curvatures)))
        at = np.stack([self._versions[effect.version - 1 - part.staleness] for part in effect.parts])
        gradients = self._curvatures * at + noise
        mean = np.array([part.weight for part in effect.parts]) @ gradients
        lr = self._lr * effect.scale
        difference = None if self._before is None else float(np.sum((mean - self._before) ** 2))
        self._before = mean
        self._versions.append(self._versions[-1] - lr * mean)
        self.folds.append(effect)
        return Folded(effect.version, tuple(np.sum(gradients**2, axis=1).tolist()), float(mean @ mean), lr, difference)

    def evaluate(self, version: Version, now: Seconds) -> Mapping[str, float]:
        return {"loss": self.loss(version)}

    def reached(self, values: Mapping[str, float]) -> bool:
        return values["loss"] <= self._target

    @staticmethod
    def reached_by(k: float, curvatures: Vector, *, variance: float, lr: float) -> float:
        """Return the loss at which the noise of k gradients keeps SGD, whose coordinates have the variance ``lr v / (h (2 - lr h) k)``.

        >>> round(Quadratic.reached_by(16, np.ones(4), variance=0.32, lr=0.1), 6)
        0.000526
        """
        return float(np.sum(lr * variance / len(curvatures) / (2.0 * k * (2.0 - lr * curvatures))))
