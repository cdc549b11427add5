"""Local steps that are not pushed yet, live: at an epoch's end, in a loop that is left, at a pull, and when their worker is thought dead.

None is lost but those of the dead, whose samples somebody else does again. And the optimizers' states, which are the workers' own.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import APART, Job, Worker, barrier, wait
from tests.live.samples import Trainer, Used, ahead, all_is_pushed, audited, finished, once, pushes, run
from tests.live.test_equality import plain_sgd, values
from tests.live.test_local_steps import natural
from torch import nn

from offbeat.errors import JobError, RefusedError
from offbeat.journal.file import read


def test_samples_of_the_dead_find_a_worker_that_has_only_now_handed_in_its_local_steps(tmp_path: Path) -> None:
    """Worker 0 has done the rest of the epoch, one step of five, and has handed that in when worker 1 dies over the other batch."""
    both, handed_in, used = barrier(2), threading.Event(), Used([[], []])

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, "ensemble(steps=5)")
        for batch in trainer.sampler(8, 4):
            if not used[worker.number]:
                both.wait()
            if worker.number == 1:
                wait(handed_in)
                worker.die()
            used[worker.number] += trainer.step(batch)

    journal = tmp_path / "journal"
    with Job(2, journal=str(journal)) as job:
        threads = job.start_all(script)
        job.until(lambda: job.snapshot is not None and job.snapshot["pushes"] == 1, "worker 0 to hand in what it has")
        handed_in.set()
        job.join(*threads)
    (report,) = finished(job, journal)
    assert once(used, 8) and (report["folded"], report["returned"]) == (8, 4)


def test_a_pull_hands_in_what_there_is(tmp_path: Path) -> None:
    """Worker 0 pulls after two steps of five: that folds when the other's five are there, and brings the mean."""

    def script(worker: Worker) -> list[int]:
        model = nn.Linear(2, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, "ensemble(steps=5)")
        versions = []
        for number in range(10):
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            if worker.number == 0 and number == 1:
                optimizer.pull()
            versions.append(optimizer.version)
        return versions

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    assert results[0] == [0, 1, 1, 1, 1, 1, 2, 2, 2, 2] and results[1] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2]
    assert sorted((push["worker"], push["steps"]) for push in pushes(tmp_path / "journal")) == [(0, 2), (0, 3), (0, 5), (1, 5), (1, 5)]
    audited(tmp_path / "journal")


def test_a_step_over_several_batches_does_not_miss_a_fraction_of_the_epoch(tmp_path: Path) -> None:
    """Ten batches, two for each step, pushed after five of them and after ten: the third step goes past the fifth batch."""

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, "ensemble(per_epoch=2, overlap=0.0)")
        batches = iter(trainer.sampler(40, 2))
        for batch in batches:
            trainer.optimizer.zero_grad()
            for part in (batch, next(batches)):
                trainer.model(torch.tensor(part).float().unsqueeze(1)).square().mean().backward()
            trainer.optimizer.step()

    run(tmp_path / "journal", 2, script)
    assert sorted((push["steps"], len(push["leases"])) for push in pushes(tmp_path / "journal")) == [(2, 4)] * 2 + [(3, 6)] * 2


def test_a_watched_step_takes_the_samples_of_its_own_batch(tmp_path: Path) -> None:
    def script(worker: Worker) -> int:
        trainer, steps = Trainer(worker, "ensemble(steps=5)"), 0
        for batch in ahead(trainer.sampler(60, 4), 4):
            with trainer.optimizer.interruptible():
                trainer.optimizer.zero_grad()
                trainer.model(batch.float().unsqueeze(1)).square().mean().backward()
            trainer.optimizer.step()
            steps += 1
        return steps

    steps, _ = run(tmp_path / "journal", 2, script)
    all_is_pushed(tmp_path / "journal", steps)
    assert all(push["samples"] == 4 * push["steps"] for push in pushes(tmp_path / "journal"))


@pytest.mark.parametrize("job", [{}, {"hosts": APART, "servers": 2}], ids=["shm", "tcp, 2 servers"])
@pytest.mark.parametrize("late", [False, True], ids=["", "about to push"])
def test_thought_dead_in_the_middle_of_local_steps(tmp_path: Path, job: dict[str, Any], late: bool) -> None:
    """Its steps are lost, and their samples are done again by the other; it takes part from the next epoch on."""
    thought_dead = threading.Event()

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "ensemble(steps=4, momentum=average)")
        sampler = trainer.sampler(60, 2)
        used: Used = [[], []]
        for epoch in range(2):
            for number, batch in enumerate(sampler):
                if (epoch, number) == (0, 6 + late):
                    if worker.number == 1:
                        worker.freeze()
                    wait(thought_dead)
                    worker.thaw()
                used[epoch] += trainer.step(batch)
        return used

    with Job(2, timeout_s=1.0, journal=str(tmp_path / "journal"), **job) as running:
        running.run_past_death(script, 1, thought_dead)
    first, second = finished(running, tmp_path / "journal")
    assert first["folded"] == second["folded"] == 60 and first["returned"] == (8 if late else 6)
    mine = [push for push in pushes(tmp_path / "journal") if push["worker"] == 1]
    assert [push["incarnation"] for push in mine] == [1] * (1 + late) + [2] * (len(mine) - 1 - late) and len(mine) > 3
    fates = [r for r in read(tmp_path / "journal") if r["kind"] == "settle" and r["worker"] == 1]
    rejected = [fate["reason"] for fate in fates if fate["fate"] == "rejected"]
    assert rejected == ["sent by incarnation 1, which was declared dead"] * late


# Steps that cannot be made, or used.


def test_an_optimizer_that_cannot_step_on_servers_is_refused_by_rules_that_need_that() -> None:
    def refuse(worker: Worker) -> None:
        model = nn.Linear(2, 1)
        with pytest.raises((RefusedError, JobError)):
            worker.distribute(natural(model), model, "ensemble(steps=5)")

    with Job(2, sync="bsp") as job:
        job.run(refuse)
        said = job.await_failure()
    assert "a rule under which workers step by themselves: full (bsp without servers) or ensemble; the rule of this job is bsp" in said
    assert "NaturalGradient is not one of torch.optim's own classes" in said


def test_nobody_waits_for_one_whose_steps_cannot_be_used(tmp_path: Path) -> None:
    """It goes on with what the others come to. If nothing can be used of anybody, all go on from where they were."""

    def script(worker: Worker) -> list[int]:
        model = nn.Linear(2, 1)
        optimizer = worker.distribute(plain_sgd(model), model, "ensemble(steps=2)")
        versions = []
        for number in range(8):
            optimizer.zero_grad()
            spoilt = (number == 2 and worker.number == 1) or number == 4
            (model(torch.ones(1, 2)).sum() * (torch.inf if spoilt else 1.0)).backward()
            optimizer.step()
            versions.append(optimizer.version)
        assert all(bool(value.isfinite().all()) for value in values(model).values())
        return versions

    with Job(3, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    assert results == [[0, 1, 1, 2, 2, 2, 2, 3]] * 3
    folds = [record for record in audited(tmp_path / "journal") if record["kind"] == "fold"]
    assert [sorted(part["worker"] for part in fold["parts"]) for fold in folds] == [[0, 1, 2], [0, 2], [0, 1, 2]]
