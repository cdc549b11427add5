"""What the workers of a test's world do: their schedule, and the script that each process of a worker goes through.

A script is a generator that yields seconds to compute, an event to send, or None to wait for what the coordinator says to its process.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TypeAlias

from offbeat.core.effects import BarrierPassed, Effect, EpochEnded, Grant, Initialise, NoMore, Release
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Event, Initialised, LeaseWanted, Left, PullWanted, Pushed, Skipped
from offbeat.core.partitions import size_of
from offbeat.core.policy import Plan, Policy, ServerRule
from offbeat.policies import BSP
from offbeat.types import LeaseId

Script: TypeAlias = Generator[float | Event | None, Effect | None, None]


def served(policy: Policy) -> ServerRule:
    """Return the rule, to be asked what only rules with servers are asked; for a rule without servers return `BSP`, which wants nothing."""
    return policy if isinstance(policy, ServerRule) else BSP()


@dataclass(frozen=True)
class Schedule:
    """What the workers of one job do, and what happens to them."""

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
    barriers: int = 0
    """After how many iterations, or after how many epochs, the script comes to a barrier; 0: never."""
    timeout_s: float | None = None
    faults: tuple[tuple[str, int, int], ...] = ()
    """What, to which worker, at which tick: see `World.fault_*`."""


@dataclass(eq=False)
class Process:
    """One process of a worker; a restarted worker gets another."""

    worker: int
    schedule: Schedule
    random: random.Random
    incarnation: int = 0
    script: Script | None = None
    inbox: deque[Effect] = field(default_factory=deque)
    waits: bool = False
    """For the inbox to fill."""
    alarm: int = 0
    """Which of the times to wake up that were set is the valid one."""
    now: float = 0.0
    gone: bool = False
    closed: bool = False
    """Its script has closed the optimizer, and its process goes on."""
    frozen_until: float = 0.0
    poisoned: bool = False
    """Its next gradient is not finite."""
    hasty: bool = False
    """It leaves its current epoch early."""
    skips: bool = False
    """Its script leaves its next batch out."""
    keeps: bool = False
    """Its script makes no step with its next gradient, but adds it to the one after."""
    kept: tuple[LeaseId, ...] = ()
    """What it has accumulated and made no step with."""
    counts: bool = True
    """Whether it knows how many samples it uses."""
    version: int = 0
    overtaken: int = 0
    """The version that has overtaken what it computes, if that is newer than its own."""
    plan: Plan = field(default_factory=Plan)
    done: int = 0
    """Batches of the epoch, of so many in its own share."""
    batches: int = 0
    steps: int = 0
    """Local steps since the last push, and what they were made of."""
    barrier: int | None = None
    """The next one; None: this process has passed none, and has not been there when the job began."""
    samples: int = 0
    leases: tuple[LeaseId, ...] = ()
    compute_s: float = 0.0

    def live(self) -> Script:
        """The whole script, from the first admission to the end."""
        self._forget()
        self.kept = ()
        yield from self._hear(None, Release)
        for iteration in range(0 if self.schedule.epochs else self.schedule.iterations):
            yield from self._step(None)
            while self.steps:
                yield from self._step(None)
            yield from self._come_to_barrier(iteration)
        for epoch in range(self.schedule.epochs):
            yield from self._epoch(epoch)
            yield from self._come_to_barrier(epoch)
        self.closed = (self.worker + self.incarnation) % 3 == 0
        yield Left(self.worker, self.incarnation, exits=not self.closed)

    def _epoch(self, epoch: int) -> Script:
        held: deque[LeaseId] = deque()
        more, self.done = True, 0
        while more or held:
            while more and len(held) <= self.schedule.prefetch:
                batch = self.plan.batch or self.schedule.batch
                answer = yield from self._ask(LeaseWanted(self.worker, self.incarnation, 0, epoch, self.schedule.size, batch))
                if isinstance(answer, EpochEnded):
                    return
                if isinstance(answer, Grant):
                    held.append(answer.lease)
                    self.batches = -(-(size_of(answer.parts) or self.schedule.size) // batch)
                more = isinstance(answer, Grant)
                if not more and not held and self.steps and isinstance(answer, NoMore) and not answer.refreshed:
                    yield from self._push()
                    more = True  # samples of the dead may come back
            if held and self.skips:
                self.skips = False
                yield Skipped(self.worker, self.incarnation, (held.popleft(),))
            elif held and self.keeps:
                self.keeps = False
                self.kept += (held.popleft(),)
                yield 1.0
            elif held:
                yield from self._step(held.popleft())
            if self.hasty:
                self.hasty = False
                break
        if self.steps and self.random.random() < (0.5 if more or held else 1.0):
            yield from self._push()  # what is not pushed by one who leaves early is lost, and its samples go to somebody else
        yield from self._ask(EpochWanted(self.worker, self.incarnation, 0, epoch, self.schedule.size, self.kept))
        self._forget()

    def _step(self, lease: LeaseId | None) -> Script:
        """Compute once. Then push, if that is the plan, or give up what has been overtaken."""
        begun = self.now
        yield float(self.random.randint(1, 2 + 2 * self.worker % 5))
        self.steps += 1
        self.done += 1
        self.compute_s += self.now - begun
        self.samples += self.random.choice((8, 8, 8, 4)) if self.counts else 0
        self.leases += (*self.kept, *(() if lease is None else (lease,)))
        self.kept = ()
        if self.overtaken > self.version:
            yield from self._hear(Abandoned(self.worker, self.incarnation, self.version, self.compute_s, self.leases), Release)
            self._forget()
        elif self.plan.due(self.steps, self.done, self.batches) or (self.plan.per_epoch and lease is None):
            yield from self._push()

    def _push(self) -> Script:
        if self.random.random() < 0.1:
            yield from self._hear(PullWanted(self.worker, self.incarnation), Release)
        yield from self._hear(
            Pushed(
                self.worker,
                self.incarnation,
                self.version,
                self.samples,
                self.compute_s,
                self.leases,
                "bias" if self.poisoned else None,
                self.random.choice((None, self.random.random())),
                self.steps,
            ),
            Release,
        )
        self.poisoned = False
        self._forget()

    def _come_to_barrier(self, iteration: int) -> Script:
        if not self.schedule.barriers or (iteration + 1) % self.schedule.barriers:
            return
        if self.barrier is None and self.incarnation == 1 and self.worker < self.schedule.workers:
            self.barrier = 0
        passed = yield from self._hear(BarrierWanted(self.worker, self.incarnation, self.barrier), BarrierPassed)
        assert isinstance(passed, BarrierPassed) and self.barrier in (None, passed.number)
        self.barrier = passed.number + 1
        yield from self._hear(None, Release)
        assert self.version >= passed.version, "the newest parameters come with the end of a barrier"

    def _forget(self) -> None:
        """Nothing has been computed since the last push."""
        self.steps, self.samples, self.leases, self.compute_s = 0, 0, (), 0.0

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
                self.version, self.plan = answer.version, answer.plan
            if isinstance(answer, kinds):
                return answer
            if isinstance(answer, Initialise):
                yield 1.0
                answer = yield Initialised(self.worker)
            else:
                answer = yield None
