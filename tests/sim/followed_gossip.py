"""Follows replicas through what a simulated job of the gossip family says of parameters, in NumPy.

The gradients are those of ``stepped_process.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tests.sim.comparison import Replayed
from tests.sim.stepped_process import LR
from tests.sim.stepped_ranks import SteppedRanks

from offbeat.core.effects import Adopt, Fold, Mix, Pair, Share
from offbeat.core.events import Folded
from offbeat.journal.records import Record
from offbeat.sim.training.workload import Exchanged, Handed
from offbeat.types import Clock, Incarnation, Version, WorkerId

Vector: TypeAlias = NDArray[np.float64]


class Simulated(NamedTuple):
    """A simulated rank goes on with these parameters."""

    worker: WorkerId
    incarnation: Incarnation
    parameters: list[float]


class FollowedGossip(Replayed):
    """A simulated run's replicas. One that comes to a running job begins with what the live one was given, whoever gave it.

    Args:
        job: the live run of the same script, which is over.
        live: its journal.
    """

    def __init__(self, job: SteppedRanks, live: Sequence[Record]) -> None:
        super().__init__(job.script, live)
        self._job = job
        self.went_on: list[Simulated] = []
        self._incarnations: dict[WorkerId, Incarnation] = {}
        self._replicas: dict[WorkerId, Vector] = {}
        self._masses: dict[WorkerId, float] = {}
        self._shared: dict[tuple[WorkerId, Clock], Vector] = {}
        self._gradients: dict[tuple[WorkerId, Incarnation, Clock], Vector] = {}

    def handed_in(self, push: Handed) -> float | None:
        sign = -1.0 if push.steps[0].number % 2 else 1.0
        self._gradients[push.worker, push.incarnation, push.clock] = np.array([push.worker + 1.0, 0.5 * sign])
        return super().handed_in(push)

    def fold(self, effect: Fold) -> Folded:
        (part,) = effect.parts
        gradient = self._gradients[part.worker, part.incarnation, part.clock]
        self._replicas[part.worker] = self._replicas[part.worker] - LR * gradient
        return super().fold(effect)

    def exchanged(self, effect: Exchanged) -> None:
        worker = effect.worker
        if isinstance(effect, Adopt):
            self._incarnations[worker] = effect.incarnation
            given = (one.parameters for one in self._job.went_on if (one.worker, one.incarnation) == (worker, effect.incarnation))
            self._replicas[worker] = np.array([1.0, -1.0] if effect.source is None else next(given, [0.0, 0.0]))
            self._masses[worker] = 1.0
        elif isinstance(effect, Share):
            self._shared[worker, effect.clock] = self._replicas[worker]
        elif isinstance(effect, Mix):
            mixed = [source.weight * self._shared[source.worker, source.clock] for source in effect.sources]
            self._replicas[worker] = np.sum([effect.own * self._replicas[worker], *mixed], axis=0)
            self._masses[worker] = effect.mass
        elif isinstance(effect, Pair):
            self._replicas[worker] = self._replicas[effect.partner] = (self._replicas[worker] + self._replicas[effect.partner]) / 2

    def released(self, worker: WorkerId, version: Version) -> None:
        model = self._replicas[worker] / self._masses[worker]
        self.went_on.append(Simulated(worker, self._incarnations[worker], model.tolist()))
