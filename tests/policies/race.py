"""A race of workers around one `Coordinator` in virtual time: each computes for as long as a law says, messages take no time.

For the rules that look at arrival times. What the shards measure at a fold is the test's own affair: a function of the `Fold`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from offbeat.core.effects import Effect, Fold, Interrupt, Release, Settle
from offbeat.core.events import Abandoned, Event, Folded, Initialised, Joined, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Policy
from offbeat.types import Fate


class Race:
    """Plays rounds; `folds` are the folds and `folded_at` their times, `fates` counts what became of the contributions.

    Args:
        law: how long each computation takes, in seconds, by worker.
        measure: what the shards say of a fold, `measured_after` seconds later; None: nothing, ever.
        loss: what the workers say of a version.
    """

    def __init__(
        self,
        policy: Policy,
        workers: int,
        law: Callable[[int], float],
        measure: Callable[[Fold], Folded] | None = None,
        measured_after: float = 0.0,
        loss: Callable[[int], float | None] = lambda version: None,
    ) -> None:
        self.job = Coordinator(policy, workers)
        self.now = 0.0
        self.folds: list[Fold] = []
        self.folded_at: list[float] = []
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        self._law, self._measure, self._measured_after, self._loss = law, measure, measured_after, loss
        self._heap: list[tuple[float, int, Event]] = []
        self._serial = 0
        self._busy: dict[int, Release] = {}
        self._told: set[int] = set()
        for worker in range(workers):
            self(Joined(worker))
        self(Initialised(0))

    @property
    def chosen(self) -> list[int]:
        """How many gradients each fold has."""
        return [len(fold.parts) for fold in self.folds]

    def run(self, versions: int) -> Race:
        while len(self.folds) < versions:
            self.now, _, event = heapq.heappop(self._heap)
            if isinstance(event, Pushed):
                if self._busy.get(event.worker) is None or self._busy[event.worker].version != event.version:
                    continue  # it has been broken off
                if event.worker in self._told:
                    event = Abandoned(event.worker, event.incarnation, event.version, event.compute_s)
                del self._busy[event.worker]
            self(event)
        return self

    def __call__(self, event: Event) -> list[Effect]:
        effects = self.job.on(event, self.now)
        for effect in effects:
            if isinstance(effect, Fold):
                self.folds.append(effect)
                self.folded_at.append(self.now)
                if self._measure is not None:
                    self._at(self._measured_after, self._measure(effect))
            elif isinstance(effect, Settle):
                self.fates[effect.fate] += 1
            elif isinstance(effect, Release):
                self._begin(effect)
        for effect in effects:
            if isinstance(effect, Interrupt) and effect.worker in self._busy and self._busy[effect.worker].version < effect.version:
                self._tell(effect)
        return effects

    def _begin(self, release: Release) -> None:
        worker, compute_s = release.worker, self._law(release.worker)
        self._busy[worker] = release
        self._told.discard(worker)
        self._at(compute_s, Pushed(worker, release.incarnation, release.version, 8, compute_s, loss=self._loss(release.version)))

    def _tell(self, interrupt: Interrupt) -> None:
        if interrupt.at_once:
            release = self._busy.pop(interrupt.worker)
            self._at(0.0, Abandoned(interrupt.worker, interrupt.incarnation, release.version, 0.0))
        else:
            self._told.add(interrupt.worker)

    def _at(self, after: float, event: Event) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.now + after, self._serial, event))


def shifted(alpha: float, seed: int) -> Callable[[int], float]:
    """The round-trip times of DBW's paper: 1 - alpha + alpha * Exp(1)."""
    rng = np.random.default_rng(seed)
    return lambda worker: 1.0 - alpha + alpha * float(rng.exponential())


def steady(*times_s: float) -> Callable[[int], float]:
    """Each worker always takes the same time."""
    return lambda worker: times_s[worker]


def norms(norm: float, variance: float) -> Callable[[Fold], Folded]:
    """Shards that measure what is expected where the full gradient and the variance are these."""

    def measure(fold: Fold) -> Folded:
        k = len(fold.parts)
        return Folded(fold.version, (norm + variance,) * k, norm + variance / k, 0.1)

    return measure
