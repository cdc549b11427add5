"""AdaComm: local steps and averaging of parameters, with fewer steps between averages as the loss falls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, isfinite, sqrt
from statistics import fmean
from typing import Literal, get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import Averaging, Contribution, ServerRule
from offbeat.core.settings import whole_number
from offbeat.policies.rounds import Combine, Momentum, RoundsPolicy, averaging_of, check_averaging


@dataclass(frozen=True, kw_only=True)
class AdaComm(ServerRule):
    """Let each worker make T local optimizer steps, then average all workers' parameters; T falls with the loss.

    Update rule: that of `EnsembleSync` with T local steps, ``W <- (1/M) * sum_j W_j``. After epoch l,
    ``T_l = ceil(sqrt(F_l / F_0) * T_0)`` if that is less than ``T_{l-1}``, else half of ``T_{l-1}``, rounded up. F_l is the mean of the
    losses that the script logged in the epoch, F_0 that of the first fold. Without logged losses T does not change.

    Source: Wang and Joshi 2019, "Adaptive communication strategies to achieve the best error-runtime trade-off in local-update SGD"
    (AdaComm). Departures: T changes after each epoch, or every 50 folds if samples are not dealt out, not after intervals of time; it does
    not depend on the learning rate. ``outer_momentum`` is the momentum of the averaged model, which the paper calls block momentum.

    >>> AdaComm(steps=20).spelling
    'adacomm(steps=20)'

    Raises:
        ConfigurationError: a setting is out of its range.
    """

    about = About(
        examples=("adacomm(steps=4)", "adacomm(steps=4, combine=median)", "adacomm(steps=3, overlap=0.5, momentum=reset)"),
        draws=lambda workers: [
            {"steps": range(1, 5), "combine": get_args(Combine)[:3]},
            {"steps": range(1, 5), "overlap": (0.0, 0.5, 1.0)},
        ],
        row=Row(
            "`adacomm(steps=20)`",
            "the mean of all workers' parameters",
            "all workers, after the fold",
            "as `ensemble`, with fewer steps between exchanges as the loss falls: fast first, accurate later",
        ),
    )

    always_spelled = ("steps",)

    steps: int = 10
    """T_0, the local steps between two folds in the first epoch; at least 1."""
    overlap: float | None = None
    """The fraction of the data, 0 to 1, that all workers' splits share. None: no splits; workers take batches from one pool."""
    combine: Combine = "mean"
    """How parameters are combined: ``mean``, equal weights; ``samples``, weighted by samples; ``median``, per coordinate."""
    outer_lr: float = 1.0
    """eta of ``w[v+1] = w[v] - eta * (d + mu * m)``, with d = w[v] - combined and m = mu * m + d; above 0. With 1, and without momentum,
    the new version is the combined parameters."""
    outer_momentum: float = 0.0
    """mu there, Nesterov's momentum as torch has it; at least 0, less than 1."""
    momentum: Momentum = "keep"
    """What a fold does to the state of the workers' own optimizers."""

    def __post_init__(self) -> None:
        whole_number("adacomm", "steps", self.steps, least=1)
        check_averaging(self, ("mean", "samples", "median"))

    @property
    def split_overlap(self) -> float | None:
        return self.overlap

    @property
    def averaging(self) -> Averaging:
        return averaging_of(self)

    @property
    def entry(self) -> Literal["at_once", "next_epoch"]:
        return "next_epoch"

    @property
    def uses_loss(self) -> bool:
        return True

    def start(self) -> ServerRule:
        return RoundsPolicy(self, period=Period(self.steps))


class Period:
    """The number of steps between two folds, which follows the loss.

    Args:
        first: T_0.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._first_loss: float | None = None
        self._losses: list[float] = []
        """The losses of the present epoch."""

    def note(self, parts: Sequence[Contribution]) -> None:
        """Add the losses of the contributions of a fold."""
        self._losses += [c.loss for c in parts if c.loss is not None and isfinite(c.loss)]
        if self._first_loss is None and self._losses:
            self._first_loss = fmean(self._losses)

    def after_epoch(self, last: int) -> int:
        """Return the steps of the next epoch, which follows one with ``last`` steps; without losses as many."""
        losses, self._losses = self._losses, []
        if not losses or not self._first_loss:
            return last
        return next_period(max(0.0, fmean(losses) / self._first_loss), self._first, last)


def next_period(ratio: float, first: int, last: int) -> int:
    """Return ``ceil(sqrt(F / F_0) * T_0)`` if that is less than ``last``, else half of ``last``, rounded up.

    Args:
        ratio: ``F / F_0``, the loss now over the loss at the start.
        first: T_0.
        last: the present period, at most ``first``.

    >>> next_period(0.25, first=20, last=20), next_period(0.98, first=20, last=20)
    (10, 10)
    """
    period = max(1, ceil(sqrt(ratio) * first))
    return period if period < last else ceil(last / 2)
