"""One superstep of ElasticBSP: count each worker's pushes since the barrier, measure its speed, and plan where it stops for the next one.

`policies.elastic` decides about contributions with this state. Counts are kept incrementally, so that the cost of a push does not depend on
the number of workers. Only a barrier, a plan, a worker's departure and, while speeds are measured, a new slowest worker visit all workers.
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
    """One active worker in the present superstep."""

    since: Seconds
    """When the worker was released: its next push is expected one interval later."""
    count: int = 0
    """The worker's pushes since the barrier. A worker that joins later begins with the least count of the others."""
    first: int = 0
    """The count with which the worker began."""
    limit: int = 0
    """The count at which the worker waits for the barrier, once the barrier is planned."""
    most: int | None = None
    """The greatest limit that a later plan of this superstep may set: R pushes after the first plan. Without it workers that are often
    late, as with exponential times, would postpone the barrier without end."""
    late: bool = False
    """Whether the worker has joined after the plan and has not pushed yet."""


class Superstep:
    """The state of the present superstep: first workers are measured, then there is a plan."""

    def __init__(self, rule: ElasticBSP) -> None:
        self._rule = rule
        self._intervals: dict[WorkerId, Seconds] = {}
        """The measured interval of each worker, also of inactive ones."""
        self._paces: dict[WorkerId, Pace] = {}
        """The active workers, from their first release on. A worker that leaves and returns gets a new entry."""
        self._unmeasured: deque[WorkerId] = deque()
        """All workers still to be measured, and others: `_all_measured` removes measured and departed workers from the front lazily."""
        self._planned = rule.monitor == 0
        self._barrier: Seconds = 0.0
        self._deadlines: list[tuple[Seconds, WorkerId]] = []
        """For each worker when its lateness makes the plan fail, the latest first."""
        self._recalled: dict[WorkerId, None] = {}
        """Held workers that may continue now but have not been admitted yet; `wake_at` asks for this at once."""
        self._recalled_at: Seconds = 0.0
        self._leaving: set[WorkerId] = set()
        """Workers that waited at the barrier when it opened and have not been admitted yet."""
        self._active = 0
        self._low = self._at_low = self._high = 0
        """The least count of the active workers, how many workers have it, and the greatest count of any worker."""
        self._exact = True
        """Whether ``_low`` and ``_at_low`` are exact; otherwise ``_low`` is a lower bound."""

    # Events.

    def look(self, view: View) -> None:
        """Update the state after any event: forget workers that have left, and plan, or plan again, if it is time."""
        active = view.active
        if len(active) < self._active:
            for worker in [worker for worker in self._paces if worker not in active]:
                del self._paces[worker]
                self._recalled.pop(worker, None)
            self._exact = False
        self._active = len(active)
        if not self._planned:
            if self._all_measured():
                self._plan(view)
        else:
            self._drop_deadlines()
            if self._deadlines and view.now >= self._deadlines[-1][0]:
                self._plan(view)

    def pushed(self, view: View, c: Contribution) -> None:
        """Count and measure a contribution that has arrived."""
        worker = c.worker
        pace = self._paces.get(worker) or self._join(view, worker)
        measured = max(view.now - pace.since, c.compute_s)  # a pull during an iteration resets `since`
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
        """Note that a worker begins to compute."""
        pace = self._paces.get(worker) or self._join(view, worker)
        pace.since = view.now

    def over(self, view: View) -> bool:
        """Return whether the superstep is over: every worker is at the barrier, dead, or paused."""
        if not view.active:
            return True
        if not self._planned or len(view.waiting) < len(view.active):
            return False
        return not any(worker not in self._paces or self._goes(worker) for worker in view.waiting)

    def begin(self, view: View) -> None:
        """Open the barrier and begin the next superstep."""
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

    # Questions of the rule.

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        """Decide whether a worker may continue."""
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
        """Return when the rule must be asked again without an event: at once for recalled workers, else at the plan's next deadline."""
        if self._recalled:
            return self._recalled_at
        return self._deadlines[-1][0] if self._deadlines else None

    # The measuring phase.

    def _goes(self, worker: WorkerId) -> bool:
        pace = self._paces[worker]
        return pace.count < pace.limit

    def _join(self, view: View, worker: WorkerId) -> Pace:
        """Add a worker that was absent at the barrier."""
        if view.pushed_at(worker) is None:
            self._intervals.pop(worker, None)  # measured of an earlier process
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
        """Return how many pushes this worker can make until the planned barrier; 0 if its interval is not known."""
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
        """Return the least count of the active workers."""
        if not self._exact:
            counts = [pace.count for pace in self._paces.values()]
            self._low = min(counts, default=self._low)
            self._at_low = counts.count(self._low)
            self._exact = True
        return self._low

    def _capped(self, pace: Pace) -> bool:
        """Return whether a worker is R or more pushes ahead of the slowest: a bound on the lead while workers are measured."""
        bound = self._rule.R
        return pace.count - self._low >= bound and pace.count - self._slowest() >= bound

    def _recall(self, view: View) -> None:
        """Collect the held workers that may continue now, for `wake_at`."""
        self._recalled_at = view.now
        for worker in view.waiting:
            pace = self._paces.get(worker)
            if pace is not None and (pace.count < pace.limit if self._planned else not self._capped(pace)):
                self._recalled[worker] = None

    # The plan.

    def _plan(self, view: View) -> None:
        """Choose for each active worker the number of pushes until the barrier. Waiting workers begin to compute now."""
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
            # A late worker's interval is out of date: it is expected to take as long again as it has been computing.
            expected = np.where(elapsed >= (1.0 + rule.grace) * interval - LEAST, 2.0 * elapsed, interval)
            ends, line = meet(rule, elapsed, expected)
            self._barrier = now + line.barrier
            for (worker, pace), row, chosen, step in zip(known, ends, line.choice, interval, strict=True):
                if pace.most is None:
                    pace.most = pace.count + rule.R
                pace.limit = max(pace.count + (worker not in view.waiting), min(pace.count + chosen + 1, cap, pace.most))
                self._deadlines.append((now + max(LEAST, float(row[chosen] + rule.grace * step)), worker))
            self._deadlines = sorted((d for d in self._deadlines if isfinite(d[0])), reverse=True)
            self._drop_deadlines()
        self._recall(view)

    def _drop_deadlines(self) -> None:
        """Drop the next deadlines as long as they are of workers that have reached their limits or have left."""
        while self._deadlines:
            worker = self._deadlines[-1][1]
            if worker in self._paces and self._goes(worker):
                break
            self._deadlines.pop()
