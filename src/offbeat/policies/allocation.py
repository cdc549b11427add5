"""Divide a budget of samples into batch sizes such that all workers finish their shares of an epoch at the same time.

Pure arithmetic over measured step times: how long a worker's steps take (`Speed`, `StepTime`), and the whole batch sizes with which the
slowest takes the shortest time (`core.batch_sizes.whole`). `Budget` combines them over a run.

A worker with N samples takes ``t(x) = N/x * s(x) = N * (a/x + c)`` over its share of an epoch, if a step with a batch of x takes
``s(x) = a + c * x``. With all c = 0 and before rounding the sizes are the paper's ``x_i = B * alpha_i / sum(alpha)``, where ``alpha_i`` is
``t_i * x_i``.

Source: EnsembleSync, section 3.2. Departures: the affine model, the least longest time in whole samples, and the treatment of returning
workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from offbeat.core.batch_sizes import whole
from offbeat.types import Epoch, Seconds, WorkerId

Model: TypeAlias = Literal["none", "affine", "inverse"]

HISTORY = 8
"""The number of epochs over which step times are fitted. A line through the last two alone follows the noise: with 10 % of noise in the
times, epochs then took 13 to 19 % longer than necessary, and 2 to 5 % with eight."""
DOUBT = 0.01
"""The weight of the prior assumption that a step's time does not depend on its batch: that of two epochs whose batches differ by 14 %."""
SAME = 0.1
"""Batch sizes with a smaller relative difference count as equal when a change of a worker's speed is detected."""
CHANGED = 0.25
"""The relative difference of a step's time, at equal batch size, from which on the worker's speed has changed (another tenant, a slower
clock), so that earlier measurements are discarded."""
FIXED = 0.05
"""The least fraction of a step that counts as fixed. Without it an epoch's time might not depend on the batch sizes, which could then not
be adapted."""
MEMORY: Epoch = 10
"""The number of epochs for which measurements of an absent worker stay valid."""


class StepTime(NamedTuple):
    """The seconds of one local step with a batch of x: ``s(x) = fixed_s + sample_s * x``."""

    fixed_s: Seconds
    sample_s: Seconds


@dataclass(slots=True)
class Speed:
    """The step times of one worker at the batch sizes of its last epochs.

    >>> speed = Speed()
    >>> speed.observe(100.0, 0.2, epoch=0)
    >>> speed.time("affine")
    StepTime(fixed_s=0.2, sample_s=0.0)
    >>> speed.observe(300.0, 0.4, epoch=1)
    >>> [round(seconds, 3) for seconds in speed.time("affine")], speed.time("inverse")
    ([0.102, 0.001], StepTime(fixed_s=0.4, sample_s=0.0))
    """

    epoch: Epoch = 0
    """The epoch of the last measurement."""
    seen: list[tuple[float, Seconds]] = field(default_factory=list)
    """(batch size, seconds of a step), the newest last."""

    def observe(self, batch: float, step_s: Seconds, epoch: Epoch) -> None:
        """Add the mean batch size and step time of an epoch; discard earlier ones if the worker's speed has changed."""
        same = [s for x, s in self.seen if abs(x - batch) <= SAME * batch]
        if same and abs(step_s - fmean(same)) > CHANGED * fmean(same):
            self.seen = []
        self.seen = [*self.seen, (batch, step_s)][-HISTORY:]
        self.epoch = epoch

    def time(self, model: Model) -> StepTime:
        """Return the fitted step time. ``inverse``: the last one, all fixed. ``affine``: the line with the least relative errors.

        ``c = sum(w * (x - X) * (s - S)) / (sum(w * (x - X)^2) + DOUBT * X^2)`` and ``a = S - c * X``, with weights ``w ~ 1/s^2`` and
        weighted means X and S. The term with DOUBT keeps c near 0 while batch sizes are almost equal.
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
    """The batch sizes of a job's workers, set for each epoch from the measurements of earlier ones.

    Args:
        total: B, the sum of the batch sizes.
        model: the model of step times; ``none``: equal batch sizes.
        granularity: see `whole`, also for ``least`` and ``most``.
        hysteresis: keep all batch sizes if none would change by this fraction or more.
        humble: a returning worker begins with the least batch; otherwise by its earlier measurements, or if they are too old the median.
    """

    total: int
    model: Model = "none"
    granularity: int = 1
    least: int = 1
    most: int | None = None
    hysteresis: float = 0.0
    humble: bool = False
    batches: dict[WorkerId, int] = field(default_factory=dict)
    """The present batch sizes."""
    speeds: dict[WorkerId, Speed] = field(default_factory=dict)
    _sums: dict[WorkerId, tuple[Seconds, int, int]] = field(default_factory=dict)

    def note(self, worker: WorkerId, compute_s: Seconds, samples: int, steps: int) -> None:
        """Add the measurement of a push: the steps, their samples, and their compute time without waiting."""
        if compute_s > 0.0 and samples > 0 and steps > 0:
            seconds, s, n = self._sums.get(worker, (0.0, 0, 0))
            self._sums[worker] = seconds + compute_s, s + samples, n + steps

    def deal(self, shares: Mapping[WorkerId, int], epoch: Epoch) -> None:
        """Set the batch sizes, at the beginning of an epoch or when workers have joined or left.

        Args:
            shares: the samples of each worker that takes part in the epoch.
            epoch: the epoch that begins, or the present one.
        """
        for worker, (seconds, samples, steps) in self._sums.items():
            self.speeds.setdefault(worker, Speed()).observe(samples / steps, seconds / steps, epoch)
        self._sums.clear()
        workers = sorted(shares)
        weights, fixed = self._times(workers, shares, epoch)
        sizes = whole(weights, self.total, fixed=fixed, granularity=self.granularity, least=self.least, most=self.most)
        new = dict(zip(workers, sizes, strict=True))
        if new.keys() != self.batches.keys() or any(abs(x - self.batches[w]) >= self.hysteresis * self.batches[w] for w, x in new.items()):
            self.batches = new

    def _times(self, workers: Sequence[WorkerId], shares: Mapping[WorkerId, int], epoch: Epoch) -> tuple[list[float], list[float]]:
        """Return N * a and N * c of each worker: 1 and 0 for all as long as nothing is known, 0 and 0 for one that is to have the least."""
        known = {w: speed.time(self.model) for w, speed in self.speeds.items() if epoch - speed.epoch <= MEMORY}
        measured = [known[w] for w in workers if w in known and self.model != "none"]
        if not measured:
            return [1.0] * len(workers), [0.0] * len(workers)
        middle = StepTime(median(t.fixed_s for t in measured), median(t.sample_s for t in measured))
        back = {w for w in workers if self.humble and self.batches and w not in self.batches}
        samples = [0 if w in back else max(1, shares[w]) for w in workers]
        times = [known.get(w, middle) for w in workers]
        return [n * t.fixed_s for n, t in zip(samples, times, strict=True)], [n * t.sample_s for n, t in zip(samples, times, strict=True)]
