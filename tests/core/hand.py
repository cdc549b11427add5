"""For tests that carry the events by hand: a job with a clock that ticks once per event, and short forms of what it says."""

from __future__ import annotations

from typing import TypeVar

from offbeat.core.effects import Effect
from offbeat.core.events import EpochWanted, Event, Initialised, Joined, LeaseWanted, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Policy

E = TypeVar("E")


class Hand:
    """A `Coordinator`, its clock, and everything that it has said.

    Args:
        begun: join all expected workers and give version 0, to start with.
    """

    def __init__(self, policy: Policy, workers: int, timeout_s: float | None = None, *, begun: bool = True) -> None:
        self.job = Coordinator(policy, workers, timeout_s)
        self.now = 0.0
        self.said: list[Effect] = []
        for worker in range(workers if begun else 0):
            self(Joined(worker))
        if begun:
            self(Initialised(0))

    def __call__(self, event: Event) -> list[Effect]:
        self.now += 1.0
        effects = self.job.on(event, self.now)
        self.said += effects
        return effects

    def push(
        self, worker: int, version: int, incarnation: int = 1, leases: tuple[int, ...] = (), nonfinite: str | None = None
    ) -> list[Effect]:
        return self(Pushed(worker, incarnation, version, 8, 1.0, leases, nonfinite))

    def want(self, worker: int, epoch: int = 0, size: int = 6, batch: int = 2, incarnation: int = 1, pool: int = 0) -> list[Effect]:
        return self(LeaseWanted(worker, incarnation, pool, epoch, size, batch))

    def finish(self, worker: int, epoch: int = 0, size: int = 6, incarnation: int = 1, pool: int = 0) -> list[Effect]:
        return self(EpochWanted(worker, incarnation, pool, epoch, size))


def names(effects: list[Effect]) -> list[str]:
    """What kinds of effects these are, and for whom: ``Release 1``."""
    return [f"{type(effect).__name__} {getattr(effect, 'worker', '')}".strip() for effect in effects]


def only(kind: type[E], effects: list[Effect]) -> E:
    """The one effect of this kind."""
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, f"expected one {kind.__name__}: {effects}"
    return found[0]
