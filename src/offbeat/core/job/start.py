"""Begin a job: choose the worker that provides version 0, and remember the workers that were there then."""

from __future__ import annotations

from offbeat.core.effects import Effect, Initialise
from offbeat.core.membership import Membership
from offbeat.types import Incarnation, WorkerId, WorkerState


class JobStart:
    """Begin a job with version 0, and keep the workers that began with it.

    Args:
        membership: of the job.
        effects: of the event in hand; this object appends its own.
    """

    def __init__(self, membership: Membership, effects: list[Effect]) -> None:
        self._membership, self._effects = membership, effects
        self.begun = False
        """True once version 0 exists."""
        self.initialiser: WorkerId | None = None
        """The worker that has been asked for the initial parameters; None: no worker has."""
        self._beginners: frozenset[tuple[WorkerId, Incarnation]] = frozenset()

    def ask(self) -> None:
        """Ask the first living worker for the initial parameters, once no worker is expected any more."""
        if self.initialiser is not None or self._membership.expecting:
            return
        alive = self._membership.in_state(WorkerState.ALIVE)
        if alive:
            self.initialiser = alive[0]
            self._effects.append(Initialise(alive[0], "every expected worker has joined or is lost"))

    def provided(self, worker: WorkerId) -> bool:
        """Note that a worker has provided the initial parameters; return whether the job begins with them."""
        if self.begun or worker != self.initialiser:
            return False
        self.begun = True
        alive = self._membership.in_state(WorkerState.ALIVE)
        self._beginners = frozenset((worker, self._membership[worker].incarnation) for worker in alive)
        return True

    def lost(self, worker: WorkerId) -> None:
        """Note that a worker is gone: if it was to provide the initial parameters, another one can be asked."""
        if worker == self.initialiser:
            self.initialiser = None

    def began_with(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this incarnation was there when the job began; the others have come to a running job."""
        return (worker, incarnation) in self._beginners

    def first(self, worker: WorkerId) -> bool:
        """Return whether a worker's newest incarnation was there when the job began."""
        return self.began_with(worker, self._membership[worker].incarnation)

    def completed(self) -> bool:
        """Return whether the script of a worker that was there when the job began has come to its end."""
        return any(self._membership[worker].completed and self.first(worker) for worker in self._membership)
