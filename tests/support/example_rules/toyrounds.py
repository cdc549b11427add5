"""A rule of the allreduce family that exists in tests only."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.core.about import About, Row
from offbeat.core.allreduce.policy import RoundRule, RoundView


@dataclass(frozen=True, kw_only=True)
class ToyRounds(RoundRule):
    """A round closes when half of the ranks have arrived.

    Source: none, made up for a test.
    """

    about = About(
        examples=("toyrounds",),
        row=Row("`toyrounds`", "what is there when half have arrived", "who waited", "a test"),
    )

    def closes(self, view: RoundView) -> bool:
        return 2 * view.arrivals >= view.actives
