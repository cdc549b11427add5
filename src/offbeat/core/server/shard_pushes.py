"""Follow each push over all shards under a rule of shard scope: the shards of its arrival, of its fates, and the fate of its samples.

The ledgers of the shards (`core.server.shard_view`) are independent of each other; here their fates come together.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from offbeat.core.effects import Settle
from offbeat.core.events import Pushed
from offbeat.core.policy import Contribution
from offbeat.types import Clock, Fate, Incarnation, LeaseId, Version, WorkerId


@dataclass(slots=True, eq=False)
class Push:
    """Follow one push over all shards."""

    event: Pushed
    """The event of its first arrival."""
    clock: Clock
    refusal: str | None
    """The reason for which the push is rejected; None: it is not."""
    absent: set[int]
    """Shards at which the push has not arrived and still may."""
    open: int = 0
    """Number of shards at which the push has arrived and has no fate."""
    fate: tuple[Fate, str, Version] | None = None
    """The fate of its samples, as far as it is known."""
    carries: list[Push] = field(default_factory=list)
    """Earlier pushes of its worker whose samples share its fate."""


class Pushes:
    """Keep the pushes of one job that have no fate yet as a whole.

    Args:
        shards: how many there are.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._open: dict[tuple[WorkerId, Incarnation, Clock], Push] = {}
        self._arriving: dict[WorkerId, list[Push]] = {}
        """Pushes that have not arrived at every shard, in the order in which they were sent."""
        self._whole: list[Settle] = []

    @property
    def workers(self) -> Collection[WorkerId]:
        """The workers that have sent them."""
        return {worker for worker, _, _ in self._open}

    def known(self, event: Pushed) -> Push | None:
        """Return the push that arrives at one more shard. Versions may repeat after a `Release`: then the earlier push arrives first."""
        for push in self._arriving.get(event.worker, ()):
            if push.event.version == event.version and event.shard in push.absent:
                return push
        return None

    def begin(self, event: Pushed, clock: Clock, refusal: str | None) -> Push:
        """Take the first arrival of a push, which brings its worker to this clock."""
        push = Push(event, clock, refusal, {event.shard} if event.alone and event.shard is not None else set(range(self._shards)))
        self._open[event.worker, event.incarnation, clock] = push
        self._arriving.setdefault(event.worker, []).append(push)
        return push

    def arrived(self, push: Push, shard: int) -> None:
        """Note that the push has arrived at a shard and waits there for its fate."""
        push.absent.discard(shard)
        push.open += 1
        if not push.absent:
            self._arriving[push.event.worker].remove(push)

    def held(self, contribution: Contribution, shard: int) -> Version:
        """Return the version of this shard's block from which the push was computed."""
        return self._open[contribution.worker, contribution.incarnation, contribution.clock].event.held[shard]

    def carry(self, contribution: Contribution, newer: Contribution) -> None:
        """Note that the push is carried: its samples share the fate of a newer one."""
        push, newest = (self._open[c.worker, c.incarnation, c.clock] for c in (contribution, newer))
        newest.carries += [*push.carries, push]
        push.carries = []

    def settle(self, contribution: Contribution, fate: Fate, reason: str, version: Version) -> None:
        """Note the fate of the push at one shard."""
        push = self._open[contribution.worker, contribution.incarnation, contribution.clock]
        for settled in [*push.carries, push]:
            settled.open -= 1
            if settled.fate is None or (fate is Fate.FOLDED and settled.fate[0] is not Fate.FOLDED):
                settled.fate = fate, reason, version
            self._conclude(settled)

    def expect_no_more(self, worker: WorkerId) -> None:
        """Expect no further arrivals of this worker's pushes."""
        for push in self._arriving.pop(worker, []):
            push.absent.clear()
            self._conclude(push)

    def close(self) -> None:
        """Expect no further arrivals of any push."""
        for worker in list(self._arriving):
            self.expect_no_more(worker)

    def recalled(self, worker: WorkerId) -> tuple[LeaseId, ...]:
        """Return the leases of the worker's pushes of which no shard has folded a part."""
        of_worker = [push for key, push in self._open.items() if key[0] == worker]
        return tuple(lease for push in of_worker if push.fate is None or push.fate[0] is not Fate.FOLDED for lease in push.event.leases)

    def fates(self) -> list[Settle]:
        """Return the fates of whole pushes since the last call: folded if any shard has folded its block, else the first fate."""
        whole, self._whole = self._whole, []
        return whole

    def _conclude(self, push: Push) -> None:
        if push.open or push.absent:
            return
        assert push.fate is not None, f"a push without a single arrival: {push}"
        worker, incarnation = push.event.worker, push.event.incarnation
        del self._open[worker, incarnation, push.clock]
        fate, reason, version = push.fate
        self._whole.append(Settle(worker, incarnation, push.clock, fate, reason, version, push.event.samples))
