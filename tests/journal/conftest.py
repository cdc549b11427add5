"""Journals to report on: a small virtual-clock drive of the real coordinator, written down as the runtime would write it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import pytest

from offbeat.core.effects import Effect, Grant, Initialise, NoMore, Release
from offbeat.core.events import EpochWanted, Event, Initialised, Joined, LeaseWanted, Left, Lost, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Policy
from offbeat.journal.records import end_record, fault_record, job_record, metrics_record, process_record, record

Record: TypeAlias = dict[str, Any]

BATCH = 8


class Drive:
    """Workers that ask for samples, compute, push, and die when told to."""

    def __init__(self, policy: Policy, compute_s: list[float], *, size: int, epochs: int, seed: int, leaving_early: float) -> None:
        self.job = Coordinator(policy, workers=len(compute_s), timeout_s=None)
        self.compute_s, self.size, self.epochs = compute_s, size, epochs
        self.leaving_early = leaving_early
        self.random = random.Random(seed)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = itertools.count()
        self.epoch = dict.fromkeys(range(len(compute_s)), 0)
        self.incarnation = dict.fromkeys(range(len(compute_s)), 0)
        self.version = dict.fromkeys(range(len(compute_s)), 0)
        started = "2026-01-01T00:00:00"
        self.records = [job_record(sync=policy.spelling, workers=len(compute_s), servers=1, seed=seed, started=started, script="train.py")]

    def at(self, t: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (t, next(self.serial), call))

    def run(self, kill: Mapping[int, float], back_after_s: float) -> list[Record]:
        for worker, number in enumerate(self.compute_s):
            self.records.append(process_record(0.0, "worker", worker, "started", f"{number} s"))
            self.at(0.05 + 0.01 * worker, partial(self.join, worker))
        for worker, t in kill.items():
            self.at(t, partial(self.kill, worker, back_after_s))
        while self.heap:
            self.now, _, call = heapq.heappop(self.heap)
            call()
        self.note(*self.job.close(self.now, "the job is over"))
        self.records.append(end_record(self.now, True, "every worker has finished"))
        return self.records

    def on(self, event: Event) -> None:
        effects = self.job.on(event, self.now)
        self.note(event, *effects)
        for effect in effects:
            self.obey(effect)

    def note(self, *items: Event | Effect) -> None:
        entries = [record(item, self.now) for item in items]
        self.records += [entry for entry in entries if entry is not None]

    def obey(self, effect: Effect) -> None:
        if isinstance(effect, Initialise):
            self.at(self.now + 0.02, lambda: self.on(Initialised(effect.worker)))
        elif isinstance(effect, Release):
            self.incarnation[effect.worker], self.version[effect.worker] = effect.incarnation, effect.version
            if effect.reason.endswith("is over"):
                self.epoch_over(effect.worker)
            elif effect.reason != "samples have come back":
                self.at(self.now, lambda: self.ask(effect.worker, effect.incarnation))
        elif isinstance(effect, Grant):
            compute_s = self.compute_s[effect.worker] * self.random.uniform(0.9, 1.3)
            self.at(self.now + compute_s, lambda: self.push(effect, compute_s))
        elif isinstance(effect, NoMore) and not effect.reason.endswith("is next"):
            raise AssertionError("a worker that holds one lease at a time is not told that the rest is its own")

    def epoch_over(self, worker: int) -> None:
        incarnation = self.incarnation[worker]
        values = {"test_accuracy": 1 - 0.5 / (self.epoch[worker] + 1)}
        self.records.append(metrics_record(self.now, worker, self.version[worker], values))
        self.epoch[worker] += 1
        self.at(self.now + 0.001, lambda: self.ask(worker, incarnation))

    def ask(self, worker: int, incarnation: int) -> None:
        if incarnation != self.incarnation[worker]:
            return
        if self.epoch[worker] >= self.epochs:
            self.on(Left(worker, incarnation))
            self.records.append(process_record(self.now, "worker", worker, "exited", "0"))
        elif self.random.random() < self.leaving_early:
            self.on(EpochWanted(worker, incarnation, 0, self.epoch[worker], self.size))
        else:
            self.on(LeaseWanted(worker, incarnation, 0, self.epoch[worker], self.size, BATCH))

    def push(self, grant: Grant, compute_s: float) -> None:
        if grant.incarnation == self.incarnation[grant.worker]:
            loss = 2.0 / (1 + self.job.version)
            samples = grant.stop - grant.start
            self.on(Pushed(grant.worker, grant.incarnation, self.version[grant.worker], samples, compute_s, (grant.lease,), None, loss))

    def join(self, worker: int) -> None:
        self.on(Joined(worker))

    def kill(self, worker: int, back_after_s: float) -> None:
        self.records.append(fault_record(self.now, worker, "kill", f"at {self.now} s"))
        self.records.append(process_record(self.now, "worker", worker, "killed", "signal 9"))
        self.incarnation[worker] += 1000  # whatever this process still had in mind is forgotten
        self.at(self.now + 0.005, lambda: self.gone(worker))
        self.at(self.now + back_after_s, lambda: self.back(worker))

    def gone(self, worker: int) -> None:
        self.incarnation[worker] -= 1001
        self.on(Lost(worker, "its process was killed by signal 9"))

    def back(self, worker: int) -> None:
        self.records.append(process_record(self.now, "worker", worker, "restarted"))
        self.join(worker)


RunJob: TypeAlias = Callable[..., list[Record]]


@pytest.fixture(scope="session")
def run_job() -> RunJob:
    """Records of a whole job; ``kill`` maps workers to the time at which they die, to be back ``back_after_s`` later."""

    def run(
        policy: Policy,
        compute_s: list[float],
        *,
        size: int = 160,
        epochs: int = 2,
        seed: int = 0,
        kill: Mapping[int, float] | None = None,
        back_after_s: float = 0.5,
        leaving_early: float = 0.0,
    ) -> list[Record]:
        return Drive(policy, compute_s, size=size, epochs=epochs, seed=seed, leaving_early=leaving_early).run(kill or {}, back_after_s)

    return run
