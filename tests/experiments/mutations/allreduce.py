"""Broken partial allreduces: who closes a round, and what becomes of late gradients."""

from __future__ import annotations

from typing import Any, Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.core.allreduce.policy import RoundView
from offbeat.core.allreduce.rounds import Arrival, Rounds
from offbeat.policies import RULES
from offbeat.types import Version, WorkerId

arrive = Rounds.arrive


def losing(self: Rounds, rank: WorkerId, buffer: int | None, version: Version | None = None, samples: int = 0) -> Arrival:
    """Take no gradient of a rank that is late, as the paper's code does."""
    late = (self.version(rank) if version is None else version) < self.number
    return arrive(self, rank, None if late else buffer, version, samples)


def closing(rule: str, broken: str, closes: Any, experiment: str = "eager_fig10") -> Mutation:
    """Let a rule close its rounds by another condition."""
    return Mutation(rule, broken, experiment, replaced(RULES[rule], "closes", closes))


def after(count: int) -> Any:
    """Return the condition of so many arrivals; 0 and less: of all but so many."""
    return lambda self, view: view.arrivals >= (count if count > 0 else view.actives + count)


def half(self: Any, view: RoundView) -> bool:
    return view.arrivals >= view.actives // 2


def drawn(self: Any, view: RoundView) -> bool:
    return view.arrivals_of(view.drawn(1)) == 1


MUTATIONS: Final = (
    closing("majority", "a fixed initiator", lambda self, view: view.arrivals_of([WorkerId(0)]) == 1),
    closing("majority", "as a quorum of half", half),
    closing("majority", "as solo", after(1)),
    closing("solo", "as full", after(0)),
    Mutation("solo", "late gradients are lost", "eager_fig10", replaced(Rounds, "arrive", losing)),
    Mutation("solo", "no bound on the staleness", "eager_fig10", replaced(Rounds, "_leaves_behind", lambda self, number: False)),
    closing("quorum", "any number will do", after(1)),
    closing("quorum", "half, whatever q", half),
    closing("first_of", "one initiator, whatever m", drawn),
    closing("all_of", "one initiator, whatever m", drawn),
    closing("full", "all but one", after(-1)),
    closing("full", "all but two", after(-2), "eager_table2"),
)
