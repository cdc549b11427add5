"""The rounds of EnsembleSync as they go: when parameters are folded, what is measured of the workers, and what their next plans say.

The settings are `policies.ensemble`'s, what a measurement means for the batches is `policies.allocation`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite, sqrt
from statistics import fmean
from typing import TYPE_CHECKING

from offbeat.core.policy import Admit, Averaging, Contribution, Decision, Hold, Plan, Policy, View
from offbeat.policies.allocation import Budget
from offbeat.types import Version, WorkerId

if TYPE_CHECKING:
    from offbeat.policies.ensemble import EnsembleSync

INTERVAL = 50
"""Where samples are not dealt out there are no epochs: the loss is looked at again after so many folds."""


def next_period(ratio: float, first: int, last: int) -> int:
    """AdaComm's rule: ``ceil(sqrt(F / F_0) * T_0)``, or half of the last period where that is not less.

    Args:
        ratio: ``F / F_0``, of the loss now and at the start.
        first: T_0.
        last: the period so far; no greater than ``first``.

    >>> next_period(0.25, first=20, last=20), next_period(0.98, first=20, last=20)
    (10, 10)
    """
    period = max(1, ceil(sqrt(ratio) * first))
    return period if period < last else ceil(last / 2)


class RoundsPolicy(Policy):
    """One run of the rule: what has been measured, and what is planned.

    Args:
        rule: its configuration.
    """

    word = "ensemble"

    def __init__(self, rule: EnsembleSync) -> None:
        self.rule = rule
        self._steps = rule.steps
        self._budget: Budget | None = None
        if rule.budget is not None:
            limits = (rule.granularity, rule.batch_min, rule.batch_max)
            self._budget = Budget(rule.budget, rule.reallocate, *limits, rule.hysteresis, rule.returning == "least")
        self._turn = 0
        """The epoch; where samples are not dealt out, an interval of that many folds."""
        self._dealt = False
        self._stale = True
        """The batches are those of another epoch."""
        self._first_loss: float | None = None
        self._losses: list[float] = []
        """Of this turn."""
        self._given: dict[WorkerId, Version] = {}
        """The version that each worker has been given last."""
        self._again: set[WorkerId] = set()
        """Who is to begin again, there being nothing to combine."""

    @property
    def averaging(self) -> Averaging:
        return self.rule.averaging

    @property
    def spelling(self) -> str:
        return self.rule.spelling

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
            if worker not in self._again:  # were it to begin again at once, all others would have to wait for its steps
                return Hold("what it has handed in is of no use: it goes on with what the others come to")
            self._again.remove(worker)
            return Admit("nothing that was handed in is of use: all begin again")
        return Admit("the parameters are combined")

    def plan(self, view: View, worker: WorkerId) -> Plan:
        self._look(view)
        self._given[worker] = view.version
        return Plan(self._steps, self.rule.per_epoch or 0, self._batch(view, worker))

    def _look(self, view: View) -> None:
        """Whether an epoch has ended since."""
        turn = view.epoch if self._dealt or view.epoch else view.version // INTERVAL
        if turn != self._turn:
            self._turn, self._stale = turn, True
            losses, self._losses = self._losses, []
            if self.rule.adapt_period and losses and self._first_loss:
                self._steps = next_period(max(0.0, fmean(losses) / self._first_loss), self.rule.steps, self._steps)

    def _note(self, parts: Sequence[Contribution]) -> None:
        self._losses += [c.loss for c in parts if c.loss is not None and isfinite(c.loss)]
        if self._first_loss is None and self._losses:
            self._first_loss = fmean(self._losses)
        for c in parts:
            self._dealt = self._dealt or bool(c.leases)
            if self._budget is not None:
                self._budget.note(c.worker, c.compute_s, c.samples, c.steps)

    def _batch(self, view: View, worker: WorkerId) -> int | None:
        budget = self._budget
        if budget is None:
            return None
        others = not self._dealt and len(view.active) != len(budget.batches)  # where samples are dealt, who pauses is not active either
        if self._stale or others or worker not in budget.batches:
            self._stale = False
            shares = {w: view.share(w) for w in {*view.active, *budget.batches, *budget.speeds, worker}}
            split = {w: share for w, share in shares.items() if share is not None}
            budget.deal({**(split or dict.fromkeys(view.active, 1)), worker: split.get(worker, 1)}, self._turn)
        return budget.batches[worker]
