"""Rounds of local steps after which parameters are averaged: the settings that such rules share, and the state of one run.

A run decides when parameters are folded, measures the workers, and makes their next plans. `policies.ensemble` and `policies.adacomm` are
the rules; `policies.allocation` turns measurements into batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Literal, TypeAlias, get_args

from offbeat.core.policy import Admit, Averaging, Contribution, Decision, Hold, Plan, ServerRule, View
from offbeat.core.settings import is_number, one_of
from offbeat.errors import ConfigurationError
from offbeat.policies.allocation import Budget
from offbeat.types import Version, WorkerId

INTERVAL = 50
"""The number of folds that count as an epoch if samples are not dealt out."""

Combine: TypeAlias = Literal["mean", "samples", "median", "trimmed_mean"]
Momentum: TypeAlias = Literal["keep", "reset", "average"]


class AveragedRounds(ServerRule):
    """The settings that rules with local steps and averaged parameters share. Subclasses are dataclasses that have them as fields."""

    always_spelled = ("steps",)

    steps: int
    overlap: float | None
    combine: Combine
    outer_lr: float
    outer_momentum: float
    momentum: Momentum

    def check_averaging(self, combine: tuple[str, ...]) -> None:
        """Check the shared settings except ``steps``; ``combine`` lists the words that the rule accepts for it.

        Raises:
            ConfigurationError: a setting is out of its range.
        """
        if self.overlap is not None:
            self.number("overlap", "a fraction of the data, from 0 to 1", lambda x: 0 <= x <= 1)
        self.number("outer_lr", "a learning rate, more than 0", lambda x: 0 < x < inf)
        self.number("outer_momentum", "a factor, from 0 to less than 1", lambda x: 0 <= x < 1)
        one_of(self.called(), "combine", self.combine, combine)
        one_of(self.called(), "momentum", self.momentum, get_args(Momentum))

    def number(self, name: str, what: str, holds: Callable[[float], bool]) -> None:
        """Check that a setting is a number for which ``holds`` is true.

        Raises:
            ConfigurationError: it is not; the message says ``what`` it must be.
        """
        value: Any = getattr(self, name)
        if not is_number(value) or not holds(value):
            raise ConfigurationError(f"{self.called()}({name}={value!r}): {name} must be {what}")

    @property
    def split_overlap(self) -> float | None:
        return self.overlap

    @property
    def averaging(self) -> Averaging:
        combine: Literal["mean", "median", "trimmed_mean"] = "mean" if self.combine == "samples" else self.combine
        return Averaging(combine, 0.0, float(self.outer_lr), float(self.outer_momentum), self.momentum)

    @property
    def entry(self) -> Literal["at_once", "next_epoch"]:
        return "next_epoch"


class RoundsPolicy(ServerRule):
    """The state of the rule in one run: measurements and plans.

    Args:
        rule: the configuration.
        per_epoch: the number of pushes per epoch, instead of one every ``rule.steps`` steps; 0: by steps.
        budget: sets the workers' batch sizes; None: the script sets them.
    """

    def __init__(self, rule: AveragedRounds, per_epoch: int = 0, budget: Budget | None = None) -> None:
        self.rule = rule
        self._steps = rule.steps
        self._per_epoch = per_epoch
        self._budget = budget
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
            self._epoch_ended()

    def _epoch_ended(self) -> None:
        """Adapt the plans of the next epoch; for subclasses."""

    def _note(self, parts: Sequence[Contribution]) -> None:
        """Measure the contributions of a fold."""
        for c in parts:
            self._dealt = self._dealt or bool(c.leases)
            if self._budget is not None:
                self._budget.note(c.worker, c.compute_s, c.samples, c.steps)

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
