"""Broken EnsembleSync: what is averaged, when who enters, how much is computed, and with which batches."""

from __future__ import annotations

from typing import Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.core.policy import Decision, Plan, View
from offbeat.policies.allocation import Model, Speed, StepTime
from offbeat.policies.ensemble import EnsembleSync
from offbeat.policies.rounds import RoundsPolicy
from offbeat.types import WorkerId

fold, plan, time = RoundsPolicy.fold, RoundsPolicy.plan, Speed.time


def one_worker(self: RoundsPolicy, view: View) -> Decision | None:
    """Take the parameters of one worker in place of the mean."""
    decision = fold(self, view)
    return decision and decision._replace(weights=(1.0, *[0.0] * (len(decision.fold) - 1)))


def without_waiting(self: RoundsPolicy, view: View) -> Decision | None:
    """Fold what the first worker has pushed, without the others."""
    parts = tuple(view.pending.values())
    return Decision(parts, "mutated", weights=(1.0 / len(parts),) * len(parts)) if parts else None


def one_step(self: RoundsPolicy, view: View, worker: WorkerId) -> Plan:
    """Push after each step."""
    return Plan(1, 0, plan(self, view, worker).batch)


def opposite(self: Speed, model: Model) -> StepTime:
    """Take a slow worker for a fast one."""
    return StepTime(1.0 / time(self, model).fixed_s, 0.0)


MUTATIONS: Final = (
    Mutation("ensemble", "parameters of one worker", "ensemble_table", replaced(RoundsPolicy, "fold", one_worker)),
    Mutation("ensemble", "no waiting for the others", "ensemble_table", replaced(RoundsPolicy, "fold", without_waiting)),
    Mutation("ensemble", "a push after each step", "ensemble_table", replaced(RoundsPolicy, "plan", one_step)),
    Mutation("ensemble", "a recovered worker enters at once", "ensemble_fig4", replaced(EnsembleSync, "entry", "at_once")),
    Mutation("ensemble", "equal batches", "ensemble_fig5", replaced(Speed, "time", lambda self, model: StepTime(1.0, 0.0))),
    Mutation("ensemble", "smaller batches for slow workers", "ensemble_fig5", replaced(Speed, "time", opposite)),
)
