"""What the workers of a test's world do: their plan, and the script that each process of a worker goes through.

A script is a generator that yields seconds to compute, an event to send, or None to wait for what the coordinator says to its process.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias

from offbeat.protocol.effects import Effect, EpochEnded, Grant, Initialise, NoMore, Release
from offbeat.protocol.events import EpochWanted, Event, Initialised, LeaseWanted, Left, PullWanted, Pushed
from offbeat.protocol.policy import Policy
from offbeat.types import LeaseId

Script: TypeAlias = Generator[float | Event | None, Effect | None, None]


@dataclass(frozen=True)
class Plan:
    """One schedule: what the workers do, and what happens to them."""

    policy: Policy
    workers: int
    seed: int = 0
    """Of the compute times and the moments of joining, whole ticks so that much happens at the same instant."""
    iterations: int = 3
    """Pushes of each worker, where the job does not deal out samples."""
    epochs: int = 0
    """More than 0: the samples are dealt out, and this many epochs are gone through."""
    size: int = 12
    batch: int = 4
    prefetch: int = 0
    """Leases that a worker takes ahead of the one it works on."""
    timeout_s: float | None = None
    faults: tuple[tuple[str, int, int], ...] = ()
    """What, to which worker, at which tick: see `World.fault_*`."""


@dataclass(eq=False)
class Process:
    """One process of a worker; a restarted worker gets another."""

    worker: int
    plan: Plan
    random: random.Random
    incarnation: int = 0
    script: Script | None = None
    inbox: deque[Effect] = field(default_factory=deque)
    waits: bool = False
    """For the inbox to fill."""
    gone: bool = False
    frozen_until: float = 0.0
    version: int = 0
    poisoned: bool = False
    """Its next gradient is not finite."""
    hasty: bool = False
    """It leaves its current epoch early."""

    def live(self) -> Script:
        """The whole script, from the first admission to the end."""
        yield from self._hear(None, Release)
        for _ in range(0 if self.plan.epochs else self.plan.iterations):
            yield from self._iterate(())
        for epoch in range(self.plan.epochs):
            yield from self._epoch(epoch)
        yield Left(self.worker, self.incarnation)

    def _epoch(self, epoch: int) -> Script:
        held: deque[LeaseId] = deque()
        more = True
        while more or held:
            while more and len(held) <= self.plan.prefetch:
                wish = LeaseWanted(self.worker, self.incarnation, 0, epoch, self.plan.size, self.plan.batch)
                answer = yield from self._ask(wish)
                if isinstance(answer, EpochEnded):
                    return
                if isinstance(answer, Grant):
                    held.append(answer.lease)
                more = isinstance(answer, Grant)
            if held:
                yield from self._iterate((held.popleft(),))
            if self.hasty:
                self.hasty = False
                break
        yield from self._ask(EpochWanted(self.worker, self.incarnation, 0, epoch, self.plan.size))

    def _iterate(self, leases: tuple[LeaseId, ...]) -> Script:
        compute_s = float(self.random.randint(1, 2 + 2 * self.worker % 5))
        yield compute_s
        if self.random.random() < 0.1:
            yield from self._hear(PullWanted(self.worker, self.incarnation), Release)
        nonfinite = "bias" if self.poisoned else None
        self.poisoned = False
        samples = self.random.choice((8, 8, 8, 4))
        push = Pushed(self.worker, self.incarnation, self.version, samples, compute_s, leases, nonfinite)
        yield from self._hear(push, Release)

    def _ask(self, wish: LeaseWanted | EpochWanted) -> Generator[float | Event | None, Effect | None, Grant | NoMore | EpochEnded]:
        """Ask for samples, or for the end of an epoch; some answers bring the newest parameters."""
        answer = yield from self._hear(wish, Grant, NoMore, EpochEnded)
        assert isinstance(answer, Grant | NoMore | EpochEnded)
        if isinstance(answer, EpochEnded) or answer.refreshed:
            yield from self._hear(None, Release)
        return answer

    def _hear(self, send: Event | None, *kinds: type[Effect]) -> Generator[float | Event | None, Effect | None, Effect]:
        """Send an event and wait for one of these answers; give the initial parameters if asked for."""
        answer = yield send
        while True:
            if isinstance(answer, Release):
                self.version = answer.version
            if isinstance(answer, kinds):
                return answer
            if isinstance(answer, Initialise):
                yield 1.0
                answer = yield Initialised(self.worker)
            else:
                answer = yield None
