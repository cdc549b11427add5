"""Begin a job: choose the worker that provides version 0, or begin with a checkpoint, and remember the workers that were there then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from offbeat.core.effects import Effect, Initialise
from offbeat.core.job.ledgers import AnyLedger
from offbeat.core.job.progress import Progress
from offbeat.core.membership import Membership
from offbeat.types import Incarnation, Seconds, Version, WorkerId, WorkerState


class Beginning(NamedTuple):
    """What a job begins with that resumes from a checkpoint: the servers have its parameters already."""

    version: Version
    places: Mapping[int, Mapping[str, Any]] = {}
    """Each sampler's position: see `core.leases.Leases.progress`."""
    ledger: AnyLedger | None = None
    """The ledger of the job before, see `core.job.resumption`; None: the job has other workers or servers, and its ledger begins anew."""
    progress: Progress | None = None
    """The steps of each worker's script before; None: not known."""
    now: Seconds = 0.0
    """The time that it had reached; the clock of this job begins at 0 again."""


class JobStart:
    """Begin a job with version 0, or with the version of a checkpoint, and keep the workers that began with it.

    Args:
        membership: of the job.
        effects: of the event in hand; this object appends its own.
        resumes: True if the parameters are those of a checkpoint, so that no worker provides them.
    """

    def __init__(self, membership: Membership, effects: list[Effect], *, resumes: bool = False) -> None:
        self._membership, self._effects = membership, effects
        self.resumes = resumes
        self.begun = False
        """True once the first version exists and every expected worker has joined or is lost."""
        self.initialiser: WorkerId | None = None
        """The worker that has been asked for the initial parameters; None: no worker has."""
        self._beginners: frozenset[tuple[WorkerId, Incarnation]] = frozenset()

    def ask(self) -> bool:
        """Ask the first living worker for the initial parameters, once no worker is expected any more.

        Returns:
            True if the job begins at once, with a checkpoint's parameters.
        """
        if self.initialiser is not None or self._membership.expecting:
            return False
        alive = self._membership.in_state(WorkerState.ALIVE)
        if alive and self.resumes:
            self._begin(alive)
        elif alive:
            self.initialiser = alive[0]
            self._effects.append(Initialise(alive[0], "every expected worker has joined or is lost"))
        return self.begun

    def provided(self, worker: WorkerId) -> bool:
        """Note that a worker has provided the initial parameters; return whether the job begins with them."""
        if self.begun or worker != self.initialiser:
            return False
        self._begin(self._membership.in_state(WorkerState.ALIVE))
        return True

    def _begin(self, alive: list[WorkerId]) -> None:
        self.begun = True
        self._beginners = frozenset((worker, self._membership[worker].incarnation) for worker in alive)

    def lost(self, worker: WorkerId) -> None:
        """Note that a worker is gone: if it was to provide the initial parameters, another one can be asked."""
        if worker == self.initialiser:
            self.initialiser = None

    def began_with(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this incarnation was there when the job began; the others have come to a running job."""
        return (worker, incarnation) in self._beginners

    def loads(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether what this process's script loads becomes the job's state: not where the job has a state already."""
        return not self.resumes and self.began_with(worker, incarnation)

    def first(self, worker: WorkerId) -> bool:
        """Return whether a worker's newest incarnation was there when the job began."""
        return self.began_with(worker, self._membership[worker].incarnation)

    def completed(self) -> bool:
        """Return whether the script of a worker that was there when the job began has come to its end."""
        return any(self._membership[worker].completed and self.first(worker) for worker in self._membership)

    def closed(self) -> bool:
        """Return whether such a script has come to its end, or has closed the optimizer."""
        members = self._membership
        return any((members[worker].completed or members[worker].goes_on) and self.first(worker) for worker in members)
