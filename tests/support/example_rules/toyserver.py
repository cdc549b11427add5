"""A rule with servers that exists in tests only."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.core.about import About, Row
from offbeat.core.policy import Admit, Decision, Hold, ServerRule, View
from offbeat.core.settings import whole_number
from offbeat.types import WorkerId


@dataclass(frozen=True, kw_only=True)
class ToyServer(ServerRule):
    """Fold as soon as `size` contributions are there, or all of them.

    Source: none, made up for a test.
    """

    about = About(
        examples=("toyserver(size=2)",),
        draws=lambda workers: [{"size": range(1, workers + 1)}],
        row=Row("`toyserver(size=2)`", "the first few gradients", "who is in no sum that waits", "a test"),
    )

    size: int = 2
    """How many contributions a version is made of, at least 1."""

    def __post_init__(self) -> None:
        whole_number("toyserver", "size", self.size, least=1)

    def fold(self, view: View) -> Decision | None:
        parts = tuple(view.pending.values())
        if not parts or (len(parts) < self.size and view.missing):
            return None
        return Decision(parts, f"{len(parts)} contributions are there")

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return Hold("its contribution waits for others") if worker in view.pending else Admit("its contribution has a fate")
