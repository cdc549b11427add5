"""Broken weights: what slow workers and long batches have in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.core.policy import Decision, View
from offbeat.policies import asp, elastic, rennala, ringmaster

_LOCAL, _RINGMASTER, _RENNALA = elastic._Local.fold, ringmaster.Ringmaster.fold, rennala.Rennala.fold


def _by_steps(self: elastic._Local, view: View) -> Decision | None:
    decision = _LOCAL(self, view)
    if decision is None:
        return None
    total = sum(c.steps for c in decision.fold)
    return decision._replace(weights=tuple(c.steps / total for c in decision.fold))


def _equal(self: elastic._Local, view: View) -> Decision | None:
    decision = _LOCAL(self, view)
    return None if decision is None else decision._replace(weights=(1 / len(decision.fold),) * len(decision.fold))


def _far(self: ringmaster.Ringmaster, view: View) -> Decision | None:
    return _RINGMASTER(replace(self, threshold=2 * self.threshold), view)


def _half(self: rennala.Rennala, view: View) -> Decision | None:
    return _RENNALA(replace(self, batch=self.batch // 2), view)


MUTATIONS: Final = (
    Mutation("elastic", "local parameters weigh by steps", "bias", replaced(elastic._Local, "fold", _by_steps)),
    Mutation("elastic", "workers do not count alike in mode local", "bias", replaced(elastic._Local, "fold", _equal)),
    Mutation("asp", "no discount", "bias", replaced(asp.ASP, "scale", lambda self, staleness: 1.0)),
    Mutation("ringmaster", "twice the threshold", "bias", replaced(ringmaster.Ringmaster, "fold", _far)),
    Mutation("rennala", "half of the batch", "bias", replaced(rennala.Rennala, "fold", _half)),
)
