"""DBW with its estimates written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offbeat.core.events import Folded
from offbeat.core.policy import ServerRule
from offbeat.policies import DBW
from offbeat.policies.dbw_gain import GainEstimator
from offbeat.policies.dbw_run import Run


class Estimate(NamedTuple):
    """What the rule knows when it chooses k for a version."""

    version: int
    norm: float
    variance: float
    smoothness: float | None
    """None unless estimated."""


class Noted(GainEstimator):
    """Writes down its estimates after each fold, and how many gradients each fold had."""

    estimates: list[Estimate]
    parts: dict[int, int]

    def add(self, event: Folded, weights: Sequence[float], scale: float) -> bool:
        known = super().add(event, weights, scale)
        self.parts[event.version] = len(weights)
        if self.norm is not None and self.variance is not None:
            self.estimates.append(Estimate(event.version, self.norm, self.variance, self.smoothness))
        return known


@dataclass(frozen=True, kw_only=True)
class NotedDBW(DBW):
    """DBW, which tells what it believes.

    Source: `DBW`.
    """

    estimates: list[Estimate] = field(default_factory=list, repr=False, compare=False)
    parts: dict[int, int] = field(default_factory=dict, repr=False, compare=False)

    def start(self) -> ServerRule:
        gain = Noted(history=self.history, smoothness=self.smoothness, momentum=self.momentum)
        gain.estimates, gain.parts = self.estimates, self.parts
        return Run(self, gain)
