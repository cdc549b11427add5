"""One superstep of ElasticBSP: who has pushed how often since the barrier, how fast each worker is, and where it is to stop for the next.

It decides nothing about contributions: `policies.elastic` does, and asks here. All is counted as it happens, so that a push costs the same
however many workers there are; only a barrier, a plan, a worker's departure and, while paces are measured, a new slowest look at all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from offbeat.core.policy import Admit, Contribution, Hold, View
from offbeat.policies.prediction import LEAST, averaged, meet
from offbeat.types import Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.policies.elastic import ElasticBSP


@dataclass(slots=True)
class Pace:
    """One active worker in the superstep under way."""

    since: Seconds
    """When it was released: its next push is expected one interval later."""
    count: int = 0
    """Its pushes since the barrier. Who comes later begins with the least of the others'."""
    first: int = 0
    """What it began with."""
    limit: int = 0
    """At this count it waits for the barrier, once that is planned."""
    most: int | None = None
    """No later plan of this superstep puts the limit beyond this: R pushes after the first. Else workers that are often late, as with
    exponential times, would have the barrier put off for ever."""
    late: bool = False
    """It has come after the plan, and has not pushed yet."""


class Superstep:
    """The book of the superstep under way: first it measures, then it has a plan."""

    def __init__(self, rule: ElasticBSP) -> None:
        self._rule = rule
        self._intervals: dict[WorkerId, Seconds] = {}
        """Also of workers that are away."""
        self._paces: dict[WorkerId, Pace] = {}
        """Of the active workers, from their first release on. Who goes and comes back begins anew."""
        self._unmeasured: deque[WorkerId] = deque()
        """Whoever is still to be measured is in here; who is in front and need not be is taken out when somebody looks."""
        self._planned = rule.monitor == 0
        self._barrier: Seconds = 0.0
        self._deadlines: list[tuple[Seconds, WorkerId]] = []
        """When the plan has failed, the latest first."""
        self._recalled: dict[WorkerId, None] = {}
        """Held workers that may go on by now and are still to be asked, which is done at once."""
        self._recalled_at: Seconds = 0.0
        self._leaving: set[WorkerId] = set()
        """Who stood at the barrier when it opened, and is still to be told."""
        self._active = 0
        self._low = self._at_low = self._high = 0
        """The least count of the active workers, how many have it, and the greatest count that anybody has had."""
        self._exact = True
        """Whether the first two are; otherwise ``_low`` is at most what it should be."""

    # What happens.

    def look(self, view: View) -> None:
        """To be called first, whatever has happened: begin, plan, or plan anew if it is time for that."""
        active = view.active
        if len(active) < self._active:
            for worker in [worker for worker in self._paces if worker not in active]:
                del self._paces[worker]
            self._exact = False
        self._active = len(active)
        if not self._planned:
            if self._all_measured():
                self._plan(view)
        elif self._deadlines and view.now >= self._deadlines[-1][0]:
            due = self._deadline()
            if due is not None and view.now >= due:
                self._plan(view)

    def pushed(self, view: View, c: Contribution) -> None:
        """A contribution that counts has arrived."""
        worker = c.worker
        pace = self._paces.get(worker) or self._join(view, worker)
        measured = max(view.now - pace.since, c.compute_s)  # a pull in the middle of an iteration counts as a release, too
        self._intervals[worker] = averaged(self._rule, self._intervals.get(worker), measured)
        pace.count += 1
        self._high = max(self._high, pace.count)
        if pace.late:
            pace.late = False
            pace.limit = min(pace.count + min(self._room(view, worker), self._rule.R - 1), self._low + 2 * self._rule.R)
        if self._exact and pace.count == self._low + 1:
            self._at_low -= 1
            self._exact = self._at_low > 0
        if not self._exact and not self._planned and len(view.waiting) > 1:
            self._recall(view)
        self.look(view)

    def released(self, view: View, worker: WorkerId) -> None:
        """A worker begins to compute, for the first time or again."""
        pace = self._paces.get(worker) or self._join(view, worker)
        pace.since = view.now

    def over(self, view: View) -> bool:
        """Whether nobody computes any more, all having come to the barrier, died, or paused."""
        if not view.active:
            return True
        if not self._planned or len(view.waiting) < len(view.active):
            return False
        return not any(worker not in self._paces or self._goes(worker) for worker in view.waiting)

    def begin(self, view: View) -> None:
        """Open the barrier."""
        self._paces = {worker: Pace(view.now) for worker in view.active}
        self._unmeasured = deque(self._paces)
        self._planned = False
        self._deadlines.clear()
        self._recalled.clear()
        self._leaving = set(view.waiting)
        self._active = self._at_low = len(self._paces)
        self._low = self._high = 0
        self._exact = True
        if self._rule.monitor == 0:
            self._plan(view)

    # What is asked.

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        """Whether a worker may go on."""
        self._recalled.pop(worker, None)
        if worker not in self._paces:
            return Admit("takes part in the superstep under way")
        if worker in self._leaving:
            self._leaving.remove(worker)
            return Admit("the barrier is open")
        pace = self._paces[worker]
        if self._planned:
            if pace.count < pace.limit:
                return Admit(f"{pace.limit - pace.count} more to push before the barrier")
            return Hold(f"has come to the barrier, which is expected in {max(0.0, self._barrier - view.now):.3g} s")
        if self._capped(pace):
            return Hold(f"{pace.count - self._low} pushes ahead of the slowest worker, which is still being measured")
        return Admit("is being measured")

    def wake_at(self, view: View) -> Seconds | None:
        """When there is something to do even if nothing happens."""
        while self._recalled:
            worker = next(iter(self._recalled))
            if worker in view.waiting:
                return self._recalled_at
            del self._recalled[worker]
        return self._deadline()

    # The measuring phase.

    def _goes(self, worker: WorkerId) -> bool:
        pace = self._paces[worker]
        return pace.count < pace.limit

    def _join(self, view: View, worker: WorkerId) -> Pace:
        """A worker takes part that was not there at the barrier."""
        if view.pushed_at(worker) is None:
            self._intervals.pop(worker, None)  # of another process
        count = self._slowest() if self._high >= self._rule.R else self._low
        self._at_low += 1
        pace = self._paces[worker] = Pace(view.now, count, count)
        if self._planned:
            pace.limit = min(count + max(1, self._room(view, worker)), count + self._rule.R)
            pace.late = True
        else:
            self._unmeasured.append(worker)
        return pace

    def _room(self, view: View, worker: WorkerId) -> int:
        """How many pushes this worker can still make until the barrier, as planned; 0 where its interval is not known."""
        interval = self._intervals.get(worker)
        return 0 if interval is None else int(min(max(0.0, self._barrier - view.now) / interval, self._rule.R))

    def _all_measured(self) -> bool:
        while self._unmeasured:
            worker = self._unmeasured[0]
            pace = self._paces.get(worker)
            if pace is not None and pace.count - pace.first < self._rule.monitor:
                return False
            self._unmeasured.popleft()
        return bool(self._paces)

    def _slowest(self) -> int:
        """The least count of the active workers."""
        if not self._exact:
            counts = [pace.count for pace in self._paces.values()]
            self._low = min(counts, default=self._low)
            self._at_low = counts.count(self._low)
            self._exact = True
        return self._low

    def _capped(self, pace: Pace) -> bool:
        """Without this a fast worker would run ahead without bound until the slowest has been measured."""
        bound = self._rule.R
        return pace.count - self._low >= bound and pace.count - self._slowest() >= bound

    def _recall(self, view: View) -> None:
        """Have those asked again who may go on now."""
        self._recalled_at = view.now
        for worker in view.waiting:
            pace = self._paces.get(worker)
            if pace is not None and (pace.count < pace.limit if self._planned else not self._capped(pace)):
                self._recalled[worker] = None

    # The plan.

    def _plan(self, view: View) -> None:
        """Choose for each active worker how often it pushes until the barrier. Who waits begins at this moment."""
        rule, now, intervals = self._rule, view.now, self._intervals
        self._planned, self._barrier = True, now
        self._deadlines.clear()
        cap = self._slowest() + 2 * rule.R
        known = [(worker, pace) for worker, pace in self._paces.items() if worker in intervals]
        for pace in self._paces.values():
            pace.limit = max(pace.limit, pace.count + 1)
        if known:
            elapsed = np.array([0.0 if worker in view.waiting else now - pace.since for worker, pace in known])
            interval = np.array([intervals[worker] for worker, _ in known])
            # Of one that is late no more is known than how long it has been computing: it is expected to take as long again.
            expected = np.where(elapsed >= (1.0 + rule.grace) * interval - LEAST, 2.0 * elapsed, interval)
            ends, line = meet(rule, elapsed, expected)
            self._barrier = now + line.barrier
            for (worker, pace), row, chosen, step in zip(known, ends, line.choice, interval, strict=True):
                if pace.most is None:
                    pace.most = pace.count + rule.R
                pace.limit = max(pace.count + (worker not in view.waiting), min(pace.count + chosen + 1, cap, pace.most))
                self._deadlines.append((now + max(LEAST, float(row[chosen] + rule.grace * step)), worker))
            self._deadlines = sorted((d for d in self._deadlines if isfinite(d[0])), reverse=True)
        self._recall(view)

    def _deadline(self) -> Seconds | None:
        """When the first worker that is still on its way will be too late for the plan to make sense."""
        while self._deadlines:
            due, worker = self._deadlines[-1]
            if worker in self._paces and self._goes(worker):
                return due
            self._deadlines.pop()
        return None
