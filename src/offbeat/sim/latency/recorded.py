"""Define the law of a recorded run: each worker's measured seconds, with what lasts replayed by time and what does not by iteration.

A worker that is slow for half a minute is slow for half a minute under any rule, however many steps it makes meanwhile. A step that is
late now and then is late as often per step under any rule, however long the others wait for it. So `column` divides a worker's measured
seconds into a level, the running median, which is a function of time, and a rest, which is a function of the number of the iteration.
Replayed at the same times, both together are the measured seconds again. Whether anything lasts is found out by shuffling: if steps that
follow one another differ as much as shuffled ones do, and running medians no more than those of shuffled ones, the level is one number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError
from offbeat.sim.latency.base import Law, Sampler
from offbeat.types import Clock, Seconds

WINDOW: Final = 9
"""Steps of a running median: slowness of at least five steps in a row lasts; shorter slowness does not."""
SHUFFLES, SHUFFLED = 20, 512
"""How many times steps are shuffled, and how many of them: running medians of shuffled steps do not depend on their number."""
LASTS: Final = 1.5
"""Slowness lasts if the variance of the running medians is this many times that of the shuffled steps' in all shuffles,"""
ALIKE: Final = 0.6
"""or if steps that follow one another differ by less than this part of what shuffled ones differ by in all shuffles."""


class Column(NamedTuple):
    """The measured seconds of one worker's steps."""

    times: Sequence[Seconds]
    """When each step began, in order."""
    levels: Sequence[Seconds]
    """What lasts, from each of these times on; one number if nothing does."""
    factors: Sequence[float]
    """By step, at most 1: shorter steps than the level are shorter in proportion;"""
    extras: Sequence[Seconds]
    """longer ones are longer by a delay."""

    def moved(self, steps: int) -> Column:
        """Return this column begun so many steps later, for a worker that is like this one without being late when it is."""
        at, count = steps % len(self.factors), len(self.levels)
        levels = self.levels if count == 1 else [*self.levels[at:], *self.levels[:at]]
        return Column(self.times, levels, [*self.factors[at:], *self.factors[:at]], [*self.extras[at:], *self.extras[:at]])

    @property
    def mean(self) -> Seconds:
        """The mean of the measured seconds."""
        levels = np.broadcast_to(np.asarray(self.levels), (len(self.factors),))
        return float(np.mean(levels * np.asarray(self.factors) + np.asarray(self.extras)))


def column(times: Sequence[Seconds], seconds: Sequence[Seconds]) -> Column:
    """Divide the measured seconds of a worker's steps into what lasts and the rest.

    >>> slow_for_a_while = [1.0] * 20 + [5.0] * 20 + [1.0] * 20
    >>> [column(range(60), slow_for_a_while).levels[step] for step in (10, 30, 50)]
    [1.0, 5.0, 1.0]
    >>> now_and_then = [5.0 if step % 7 == 3 else 1.0 for step in range(60)]
    >>> column(range(60), now_and_then).levels, sum(column(range(60), now_and_then).extras)
    ([1.0], 36.0)
    """
    measured = np.asarray(seconds, dtype=np.float64)
    levels = _medians(measured)
    generator = np.random.Generator(np.random.Philox(0))
    shuffled = [generator.permutation(measured)[:SHUFFLED] for _ in range(SHUFFLES)]
    varies = float(np.var(levels)) > LASTS * max(float(np.var(_medians(steps))) for steps in shuffled) + 1e-18
    if not varies and not _jumps(measured) < ALIKE * min(_jumps(steps) for steps in shuffled):
        levels = np.full(1, np.median(measured))
    whole = np.broadcast_to(levels, measured.shape)
    factors = np.minimum(1.0, np.divide(measured, whole, out=np.ones_like(measured), where=whole > 0.0))
    extras = np.maximum(0.0, measured - whole)
    return Column(list(times), levels.tolist(), factors.tolist(), extras.tolist())


def _jumps(seconds: NDArray[np.float64]) -> float:
    """Return by how much steps that follow one another differ, on average."""
    return float(np.abs(np.diff(seconds)).mean()) if len(seconds) > 1 else 0.0


def _medians(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    half = min(WINDOW // 2, max(0, len(seconds) - 1))
    padded = np.pad(seconds, half, mode="reflect")
    found: NDArray[np.float64] = np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)
    return found


@dataclass(frozen=True, kw_only=True)
class Recorded(Law):
    """The seconds of a recorded run, worker by worker, from its second ``begin`` and its step ``turned`` on. The seed has no influence.

    It cannot be written on the command line: `sim.recording` makes it from a journal.
    """

    what: str
    """What takes so long, and in which run."""
    columns: tuple[Column, ...] = field(repr=False)
    """One for each worker. Messages to several servers take the same time each."""
    begin: Seconds = 0.0
    turned: int = 0

    @property
    def spelling(self) -> str:
        return f"{self.word()}(what={self.what!r}, begin={self.begin!r}, turned={self.turned!r})"

    def check(self, workers: int) -> None:
        if workers % len(self.columns):
            raise ConfigurationError(
                f"{self.spelling}: it has {len(self.columns)} workers, and the job has {workers}; give it one for each"
            )

    def start(self, seed: int, workers: int) -> Sampler:
        self.check(workers)
        columns, begin, turned = self.columns, self.begin, self.turned

        def draw(worker: int, clock: Clock, now: Seconds) -> Seconds:
            times, levels, factors, extras = columns[worker % len(columns)]
            step = (clock + turned) % len(factors)
            level = levels[0] if len(levels) == 1 else levels[max(0, bisect_right(times, now + begin) - 1)]
            return level * factors[step] + extras[step]

        return Sampler(draw)
