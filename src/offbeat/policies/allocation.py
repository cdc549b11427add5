"""Sharing out a budget of samples, the batch sizes of all workers, so that they finish an epoch's share at the same time.

Pure arithmetic over step times that a rule hands in: how long a worker's steps take (`Speed`, `StepTime`), what everybody should have
(`equalised`), and the same in whole samples (`whole`). `Budget` puts these together over a run. It knows no view and no plan.

Source: EnsembleSync, section 3.2. The affine model, the whole numbers and what becomes of those who return are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import fmean, median
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from offbeat.types import Epoch, Seconds, WorkerId

Model: TypeAlias = Literal["none", "affine", "inverse"]

HISTORY = 8
"""The epochs over which step times are fitted. A line through the last two alone follows every hiccup: with 10 % of noise in the times,
epochs then took 13 to 19 % longer than they need to, and 2 to 5 % with eight."""
DOUBT = 0.01
"""How strongly a step is taken to be all fixed until batch sizes have differed: as much as two epochs 14 % apart can say."""
SAME = 0.1
"""Batch sizes that differ less than this, relatively, are the same when it comes to telling whether a worker has changed."""
CHANGED = 0.25
"""A step this much longer or shorter at the same batch size, relatively: another tenant, a slower clock. What was known is forgotten."""
FIXED = 0.05
"""At least this part of a step is taken to be fixed. Else the time of an epoch would not depend on the batch size, and nothing moved."""
MEMORY: Epoch = 10
"""For this many epochs what was measured of a worker that is away is believed."""
HALVINGS = 100
"""Of the interval in which the common time is sought: more than a float has bits to tell."""


class StepTime(NamedTuple):
    """The seconds of one local step with a batch of x: ``s(x) = fixed_s + sample_s * x``."""

    fixed_s: Seconds
    sample_s: Seconds


def equalised(times: Sequence[StepTime], samples: Sequence[int], budget: float) -> list[float]:
    """The batch sizes x, not whole yet, with which all workers take equally long over their parts of an epoch.

    A worker with N samples takes ``t(x) = N/x * s(x) = N * (a/x + c)``; so ``x = N*a / (t - N*c)``, and the common t is where these add up
    to the budget. With every c = 0 that is the paper's ``x_i = B * alpha_i / sum(alpha)``, ``alpha_i = t_i * x_i = N_i * a_i``.

    Args:
        times: of each worker; every ``fixed_s`` is more than 0.
        samples: N of each worker.
        budget: B, what the batch sizes add up to.

    >>> equalised([StepTime(0.1, 0.0), StepTime(0.3, 0.0)], [1000, 1000], 256)
    [64.0, 192.0]
    """
    N = np.maximum(1, np.asarray(samples, dtype=float))
    a, c = (N * np.array(column) for column in zip(*times, strict=True))
    if not c.any():
        return [float(x) for x in budget * a / a.sum()]
    low, high = c.max(), float((a * len(a) / budget + c).max())  # even shares are possible, so that the common time is at most theirs
    for _ in range(HALVINGS):
        t = (low + high) / 2
        if (a / np.maximum(t - c, 1e-300)).sum() > budget:
            low = t
        else:
            high = t
    return [float(x) for x in a / np.maximum(high - c, 1e-300)]


def whole(ideal: Sequence[float], budget: int, *, granularity: int = 1, least: int = 1, most: int | None = None) -> list[int]:
    """Whole batch sizes near these, by largest remainder, which add up to the budget exactly; the first in order wins a tie.

    Only what is impossible gives way: where all are at ``most``, the rest of the budget is unused; where there are more workers than the
    budget has units, each has one.

    Args:
        ideal: what each should have; only the proportions of what is above ``least`` count.
        budget: a multiple of ``granularity``.
        granularity: all sizes are multiples of it.
        least: of each.
        most: of each; None: no limit. What is above is shared out among the others.

    >>> whole([100.0, 100.0, 56.0], 256, granularity=8)
    [104, 96, 56]
    >>> whole([250.0, 6.0], 256, least=16, most=200)
    [200, 56]
    """
    n, units = len(ideal), budget // granularity
    assert n > 0 and units * granularity == budget, f"{budget} samples in units of {granularity} for {n} workers"
    low = max(1, min(ceil(least / granularity), units // n))
    high = max(low, units if most is None else most // granularity)
    if not low * n < units < high * n:
        return [granularity * (low if units <= low * n else high)] * n
    above = _spread([max(0.0, x / granularity - low) for x in ideal], units - low * n, high - low)
    given = [low + int(x + 1e-9) for x in above]
    by_remainder = sorted(range(n), key=lambda i: (given[i] - low - above[i], i))
    for i in [i for i in by_remainder if given[i] < high][: units - sum(given)]:
        given[i] += 1
    return [granularity * x for x in given]


def _spread(wants: Sequence[float], room: float, most: float) -> list[float]:
    """Share out the room in proportion to the wants, no more than ``most`` to anybody; what that leaves goes to the others."""
    given, free = [0.0] * len(wants), set(range(len(wants)))
    while True:
        total = sum(wants[i] for i in free)
        fair = {i: room * wants[i] / total if total > 0 else room / len(free) for i in free}
        over = {i for i in free if fair[i] > most}
        for i in over or free:
            given[i] = min(fair[i], most)
        free -= over
        if not over or not free:
            return given
        room -= most * len(over)


@dataclass(slots=True)
class Speed:
    """How long one worker's steps have taken, at the batch sizes of its last epochs.

    >>> speed = Speed()
    >>> speed.observe(100.0, 0.2, epoch=0)
    >>> speed.time("affine")
    StepTime(fixed_s=0.2, sample_s=0.0)
    >>> speed.observe(300.0, 0.4, epoch=1)
    >>> [round(seconds, 3) for seconds in speed.time("affine")], speed.time("inverse")
    ([0.102, 0.001], StepTime(fixed_s=0.4, sample_s=0.0))
    """

    epoch: Epoch = 0
    """When it was measured last."""
    seen: list[tuple[float, Seconds]] = field(default_factory=list)
    """Batch sizes and the seconds of a step, the newest last."""

    def observe(self, batch: float, step_s: Seconds, epoch: Epoch) -> None:
        """A step with a batch of this size has taken so long, on average over an epoch."""
        same = [s for x, s in self.seen if abs(x - batch) <= SAME * batch]
        if same and abs(step_s - fmean(same)) > CHANGED * fmean(same):
            self.seen = []
        self.seen = [*self.seen, (batch, step_s)][-HISTORY:]
        self.epoch = epoch

    def time(self, model: Model) -> StepTime:
        """``inverse``: all of a step is fixed, as the last one was. ``affine``: the line nearest to all, by relative errors.

        ``c = sum(w * (x - X) * (s - S)) / (sum(w * (x - X)^2) + DOUBT * X^2)`` and ``a = S - c * X``, weights ``w ~ 1/s^2``, weighted means
        X and S; so that batch sizes that are almost alike say nothing of c.
        """
        if model == "inverse":
            return StepTime(self.seen[-1][1], 0.0)
        x, s = (np.array(column) for column in zip(*self.seen, strict=True))
        w = (s.mean() / s) ** 2
        mean_x, mean_s = float(np.average(x, weights=w)), float(np.average(s, weights=w))
        spread = float((w * (x - mean_x) ** 2).sum()) + DOUBT * mean_x**2
        sample_s = max(0.0, float((w * (x - mean_x) * (s - mean_s)).sum()) / spread)
        fixed_s = max(FIXED * mean_s, mean_s - sample_s * mean_x)
        return StepTime(fixed_s, (mean_s - fixed_s) / mean_x)


@dataclass(slots=True)
class Budget:
    """The batch sizes of a job's workers, dealt out anew for each epoch from what the last has shown.

    Args:
        total: B, what they add up to.
        model: ``none``: even shares.
        granularity: see `whole`, as ``least`` and ``most``.
        hysteresis: leave everything as it is where no batch would change by this fraction or more.
        humble: who has been away begins anew with the least; otherwise with what was measured of it, or if that is too old, the median.
    """

    total: int
    model: Model = "none"
    granularity: int = 1
    least: int = 1
    most: int | None = None
    hysteresis: float = 0.0
    humble: bool = False
    batches: dict[WorkerId, int] = field(default_factory=dict)
    """As last dealt out."""
    speeds: dict[WorkerId, Speed] = field(default_factory=dict)
    _sums: dict[WorkerId, tuple[Seconds, int, int]] = field(default_factory=dict)

    def note(self, worker: WorkerId, compute_s: Seconds, samples: int, steps: int) -> None:
        """So many steps over so many samples have taken so long, waiting left out."""
        if compute_s > 0.0 and samples > 0 and steps > 0:
            seconds, s, n = self._sums.get(worker, (0.0, 0, 0))
            self._sums[worker] = seconds + compute_s, s + samples, n + steps

    def deal(self, shares: Mapping[WorkerId, int], epoch: Epoch) -> None:
        """An epoch begins, or others take part than before.

        Args:
            shares: of each worker that takes part, how many samples it has in the epoch.
        """
        for worker, (seconds, samples, steps) in self._sums.items():
            self.speeds.setdefault(worker, Speed()).observe(samples / steps, seconds / steps, epoch)
        self._sums.clear()
        workers = sorted(shares)
        sizes = whole(self._ideal(workers, shares, epoch), self.total, granularity=self.granularity, least=self.least, most=self.most)
        new = dict(zip(workers, sizes, strict=True))
        if new.keys() != self.batches.keys() or any(abs(x - self.batches[w]) >= self.hysteresis * self.batches[w] for w, x in new.items()):
            self.batches = new

    def _ideal(self, workers: Sequence[WorkerId], shares: Mapping[WorkerId, int], epoch: Epoch) -> list[float]:
        known = {w: speed.time(self.model) for w, speed in self.speeds.items() if epoch - speed.epoch <= MEMORY}
        measured = [known[w] for w in workers if w in known and self.model != "none"]
        if not measured:
            return [self.total / len(workers)] * len(workers)
        middle = StepTime(median(t.fixed_s for t in measured), median(t.sample_s for t in measured))
        back = {w for w in workers if self.humble and self.batches and w not in self.batches}
        ready = [w for w in workers if w not in back]
        dealt = equalised([known.get(w, middle) for w in ready], [shares[w] for w in ready], self.total) if ready else []
        ideal = dict(zip(ready, dealt, strict=True))
        return [ideal.get(w, 0.0) for w in workers]
