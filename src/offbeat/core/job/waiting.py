"""Keep the workers that wait, and those set aside since they wait in the job of another optimizer of their process.

The ledger knows who waits to be admitted, and the epochs know who waits for samples. Ranks that decide among themselves say here when they
have to wait. `core.job.several_optimizers` looks at all of them.
"""

from __future__ import annotations

from offbeat.core.effects import Effect, SetAside, TakenBack
from offbeat.core.events import Elsewhere, Returned, Stands
from offbeat.core.job.participants import Participants
from offbeat.core.job.start import JobStart
from offbeat.core.job.work import JobWork
from offbeat.types import Seconds, WorkerId


class Waiting:
    """Keep the waiting workers of one job.

    Args:
        start: of the job.
        participants: of the job.
        work: of the job.
        effects: of the event in hand; this object appends its own.
    """

    def __init__(self, start: JobStart, participants: Participants, work: JobWork, effects: list[Effect]) -> None:
        self._start, self._participants, self._work, self._effects = start, participants, work, effects
        self.aside: dict[WorkerId, None] = {}
        """Workers that the rule does not wait for, since they wait elsewhere."""
        self._standing: set[WorkerId] = set()
        """Workers that have said that they have to wait, where the ledger cannot know."""

    @property
    def idle(self) -> set[WorkerId]:
        """Return the living workers that have no work here before an epoch ends, samples come back, or a barrier is passed."""
        work, outside = self._work, self._participants.outside
        return {w for w in self._participants.alive() if w in work.epochs.idle or w in work.barriers.waiting or w in outside}

    @property
    def held(self) -> set[WorkerId]:
        """Return the living workers that wait here: for version 0, for admission, or because they are `idle`."""
        alive = self._participants.alive()
        if not self._start.begun:
            return set(alive)
        work = self._work
        waiting = {*work.ledger.waiting, *self._standing, *work.epochs.idle, *work.barriers.waiting, *self._participants.outside}
        return waiting.intersection(alive)

    def admitted(self, worker: WorkerId) -> bool:
        """Return True if a living worker has been told to continue. Pushes of other workers are mistakes, and are rejected."""
        return self._start.begun and worker not in self._work.ledger.waiting and worker not in self._participants.outside

    def expected(self, worker: WorkerId) -> bool:
        """Return whether the rule may wait for a worker: it takes part, does not wait here itself, and is not set aside."""
        if worker in self.aside or not self._start.begun:
            return False
        return worker not in self.held and worker in self._participants.inside()

    def stands(self, event: Stands, now: Seconds) -> None:
        """Note that a rank has to wait, or that it goes on."""
        if self._participants.present(event.worker, event.incarnation):
            (self._standing.add if event.still else self._standing.discard)(event.worker)

    def elsewhere(self, event: Elsewhere, now: Seconds) -> None:
        """Set a worker aside that waits elsewhere, if the rule may wait for it."""
        worker = event.worker
        if self.expected(worker):
            self.aside[worker] = None
            self._effects.append(SetAside(worker, self._participants.membership[worker].incarnation, event.reason))
            self._work.epochs.note(self._work.ledger.pause(worker, now))
            self._work.deal(now)

    def returned(self, event: Returned, now: Seconds) -> None:
        """Let a worker count again that does not wait elsewhere any more."""
        self.take_back(event.worker, now)

    def take_back(self, worker: WorkerId, now: Seconds) -> None:
        """Let a worker count again if it was set aside, after it has returned or sent a message."""
        if worker in self.aside:
            del self.aside[worker]
            self._effects.append(TakenBack(worker, self._participants.membership[worker].incarnation))
            self._work.epochs.note(self._work.ledger.resume(worker, now))
            self._work.deal(now)

    def forget(self, worker: WorkerId) -> None:
        """Note that a worker is gone."""
        self.aside.pop(worker, None)
        self._standing.discard(worker)
