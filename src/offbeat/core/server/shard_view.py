"""Keep one shard's ledger under a rule of shard scope, which is the rule's view, and the list of workers that all shards share.

A shard's ledger has the version of the shard and the contributions that wait there for a fate. What the other shards have done with the
other blocks of the same gradients is in `core.server.per_shard_ledger`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from offbeat.core.base_ledger import Standing
from offbeat.core.policy import Contribution, ServerRule
from offbeat.types import Clock, Epoch, Incarnation, Seconds, Version, WorkerId


@dataclass(slots=True)
class Roll:
    """Keep the active workers and their clocks."""

    now: Seconds = 0.0
    epoch: Epoch = 0
    standings: dict[WorkerId, Standing] = field(default_factory=dict)
    active: dict[WorkerId, None] = field(default_factory=dict)
    present: tuple[tuple[WorkerId, Incarnation], ...] = ()
    """The active workers with their incarnations."""
    shares: Mapping[WorkerId, int] = field(default_factory=dict)
    last_slowest: Clock = 0
    """The least clock at the last time that a worker was active."""

    def changed(self) -> None:
        """Update the slowest clock after workers have come or gone."""
        self.present = tuple((worker, self.standings[worker].incarnation) for worker in self.active)

    def slowest(self) -> Clock:
        """Least clock of the active workers, or of those that were active last."""
        if self.active:
            self.last_slowest = min(self.standings[worker].clock for worker in self.active)
        return self.last_slowest

    def tick(self, worker: WorkerId) -> Standing:
        """Advance the clock of a worker that has completed an iteration."""
        standing = self.standings[worker]
        standing.clock += 1
        if standing.pushed_at is not None:
            standing.interval = self.now - standing.pushed_at
        standing.pushed_at = self.now
        return standing


class ShardLedger:
    """Keep the pending contributions of one shard. The shard's rule reads them through the `View` interface.

    ``version`` is the shard's own. ``pending`` holds the newest contribution of each worker that has no fate at this shard; ``gathered``
    those that the same worker has pushed before it, since a worker of such a rule goes on while its gradient waits. Clocks are
    counted over all shards. The slowest and the fastest clock cost O(active) here, everything else O(1).
    """

    def __init__(self, policy: ServerRule, roll: Roll) -> None:
        self.policy = policy.start()
        self.version: Version = 0
        self.missing = 0
        self.pending: dict[WorkerId, Contribution] = {}
        self.gathered: list[Contribution] = []
        self._roll = roll

    # What changes it.

    def add(self, contribution: Contribution) -> None:
        """Add a contribution that has arrived at this shard."""
        worker = contribution.worker
        earlier = self.pending.pop(worker, None)
        if earlier is not None:
            self.gathered.append(earlier)
        elif worker in self._roll.active:
            self.missing -= 1
        self.pending[worker] = contribution

    def take(self, contribution: Contribution) -> None:
        """Remove a contribution that has got its fate."""
        worker = contribution.worker
        if self.pending.get(worker) is contribution:
            del self.pending[worker]
            self.missing += worker in self._roll.active
        else:
            # By identity, not with `remove`: comparing tuples of ten fields one by one takes longer.
            self.gathered = [other for other in self.gathered if other is not contribution]

    def waiting_of(self, worker: WorkerId) -> list[Contribution]:
        """Return the contributions of a worker that this shard has not settled, in the order of arrival."""
        newest = self.pending.get(worker)
        return [c for c in self.gathered if c.worker == worker] + ([newest] if newest is not None else [])

    def count(self, worker: WorkerId, comes: int) -> None:
        """Count a worker that becomes active (1) or inactive (-1)."""
        if worker not in self.pending:
            self.missing += comes

    # What else a rule may look at.

    @property
    def now(self) -> Seconds:
        return self._roll.now

    @property
    def active(self) -> Collection[WorkerId]:
        return self._roll.active.keys()

    @property
    def waiting(self) -> Collection[WorkerId]:
        """Empty: workers continue by themselves."""
        return ()

    @property
    def epoch(self) -> Epoch:
        return self._roll.epoch

    @property
    def slowest(self) -> Clock:
        return self._roll.slowest() if self._roll.active else 0

    @property
    def fastest(self) -> Clock:
        return max((self._roll.standings[worker].clock for worker in self._roll.active), default=0)

    def slowest_worker(self) -> WorkerId:
        return min(self._roll.active, key=lambda worker: (self._roll.standings[worker].clock, worker))

    def clock(self, worker: WorkerId) -> Clock:
        return self._roll.standings[worker].clock

    def pushed_at(self, worker: WorkerId) -> Seconds | None:
        return self._roll.standings[worker].pushed_at

    def interval(self, worker: WorkerId) -> Seconds | None:
        return self._roll.standings[worker].interval

    def share(self, worker: WorkerId) -> int | None:
        return self._roll.shares.get(worker)
