"""Define laws that modify another law: slow windows, factors per worker, additional delays, sums.

The inner law is given as quoted text or as an object, and draws what it would draw alone under the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

from offbeat.core.settings import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.latency.base import Drawn, Law, Sampler, derived, stretched
from offbeat.types import Clock, Seconds


@dataclass(frozen=True, kw_only=True)
class Nested(Law):
    """A law that modifies another law."""

    law: str | Law
    """The inner law, or its text form, which is parsed."""

    def __post_init__(self) -> None:
        self._resolve("law")

    def _resolve(self, name: str) -> None:
        from offbeat.sim.latency.registry import law  # not at the top, because the registry imports this file

        object.__setattr__(self, name, law(getattr(self, name)))

    @property
    def inner(self) -> Law:
        assert isinstance(self.law, Law)
        return self.law

    def check(self, workers: int) -> None:
        self.inner.check(workers)


@dataclass(frozen=True, kw_only=True)
class Windows(Nested):
    """Make ``worker`` ``factor`` times slower from ``begin`` to ``end``, and again after each period of ``every``.

    An iteration that overlaps a window is slower only for its part within the window; see `base.stretched`.

    >>> sampler = Windows(law="constant(seconds=1)", worker=2, begin=10, end=20, factor=5).start(seed=0, workers=4)
    >>> [sampler.draw(2, 0, now) for now in (0.0, 9.5, 12.0, 20.0)], sampler.draw(1, 0, 12.0)
    ([1.0, 3.0, 5.0, 1.0], 1.0)
    """

    worker: int
    begin: Seconds
    """Seconds since the job began; at least 0."""
    end: Seconds
    """After ``begin``."""
    factor: float
    """Greater than 0; with 5, one second of work takes five."""
    every: Seconds = math.inf
    """The period, from the beginning of one window to that of the next; at least ``end - begin``. ``inf``: there is one window."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("begin")
        self._check_number("end", least=self.begin, above=True)
        self._check_number("factor", above=True)
        self._check_number("every", least=self.end - self.begin, finite=False)
        whole_number("windows", "worker", self.worker, least=0)

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.worker >= workers:
            raise ConfigurationError(f"{self.spelling}: there is no worker {self.worker}; the {workers} workers are numbered from 0")

    def start(self, seed: int, workers: int) -> Sampler:
        self.check(workers)
        inner = self.inner.start(seed, workers)

        def draw(worker: int, clock: Clock, now: Seconds) -> Seconds:
            work_s = inner.draw(worker, clock, now)
            return stretched(work_s, now, self._windows(now)) if worker == self.worker else work_s

        return Sampler(draw)

    def _windows(self, now: Seconds) -> Iterator[tuple[Seconds, Seconds, float]]:
        if math.isinf(self.every):
            yield self.begin, self.end, self.factor
            return
        first = max(0, math.floor((now - self.begin) / self.every))
        for k in count(first):
            yield self.begin + k * self.every, self.end + k * self.every, self.factor


@dataclass(frozen=True, kw_only=True)
class PerWorker(Nested):
    """Multiply the times of each worker by ``factors[worker]``: permanent differences in speed.

    >>> PerWorker(law="constant(seconds=0.5)", factors=(1, 1, 4)).start(seed=0, workers=3).draw(2, 0, 0.0)
    2.0
    """

    factors: tuple[float, ...]
    """One for each worker, greater than 0; with 4, one second of work takes four."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.factors
        if not isinstance(given, tuple | list):
            given = ()
        if not given or not all(isinstance(f, int | float) and not isinstance(f, bool) and 0.0 < f < math.inf for f in given):
            raise ConfigurationError(f"per_worker(factors={self.factors!r}): write a number greater than 0 for each worker: (1, 1, 4)")
        object.__setattr__(self, "factors", tuple(float(f) for f in given))

    def check(self, workers: int) -> None:
        super().check(workers)
        if len(self.factors) < workers:
            raise ConfigurationError(
                f"{self.spelling}: {len(self.factors)} factors are too few for {workers} workers; write one for each worker"
            )

    def start(self, seed: int, workers: int) -> Sampler:
        self.check(workers)
        inner, factors = self.inner.start(seed, workers), self.factors
        return Sampler(lambda worker, clock, now: inner.draw(worker, clock, now) * factors[worker])


@dataclass(frozen=True, kw_only=True)
class OneOf(Nested):
    """Add ``seconds`` to one worker (or ``count`` workers), drawn anew in each iteration.

    Eager-SGD's experiments (section 7) delay one of 8 workers by 0.2, 0.3 or 0.4 s for the hyperplane, and ``count=4`` of 64 by 0.3 or
    0.46 s for ImageNet.
    """

    seconds: Seconds
    """At least 0."""
    count: int = 1
    """How many workers are delayed in each iteration; at least 1, at most all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_number("seconds")
        whole_number("one_of", "count", self.count, least=1)

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.count > workers:
            raise ConfigurationError(f"{self.spelling}: count={self.count} workers cannot be drawn from {workers}; lower count")

    def start(self, seed: int, workers: int) -> Sampler:
        self.check(workers)
        inner = self.inner.start(seed, workers)
        uniform = Drawn(derived(seed, "one_of"), self.count, lambda generator, n: generator.random(n))

        @lru_cache(maxsize=1)
        def chosen(clock: Clock) -> set[int]:
            """Draw ``count`` workers by Floyd's sampling without replacement: every set is equally likely."""
            found: set[int] = set()
            for i in range(self.count):
                last = workers - self.count + i
                pick = int(uniform.draw(i, clock, 0.0) * (last + 1))
                found.add(last if pick in found else pick)
            return found

        def draw(worker: int, clock: Clock, now: Seconds) -> Seconds:
            seconds = inner.draw(worker, clock, now)
            return seconds + self.seconds if worker in chosen(clock) else seconds

        return Sampler(draw)


@dataclass(frozen=True, kw_only=True)
class Plus(Nested):
    """Add the independent draws of two laws: ``plus(law="...", extra="sometimes(probability=0.01, seconds=4)")``."""

    extra: str | Law
    """The second law, or its text form."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._resolve("extra")

    @property
    def second(self) -> Law:
        assert isinstance(self.extra, Law)
        return self.extra

    def check(self, workers: int) -> None:
        super().check(workers)
        self.second.check(workers)

    def start(self, seed: int, workers: int) -> Sampler:
        inner, second = self.inner.start(seed, workers), self.second.start(derived(seed, "extra"), workers)
        return Sampler(lambda worker, clock, now: inner.draw(worker, clock, now) + second.draw(worker, clock, now))
