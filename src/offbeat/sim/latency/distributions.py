"""Define the basic laws: one distribution for all workers and iterations, and the rotating skew.

The log-normal law is in ``lognormal.py``, laws that modify another law are in ``modifiers.py``, measured times in ``traces.py``.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.sim.latency.base import Drawn, Law, Sampler
from offbeat.types import Seconds


@dataclass(frozen=True, kw_only=True)
class Independent(Law):
    """A law whose draws are independent and of one distribution."""

    @abstractmethod
    def block(self, generator: np.random.Generator, n: int) -> NDArray[np.float64]:
        """Return ``n`` independent draws, in seconds."""

    def start(self, seed: int, workers: int) -> Sampler:
        return Sampler(Drawn(seed, workers, self.block).draw)


@dataclass(frozen=True, kw_only=True)
class Constant(Law):
    """Always ``seconds``; ``constant(seconds=0)`` is no delay.

    >>> Constant(seconds=0.1).start(seed=0, workers=1).draw(worker=0, clock=0, now=0.0)
    0.1
    """

    seconds: Seconds
    """At least 0."""

    def __post_init__(self) -> None:
        self._check_number("seconds")

    def start(self, seed: int, workers: int) -> Sampler:
        seconds = self.seconds
        return Sampler(lambda worker, clock, now: seconds)


@dataclass(frozen=True, kw_only=True)
class Uniform(Independent):
    """Uniform between ``low`` and ``high``: mean (low + high) / 2, variance (high - low)^2 / 12."""

    low: Seconds
    """At least 0."""
    high: Seconds
    """At least ``low``."""

    def __post_init__(self) -> None:
        self._check_number("low")
        self._check_number("high", least=self.low)

    def block(self, generator: np.random.Generator, n: int) -> NDArray[np.float64]:
        return self.low + (self.high - self.low) * generator.random(n)


@dataclass(frozen=True, kw_only=True)
class ShiftedExponential(Independent):
    """``shift + scale * Exp(1)``: mean shift + scale, standard deviation scale.

    DBW's round-trip times (section 4) are ``(1 - alpha) + alpha * Exp(1)``: ``shift = 1 - alpha``, ``scale = alpha``.

    >>> ShiftedExponential(shift=0.3, scale=0.7).spelling
    'shifted_exponential(shift=0.3, scale=0.7)'
    """

    shift: Seconds
    """At least 0."""
    scale: Seconds
    """At least 0; 0 is the constant ``shift``."""

    def __post_init__(self) -> None:
        self._check_number("shift")
        self._check_number("scale")

    def block(self, generator: np.random.Generator, n: int) -> NDArray[np.float64]:
        return self.shift + self.scale * generator.standard_exponential(n)


@dataclass(frozen=True, kw_only=True)
class Pareto(Independent):
    """Heavy-tailed: at least ``scale``, and longer than t with probability ``(scale / t) ** shape``.

    The mean is ``scale * shape / (shape - 1)`` for shape > 1 and infinite below; the variance is finite for shape > 2.
    """

    scale: Seconds
    """The shortest time; greater than 0."""
    shape: float
    """Greater than 0; the smaller, the heavier the tail."""

    def __post_init__(self) -> None:
        self._check_number("scale", above=True)
        self._check_number("shape", above=True)

    def block(self, generator: np.random.Generator, n: int) -> NDArray[np.float64]:
        return self.scale * (1.0 + generator.pareto(self.shape, n))


@dataclass(frozen=True, kw_only=True)
class Sometimes(Independent):
    """``seconds`` with the given probability and otherwise 0: a lost packet that is sent again after a timeout.

    PSP-SGD's experiment (section 5) delays 0.16 % of the pull replies: ``sometimes(probability=0.0016, seconds=4)``.
    """

    probability: float
    """Between 0 and 1."""
    seconds: Seconds
    """At least 0."""

    def __post_init__(self) -> None:
        self._check_number("probability")
        self._check_number("seconds")
        if self.probability > 1.0:
            raise ConfigurationError(f"sometimes(probability={self.probability:g}): a probability is at most 1; 0.16 % is 0.0016")

    def block(self, generator: np.random.Generator, n: int) -> NDArray[np.float64]:
        return np.where(generator.random(n) < self.probability, self.seconds, 0.0)


@dataclass(frozen=True, kw_only=True)
class Rotating(Law):
    """A rotating skew: worker p of P takes ``low + (high - low) * ((p + t) mod P) / (P - 1)`` in its iteration t.

    In each iteration every worker has another of P evenly spaced times; a single worker always takes ``low``. Eager-SGD's CIFAR-10
    experiment (section 7.2) adds 50 to 400 ms to 8 workers like this: ``plus(law="...", extra="rotating(low=0.05, high=0.4)")``.

    >>> sampler = Rotating(low=0.05, high=0.40).start(seed=0, workers=8)
    >>> [round(sampler.draw(worker, 1, 0.0), 3) for worker in range(8)]
    [0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.05]
    """

    low: Seconds
    """At least 0."""
    high: Seconds
    """At least ``low``."""

    def __post_init__(self) -> None:
        self._check_number("low")
        self._check_number("high", least=self.low)

    def start(self, seed: int, workers: int) -> Sampler:
        step = (self.high - self.low) / max(1, workers - 1)
        times = [self.low + step * place for place in range(workers)]
        return Sampler(lambda worker, clock, now: times[(worker + clock) % workers])
