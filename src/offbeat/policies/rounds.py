"""Rounds of local steps after which parameters are averaged: the settings that such rules share, and the state of one run.

A run decides when parameters are folded, measures the workers, and makes their next plans. `policies.ensemble` and `policies.adacomm` are
the rules; `policies.allocation` turns measurements into batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from offbeat.core.policy import Admit, Averaging, Contribution, Decision, Hold, Plan, ServerRule, View
from offbeat.core.settings import is_number, one_of
from offbeat.errors import ConfigurationError
from offbeat.policies.allocation import Budget
from offbeat.types import Version, WorkerId

if TYPE_CHECKING:
    from offbeat.policies.adacomm import AdaComm, Period
    from offbeat.policies.ensemble import EnsembleSync

INTERVAL = 50
"""The number of folds that count as an epoch if samples are not dealt out."""

Combine: TypeAlias = Literal["mean", "samples", "median", "trimmed_mean"]
Momentum: TypeAlias = Literal["keep", "reset", "average"]


def check_averaging(rule: AdaComm | EnsembleSync, combine: tuple[str, ...]) -> None:
    """Check the settings that the rules share, except ``steps``; ``combine`` lists the words that the rule accepts for it.

    Raises:
        ConfigurationError: a setting is out of its range.
    """
    if rule.overlap is not None:
        check_number(rule, "overlap", "a fraction of the data, from 0 to 1", lambda x: 0 <= x <= 1)
    check_number(rule, "outer_lr", "a learning rate, more than 0", lambda x: 0 < x < inf)
    check_number(rule, "outer_momentum", "a factor, from 0 to less than 1", lambda x: 0 <= x < 1)
    one_of(rule.called(), "combine", rule.combine, combine)
    one_of(rule.called(), "momentum", rule.momentum, get_args(Momentum))


def check_number(rule: ServerRule, name: str, what: str, holds: Callable[[float], bool]) -> None:
    """Check that a setting is a number for which ``holds`` is true.

    Raises:
        ConfigurationError: it is not; the message says ``what`` it must be.
    """
    value: Any = getattr(rule, name)
    if not is_number(value) or not holds(value):
        raise ConfigurationError(f"{rule.called()}({name}={value!r}): {name} must be {what}")


def averaging_of(rule: AdaComm | EnsembleSync, trim: float = 0.0) -> Averaging:
    """Return the exchange of parameters for a rule's settings; ``trim`` is that of the trimmed mean."""
    combine: Literal["mean", "median", "trimmed_mean"] = "mean" if rule.combine == "samples" else rule.combine
    return Averaging(combine, trim, float(rule.outer_lr), float(rule.outer_momentum), rule.momentum)


class RoundsPolicy(ServerRule):
    """The state of the rule in one run: measurements and plans.

    Args:
        rule: the configuration.
        per_epoch: the number of pushes per epoch, instead of one every ``rule.steps`` steps; 0: by steps.
        budget: sets the workers' batch sizes; None: the script sets them.
        period: sets the number of steps of the next epoch; None: it stays.
    """

    def __init__(
        self, rule: AdaComm | EnsembleSync, *, per_epoch: int = 0, budget: Budget | None = None, period: Period | None = None
    ) -> None:
        self.rule = rule
        self._steps = rule.steps
        self._per_epoch = per_epoch
        self._budget = budget
        self._period = period
        self._turn = 0
        """The epoch; if samples are not dealt out, the number of the interval of INTERVAL folds."""
        self._dealt = False
        """Whether samples are dealt out, as far as known."""
        self._stale = True
        """Whether the batch sizes are those of an earlier epoch."""
        self._given: dict[WorkerId, Version] = {}
        """The last version that each worker received."""
        self._again: set[WorkerId] = set()
        """Workers that are to compute again from the same version, since no contribution could be folded."""

    def fold(self, view: View) -> Decision | None:
        self._look(view)
        if not view.pending or (view.missing and len(view.waiting) < len(view.active)):
            return None
        parts = tuple(view.pending.values())
        self._note(parts)
        weights = None if self.rule.combine == "samples" else (1.0 / len(parts),) * len(parts)
        return Decision(parts, f"all {len(view.active)} active workers have handed in their parameters", weights=weights)

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        if worker in view.pending:
            return Hold(f"{view.missing} of {len(view.active)} active workers are still at their local steps")
        if view.pushed_at(worker) is not None and self._given.get(worker) == view.version:
            if not view.pending and len(view.waiting) == len(view.active):
                self._again = set(view.waiting)
            if worker not in self._again:  # if it computed again at once, all others would wait for its steps
                return Hold("what it has handed in is of no use: it goes on with what the others come to")
            self._again.remove(worker)
            return Admit("nothing that was handed in is of use: all begin again")
        return Admit("the parameters are combined")

    def plan(self, view: View, worker: WorkerId) -> Plan:
        self._look(view)
        self._given[worker] = view.version
        return Plan(self._steps, self._per_epoch, self._batch(view, worker))

    def _look(self, view: View) -> None:
        """Check whether an epoch has ended since the last call."""
        turn = view.epoch if self._dealt or view.epoch else view.version // INTERVAL
        if turn != self._turn:
            self._turn, self._stale = turn, True
            if self._period is not None:
                self._steps = self._period.after_epoch(self._steps)

    def _note(self, parts: Sequence[Contribution]) -> None:
        """Measure the contributions of a fold."""
        for c in parts:
            self._dealt = self._dealt or bool(c.leases)
            if self._budget is not None:
                self._budget.note(c.worker, c.compute_s, c.samples, c.steps)
        if self._period is not None:
            self._period.note(parts)

    def _batch(self, view: View, worker: WorkerId) -> int | None:
        budget = self._budget
        if budget is None:
            return None
        # If samples are dealt out, a worker that pauses at the end of an epoch is not active either: its share must not be dealt again.
        changed = not self._dealt and len(view.active) != len(budget.batches)
        if self._stale or changed or worker not in budget.batches:
            self._stale = False
            shares = {w: view.share(w) for w in {*view.active, *budget.batches, *budget.speeds, worker}}
            split = {w: share for w, share in shares.items() if share is not None}
            budget.deal({**(split or dict.fromkeys(view.active, 1)), worker: split.get(worker, 1)}, self._turn)
        return budget.batches[worker]
