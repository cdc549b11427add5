"""Draw norms of gradients from a signal-plus-noise model, for rules that use norms in simulations that compute no gradients.

``offbeat simulate --gradient "noise(signal=1.0, variance=4.0)"``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.core.policy import Policy
from offbeat.core.settings import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.latency.registry import derived
from offbeat.sim.training.workload import Workload
from offbeat.spec import build


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Gradients ``g = s + e`` of a fold that makes version t: ``|s|^2 = signal * decay^t``, e Gaussian with ``E|e|^2 = variance``.

    For each fold vectors of ``dimensions`` coordinates are drawn, so that the norms of the gradients and of their weighted sum are
    consistent. There are no losses.

    >>> Noise(signal=1.0, variance=4.0, decay=0.999)
    Noise(signal=1.0, variance=4.0, decay=0.999, lr=0.1, dimensions=64)
    """

    signal: float = 1.0
    """The squared norm of the true gradient at version 0; at least 0."""
    variance: float
    """The variance of one contribution's gradient, summed over the dimensions; at least 0."""
    decay: float = 1.0
    """The factor of the signal from one version to the next; greater than 0."""
    lr: float = 0.1
    """The learning rate that rules see; greater than 0."""
    dimensions: int = 64
    """The number of coordinates; at least 1. With fewer the norms fluctuate more."""

    def __post_init__(self) -> None:
        whole_number("noise", "dimensions", self.dimensions, least=1)
        for name, least, above in (("signal", 0.0, False), ("variance", 0.0, False), ("decay", 0.0, True), ("lr", 0.0, True)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < least or (above and value == least):
                raise ConfigurationError(f"noise({name}={value!r}): {name} must be a number {'greater than' if above else 'of at least'} 0")


GRADIENTS: Final = {"noise": Noise}


class NoisyWorkload(Workload):
    """Contributions that consist of norms only.

    Args:
        noise: the model of the gradients.
    """

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._key = 0
        self._before: NDArray[np.float64] | None = None

    def start(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        self._key = derived(seed, "gradients")

    def fold(self, effect: Fold) -> Folded:
        noise = self._noise
        generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, 0, effect.version]))
        gradients = generator.normal(scale=math.sqrt(noise.variance / noise.dimensions), size=(len(effect.parts), noise.dimensions))
        gradients[:, 0] += math.sqrt(noise.signal * noise.decay**effect.version)
        total = np.array([part.weight for part in effect.parts]) @ gradients
        difference = None if self._before is None else float(np.sum((total - self._before) ** 2))
        self._before = total
        squares = tuple(np.sum(gradients**2, axis=1).tolist())
        return Folded(effect.version, squares, float(total @ total), noise.lr * effect.scale, difference)


def content(spec: str | Noise | None) -> Workload:
    """Return contributions with norms drawn from a `Noise` or its text form; None: contributions without content.

    >>> type(content("noise(variance=4.0)")).__name__, type(content(None)).__name__
    ('NoisyWorkload', 'Workload')

    Raises:
        ConfigurationError: there is no such model, or one of its settings is wrong.
    """
    if spec is None:
        return Workload()
    return NoisyWorkload(build(spec, GRADIENTS, "gradient model") if isinstance(spec, str) else spec)
