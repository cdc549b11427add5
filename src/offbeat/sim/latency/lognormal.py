"""Define the log-normal law, shifted and clipped to a range, and fit it to a mean and a standard deviation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.sim.latency.distributions import Independent
from offbeat.types import Seconds

NARROWEST: Final = 1e-6
WIDEST: Final = 8.0
"""The range in which the fit searches sigma. With a larger sigma nearly every draw is at one of the two ends of the range."""


@dataclass(frozen=True, kw_only=True)
class Lognormal(Independent):
    """``min(low + exp(mu + sigma * N(0, 1)), high)``, with mu and sigma fitted so that the clipped variable has ``mean`` and ``sd``.

    Published batch times can thus be reproduced from the four numbers that papers print, for instance eager-SGD's LSTM on UCF101:
    ``lognormal(mean=1.235, sd=0.706, low=0.201, high=3.41)``. Without ``high`` the fit is ``sigma^2 = log(1 + (sd / (mean - low))^2)``,
    ``mu = log(mean - low) - sigma^2 / 2``; with it, two nested bisections over the moments of the clipped variable.

    >>> Lognormal(mean=0.475, sd=0.144, low=0.179, high=3.482).spelling
    'lognormal(mean=0.475, sd=0.144, low=0.179, high=3.482)'
    """

    mean: Seconds
    """Between ``low`` and ``high``."""
    sd: Seconds
    """The standard deviation; at most about 0.9 of ``sqrt((mean - low) * (high - mean))``, the limit of any law in this range."""
    low: Seconds = 0.0
    """The shortest time; at least 0."""
    high: Seconds = math.inf
    """The longest time, to which longer draws are clipped; ``inf``: none is clipped."""

    def __post_init__(self) -> None:
        self._check_number("low")
        self._check_number("mean", least=self.low, above=True)
        self._check_number("sd")
        self._check_number("high", least=self.mean, above=True, finite=False)
        self.parameters()

    def parameters(self) -> tuple[float, float]:
        """Return mu and sigma.

        Raises:
            ConfigurationError: no clipped log-normal law in this range has a standard deviation of ``sd``.
        """
        if math.isinf(self.high):
            sigma = math.sqrt(math.log1p((self.sd / (self.mean - self.low)) ** 2))
            return math.log(self.mean - self.low) - sigma * sigma / 2.0, sigma
        width = self.high - self.low
        fit = _fit((self.mean - self.low) / width, self.sd / width)
        if fit is None:
            most = math.sqrt((self.mean - self.low) * (self.high - self.mean))
            raise ConfigurationError(
                f"{self.spelling}: this mean and range allow no standard deviation above {most:g}, and a log-normal law reaches about "
                "nine tenths of that; lower sd or raise high"
            )
        return fit[0] + math.log(width), fit[1]

    def block(self, generator: np.random.Generator, n: int) -> NDArray[np.float64]:
        mu, sigma = self.parameters()
        return np.minimum(self.low + np.exp(mu + sigma * generator.standard_normal(n)), self.high)


@cache
def _fit(mean: float, sd: float) -> tuple[float, float] | None:
    """Return mu and sigma for which ``min(exp(mu + sigma * N), 1)`` has this mean and sd; None if no sigma does."""
    if sd == 0.0:
        return math.log(mean), 0.0

    def variance(sigma: float) -> float:
        return _moment(2, _mu(mean, sigma), sigma) - mean * mean

    if variance(WIDEST) < sd * sd:
        return None
    sigma = _bisect(variance, sd * sd, NARROWEST, WIDEST)
    return _mu(mean, sigma), sigma


def _mu(mean: float, sigma: float) -> float:
    """Return the mu that gives the clipped variable this mean.

    It lies between the mu of the unclipped variable and that of a variable which is 1 if clipped and 0 otherwise.
    """
    return _bisect(lambda mu: _moment(1, mu, sigma), mean, math.log(mean) - sigma * sigma / 2.0, sigma * NormalDist().inv_cdf(mean))


def _moment(k: int, mu: float, sigma: float) -> float:
    """Return ``E[min(Y, 1)^k]``, Y = exp(mu + sigma N): ``exp(k mu + (k sigma)^2 / 2) Phi(-mu / sigma - k sigma) + Phi(mu / sigma)``."""
    return math.exp(k * mu + (k * sigma) ** 2 / 2.0) * _phi(-mu / sigma - k * sigma) + _phi(mu / sigma)


def _phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2.0)) / 2.0


def _bisect(f: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Return where the increasing function ``f`` reaches ``target``, to the last bit, by bisection."""
    while low < (middle := (low + high) / 2.0) < high:
        low, high = (middle, high) if f(middle) < target else (low, middle)
    return high
