"""One job: its membership, its ledger with one rule, and its sample leases, behind one entrance.

`Coordinator.on` takes an event and the time and returns what is to be done, in order; `Coordinator.wake_at` says when to call
`Coordinator.wake` even if nothing happens. The live server and the simulator drive the same object.

What it adds to its parts: the start (version 0 exists once nobody is expected any more), fencing, and when a newcomer takes part. A
worker for whom an epoch has no samples left is idle until its end, so that samples of the dead still find somebody; the rule does not
wait for the idle. Where the rule lets newcomers in at the next epoch only, they wait outside until then, and nobody waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from offbeat.core.allreduce.ledger import RoundLedger
from offbeat.core.effects import Effect, EpochEnded, Fence, Initialise, SetAside, Settle, StateChanged, TakenBack
from offbeat.core.events import (
    Abandoned,
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
    Returned,
    Stands,
    Voided,
    Withdrawn,
)
from offbeat.core.job.epochs import Epochs
from offbeat.core.job.ledgers import ledger_of
from offbeat.core.membership import Membership
from offbeat.core.policy import Policy
from offbeat.core.server.per_shard_ledger import ShardedLedger
from offbeat.types import Clock, Fate, Incarnation, Seconds, Version, WorkerId, WorkerState


class Coordinator:
    """The pure part of a job.

    Args:
        policy: the synchronization rule.
        workers: how many are expected at the start; nobody computes before each of them has joined or is lost.
        timeout_s: silence after which a worker is dead; None: only a closed connection tells.
        shards: how many there are; only a rule of shard scope needs to know.
        seed: of what a rule without servers draws.
        follows: ranks decide among themselves, and this job is told: of the steps of a rule of the gossip family; of the allreduce family
            after each event that has closed a round, by `events.Folded` with the version that comes of it.

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
        self, policy: Policy, workers: int, timeout_s: Seconds | None = None, shards: int = 1, *, seed: int = 0, follows: bool = False
    ) -> None:
        policy.check(workers)
        self.membership = Membership(workers, timeout_s)
        self._policy = policy
        self._ledger = ledger_of(policy, shards, seed, follows)
        self._epochs = Epochs(
            self._ledger, self._inside, self._alive, workers=workers, overlap=policy.split_overlap, first=self._first, ended=self._ended
        )
        self._outside: dict[WorkerId, None] = {}
        """Alive, and not let in before the next epoch."""
        self._standing: set[WorkerId] = set()
        """They have said that they have to wait, where the ledger cannot know."""
        self._aside: dict[WorkerId, None] = {}
        """They wait in the job of another optimizer of their process."""
        self._initialiser: WorkerId | None = None
        self._begun = False
        self._beginners: frozenset[tuple[WorkerId, Incarnation]] = frozenset()
        self._effects: list[Effect] = []
        self._handlers: dict[type, Callable[[Any, Seconds], None]] = {
            Joined: self._joined,
            Initialised: self._initialised,
            Heard: self._heard,
            Pushed: self._pushed,
            Abandoned: self._abandoned,
            Folded: self._folded,
            Withdrawn: self._withdrawn,
            Voided: self._voided,
            PullWanted: self._pull_wanted,
            LeaseWanted: self._samples_wanted,
            EpochWanted: self._samples_wanted,
            Stands: self._stands,
            Elsewhere: self._elsewhere,
            Returned: lambda event, now: self._take_back(event.worker, now),
            Lost: self._lost,
            Left: self._left,
        }

    @property
    def version(self) -> Version:
        return self._ledger.version

    def clock(self, worker: WorkerId) -> Clock:
        """How many iterations a worker has completed, of those that take part."""
        return self._ledger.clock(worker)

    def arriving(self, event: Pushed) -> Clock | None:
        """In rules of shard scope: the clock of the push of which this is one more arrival; None: this is the first arrival of its push."""
        assert isinstance(self._ledger, ShardedLedger), "elsewhere a push arrives once"
        return self._ledger.arriving(event)

    @property
    def initialiser(self) -> WorkerId | None:
        """The worker that has been asked for the initial parameters; None: nobody has."""
        return self._initialiser

    @property
    def begun(self) -> bool:
        """Whether version 0 exists."""
        return self._begun

    def began_with(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this incarnation was there when the job began; the others have come to a running job."""
        return (worker, incarnation) in self._beginners

    def _first(self, worker: WorkerId) -> bool:
        return self.began_with(worker, self.membership[worker].incarnation)

    def _ended(self) -> bool:
        """Whether the script of a worker that was there when the job began has come to its end."""
        return any(self.membership[worker].completed and self._first(worker) for worker in self.membership)

    def places(self) -> dict[int, dict[str, Any]]:
        """Where each of the script's samplers stands, by number, for a checkpoint; see `core.leases.Leases.place`."""
        return self._epochs.places()

    def waits(self, worker: WorkerId) -> bool:
        """Whether a worker waits for samples, or for an epoch's end."""
        return self._epochs.waits(worker)

    @property
    def unsettled(self) -> Collection[WorkerId]:
        """Workers, dead ones too, with contributions that have no fate yet."""
        return self._ledger.unsettled

    @property
    def idle(self) -> set[WorkerId]:
        """Living workers that have nothing to do here before an epoch ends, or samples come back."""
        return {worker for worker in self._alive() if worker in self._epochs.idle or worker in self._outside}

    @property
    def held(self) -> set[WorkerId]:
        """Living workers that wait here: for version 0, to be admitted, or because they are `idle`."""
        alive = self._alive()
        if not self._begun:
            return set(alive)
        waiting = {*self._ledger.waiting, *self._standing, *self._epochs.idle, *self._outside}
        return waiting.intersection(alive)

    @property
    def inside(self) -> Collection[WorkerId]:
        """The living workers that take part."""
        return self._inside()

    @property
    def aside(self) -> Collection[WorkerId]:
        """Workers for which the rule does not wait, since they wait elsewhere; see `core.job.several_optimizers`."""
        return self._aside.keys()

    @property
    def over(self) -> bool:
        """Whether nobody takes part any more and nobody is expected."""
        return not self.membership.in_state(WorkerState.EXPECTED, WorkerState.ALIVE, WorkerState.RECOVERED)

    def on(self, event: Event, now: Seconds) -> list[Effect]:
        """Take note of an event; the answer is what to do about it, in order."""
        self._handlers[type(event)](event, now)
        return self._flush()

    def wake_at(self) -> Seconds | None:
        """When `wake` is to be called at the latest; None: only events matter."""
        silent, rule = self.membership.wake_at(), self._ledger.wake_at()
        if silent is None or rule is None:
            return rule if silent is None else silent
        return min(silent, rule)

    def wake(self, now: Seconds) -> list[Effect]:
        """Time has passed: declare the silent dead, and let the rule look again."""
        for worker in self.membership.silent(now):
            silence = now - self.membership[worker].heard_at
            self._take_out(worker, WorkerState.DEAD, f"not heard of for {silence:.1f} s", now)
        self._do(self._ledger.wake(now))
        self._deal(now)
        return self._flush()

    def close(self, now: Seconds, reason: str) -> list[Effect]:
        """End the job: contributions without a fate are dropped, epochs under way are reported as they stand."""
        self._do(self._ledger.close(now, reason))
        self._effects += self._epochs.close(list(self.membership), now)
        return self._flush()

    # Members.

    def _joined(self, event: Joined, now: Seconds) -> None:
        worker = event.worker
        if self.membership[worker].state is WorkerState.ALIVE:
            self._take_out(worker, WorkerState.DEAD, "a new process has taken its place", now)
        incarnation = self.membership.join(worker, now)
        self._effects.append(StateChanged(worker, incarnation, WorkerState.ALIVE, "joined"))
        if not self._begun:
            self._begin(now)
        elif self._policy.entry == "next_epoch" and self._epochs.under_way and self._inside() != [worker]:
            self._outside[worker] = None
        else:
            self._enter([worker], now)

    def _alive(self) -> list[WorkerId]:
        return self.membership.in_state(WorkerState.ALIVE)

    def _inside(self) -> list[WorkerId]:
        """The living workers that take part."""
        return [worker for worker in self._alive() if worker not in self._outside]

    def _let_in(self, now: Seconds) -> None:
        outside, self._outside = self._outside, {}
        self._enter(list(outside), now)

    def _enter(self, workers: Sequence[WorkerId], now: Seconds) -> None:
        self._epochs.prepare()
        for worker in workers:
            self._epochs.withdraw(self._ledger.recalled(worker))
            self._do(self._ledger.enter(worker, self.membership[worker].incarnation, now, more=worker != workers[-1]))
        self._deal(now)

    def _begin(self, now: Seconds) -> None:
        """Once nobody is expected any more, ask the first living worker for the initial parameters."""
        if self._initialiser is not None or self.membership.expecting:
            return
        alive = self._inside()
        if not alive:
            return
        self._initialiser = alive[0]
        self._effects.append(Initialise(alive[0], "every expected worker has joined or is lost"))

    def _initialised(self, event: Initialised, now: Seconds) -> None:
        if self._begun or event.worker != self._initialiser:
            return
        self._begun = True
        self._beginners = frozenset((worker, self.membership[worker].incarnation) for worker in self._alive())
        self._enter(self._alive(), now)

    def _heard(self, event: Heard, now: Seconds) -> None:
        self._speaks(event.worker, event.incarnation, now)

    def _speaks(self, worker: WorkerId, incarnation: Incarnation, now: Seconds) -> bool:
        """Whether to listen. A dead worker's own process is told, once, to join again; a replaced one's is not answered."""
        if self.membership.speaks(worker, incarnation, now):
            return True
        if worker not in self.membership:
            return False
        member = self.membership[worker]
        if member.state is WorkerState.DEAD and incarnation == member.incarnation:
            member.state = WorkerState.RECOVERED
            reason = f"incarnation {incarnation} was declared dead"
            self._effects += [
                StateChanged(worker, incarnation, WorkerState.RECOVERED, "heard of again"),
                Fence(worker, incarnation, reason),
            ]
        return False

    def present(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether this is the newest incarnation of a worker that is alive."""
        if worker not in self.membership:
            return False
        member = self.membership[worker]
        return member.state is WorkerState.ALIVE and incarnation == member.incarnation

    def _lost(self, event: Lost, now: Seconds) -> None:
        member = self.membership[event.worker]
        if event.incarnation is None:
            member.completed = False  # a process that fails after it has left, for instance sys.exit(3), has not completed its script
        if event.incarnation in (None, member.incarnation):
            self._take_out(event.worker, WorkerState.DEAD, event.reason, now)

    def _left(self, event: Left, now: Seconds) -> None:
        if self._speaks(event.worker, event.incarnation, now):
            self.membership[event.worker].completed = not event.noticed
            reason = "it was told to leave" if event.noticed else "its script has ended"
            self._take_out(event.worker, WorkerState.FINISHED, reason, now)

    def _take_out(self, worker: WorkerId, state: WorkerState, reason: str, now: Seconds) -> None:
        member = self.membership[worker]
        before, member.state = member.state, state
        if before in (WorkerState.DEAD, WorkerState.FINISHED):
            member.state = before
            return
        self._effects.append(StateChanged(worker, member.incarnation, state, reason))
        if worker == self._initialiser:
            self._initialiser = None
        self._outside.pop(worker, None)
        self._aside.pop(worker, None)
        self._standing.discard(worker)
        self._epochs.gone(worker)
        if not self._begun:
            self._begin(now)
            return
        self._do(self._ledger.leave(worker, now))
        self._deal(now)
        if self._outside and not self._inside():
            self._let_in(now)

    def _stands(self, event: Stands, now: Seconds) -> None:
        if self.present(event.worker, event.incarnation):
            (self._standing.add if event.still else self._standing.discard)(event.worker)

    def _elsewhere(self, event: Elsewhere, now: Seconds) -> None:
        """Who waits here, or does not take part, is not set aside: there is nothing that this rule could expect of it."""
        worker = event.worker
        if worker in self._aside or worker in self.held or not self._begun or worker not in self._inside():
            return
        self._aside[worker] = None
        self._effects.append(SetAside(worker, self.membership[worker].incarnation, event.reason))
        self._do(self._ledger.pause(worker, now))
        self._deal(now)

    def _take_back(self, worker: WorkerId, now: Seconds) -> None:
        """A worker counts again: it was said to have returned, or speaks."""
        if worker not in self._aside:
            return
        del self._aside[worker]
        self._effects.append(TakenBack(worker, self.membership[worker].incarnation))
        self._do(self._ledger.resume(worker, now))
        self._deal(now)

    def _deal(self, now: Seconds) -> None:
        effects = self._epochs.deal(now)
        self._effects += effects
        if self._outside and any(isinstance(effect, EpochEnded) for effect in effects):
            self._let_in(now)

    # Contributions.

    def _pushed(self, event: Pushed, now: Seconds) -> None:
        worker, incarnation = event.worker, event.incarnation
        fenced = None
        # What another server reports is no sign of life: the push may be older than the worker's end, which server 0 has seen already.
        if not (self.present(worker, incarnation) if event.shard else self._speaks(worker, incarnation, now)):
            left = worker in self.membership and self.membership[worker].state is WorkerState.FINISHED
            fenced = f"sent by incarnation {incarnation}, which {'has left' if left else 'was declared dead'}"
        elif not self.admitted(worker):
            fenced = "pushed without having been admitted"
        if fenced is not None:
            self._effects.append(Settle(worker, incarnation, 0, Fate.REJECTED, fenced, self.version, event.samples, event.shard))
            return
        refusal = None
        self._take_back(worker, now)
        if self._ledger.begins(event):
            self._effects += self._epochs.resume(worker, now)
            refusal = self._epochs.claim(event, self._ledger.clock(worker) + 1)
            if event.nonfinite is not None:
                refusal = f"gradient not finite in {event.nonfinite}"
        self._do(self._ledger.push(event, now, refusal))
        self._deal(now)

    def _abandoned(self, event: Abandoned, now: Seconds) -> None:
        worker = event.worker
        if not self._speaks(worker, event.incarnation, now) or not self.admitted(worker):
            return
        self._take_back(worker, now)
        self._effects += self._epochs.resume(worker, now)
        self._epochs.abandon(event)
        self._do(self._ledger.abandon(event, now))
        self._deal(now)

    def _folded(self, event: Folded, now: Seconds) -> None:
        self._do(self._ledger.folded(event, now))
        self._deal(now)  # a rule that has waited for measurements folds now, and that may have been all that an epoch's end waited for

    def _withdrawn(self, event: Withdrawn, now: Seconds) -> None:
        assert isinstance(self._ledger, RoundLedger), "only a gradient that is summed among hosts can go with one"
        if event.number >= self._ledger.version:
            self._epochs.withdraw(self._ledger.recalled(event.worker))
        self._do(self._ledger.withdrawn(event, now))
        self._deal(now)

    def _voided(self, event: Voided, now: Seconds) -> None:
        assert isinstance(self._ledger, RoundLedger), "servers weight gradients before they add them"
        self._do(self._ledger.voided(event, now))

    def admitted(self, worker: WorkerId) -> bool:
        """Whether a living worker has been told to go on: what the others send is a mistake of theirs, and does no harm."""
        return self._begun and worker not in self._ledger.waiting and worker not in self._outside

    def _pull_wanted(self, event: PullWanted, now: Seconds) -> None:
        # A worker that waits to be admitted gets the newest parameters with that, and not before its contribution has a fate.
        if self._speaks(event.worker, event.incarnation, now) and self.admitted(event.worker):
            self._do(self._ledger.refresh(event.worker, now, "asked for"))

    def _do(self, effects: list[Effect]) -> None:
        """Pass on the ledger's effects; the samples of a contribution share its fate."""
        self._epochs.settle(effects)
        self._effects += effects

    def _samples_wanted(self, event: LeaseWanted | EpochWanted, now: Seconds) -> None:
        if self._speaks(event.worker, event.incarnation, now) and event.worker not in self._outside:
            self._take_back(event.worker, now)
            effects = self._epochs.want(event, now)
            self._effects += effects
            if self._outside and any(isinstance(effect, EpochEnded) for effect in effects):
                self._let_in(now)

    def _flush(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
