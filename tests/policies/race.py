"""A race of workers around one `Coordinator` in virtual time: each computes for as long as a law says, messages take no time.

For the rules that look at arrival times. What the shards measure at a fold is the test's own affair: a function of the `Fold`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from math import inf
from typing import TypeVar

import numpy as np

from offbeat.core.effects import Effect, Fold, Interrupt, Release, Settle
from offbeat.core.events import Abandoned, Event, Folded, Initialised, Joined, Lost, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Policy
from offbeat.types import Fate

E = TypeVar("E")


class Race:
    """Plays rounds; `log` has every effect and when it was, `fates` counts what became of the contributions.

    Args:
        takes: seconds for iteration ``i``, from 0, of worker ``w``.
        measure: what the shards say of a fold, `measured_after` seconds later; None: nothing, ever.
        loss: what the workers say of a version.
    """

    def __init__(
        self,
        policy: Policy,
        workers: int,
        takes: Callable[[int, int], float],
        measure: Callable[[Fold], Folded] | None = None,
        measured_after: float = 0.0,
        loss: Callable[[int], float | None] = lambda version: None,
    ) -> None:
        self.job = Coordinator(policy, workers)
        self.now = 0.0
        self.log: list[tuple[float, Effect]] = []
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        self.made: Counter[int] = Counter()
        """Iterations that each worker has pushed."""
        self.waited = 0.0
        self._takes, self._measure, self._measured_after, self._loss = takes, measure, measured_after, loss
        self._heap: list[tuple[float, int, int, Event]] = []
        """Of events of one instant, those of the shards come first, then by worker."""
        self._serial = 0
        self._busy: dict[int, Release] = {}
        self._told: set[int] = set()
        self._pushed_at: dict[int, float] = {}
        for worker in range(workers):
            self(Joined(worker))
        self(Initialised(0))

    def of(self, kind: type[E]) -> list[tuple[float, E]]:
        """The effects of a kind, with their times."""
        return [(at, effect) for at, effect in self.log if isinstance(effect, kind)]

    @property
    def folds(self) -> list[Fold]:
        return [fold for _, fold in self.of(Fold)]

    @property
    def folded_at(self) -> list[float]:
        return [at for at, _ in self.of(Fold)]

    @property
    def chosen(self) -> list[int]:
        """How many gradients each fold has."""
        return [len(fold.parts) for fold in self.folds]

    @property
    def barriers(self) -> list[float]:
        """When the barrier opened."""
        return sorted({at for at, release in self.of(Release) if release.reason == "the barrier is open"})

    def run(self, versions: float = inf, until: float = inf) -> Race:
        """Go on until there are so many folds, or until a time."""
        while self.job.version < versions:
            wake, event_at = self.job.wake_at(), self._heap[0][0] if self._heap else inf
            if min(event_at, event_at if wake is None else wake) > until:
                self.now = until
                break
            if wake is not None and wake <= event_at:
                self.now = max(self.now, wake)
                self._do(self.job.wake(self.now))
                later = self.job.wake_at()
                assert later is None or later > self.now
                continue
            self.now, _, _, event = heapq.heappop(self._heap)
            if isinstance(event, Pushed):
                begun = self._busy.get(event.worker)
                if begun is None or (begun.incarnation, begun.version) != (event.incarnation, event.version):
                    continue  # it has been broken off
                del self._busy[event.worker]
                if event.worker in self._told:
                    event = Abandoned(event.worker, event.incarnation, event.version, event.compute_s)
                else:
                    self.made[event.worker] += event.steps
                self._pushed_at[event.worker] = self.now
            self(event)
        return self

    def __call__(self, event: Event) -> list[Effect]:
        if isinstance(event, Lost):
            self._busy.pop(event.worker, None)
        return self._do(self.job.on(event, self.now))

    def _do(self, effects: list[Effect]) -> list[Effect]:
        self.log += [(self.now, effect) for effect in effects]
        for effect in effects:
            if isinstance(effect, Fold) and self._measure is not None:
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
        worker, steps = release.worker, release.plan.steps
        takes = sum(self._takes(worker, self.made[worker] + i) for i in range(steps))
        self._busy[worker] = release
        self._told.discard(worker)
        self.waited += self.now - self._pushed_at.get(worker, self.now)
        work = release.version, 8 * steps, takes
        self._at(takes, Pushed(worker, release.incarnation, *work, loss=self._loss(release.version), steps=steps))

    def _tell(self, interrupt: Interrupt) -> None:
        if interrupt.at_once:
            release = self._busy.pop(interrupt.worker)
            self._at(0.0, Abandoned(interrupt.worker, interrupt.incarnation, release.version, 0.0))
        else:
            self._told.add(interrupt.worker)

    def _at(self, after: float, event: Event) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.now + after, getattr(event, "worker", -1), self._serial, event))


def shifted(alpha: float, seed: int) -> Callable[[int, int], float]:
    """The round-trip times of DBW's paper: 1 - alpha + alpha * Exp(1)."""
    rng = np.random.default_rng(seed)
    return lambda worker, iteration: 1.0 - alpha + alpha * float(rng.exponential())


def steady(*times_s: float) -> Callable[[int, int], float]:
    """Each worker always takes the same time."""
    return lambda worker, iteration: times_s[worker]


def norms(norm: float, variance: float) -> Callable[[Fold], Folded]:
    """Shards that measure what is expected where the full gradient and the variance are these."""

    def measure(fold: Fold) -> Folded:
        k = len(fold.parts)
        return Folded(fold.version, (norm + variance,) * k, norm + variance / k, 0.1)

    return measure
