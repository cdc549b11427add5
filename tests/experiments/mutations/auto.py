"""Broken rules that change: too soon, never, or to the wrong rule."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any, Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.policies import auto
from offbeat.policies.auto import Auto, _Run
from offbeat.policies.replayed import Outlook


def started(**changed: Any) -> Any:
    """Let a run begin with other settings."""
    return replaced(Auto, "start", lambda self: _Run(replace(self, **changed)))


_chosen = auto.chosen


def _onwards(choices: Any, rule: Auto, own: Any) -> Any:
    best = _chosen(choices, rule, own)
    return own if best is not None and best.batch == len(choices[0].outlook.folded) and own is not None else best


def _versions(outlook: Outlook) -> float:
    """Return the versions a second: half of the gradients make a step of sqrt(1 / 2)."""
    versions = outlook.steps * sqrt(2.0)
    return versions if outlook.gradients < 2.5 * versions else outlook.steps


MUTATIONS: Final = (
    Mutation("auto", "patience ignored", "auto", started(patience=1)),
    Mutation("auto", "gain ignored: never changes", "auto", started(gain=1e9)),
    Mutation("auto", "bias ignored", "auto", replaced(auto, "FAIR", 0.0)),
    Mutation("auto", "never goes back", "auto", replaced(auto, "chosen", _onwards)),
    Mutation("auto", "takes what makes the most versions", "auto", replaced(Outlook, "progress", property(_versions))),
)
