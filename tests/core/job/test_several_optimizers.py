"""Several coordinators of one job, in which a worker waits with one optimizer at a time: nothing stands still, in any order of things."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from offbeat.core.effects import Effect, EpochEnded, Fold, Grant, Initialise, NoMore, Release
from offbeat.core.events import Event, Folded, Initialised, Joined, LeaseWanted, Lost, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.job.several_optimizers import Several
from offbeat.core.policy import ServerRule
from offbeat.policies import rule, rule_of

RULES = ["bsp", "asp", "ssp(staleness=1)", "backup(b=1)", "dbw", "elastic(R=3)"]
SIZE, BATCH, EPOCHS = 20, 2, 2


class World:
    """Workers whose script takes a batch of the first optimizer's, steps both, and computes for as long as a draw says."""

    def __init__(self, rules: tuple[str, str], workers: int, seed: int, dies: int | None) -> None:
        self.jobs = {number: Coordinator(rule(name), workers) for number, name in enumerate(rules)}
        self.measures = {number: rule_of(ServerRule, name).measures != "nothing" for number, name in enumerate(rules)}
        self.several = Several(self.jobs)
        self.draw = random.Random(seed)
        self.now = 0.0
        self.waits: dict[int, Any] = {}
        """By worker: what its script waits for, the number of the optimizer and the kinds of effects; None: it computes."""
        self.answers: dict[int, Effect] = {}
        self.scripts = {worker: self.script(worker) for worker in range(workers)}
        self.dies = dies
        self.reports: list[dict[str, Any]] = []

    def script(self, worker: int) -> Any:
        version = [0, 0]
        for number in (0, 1):
            version[number] = (yield number, Joined(worker), Release).version
        for epoch in range(EPOCHS):
            while isinstance(answer := (yield 0, LeaseWanted(worker, 1, 0, epoch, SIZE, BATCH), (Grant, NoMore, EpochEnded)), Grant):
                for number in (0, 1):
                    yield None
                    leases = (answer.lease,) if number == 0 else ()
                    push = Pushed(worker, 1, version[number], BATCH, 0.1, leases)
                    version[number] = (yield number, push, Release).version

    def feed(self, number: int, event: Event) -> None:
        for effect in self.jobs[number].on(event, self.now):
            self.take(number, effect)

    def take(self, number: int, effect: Effect) -> None:
        if isinstance(effect, Initialise):
            self.feed(number, Initialised(effect.worker))
        elif isinstance(effect, Fold) and self.measures[number]:
            self.feed(number, Folded(effect.version, tuple(1.0 for _ in effect.parts), 0.5, 0.1, 0.1))
        elif isinstance(effect, EpochEnded):
            self.reports.append(effect.report)
            for worker in effect.workers:
                self.answer(number, worker, effect)
        elif isinstance(effect, Release | Grant | NoMore):
            self.answer(number, effect.worker, effect)

    def answer(self, number: int, worker: int, effect: Effect) -> None:
        waits = self.waits.get(worker)
        if waits is not None and waits[0] == number and isinstance(effect, waits[1]):
            self.answers.setdefault(worker, effect)

    def settle(self) -> None:
        while (found := self.several.next(self.now)) is not None:
            self.feed(*found)

    def run(self) -> None:
        for steps in itertools.count():
            assert steps < 10_000
            able = [worker for worker in self.scripts if self.waits.get(worker) is None or worker in self.answers]
            if not self.scripts:
                return
            wakes = [at for job in self.jobs.values() if (at := job.wake_at()) is not None]
            if not able:
                assert wakes, f"all stand still: {self.waits}"
                self.now = max(self.now, min(wakes))
                for number, job in self.jobs.items():
                    for effect in job.wake(self.now):
                        self.take(number, effect)
                self.settle()
                continue
            self.now += 0.01
            worker = self.draw.choice(able)
            if worker == self.dies and self.now > 0.3:
                self.end(worker, "killed")
                self.dies = None
                continue
            self.go_on(worker)

    def go_on(self, worker: int) -> None:
        answer = self.answers.pop(worker, None)
        self.waits.pop(worker, None)
        try:
            wish = self.scripts[worker].send(answer)
        except StopIteration:
            self.end(worker, "its script has ended")
            return
        if wish is not None:
            number, event, kinds = wish
            self.waits[worker] = number, kinds
            self.feed(number, event)
            self.settle()

    def end(self, worker: int, reason: str) -> None:
        del self.scripts[worker]
        self.waits.pop(worker, None)
        self.answers.pop(worker, None)
        for number in self.jobs:
            self.feed(number, Lost(worker, reason))
        self.settle()


@pytest.mark.few(6)
@pytest.mark.parametrize("rules", list(itertools.product(RULES, RULES)), ids=" and ".join)
def test_nothing_stands_still(rules: tuple[str, str]) -> None:
    for seed in range(6):
        world = World(rules, workers=2 + seed % 3, seed=seed, dies=1 if seed % 2 else None)
        world.run()
        for report in world.reports[:EPOCHS]:
            assert report["folded"] + report["dropped"] + report["unused"] + report["rejected"] == SIZE
