"""Define laws that modify another law: slow windows, factors per worker, additional delays, sums.

The inner law is given as quoted text or as an object, and draws what it would draw alone under the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from offbeat.core.policy import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.latency.base import DrawnSampler, Law, Sampler, derived, stretched
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
        return _Windows(self, self.inner.start(seed, workers))


class _Windows(Sampler):
    __slots__ = ("_inner", "_law")

    def __init__(self, law: Windows, inner: Sampler) -> None:
        self._law = law
        self._inner = inner

    def draw(self, worker: int, clock: Clock, now: Seconds) -> Seconds:
        work_s = self._inner.draw(worker, clock, now)
        return stretched(work_s, now, self._windows(now)) if worker == self._law.worker else work_s

    def _windows(self, now: Seconds) -> Iterator[tuple[Seconds, Seconds, float]]:
        law = self._law
        if math.isinf(law.every):
            yield law.begin, law.end, law.factor
            return
        first = max(0, math.floor((now - law.begin) / law.every))
        for k in count(first):
            yield law.begin + k * law.every, law.end + k * law.every, law.factor


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
        return _PerWorker(self.factors, self.inner.start(seed, workers))


class _PerWorker(Sampler):
    __slots__ = ("_factors", "_inner")

    def __init__(self, factors: tuple[float, ...], inner: Sampler) -> None:
        self._factors = factors
        self._inner = inner

    def draw(self, worker: int, clock: Clock, now: Seconds) -> Seconds:
        return self._inner.draw(worker, clock, now) * self._factors[worker]


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
        return _OneOf(self, self.inner.start(seed, workers), derived(seed, "one_of"), workers)


class _OneOf(Sampler):
    __slots__ = ("_chosen", "_clock", "_count", "_inner", "_seconds", "_uniform", "_workers")

    def __init__(self, law: OneOf, inner: Sampler, seed: int, workers: int) -> None:
        self._inner = inner
        self._seconds = law.seconds
        self._count = law.count
        self._workers = workers
        self._uniform = DrawnSampler(seed, law.count, lambda generator, n: generator.random(n))
        self._clock = -1
        self._chosen: set[int] = set()

    def draw(self, worker: int, clock: Clock, now: Seconds) -> Seconds:
        if clock != self._clock:
            self._choose(clock)
        seconds = self._inner.draw(worker, clock, now)
        return seconds + self._seconds if worker in self._chosen else seconds

    def _choose(self, clock: Clock) -> None:
        """Draw ``count`` workers by Floyd's sampling without replacement: every set is equally likely."""
        self._clock, self._chosen = clock, set()
        for i in range(self._count):
            last = self._workers - self._count + i
            pick = int(self._uniform.draw(i, clock, 0.0) * (last + 1))
            self._chosen.add(last if pick in self._chosen else pick)


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
        return _Plus(self.inner.start(seed, workers), self.second.start(derived(seed, "extra"), workers))


class _Plus(Sampler):
    __slots__ = ("_extra", "_inner")

    def __init__(self, inner: Sampler, extra: Sampler) -> None:
        self._inner = inner
        self._extra = extra

    def draw(self, worker: int, clock: Clock, now: Seconds) -> Seconds:
        return self._inner.draw(worker, clock, now) + self._extra.draw(worker, clock, now)
