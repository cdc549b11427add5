"""EnsembleSync: local steps, then averaging of parameters; work of slow and dead workers, and their batches, are given to others."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, TypeAlias, get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import Averaging, ServerRule
from offbeat.core.settings import one_of, whole_number
from offbeat.errors import ConfigurationError
from offbeat.policies.allocation import Budget
from offbeat.policies.rounds import Combine, Momentum, RoundsPolicy, averaging_of, check_averaging, check_number

Reallocate: TypeAlias = Literal["none", "affine", "inverse"]
Returning: TypeAlias = Literal["remembered", "least"]

_COMBINED = ("mean", "samples", "median")


@dataclass(frozen=True, kw_only=True)
class EnsembleSync(ServerRule):
    """Let each worker make T local optimizer steps, then average all workers' parameters.

    Update rule: ``W <- (1/M) * sum_j W_j`` over the M workers that pushed, when every active worker has pushed. Parameters of a worker that
    died after its push count; a worker that dies before it is not waited for; a worker that returns takes part from the next epoch on.
    Communication is 1/T of that with a push each step. With an outer optimizer this is DiLoCo: ``outer_lr=0.7, outer_momentum=0.9``.

    With ``overlap`` each worker has a split of its own (`core.partitions`), and the splits of dead workers go to the living at the next
    epoch. With ``budget`` the rule sets the batch sizes at the end of each epoch such that all workers will take equally long over their
    splits, by the measured times of their steps without waiting. ``inverse`` assumes that the time of a step does not depend on its batch
    (the paper's ``t = alpha/x``, from the last epoch alone); ``affine`` fits ``a + c*x`` to the last epochs, c being 0 until batch sizes
    have differed.

    Source: Xie and Yasunaga, "EnsembleSync: Reliable Distributed SGD with Less Communication", section 3. Departures: a round is complete
    when the workers that pushed include all active workers, not when there are as many; heartbeats distinguish slow from dead workers.
    DiLoCo: Douillard et al. 2023.

    >>> EnsembleSync(per_epoch=10, overlap=0.5, budget=256, reallocate="affine").spelling
    'ensemble(per_epoch=10, overlap=0.5, budget=256, reallocate=affine)'

    Raises:
        ConfigurationError: a setting is out of its range, needs another setting, or excludes one.
    """

    about = About(
        examples=(
            "ensemble(steps=3)",
            "ensemble(steps=4, combine=median)",
            "ensemble(steps=2, combine=samples, outer_lr=0.7, outer_momentum=0.9)",
            "ensemble(per_epoch=4, overlap=0.5)",
            "ensemble(per_epoch=3, overlap=0.25, budget=12, reallocate=affine)",
            "ensemble(per_epoch=2, overlap=0.0, budget=15, reallocate=inverse, batch_min=2, combine=trimmed_mean, trim=0.34)",
        ),
        draws=lambda workers: [
            {"steps": range(1, 5), "combine": _COMBINED},
            {
                "per_epoch": range(1, 5),
                "overlap": (0.0, 0.5, 1.0),
                "budget": range(workers, 13),
                "reallocate": ("none", "affine", "inverse"),
                "combine": _COMBINED,
            },
        ],
        row=Row(
            "`ensemble(steps=10)`",
            "the mean of all workers' parameters",
            "all workers, after the fold",
            "expensive communication: one exchange in T steps; DiLoCo is one of its settings",
        ),
    )

    word = "ensemble"

    steps: int = 10
    """T, the local steps between two folds; at least 1."""
    per_epoch: int | None = None
    """In place of ``steps``: the number of folds per epoch, at equal fractions of each worker's split; at least 1; needs ``overlap``."""
    overlap: float | None = None
    """The fraction of the data, 0 to 1, that all workers' splits share. None: no splits; workers take batches from one pool."""
    budget: int | None = None
    """B, the sum of all workers' batch sizes, at least ``batch_min`` for each; None: the script sets them. A batch size changes when its
    worker is next admitted."""
    reallocate: Reallocate = "none"
    """How the budget is divided after each epoch; none: evenly."""
    granularity: int = 1
    """Batch sizes are multiples of this; at least 1."""
    batch_min: int = 1
    """The least batch of a worker; at least 1."""
    batch_max: int | None = None
    """The greatest batch of a worker, at least ``batch_min``; None: the budget."""
    hysteresis: float = 0.0
    """Keep all batch sizes if none would change by this fraction, 0 to 1, or more."""
    returning: Returning = "remembered"
    """The batch of a returning worker: by its earlier measurements, or if they are old by the median (``remembered``); or the ``least``
    batch, as in figure 5."""
    combine: Combine = "mean"
    """How parameters are combined: ``mean``, equal weights; ``samples``, weighted by samples; ``median`` and ``trimmed_mean``, per
    coordinate and robust against outliers."""
    trim: float = 0.1
    """For ``trimmed_mean``: the fraction cut off at each end; at least 0, less than 0.5."""
    outer_lr: float = 1.0
    """eta of ``w[v+1] = w[v] - eta * (d + mu * m)``, with d = w[v] - combined and m = mu * m + d; above 0. With 1, and without momentum,
    the new version is the combined parameters."""
    outer_momentum: float = 0.0
    """mu there, Nesterov's momentum as torch has it; at least 0, less than 1."""
    momentum: Momentum = "keep"
    """What a fold does to the state of the workers' own optimizers."""

    def __post_init__(self) -> None:
        for name in ("steps", "per_epoch", "budget", "granularity", "batch_min", "batch_max"):
            if getattr(self, name) is not None or getattr(EnsembleSync, name) is not None:
                whole_number("ensemble", name, getattr(self, name), least=1)
        check_number(self, "hysteresis", "a relative change, from 0 to 1", lambda x: 0 <= x <= 1)
        check_number(self, "trim", "a fraction at each end, from 0 to less than 0.5", lambda x: 0 <= x < 0.5)
        check_averaging(self, get_args(Combine))
        one_of("ensemble", "reallocate", self.reallocate, get_args(Reallocate))
        one_of("ensemble", "returning", self.returning, get_args(Returning))
        self._agree()

    def _agree(self) -> None:
        """Check the settings that need or exclude each other."""
        if self.per_epoch is not None and self.overlap is None:
            raise ConfigurationError(
                f"ensemble(per_epoch={self.per_epoch}): per_epoch needs splits of the data; "
                "set overlap= too (overlap=0.0: the splits have nothing in common), or steps= instead"
            )
        if self.reallocate != "none" and (self.budget is None or self.per_epoch is None):
            raise ConfigurationError(
                f"ensemble(reallocate={self.reallocate}) needs {'budget=' if self.budget is None else 'per_epoch='}: it divides a "
                "budget of samples such that all workers take equally long over the same fraction of their splits; over a fixed number of "
                "steps a larger batch would make a slow worker slower still"
            )
        if self.budget is not None and self.budget % self.granularity:
            raise ConfigurationError(
                f"ensemble(budget={self.budget}, granularity={self.granularity}): the budget must be a multiple of the granularity"
            )
        if self.batch_max is not None and self.batch_max < self._least:
            raise ConfigurationError(
                f"ensemble(batch_max={self.batch_max}, batch_min={self.batch_min}, granularity={self.granularity}): "
                f"the least batch is {self._least}; batch_max must not be less"
            )

    @property
    def _least(self) -> int:
        return self.granularity * ceil(self.batch_min / self.granularity)

    def check(self, workers: int) -> None:
        if self.budget is None:
            return
        if self.budget < workers * self._least:
            raise ConfigurationError(
                f"ensemble(budget={self.budget}) is not enough for {workers} workers with batches of at least {self._least}: "
                f"give {workers * self._least} or more, or use fewer workers"
            )
        if self.batch_max is not None and self.budget > workers * (self.batch_max - self.batch_max % self.granularity):
            raise ConfigurationError(
                f"ensemble(budget={self.budget}) is more than {workers} workers may take with batch_max={self.batch_max}: "
                "raise batch_max, or leave it out"
            )

    @property
    def plans_batches(self) -> bool:
        return self.budget is not None

    @property
    def split_overlap(self) -> float | None:
        return self.overlap

    @property
    def averaging(self) -> Averaging:
        return averaging_of(self, trim=float(self.trim) if self.combine == "trimmed_mean" else 0.0)

    @property
    def entry(self) -> Literal["at_once", "next_epoch"]:
        return "next_epoch"

    @property
    def spelling(self) -> str:
        """The rule with the settings that differ from their defaults, and ``steps`` unless ``per_epoch`` replaces it."""
        return self._spelled(("steps",) if self.per_epoch is None else ())

    def start(self) -> ServerRule:
        budget = None
        if self.budget is not None:
            limits = (self.granularity, self.batch_min, self.batch_max)
            budget = Budget(self.budget, self.reallocate, *limits, self.hysteresis, self.returning == "least")
        return RoundsPolicy(self, per_epoch=self.per_epoch or 0, budget=budget)
