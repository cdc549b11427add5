"""Define the law of measured times: each worker takes the times in its column of a trace, row by row, again and again.

`offbeat.traces` reads the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from offbeat.core.phases import NOT_SEPARATED
from offbeat.core.settings import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.latency.base import Law, Sampler
from offbeat.traces import Measured, Times, measured
from offbeat.types import Clock


@dataclass(frozen=True, kw_only=True)
class Trace(Law):
    """``scale`` times the measured seconds of worker p at step ``(offset + t) mod steps``. The seed has no influence.

    Reads CSV (one column per worker), the mini-batch times of Alibaba PAI, the straggler traces of ByteDance Seed, and journals of
    offbeat, which show how another rule would have done with the times of a live run: ``trace(path="run.jsonl")``. A journal's times
    are compute times without waiting.
    """

    path: str
    """The file, which is read once, when the law is checked or started."""
    job: str = ""
    """The name of a job in an npz file that has several, for instance ``SE``."""
    scale: float = 1.0
    """Seconds per unit of the file; greater than 0. Alibaba's times are normalised to 0 .. 1000, only their ratios have a meaning."""
    offset: int = 0
    """The row to begin with, from 0."""

    def __post_init__(self) -> None:
        for name in ("path", "job"):
            if not isinstance(getattr(self, name), str):
                raise ConfigurationError(f'trace({name}={getattr(self, name)!r}): {name} must be text in quotes: {name}="..."')
        if not self.path:
            raise ConfigurationError("trace(path=''): the path is empty; name a file")
        self._check_number("scale", above=True)
        whole_number("trace", "offset", self.offset, least=0)

    @cached_property
    def measured(self) -> Measured:
        """What the file says, not scaled."""
        return measured(self.path, self.job)

    @property
    def times(self) -> Times:
        """Seconds, steps x workers, scaled."""
        return self.measured.times * self.scale

    def check(self, workers: int) -> None:
        steps, columns = self.measured.times.shape
        if columns < workers:
            raise ConfigurationError(
                f"{self.spelling}: the trace has {columns} workers ({steps} steps), fewer than the {workers} of the job; "
                f"use at most {columns} workers or another trace"
            )

    def start(self, seed: int, workers: int) -> Sampler:
        self.check(workers)
        columns: list[list[float]] = np.roll(self.times, -self.offset, axis=0).T.tolist()
        steps, phases = len(self.measured.times), self.measured.shares

        def shares(worker: int, clock: Clock) -> Sequence[tuple[str, float]]:
            if not phases:
                return NOT_SEPARATED
            of_worker = phases[worker]
            return of_worker[(clock + self.offset) % steps % len(of_worker)]

        return Sampler(lambda worker, clock, now: columns[worker][clock % steps], shares)
