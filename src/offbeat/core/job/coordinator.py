"""Combine the membership, the ledger and the sample leases of one job behind one method that takes events and returns effects.

`Coordinator.on` takes an event and the time and returns what is to be done, in order; `Coordinator.wake_at` says when to call
`Coordinator.wake` even if nothing happens. The live server and the simulator drive the same object.

The coordinator hands each event to the part that it is for, and carries the changes of membership through all of them: a worker that
joins, is lost or leaves. Its parts are public to be looked at; only events change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from offbeat.core.effects import Effect, GoesOn, JobOver
from offbeat.core.events import (
    Abandoned,
    BarrierWanted,
    Elsewhere,
    EpochWanted,
    Event,
    Folded,
    Heard,
    Initialised,
    Joined,
    LeaseWanted,
    Left,
    Lost,
    PullWanted,
    Pushed,
    Resumed,
    Returned,
    Skipped,
    Stands,
    Voided,
    Withdrawn,
)
from offbeat.core.job.barriers import Barriers
from offbeat.core.job.contributions import Contributions
from offbeat.core.job.epochs import Epochs
from offbeat.core.job.ledgers import ledger_of
from offbeat.core.job.participants import Participants
from offbeat.core.job.progress import Progress
from offbeat.core.job.start import Beginning, JobStart
from offbeat.core.job.waiting import Waiting
from offbeat.core.job.work import JobWork
from offbeat.core.membership import Membership
from offbeat.core.policy import Policy
from offbeat.types import Incarnation, Seconds, Version, WorkerId, WorkerState


class Coordinator:
    """Turn the events of one job into effects.

    Args:
        policy: the synchronization rule.
        workers: number of workers expected at the start; none computes before each of them has joined or is lost.
        timeout_s: silence after which a worker is dead; None: only a closed connection tells.
        learns_timeouts: True if the timeout is only the most, and what is too long a silence is learned for each worker: see `Patience`.
        shards: how many there are; only a rule of shard scope needs to know.
        seed: of what a rule without servers draws.
        follows: ranks decide among themselves, and this job is told: of the steps of a rule of the gossip family; of the allreduce family
            after each event that has closed a round, by `events.Folded` with the version that comes of it.
        beginning: what the job resumes from; None: it begins with version 0, whose parameters a worker provides.

    >>> from offbeat.policies import BSP
    >>> job = Coordinator(BSP(), workers=1)
    >>> job.on(Joined(0), now=0.0)[-1].reason
    'every expected worker has joined or is lost'
    >>> [type(effect).__name__ for effect in job.on(Initialised(0), now=0.1)]
    ['Release']
    >>> push = Pushed(0, incarnation=1, version=0, samples=32, compute_s=0.2)
    >>> [type(effect).__name__ for effect in job.on(push, now=0.3)]
    ['Fold', 'Settle', 'Release']
    """

    def __init__(
        self,
        policy: Policy,
        workers: int,
        timeout_s: Seconds | None = None,
        shards: int = 1,
        *,
        seed: int = 0,
        follows: bool = False,
        learns_timeouts: bool = False,
        beginning: Beginning | None = None,
    ) -> None:
        policy.check(workers)
        self.rule = policy
        """The rule as it was given, without the state of this run."""
        self._effects: list[Effect] = []
        """The effects of the present event so far; all parts append to it."""
        self.membership = Membership(workers, timeout_s, learns=learns_timeouts)
        self.start = JobStart(self.membership, self._effects, resumes=beginning is not None)
        self.participants = Participants(self.membership, self._effects)
        kept = beginning.ledger if beginning is not None else None
        self.ledger = ledger_of(policy, shards, seed, follows) if kept is None else kept
        self.ahead: Seconds = 0.0 if beginning is None else beginning.now
        """What is added to each time: the rule's state may have times of the job before, and time does not go backwards."""
        self._at: Seconds = self.ahead
        """The newest time, with what was added."""
        self.epochs = Epochs(
            self.ledger,
            self.participants,
            self.start,
            self._effects,
            workers=workers,
            overlap=policy.split_overlap,
        )
        if beginning is not None:
            if kept is None:
                self.ledger.begin_at(beginning.version)
            self.epochs.begin_at(beginning.places)
        self._work = JobWork(self.ledger, self.epochs, self.participants, self._effects)
        self.waiting = Waiting(self.start, self.participants, self._work, self._effects)
        self.progress = Progress() if beginning is None or beginning.progress is None else beginning.progress
        self._told_over: set[tuple[WorkerId, Incarnation]] = set()
        """The processes that have been told that the job is over."""
        self._contributions = Contributions(self.participants, self.waiting, self._work, self.progress, self._effects)

    @property
    def barriers(self) -> Barriers:
        """Return the barriers of the job."""
        return self._work.barriers

    @property
    def version(self) -> Version:
        """Newest version of the parameters; 0 also before version 0 exists."""
        return self.ledger.version

    @property
    def over(self) -> bool:
        """True if no worker takes part any more and none is expected."""
        return not self.membership.in_state(WorkerState.EXPECTED, WorkerState.ALIVE, WorkerState.RECOVERED)

    def on(self, event: Event, now: Seconds) -> list[Effect]:
        """Handle an event; return its effects, in the order in which to carry them out."""
        _HANDLERS[type(event)](self, event, self._time(now))
        return self._flush()

    def wake_at(self) -> Seconds | None:
        """Return when `wake` is to be called at the latest; None: only events matter."""
        times = [at - self.ahead for at in (self.membership.wake_at(), self.ledger.wake_at()) if at is not None]
        return min(times, default=None)

    def wake(self, now: Seconds) -> list[Effect]:
        """Declare silent workers dead, and ask the rule again; called when time has passed."""
        now = self._time(now)
        for worker in self.membership.silent(now):
            silence = now - self.membership[worker].heard_at
            self._take_out(worker, WorkerState.DEAD, f"not heard of for {silence:.1f} s", now)
        self.epochs.note(self.ledger.wake(now))
        self._work.deal(now)
        return self._flush()

    def stand_still(self, now: Seconds, seconds: Seconds) -> None:
        """Leave out the last ``seconds``, in which nobody handled events: no rule, patience or timer measures them."""
        self.ahead -= max(0.0, min(seconds, now + self.ahead - self._at))

    def _time(self, now: Seconds) -> Seconds:
        self._at = now + self.ahead
        return self._at

    def close(self, now: Seconds, reason: str) -> list[Effect]:
        """End the job: contributions without a fate are dropped, epochs under way are reported as they stand."""
        now = self._time(now)
        self.epochs.note(self.ledger.close(now, reason))
        self.epochs.close(list(self.membership), now)
        return self._flush()

    def _joined(self, event: Joined, now: Seconds) -> None:
        worker = event.worker
        if self.membership[worker].state is WorkerState.ALIVE:
            self._take_out(worker, WorkerState.DEAD, "a new process has taken its place", now)
        self.participants.join(worker, now)
        # At the beginning of a job of many workers, a look at all others for each of them would take longest of all.
        steps = self.progress.join(worker, self.participants.inside() if self.progress.begun else ())
        if self.start.begun:
            self.barriers.joined(worker, steps)
        if steps:
            self._effects.append(GoesOn(worker, self.membership[worker].incarnation, steps, self.start.begun))
        self._tell_over()
        if not self.start.begun:
            self._ask_to_begin(now)
        elif self.rule.entry == "next_epoch" and self.epochs.under_way and self.participants.inside() != [worker]:
            self.participants.outside[worker] = None
        else:
            self._work.enter([worker], now)

    def _initialised(self, event: Initialised, now: Seconds) -> None:
        if self.start.provided(event.worker):
            self._work.enter(self.participants.alive(), now)

    def _lost(self, event: Lost, now: Seconds) -> None:
        member = self.membership[event.worker]
        if event.incarnation is None:
            if member.goes_on:
                self.participants.died(event.worker, event.reason)
            # A process that fails after it has left, for instance sys.exit(3), has not completed its script.
            member.completed = member.goes_on = False
        if event.incarnation in (None, member.incarnation):
            self._take_out(event.worker, WorkerState.DEAD, event.reason, now)

    def _left(self, event: Left, now: Seconds) -> None:
        member = self.membership[event.worker]
        speaks = self.participants.speaks(event.worker, event.incarnation, now)
        if speaks or member.goes_on:
            member.goes_on, member.completed = not event.exits, event.exits and not event.noticed
        if speaks:
            ended = "its script has ended" if event.exits else "its script has closed the optimizer"
            self._take_out(event.worker, WorkerState.FINISHED, "it was told to leave" if event.noticed else ended, now)
        else:
            self._tell_over()

    def _take_out(self, worker: WorkerId, state: WorkerState, reason: str, now: Seconds) -> None:
        if not self.participants.leave(worker, state, reason):
            return
        self._tell_over()
        self.start.lost(worker)
        self.waiting.forget(worker)
        self.epochs.gone(worker)
        if self.start.begun:
            self._work.leave(worker, now)
        else:
            self._ask_to_begin(now)

    def _tell_over(self) -> None:
        """Tell workers that came to the running job that it is over: without a sampler, when the scripts of its first workers have ended.

        With a sampler, the epoch that no first worker begins says the same.
        """
        if not self.start.begun or self.epochs.used or not self.start.completed():
            return
        alive = self.participants.alive()
        if any(self.start.first(worker) for worker in alive):
            return
        for worker in alive:
            incarnation = self.membership[worker].incarnation
            if (worker, incarnation) not in self._told_over:
                self._told_over.add((worker, incarnation))
                self._effects.append(JobOver(worker, incarnation, "the scripts of the job's first workers have ended"))

    def _ask_to_begin(self, now: Seconds) -> None:
        if self.start.ask():
            self._work.enter(self.participants.alive(), now)

    def _flush(self) -> list[Effect]:
        effects = self._effects[:]
        del self._effects[:]
        return effects


_HANDLERS: Final[Mapping[type, Callable[[Any, Any, Seconds], object]]] = {
    Joined: Coordinator._joined,
    Initialised: Coordinator._initialised,
    Heard: lambda job, event, now: job.participants.speaks(event.worker, event.incarnation, now),
    Lost: Coordinator._lost,
    Left: Coordinator._left,
    Resumed: lambda job, event, now: job.progress.begin_at(event.worker, event.steps),
    Pushed: lambda job, event, now: job._contributions.pushed(event, now),
    Abandoned: lambda job, event, now: job._contributions.abandoned(event, now),
    Folded: lambda job, event, now: job._contributions.folded(event, now),
    Withdrawn: lambda job, event, now: job._contributions.withdrawn(event, now),
    Voided: lambda job, event, now: job._contributions.voided(event, now),
    PullWanted: lambda job, event, now: job._contributions.pull_wanted(event, now),
    BarrierWanted: lambda job, event, now: job._contributions.barrier_wanted(event, now),
    LeaseWanted: lambda job, event, now: job._contributions.samples_wanted(event, now),
    EpochWanted: lambda job, event, now: job._contributions.samples_wanted(event, now),
    Skipped: lambda job, event, now: job._contributions.skipped(event, now),
    Stands: lambda job, event, now: job.waiting.stands(event, now),
    Elsewhere: lambda job, event, now: job.waiting.elsewhere(event, now),
    Returned: lambda job, event, now: job.waiting.returned(event, now),
}
