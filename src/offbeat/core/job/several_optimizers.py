"""Connect the coordinators of a job with several optimizers, for instance of a GAN's two models; the workers are the same.

A worker waits in one of these jobs at a time, and cannot push in the others meanwhile. A rule that waits for it there may wait for ever:
under bsp, worker 0 waits for worker 1 with the first optimizer, and worker 1 for worker 0 with the second. So each coordinator is told of
workers that wait elsewhere, and sets them aside: its rule does not wait for them until they return.

A worker that is idle until an epoch's end is set aside at once. A worker that waits for others is not, since they may be about to arrive.
Only when every living worker waits, so that no further event would come, are those that wait elsewhere set aside, in the job of one
optimizer after the other, until a worker continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offbeat.core.events import Elsewhere, Event, Lost, Returned
from offbeat.core.job.coordinator import Coordinator
from offbeat.types import Seconds, WorkerId, WorkerState

GONE = (WorkerState.DEAD, WorkerState.RECOVERED, WorkerState.FINISHED)


class Several:
    """Say which events to feed to which coordinator, so that each knows of waits and deaths at the others. It feeds none itself.

    Args:
        jobs: the coordinators by the numbers of their optimizers, 0 first; more may be added while the job runs.
        patience_s: seconds without an event, while every worker waits, before a worker is set aside. Where workers decide among
            themselves, a coordinator learns of it late.
    """

    def __init__(self, jobs: Mapping[int, Coordinator], patience_s: Seconds = 0.0) -> None:
        self._jobs = jobs
        self.patience_s = patience_s
        self._still_since: Seconds | None = None
        """The time since which every living worker has waited for the same."""
        self._waits: frozenset[tuple[int, WorkerId, int]] = frozenset()

    def wake_at(self) -> Seconds | None:
        """Return the time at which to ask `next` again even without an event, in seconds; None: never."""
        return None if self._still_since is None else self._still_since + self.patience_s

    def next(self, now: Seconds) -> tuple[int, Event] | None:
        """Return the number of an optimizer and the event to feed to it, None if there is none. Ask after every event until None."""
        if len(self._jobs) < 2:
            return None
        return next(self._overdue(), None) or next(self._standstill(now), None)

    def _overdue(self) -> Iterator[tuple[int, Event]]:
        """Return an event that is due at once: a worker is idle elsewhere, has returned, or will not come."""
        for number, job in self._jobs.items():
            others = [other for key, other in self._jobs.items() if key != number]
            held = set().union(*(other.waiting.held for other in others)) if job.waiting.aside else set()
            for worker in job.waiting.aside:
                if worker not in held:
                    yield number, Returned(worker)
            if not job.start.begun and number:
                first = self._jobs[0].membership
                for worker in job.membership.in_state(WorkerState.EXPECTED):
                    if first[worker].state in GONE and not first[worker].goes_on:
                        yield number, Lost(worker, "it has left the job before it made this optimizer")
            for worker in sorted(set().union(*(other.waiting.idle for other in others))):
                if job.waiting.expected(worker):
                    yield number, Elsewhere(worker, "waits for the end of an epoch with another optimizer")

    def _standstill(self, now: Seconds) -> Iterator[tuple[int, Event]]:
        """Return the worker for which not to wait, if no worker can continue."""
        held = {number: job.waiting.held for number, job in self._jobs.items()}
        living = {worker for job in self._jobs.values() for worker in job.membership.in_state(WorkerState.ALIVE)}
        if not living or not living <= set().union(*held.values()):
            self._still_since = None
            return
        waits = frozenset((number, worker, self._jobs[number].version) for number, workers in held.items() for worker in workers)
        if self._still_since is None or waits != self._waits:
            self._still_since, self._waits = now, waits
        if now < self._still_since + self.patience_s:
            return
        for number in sorted(self._jobs, reverse=True):
            job, elsewhere = self._jobs[number], set().union(*(held[other] for other in held if other != number))
            if held[number]:
                for worker in sorted(elsewhere):
                    if job.waiting.expected(worker):
                        yield number, Elsewhere(worker, "every worker waits, this one with another optimizer")
        self._still_since = None  # nothing more can be done here: the next event must come from an expected or a dead worker
