"""Record the contributions to each version, ask the rule what to fold and whom to admit, and give each push one fate.

The ledger owns versions, clocks, contributions without a fate, and the set of workers that wait for admission. It knows neither which
workers are alive nor which samples they hold: `core.job.coordinator` tells it which workers enter, leave, or pause at the end of an epoch.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

from offbeat.core.base_ledger import BaseLedger, Standing
from offbeat.core.effects import Effect, Fold, Gather, Interrupt, Part, Release, RuleChanged
from offbeat.core.events import Abandoned, Folded, Pushed, Withdrawn
from offbeat.core.policy import Admit, Contribution, Decision, ServerRule, terms_of
from offbeat.types import Clock, Epoch, Fate, Incarnation, Seconds, Version, WorkerId


class Ledger(BaseLedger):
    """Keep the contributions, clocks and versions of one job with servers. The rule reads them through the `View` interface.

    Each method that changes the ledger returns effects, in the order in which the caller carries them out.

    Invariants: a worker has at most one pending contribution; each contribution gets exactly one fate; ``version`` grows by one with each
    `Fold`; no worker is admitted while its contribution has no fate, unless the contribution has been gathered.

    Args:
        policy: the rule; the ledger asks a fresh copy of it (`Policy.start`).
    """

    def __init__(self, policy: ServerRule) -> None:
        self._policy = policy.start()
        self._standings: dict[WorkerId, Standing] = {}
        self._active: dict[WorkerId, None] = {}
        self._pending: dict[WorkerId, Contribution] = {}
        self._gathered: dict[Contribution, float] = {}
        """Contributions that have been added to their workers' sums, each with its factor there."""
        self._shares: dict[WorkerId, int] = {}
        self._obsolete_work = policy.obsolete_work
        self._waiting: dict[WorkerId, None] = {}
        self._missing = 0
        self._census: dict[Clock, int] = {}
        self._slowest: Clock = 0
        """The least clock of the active workers. It never falls: while no worker is active, it stays at its last value."""
        self._level: Clock = 0
        """The greatest clock at the last change of the rule. A worker with a lower one is raised to it as it waits."""
        self._ask: dict[WorkerId, None] = {}
        self._gates: list[tuple[Clock, WorkerId]] = []
        self._effects: list[Effect] = []
        self.now: Seconds = 0.0
        self.version: Version = 0
        self.epoch: Epoch = 0

    # The view of the rule.

    @property
    def pending(self) -> Mapping[WorkerId, Contribution]:
        """Return the contributions without a fate, by worker."""
        return self._pending

    @property
    def gathered(self) -> Collection[Contribution]:
        """Return the contributions that have been added to their workers' sums."""
        return self._gathered.keys()

    @property
    def unsettled(self) -> Collection[WorkerId]:
        """Return the workers that have contributions without a fate, dead workers included."""
        return self._pending.keys() | {contribution.worker for contribution in self._gathered}

    @property
    def missing(self) -> int:
        return self._missing

    @property
    def slowest(self) -> Clock:
        return self._slowest if self._active else 0

    @property
    def fastest(self) -> Clock:
        return max(self._census, default=0)

    def slowest_worker(self) -> WorkerId:
        return min(self._active, key=lambda worker: (self._standings[worker].clock, worker))

    def pushed_at(self, worker: WorkerId) -> Seconds | None:
        return self._standings[worker].pushed_at

    def interval(self, worker: WorkerId) -> Seconds | None:
        return self._standings[worker].interval

    def share(self, worker: WorkerId) -> int | None:
        return self._shares.get(worker)

    def begin_at(self, version: Version) -> None:
        """Begin with this version, before any worker enters."""
        self.version = version

    # Events.

    def enter(self, worker: WorkerId, incarnation: Incarnation, now: Seconds, *, more: bool = False) -> list[Effect]:
        """Add a worker to the active ones, with the slowest clock; it waits for admission.

        A pending contribution of its previous incarnation is dropped, since the same process may already be overwriting that gradient.

        Args:
            worker: the number of the worker.
            incarnation: its new incarnation.
            now: the time, in seconds.
            more: further workers enter at the same instant. No worker is admitted before the last of them has entered, so that the rule
                makes its first plans for all of them.
        """
        self.now = now
        old = self._pending.get(worker)
        if old is not None:
            self._settle(old, Fate.DROPPED, "its worker has come back before the fold and contributes anew")
        standing = self._standings.setdefault(worker, Standing())
        standing.incarnation = incarnation
        standing.pushed_at = standing.interval = None
        standing.clock = max(self._slowest, self._level)
        self._activate(worker)
        self._waiting[worker] = None
        return self._flush() if more else self._advance(membership=True)

    def push(self, event: Pushed, now: Seconds, refusal: str | None = None) -> list[Effect]:
        """Take the contribution of an admitted worker, or reject it if ``refusal`` names a reason. Advances the worker's clock."""
        self.now = now
        worker, standing = event.worker, self._standings[event.worker]
        assert worker in self._active and worker not in self._waiting, f"worker {worker} pushed without having been admitted"
        self._tick(worker, standing, now)
        contribution = self._contribution(event, standing.clock, now)
        self._raise(standing)
        self._waiting[worker] = None
        self._ask[worker] = None
        if refusal is None:
            self._pending[worker] = contribution
            self._missing -= 1
        else:
            self._fate(contribution, Fate.REJECTED, refusal)
        return self._advance()

    def abandon(self, event: Abandoned, now: Seconds) -> list[Effect]:
        """Note that an admitted worker has given up its computation: it waits for admission, with the same clock."""
        self.now = now
        assert event.worker in self._active and event.worker not in self._waiting, f"worker {event.worker} abandoned nothing"
        self._waiting[event.worker] = None
        self._ask[event.worker] = None
        return self._advance()

    def folded(self, event: Folded, now: Seconds) -> list[Effect]:
        """Pass the measurements of a fold to the rule."""
        self.now = now
        self._policy.observe(self, event)
        return self._advance()

    def withdrawn(self, event: Withdrawn, now: Seconds) -> list[Effect]:
        """Drop the pending contribution of a worker, whose gradient is lost."""
        self.now = now
        if event.worker in self._pending:
            self._settle(self._pending[event.worker], Fate.DROPPED, "its gradient was lost with the server's former leader")
        return self._flush()

    def begin_epoch(self, epoch: Epoch, shares: Mapping[WorkerId, int]) -> None:
        """Set the epoch that the rule sees, and each worker's number of samples in it where the rule splits the data."""
        self.epoch, self._shares = epoch, dict(shares)

    def leave(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove a worker that is dead or has finished from the active ones. Its pending contribution keeps its place."""
        self.now = now
        self._waiting.pop(worker, None)
        self._deactivate(worker)
        return self._advance(membership=True)

    def pause(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove an admitted worker that has no samples left from the active ones until `resume`."""
        return self.leave(worker, now)

    def resume(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Make a paused worker active again. Its clock is raised to the slowest, or to the last slowest if all have paused."""
        self.now = now
        if worker not in self._active:
            standing = self._standings[worker]
            standing.clock = max(standing.clock, self._slowest, self._level)
            self._activate(worker)
        return self._advance(membership=True)

    def refresh(self, worker: WorkerId, now: Seconds, reason: str) -> list[Effect]:
        """Send an admitted worker the newest parameters."""
        self.now = now
        self._release(worker, reason)
        return self._flush()

    def wake(self, now: Seconds) -> list[Effect]:
        """Ask the rule again, at a time that it has named in `wake_at`."""
        self.now = now
        self._ask.update(self._waiting)
        return self._advance()

    def wake_at(self) -> Seconds | None:
        return self._policy.wake_at(self)

    def close(self, now: Seconds, reason: str) -> list[Effect]:
        """Drop the contributions that have no fate at the end of the job."""
        self.now = now
        for contribution in [*self._gathered, *self._pending.values()]:
            self._settle(contribution, Fate.DROPPED, reason)
        return self._flush()

    # The two questions to the rule: what to fold, and whom to admit.

    def _advance(self, membership: bool = False) -> list[Effect]:
        if membership:
            self._ask.update(self._waiting)
        while (decision := self._policy.fold(self)) is not None:
            self._carry_out(decision)
        while self._gates and self._gates[0][0] <= self._slowest:
            self._ask[heapq.heappop(self._gates)[1]] = None
        if len(self._waiting) == len(self._active):  # no push will come before an admission
            self._ask.update(self._waiting)
        asked, self._ask = self._ask, {}
        for worker in asked:
            if worker in self._waiting:
                answer = self._policy.admit(self, worker)
                if isinstance(answer, Admit):
                    assert worker not in self._pending, f"worker {worker} was admitted before its contribution had a fate"
                    del self._waiting[worker]
                    self._release(worker, answer.reason)
                elif answer.slowest is not None:
                    heapq.heappush(self._gates, (answer.slowest, worker))
        return self._flush()

    def _carry_out(self, decision: Decision) -> None:
        assert decision.fold or decision.drop or decision.gather or decision.becomes, "a decision folds, gathers or drops something"
        if decision.becomes:
            self._effects.append(RuleChanged(self.version, decision.becomes, decision.reason))
            self._ask.update(self._waiting)
            self._level = self.fastest  # a lead counts from here on: the rule before may have let a slow worker fall behind by hundreds
            for worker in self._waiting:
                self._raise(self._standings[worker])
        for contribution in decision.drop:
            self._settle(contribution, Fate.DROPPED, decision.reason)
        for contribution in decision.gather:
            self._gather(contribution, decision.reason)
        if decision.fold:
            self._fold(decision)

    def _gather(self, c: Contribution, reason: str) -> None:
        weight = float(c.mass)
        self._take(c)
        self._gathered[c] = weight
        self._effects.append(Gather(c.worker, c.incarnation, c.clock, weight, reason))

    def _fold(self, decision: Decision) -> None:
        before, self.version = self.version, self.version + 1
        gathered = self._gathered
        parts = [
            Part(c.worker, c.incarnation, c.clock, weight, before - c.version, gathered.get(c, 0.0) if gathered else 0.0)
            for c, weight in terms_of(decision)
        ]
        self._effects.append(Fold(self.version, tuple(parts), decision.reason, decision.scale, sums=decision.fold[0].sums))
        for contribution in decision.fold:
            self._settle(contribution, Fate.FOLDED, decision.reason)
        if self._obsolete_work != "push_and_wait":
            self._overtake()

    def _overtake(self) -> None:
        """Interrupt the workers that still compute from an older version, each once."""
        at_once = self._obsolete_work == "push_and_interrupt"
        for worker in self._active:
            standing = self._standings[worker]
            if worker not in self._waiting and not standing.told:
                standing.told = True
                reason = f"version {self.version} has overtaken what this worker computes"
                self._effects.append(Interrupt(worker, standing.incarnation, self.version, at_once, reason))

    def _settle(self, contribution: Contribution, fate: Fate, reason: str) -> None:
        if self._gathered and contribution in self._gathered:
            del self._gathered[contribution]
        else:
            self._take(contribution)
        self._fate(contribution, fate, reason)

    def _take(self, contribution: Contribution) -> None:
        """Remove a contribution from the pending ones: it has left its worker's memory."""
        worker = contribution.worker
        assert self._pending[worker] is contribution, f"not pending: {contribution}"
        del self._pending[worker]
        if worker in self._active:
            self._missing += 1
        if worker in self._waiting:
            self._ask[worker] = None

    def _release(self, worker: WorkerId, reason: str) -> None:
        standing = self._standings[worker]
        standing.told = False
        plan = self._policy.plan(self, worker)
        self._effects.append(Release(worker, standing.incarnation, self.version, standing.clock, reason, plan))

    # Clocks. The number of active workers at each clock is kept, so that the slowest is known without a search.

    def _activate(self, worker: WorkerId) -> None:
        if worker in self._active:
            self._deactivate(worker)
        clock = self._standings[worker].clock
        self._slowest = min(self._slowest, clock) if self._active else clock
        self._active[worker] = None
        self._census[clock] = self._census.get(clock, 0) + 1
        self._missing += worker not in self._pending

    def _deactivate(self, worker: WorkerId) -> None:
        if worker not in self._active:
            return
        del self._active[worker]
        self._missing -= worker not in self._pending
        self._uncount(self._standings[worker].clock)
        if self._active:
            self._slowest = min(self._census)

    def _tick(self, worker: WorkerId, standing: Standing, now: Seconds) -> None:
        self._set_forward(standing, standing.clock + 1)
        if standing.pushed_at is not None:
            standing.interval = now - standing.pushed_at
        standing.pushed_at = now

    def _raise(self, standing: Standing) -> None:
        """Raise the clock of an active worker that computes nothing to that of the fastest at the last change of the rule."""
        if standing.clock < self._level:
            self._set_forward(standing, self._level)

    def _set_forward(self, standing: Standing, clock: Clock) -> None:
        self._census[clock] = self._census.get(clock, 0) + 1
        self._uncount(standing.clock)
        standing.clock = clock
        while self._slowest not in self._census:
            self._slowest += 1

    def _uncount(self, clock: Clock) -> None:
        self._census[clock] -= 1
        if self._census[clock] == 0:
            del self._census[clock]
