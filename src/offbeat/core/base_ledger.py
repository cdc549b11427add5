"""What the ledgers of all families have in common, and the answers of a family that a question of the coordinator does not concern."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.core.effects import Effect, Release, Settle
from offbeat.core.events import Folded, Pushed
from offbeat.core.policy import Contribution
from offbeat.types import NOT_JOINED, Clock, Epoch, Fate, Incarnation, LeaseId, Seconds, Version, WorkerId


@dataclass(slots=True)
class Standing:
    """Hold a worker's numbers. They are kept while the worker is dead or paused."""

    incarnation: Incarnation = NOT_JOINED
    clock: Clock = 0
    pushed_at: Seconds | None = None
    interval: Seconds | None = None
    """Between its last two pushes."""
    told: bool = False
    """True if the worker has been sent an `Interrupt` for its present computation."""


class BaseLedger:
    """Base of the ledgers: each has its own methods for the rest of what `core.job.coordinator` tells and asks.

    Each method that changes something returns the effects, in the order in which they are to be carried out.
    """

    version: Version
    """Number of the newest version."""
    _standings: Mapping[WorkerId, Standing]
    _pending: Mapping[Any, Contribution]
    """Contributions without a fate; by worker, unless the ledger has its own `recalled`."""
    _effects: list[Effect]
    _active: Mapping[WorkerId, None]
    _waiting: Mapping[WorkerId, None]

    @property
    def active(self) -> Collection[WorkerId]:
        """Return the workers that take part and do not pause: those for which a round, or other workers, may wait."""
        return self._active.keys()

    @property
    def waiting(self) -> Collection[WorkerId]:
        """Return the workers that have pushed, given up or entered, and have not been admitted since."""
        return self._waiting.keys()

    def begin_at(self, version: Version) -> None:
        """Begin with this version, before any worker enters. Without servers each group of ranks counts its steps from 0."""

    def version_at(self, shard: int) -> Version:
        """Return the version of a shard: all have the same."""
        return self.version

    def clock(self, worker: WorkerId) -> Clock:
        """Return a worker's clock."""
        return self._standings[worker].clock

    def begins(self, event: Pushed) -> bool:
        """Return True if this is the first arrival of a push. Except at shards that decide by themselves, each arrives once."""
        return True

    def recalled(self, worker: WorkerId) -> tuple[LeaseId, ...]:
        """Return the leases of the worker's pending contribution, which is dropped if the worker enters again."""
        return self._pending[worker].leases if worker in self._pending else ()

    def fates(self, effects: Iterable[Effect]) -> list[Settle]:
        """Return the fates among effects of this ledger; the samples of a contribution share its fate."""
        return [effect for effect in effects if isinstance(effect, Settle)]

    def folded(self, event: Folded, now: Seconds) -> list[Effect]:
        """Take the measurements of a fold, if the family reads any."""
        return []

    def begin_epoch(self, epoch: Epoch, shares: Mapping[WorkerId, int]) -> None:
        """Set the epoch, and each worker's number of samples in it where the rule splits the data, if a decision depends on them."""

    def wake(self, now: Seconds) -> list[Effect]:
        """Decide again, at a time that `wake_at` has named."""
        return []

    def wake_at(self) -> Seconds | None:
        """Return when to call `wake`; None: no decision depends on the time."""
        return None

    def _contribution(self, event: Pushed, clock: Clock, now: Seconds) -> Contribution:
        work = event.samples, now, event.compute_s, event.loss, event.leases, event.steps, event.sums
        return Contribution(event.worker, event.incarnation, clock, event.version, *work)

    def _fate(self, c: Contribution, fate: Fate, reason: str) -> None:
        self._effects.append(Settle(c.worker, c.incarnation, c.clock, fate, reason, self.version, c.samples))

    def _release(self, worker: WorkerId, reason: str) -> None:
        standing = self._standings[worker]
        self._effects.append(Release(worker, standing.incarnation, self.version, standing.clock, reason))

    def _flush(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
