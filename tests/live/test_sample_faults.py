"""Samples when things go wrong, live: who is slow, dies, or computes a gradient that cannot be used; each index stays accounted for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.live.harness import Job, Worker, barrier, wait
from tests.live.samples import Trainer, ahead, data, finished, once, run
from torch import nn


@pytest.mark.parametrize("dies", [False, True], ids=["slow", "dead"])
def test_who_has_no_samples_left_takes_over_from_the_slow_and_takes_those_of_the_dead(tmp_path: Path, dies: bool) -> None:
    size, batch = 80, 4
    done: list[list[int]] = []
    others_idle, joined = threading.Event(), barrier(3)

    def script(worker: Worker) -> int:
        trainer = Trainer(worker)
        sampler = trainer.optimizer.batch_sampler(data(size), batch_size=batch)
        joined.wait()
        steps = 0
        for steps, indices in enumerate(sampler, start=1):
            if worker.number == 1 and steps == 1 + dies:
                wait(others_idle)
                if dies:
                    worker.die()
            done.append(trainer.step(torch.tensor(indices)))
            if sum(map(len, done)) == size - batch:
                others_idle.set()
        return steps

    with Job(3, journal=str(tmp_path / "journal")) as job:
        steps = job.run(script)
    (report,) = finished(job, tmp_path / "journal")
    assert once(done, size)
    assert dies or (steps[1] <= 1 and sum(steps) == size / batch)
    assert report["folded"] == size and report["returned"] == batch * dies
    assert job.summary is not None and job.summary["per_worker"][1]["deaths"] == dies


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_the_samples_of_the_dead_are_done_again(tmp_path: Path, sync: str) -> None:
    size, batch, depth = 80, 4, 3
    done: list[list[int]] = []
    dead, joined = threading.Event(), barrier(3)

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        sampler = trainer.optimizer.batch_sampler(data(size), batch_size=batch)
        joined.wait()
        for number, indices in enumerate(ahead(sampler, depth)):
            if number == 2:
                wait(dead) if worker.number != 1 else worker.die()
            done.append(trainer.step(indices))

    with Job(3, journal=str(tmp_path / "journal")) as job:
        threads = job.start_all(script)
        job.await_state(1, "dead")
        dead.set()
        job.join(*threads)
    (report,) = finished(job, tmp_path / "journal")
    assert once(done, size)
    assert report["folded"] == size and report["returned"] == depth * batch


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_a_gradient_that_is_not_finite(tmp_path: Path, sync: str) -> None:
    def script(worker: Worker) -> list[float]:
        trainer = Trainer(worker, sync)
        for number, (batch,) in enumerate(trainer.loader(40, 4)):
            trainer.step(batch, scale=float("nan") if worker.number == 1 and number == 2 else 1.0)
        return [p.item() for p in trainer.model.parameters()]

    results, (report,) = run(tmp_path / "journal", 2, script)
    assert report["rejected"] == 4 and report["folded"] == 36
    assert report["exceptions"][0]["why"] == "rejected: gradient not finite in weight"
    assert torch.isfinite(torch.tensor(results)).all()


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_a_gradient_that_is_not_finite_can_stop_the_job(sync: str) -> None:
    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, sync, nonfinite="stop")
        loss = model(torch.ones(1, 1)).sum() * (float("inf") if worker.number == 1 else 1.0)
        loss.backward()
        if worker.number == 1:
            with pytest.raises(FloatingPointError, match="gradient of weight is not finite"):
                optimizer.step()

    with Job(2) as job:
        job.run(script)
        assert job.await_failure() == "worker 1 stopped the job: the gradient of weight is not finite"
