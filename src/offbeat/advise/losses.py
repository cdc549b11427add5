"""Estimate when another rule would have reached a loss that the run has reached.

A journal tells how many samples, and how many versions, the run took to a loss. A rule without stale gradients whose versions have fewer
samples needs as many samples at best, where gradients are mostly noise, and as many versions at worst, where they are not: the estimate is
both. Of stale gradients and of averaged parameters a journal tells nothing of what they are worth, and nothing is estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

from offbeat.journal.arrivals import Record
from offbeat.types import Seconds

SMOOTH: Final = 50
"""The curve has about so many points, each the mean of the losses of its part."""


class Reached(NamedTuple):
    """A loss, and when the run had it first."""

    loss: float
    seconds: Seconds
    """In the journal's time."""


class Losses:
    """The losses of a run: those that its script logs, or else those that come with pushes."""

    def __init__(self) -> None:
        self._logged: dict[str, list[tuple[Seconds, float]]] = {}
        self._pushed: list[tuple[Seconds, float]] = []

    def add(self, record: Record) -> None:
        """Take the next record."""
        if record.get("optimizer"):
            return
        if record["kind"] == "metrics":
            for name, value in record["values"].items():
                if "loss" in name.lower():
                    self._logged.setdefault(name, []).append((record["t"], float(value)))
        elif record["kind"] == "pushed" and record.get("loss") is not None:
            self._pushed.append((record["t"], float(record["loss"])))

    @property
    def curve(self) -> Sequence[tuple[Seconds, float]]:
        """The smoothed losses by time; empty: none is known."""
        points = max(self._logged.values(), key=len, default=self._pushed) if self._logged else self._pushed
        width = max(1, len(points) // SMOOTH)
        return [
            (points[at + width - 1][0], fmean(loss for _, loss in points[at : at + width]))
            for at in range(0, len(points) - width + 1, width)
        ]

    def reached(self, target: float | None) -> Reached | None:
        """Return when the run had a loss first, None if it never had; of no target, the loss that it had at its end.

        >>> losses = Losses()
        >>> for t in range(10):
        ...     losses.add({"kind": "metrics", "t": float(t), "values": {"loss": 10.0 - t}})
        >>> losses.reached(4.5), losses.reached(0.5), losses.reached(None).loss
        (Reached(loss=4.5, seconds=6.0), None, 1.0)
        """
        curve = self.curve
        if len(curve) < 5:
            return None
        aim = min(loss for _, loss in curve[-len(curve) // 5 :]) if target is None else target
        return next((Reached(aim, t) for t, loss in curve if loss <= aim), None)
