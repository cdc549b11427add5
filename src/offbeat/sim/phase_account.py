"""Account for a simulated worker's time by phases, as a live worker's `core.phases.PhaseClock` does."""

from __future__ import annotations

from collections.abc import Sequence

from offbeat.core.phases import Phase
from offbeat.types import Seconds

PUSH, PULL, WAIT = Phase.PUSH.label, Phase.PULL.label, Phase.WAIT.label
LEAST: Seconds = 5e-7
"""What is shorter is left out of an account."""


class PhaseAccount:
    """Add up what a worker does between two pushes. What it neither computes nor sends or receives is a wait.

    Args:
        now: when the account begins.

    >>> account = PhaseAccount(0.0)
    >>> account.compute(2.0, (("data", 0.25), ("forward", 0.75)))
    >>> account.pull_s = 0.5
    >>> account.take(compute_s=1.0, now=4.0)  # interrupted half-way
    {'data': 0.25, 'forward': 0.75, 'pull': 0.5, 'wait': 2.5}
    """

    def __init__(self, now: Seconds) -> None:
        self._since = now
        self._planned: dict[str, Seconds] = {}
        self.push_s: Seconds = 0.0
        """Seconds for which the last push was under way."""
        self.pull_s: Seconds = 0.0

    def compute(self, seconds: Seconds, shares: Sequence[tuple[str, float]]) -> None:
        """Add an iteration that takes so long, if nothing ends it before."""
        planned = self._planned
        for name, share in shares:
            planned[name] = planned.get(name, 0.0) + seconds * share

    def take(self, compute_s: Seconds, now: Seconds) -> dict[str, Seconds]:
        """Return the seconds by phase since the last call, of which ``compute_s`` were computing, and begin anew."""
        whole, spent, found = sum(self._planned.values()), 0.0, {}
        for name, seconds in self._planned.items():
            part = seconds * compute_s / whole if whole > 0.0 else 0.0
            spent += part
            if part >= LEAST:
                found[name] = round(part, 6)
        if self.push_s >= LEAST:
            found[PUSH] = round(self.push_s, 6)
        if self.pull_s >= LEAST:
            found[PULL] = round(self.pull_s, 6)
        wait_s = now - self._since - (spent + self.push_s + self.pull_s)
        if wait_s >= LEAST:
            found[WAIT] = round(wait_s, 6)
        self._since, self._planned, self.push_s, self.pull_s = now, {}, 0.0, 0.0
        return found
