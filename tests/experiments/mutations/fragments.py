"""Broken averages of fragments: who is waited for."""

from __future__ import annotations

from typing import Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.core.policy import Decision, View
from offbeat.policies.decoupled import _Fragment
from offbeat.policies.diloco import DiLoCo


def _whoever_comes(self: DiLoCo, view: View) -> Decision | None:
    parts = tuple(view.pending.values())
    return Decision(parts, "mutated", weights=(1.0 / len(parts),) * len(parts)) if parts else None


MUTATIONS: Final = (
    Mutation("diloco", "no waiting for the others", "bias", replaced(DiLoCo, "fold", _whoever_comes)),
    Mutation("decoupled", "waits for all", "bias", replaced(_Fragment, "_due", lambda self, view: None)),
)
