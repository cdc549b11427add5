"""Learn from arrivals how long a fold waits for late gradients, in place of a timeout that the user guesses."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any, Final

from offbeat.core.policy import Admit, Decision, Hold, Plan, ServerRule, View
from offbeat.types import Clock, Incarnation, Seconds, Version, WorkerId

WINDOW: Final = 64
"""How many versions are looked back over."""
LEAST: Final = 8
"""Versions that must have been measured before anything is learned."""
USUAL: Final = 0.9
"""The part of versions whose gradients all came in usual time."""
MARGIN: Final = 1.5
PATIENCE: Final = 0.25
"""The part of a version's time that is waited in any case: a wait that short costs less than a gradient."""


class Deadline:
    """Learn how long after the first gradient of a version the last one of its gradients comes.

    ``seconds = max(1.5 * s, 0.25 * t)``: s is the time that 90 % of the last 64 versions needed from their first gradient to their last
    one, dropped or not; t is the median time from a version's first gradient to that of the next version. A worker that is late now and
    then is left out then; one that stays slow is waited for again once it was late in a tenth of these versions.

    Source: none; the margin and the quantile are ours.
    """

    def __init__(self) -> None:
        self.seconds: Seconds | None = None
        """None: too little is known, and nothing is to be left out."""
        self._first: dict[Version, Seconds] = {}
        """When the first gradient of each version came, the oldest version first."""
        self._spans: dict[Version, Seconds] = {}
        """How much later the last one came."""
        self._seen: dict[WorkerId, tuple[Incarnation, Clock]] = {}
        self._version: Version = -1

    def look(self, view: View) -> None:
        """Measure the newest arrival, and learn once for each version. Call it after each push."""
        for c in deque(view.pending.values(), maxlen=1):
            if self._seen.get(c.worker) != (c.incarnation, c.clock):
                self._seen[c.worker] = c.incarnation, c.clock
                first = self._first.setdefault(c.version, c.arrived)
                self._spans[c.version] = max(self._spans.get(c.version, 0.0), c.arrived - first)
        if view.version != self._version:
            self._version = view.version
            self._learn()

    def _learn(self) -> None:
        for version in sorted(self._first)[:-WINDOW]:
            del self._first[version], self._spans[version]
        begun = sorted(self._first.values())
        if len(begun) <= LEAST:
            return
        spans = sorted(self._spans.values())
        turn = median(later - earlier for earlier, later in pairwise(begun))
        self.seconds = max(MARGIN * spans[ceil(USUAL * len(spans)) - 1], PATIENCE * turn)


class Learning(ServerRule):
    """One run of a rule of which a setting is to be learned: the rule as it is with the seconds learned so far.

    Args:
        rule: the configuration, with the word ``auto`` for the setting.
        setting: its name; None stands for no deadline.
    """

    def __init__(self, rule: Any, setting: str) -> None:
        self._rule, self._setting = rule, setting
        self._deadline = Deadline()
        self._now: ServerRule = replace(rule, **{setting: None})
        self._learned: Seconds | None = None

    def fold(self, view: View) -> Decision | None:
        self._deadline.look(view)
        if self._deadline.seconds != self._learned:
            self._learned = self._deadline.seconds
            self._now = replace(self._rule, **{self._setting: self._learned})
        return self._now.fold(view)

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return self._now.admit(view, worker)

    def plan(self, view: View, worker: WorkerId) -> Plan:
        return self._now.plan(view, worker)

    def wake_at(self, view: View) -> Seconds | None:
        return self._now.wake_at(view)
