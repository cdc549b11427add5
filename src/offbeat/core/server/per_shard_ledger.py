"""Keep the ledger of a rule of shard scope: each shard decides by itself what it folds, and each worker when it continues.

It has the same methods as `core.server.ledger`, so that membership, epochs and the journal of a job need not distinguish them. Differences:

- A push arrives once per shard, each arrival an event of its own, and has one fate at each.
- No worker waits for admission. A shard publishes its new version to every active worker, and `core.block_cache` lets the worker continue.
  A `Release` brings the whole model to a worker that enters, comes back after an epoch's end, or asks for it.
- The samples of a gradient share one fate, decided when it has met one at every shard: folded if any shard has folded its block. Those of
  a push that is carried share the fate of the worker's next one at that shard.

The ledgers of all shards are kept here, in the coordinator; shards report arrivals and carry out folds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from offbeat.core.base_ledger import BaseLedger, Standing
from offbeat.core.effects import Effect, Fold, Part, Publish, Release, Settle
from offbeat.core.events import Abandoned, Pushed
from offbeat.core.policy import Contribution, Decision, ServerRule, terms_of
from offbeat.core.server.shard_pushes import Push, Pushes
from offbeat.core.server.shard_view import Roll, ShardLedger
from offbeat.types import Clock, Epoch, Fate, Incarnation, LeaseId, Seconds, Version, WorkerId


class ShardedLedger(BaseLedger):
    """Keep one ledger per shard for one job.

    Each method that changes something returns the effects, in the order in which they are to be carried out.

    Args:
        policy: a rule of shard scope; each shard runs one of its own.
        shards: how many there are.
    """

    def __init__(self, policy: ServerRule, shards: int) -> None:
        self._policy = policy
        self._roll = Roll()
        self._ledgers = [ShardLedger(policy, self._roll) for _ in range(shards)]
        self._pushes = Pushes(shards)
        self._missed: dict[WorkerId, list[Version]] = {}
        """The version of each shard at the time a worker paused; a paused worker is sent no blocks."""
        self._wakes: dict[int, Seconds] = {}
        self._effects: list[Effect] = []

    def begin_at(self, version: Version) -> None:
        """Begin with this version at every shard, before any worker enters."""
        for ledger in self._ledgers:
            ledger.version = version

    def version_at(self, shard: int) -> Version:
        """Return the version of a shard."""
        return self._ledgers[shard].version

    @property
    def version(self) -> Version:  # type: ignore[override]
        """Least version among the shards."""
        return min(ledger.version for ledger in self._ledgers)

    @property
    def active(self) -> Collection[WorkerId]:
        return self._roll.active.keys()

    @property
    def waiting(self) -> Collection[WorkerId]:
        """Empty: a worker that enters is released at once, and workers continue by themselves."""
        return ()

    @property
    def unsettled(self) -> Collection[WorkerId]:
        """Return the workers, dead ones included, with contributions that some shard has not settled yet."""
        return self._pushes.workers

    def clock(self, worker: WorkerId) -> Clock:
        return self._roll.standings[worker].clock

    def begins(self, event: Pushed) -> bool:
        """Return True if this is the first arrival of a push at any shard."""
        return self._pushes.known(event) is None

    def arriving(self, event: Pushed) -> Clock | None:
        """Return the clock of the push that arrives at one more shard; None if this is its first arrival."""
        push = self._pushes.known(event)
        return None if push is None else push.clock

    def recalled(self, worker: WorkerId) -> tuple[LeaseId, ...]:
        """Return the leases of the worker's pushes of which no shard has folded a part; they are dropped if the worker enters again."""
        return self._pushes.recalled(worker)

    def fates(self, effects: Iterable[Effect]) -> list[Settle]:
        """Return the fates of whole contributions since the last call; the samples of a contribution share its fate."""
        return self._pushes.fates()

    # What happens.

    def enter(self, worker: WorkerId, incarnation: Incarnation, now: Seconds, *, more: bool = False) -> list[Effect]:
        """Add a worker to the active ones, with the slowest clock, and release it with the newest version of every block.

        What its previous incarnation has pending is dropped, as in `core.server.ledger`. Whether ``more`` enter at the same instant makes
        no difference here.
        """
        self._roll.now = now
        self._pushes.expect_no_more(worker)
        reason = "its worker has come back before the fold and contributes anew"
        for shard, ledger in enumerate(self._ledgers):
            for contribution in ledger.waiting_of(worker):
                self._settle(shard, contribution, Fate.DROPPED, reason, ledger.version)
        standing = self._roll.standings.setdefault(worker, Standing())
        standing.incarnation = incarnation
        standing.pushed_at = standing.interval = None
        standing.clock = self._roll.slowest()
        assert worker not in self._roll.active, f"worker {worker} takes part already"
        self._activate(worker)
        self._release(worker, "takes part from now on")
        return self._advance(range(len(self._ledgers)))

    def push(self, event: Pushed, now: Seconds, refusal: str | None = None) -> list[Effect]:
        """Take a contribution that has arrived at one shard. At its first arrival ``refusal`` may name a reason to reject it."""
        self._roll.now = now
        shard = event.shard
        assert shard is not None and len(event.held) == len(self._ledgers), f"a push of shard scope names its shard and all blocks: {event}"
        known = self._pushes.known(event)
        push = known or self._begin(event, refusal)
        self._pushes.arrived(push, shard)
        contribution = self._contribution(event, push.clock, now)
        ledger = self._ledgers[shard]
        if push.refusal is not None:
            self._fate_at(shard, contribution, Fate.REJECTED, push.refusal, ledger.version)
            if known is None:  # no shard will answer with a new version on account of it
                self._release(event.worker, "its gradient is rejected")
            return self._flush()
        ledger.add(contribution)
        return self._advance((shard,))

    def abandon(self, event: Abandoned, now: Seconds) -> list[Effect]:
        """Note that a worker has given up its computation, since it holds newer blocks, and continues from those."""
        self._roll.now = now
        self._make_up(event.worker, event.incarnation)
        return self._flush()

    def begin_epoch(self, epoch: Epoch, shares: Mapping[WorkerId, int]) -> None:
        """Set the epoch that the rule sees, and each worker's number of samples in it where the rule splits the data."""
        self._roll.epoch, self._roll.shares = epoch, dict(shares)

    def leave(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove a worker that is dead or has finished from the active ones. The parts of its pushes that have arrived still count."""
        self._roll.now = now
        self._missed.pop(worker, None)
        self._pushes.expect_no_more(worker)
        self._deactivate(worker)
        return self._advance(range(len(self._ledgers)))

    def pause(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove a worker without samples from the active ones until `resume`. Its last push may still be arriving."""
        self._roll.now = now
        self._missed[worker] = [ledger.version for ledger in self._ledgers]
        self._deactivate(worker)
        return self._advance(range(len(self._ledgers)))

    def resume(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Make a paused worker active again. Its clock is raised to the slowest, or to the last slowest if all have paused."""
        self._roll.now = now
        if worker not in self._roll.active:
            standing = self._roll.standings[worker]
            standing.clock = max(standing.clock, self._roll.slowest())
            self._activate(worker)
        return self._advance(range(len(self._ledgers)))

    def refresh(self, worker: WorkerId, now: Seconds, reason: str) -> list[Effect]:
        """Send a worker the newest version of every block."""
        self._roll.now = now
        self._release(worker, reason)
        return self._flush()

    def wake(self, now: Seconds) -> list[Effect]:
        """Ask the shards' rules again, at a time that one of them has named in `wake_at`."""
        self._roll.now = now
        return self._advance([shard for shard, at in self._wakes.items() if at <= now])

    def wake_at(self) -> Seconds | None:
        return min(self._wakes.values(), default=None)

    def close(self, now: Seconds, reason: str) -> list[Effect]:
        """Drop the contributions that have no fate at the end of the job."""
        self._roll.now = now
        self._pushes.close()
        for shard, ledger in enumerate(self._ledgers):
            for contribution in [*ledger.gathered, *ledger.pending.values()]:
                self._settle(shard, contribution, Fate.DROPPED, reason, ledger.version)
        return self._flush()

    def _begin(self, event: Pushed, refusal: str | None) -> Push:
        self._make_up(event.worker, event.incarnation)
        return self._pushes.begin(event, self._roll.tick(event.worker).clock, refusal)

    def _make_up(self, worker: WorkerId, incarnation: Incarnation) -> None:
        """Send the blocks of the pause to a worker that goes on before the end of its epoch."""
        missed = self._missed.pop(worker, None)
        for shard, ledger in enumerate(self._ledgers):
            if missed is not None and ledger.version > missed[shard]:
                self._effects.append(Publish(shard, ledger.version, ((worker, incarnation),), "this worker had paused"))

    # Decisions.

    def _advance(self, shards: Iterable[int]) -> list[Effect]:
        for shard in shards:
            ledger = self._ledgers[shard]
            while (decision := ledger.policy.fold(ledger)) is not None:
                self._carry_out(shard, ledger, decision)
            wake_at = ledger.policy.wake_at(ledger)
            if wake_at is not None:
                self._wakes[shard] = wake_at
            else:
                self._wakes.pop(shard, None)
        return self._flush()

    def _carry_out(self, shard: int, ledger: ShardLedger, decision: Decision) -> None:
        assert decision.fold or decision.drop or decision.carry, "a decision folds, drops or carries something"
        assert not decision.gather, "a shard takes over every gradient as it arrives"
        for contribution in decision.drop:
            self._settle(shard, contribution, Fate.DROPPED, decision.reason, ledger.version)
        for contribution in decision.carry:
            self._pushes.carry(contribution, ledger.pending[contribution.worker])
            self._settle(shard, contribution, Fate.CARRIED, decision.reason, ledger.version)
        if not decision.fold:
            return
        before, ledger.version = ledger.version, ledger.version + 1
        parts = tuple(
            Part(c.worker, c.incarnation, c.clock, weight, before - self._pushes.held(c, shard)) for c, weight in terms_of(decision)
        )
        self._effects.append(Fold(ledger.version, parts, decision.reason, decision.scale, shard, sums=decision.fold[0].sums))
        for contribution in decision.fold:
            self._settle(shard, contribution, Fate.FOLDED, decision.reason, ledger.version)
        self._effects.append(Publish(shard, ledger.version, self._roll.present, decision.reason))

    def _settle(self, shard: int, contribution: Contribution, fate: Fate, reason: str, version: Version) -> None:
        self._ledgers[shard].take(contribution)
        self._fate_at(shard, contribution, fate, reason, version)

    def _fate_at(self, shard: int, c: Contribution, fate: Fate, reason: str, version: Version) -> None:
        self._effects.append(Settle(c.worker, c.incarnation, c.clock, fate, reason, version, c.samples, shard))
        if fate is not Fate.CARRIED:
            self._pushes.settle(c, fate, reason, version)

    def _release(self, worker: WorkerId, reason: str) -> None:
        self._missed.pop(worker, None)
        standing = self._roll.standings[worker]
        plan = self._policy.plan(self._ledgers[0], worker)
        self._effects.append(Release(worker, standing.incarnation, self.version, standing.clock, reason, plan))

    # Who is active.

    def _activate(self, worker: WorkerId) -> None:
        self._roll.active[worker] = None
        self._roll.changed()
        for ledger in self._ledgers:
            ledger.count(worker, 1)

    def _deactivate(self, worker: WorkerId) -> None:
        if worker in self._roll.active:
            self._roll.slowest()
            del self._roll.active[worker]
            self._roll.changed()
            for ledger in self._ledgers:
                ledger.count(worker, -1)
