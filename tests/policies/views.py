"""A view with whatever a test says is so: rules are asked without a ledger."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from offbeat.core.policy import Contribution
from offbeat.types import Clock, Seconds, Version, WorkerId


def contribution(worker: WorkerId, version: Version = 0, clock: Clock = 1) -> Contribution:
    return Contribution(worker, 1, clock, version, 8, 1.0, 1.0, None, ())


@dataclass
class StillView:
    """The `View` of one moment."""

    clocks: dict[WorkerId, Clock]
    """Of the active workers."""
    pushed: tuple[Contribution, ...] = ()
    version: Version = 0
    now: Seconds = 10.0
    gathered: tuple[Contribution, ...] = ()
    waiting: tuple[WorkerId, ...] = ()
    epoch: int = 0
    shares: dict[WorkerId, int] = field(default_factory=dict)
    times: dict[WorkerId, tuple[Seconds | None, Seconds | None]] = field(default_factory=dict)
    """Last push and last interval."""

    @property
    def active(self) -> Collection[WorkerId]:
        return self.clocks.keys()

    @property
    def pending(self) -> Mapping[WorkerId, Contribution]:
        return {c.worker: c for c in self.pushed}

    @property
    def missing(self) -> int:
        return len([worker for worker in self.clocks if worker not in self.pending])

    @property
    def slowest(self) -> Clock:
        return min(self.clocks.values(), default=0)

    @property
    def fastest(self) -> Clock:
        return max(self.clocks.values(), default=0)

    def slowest_worker(self) -> WorkerId:
        return min(self.clocks, key=lambda worker: (self.clocks[worker], worker))

    def clock(self, worker: WorkerId) -> Clock:
        return self.clocks[worker]

    def pushed_at(self, worker: WorkerId) -> Seconds | None:
        return self.times.get(worker, (None, None))[0]

    def interval(self, worker: WorkerId) -> Seconds | None:
        return self.times.get(worker, (None, None))[1]

    def share(self, worker: WorkerId) -> int | None:
        return self.shares.get(worker)
