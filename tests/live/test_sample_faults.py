"""Samples when things go wrong, live: who is slow, dies, or computes a gradient that cannot be used; each index stays accounted for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from tests.live.harness import Job, Worker, barrier, wait
from tests.live.samples import Trainer, ahead, finished, of_kind, once, run
from tests.support.rule_examples import spelled
from torch import nn

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.journal.file import read


@pytest.mark.parametrize("dies", [False, True], ids=["slow", "dead"])
def test_who_has_no_samples_left_takes_over_from_the_slow_and_takes_those_of_the_dead(tmp_path: Path, dies: bool) -> None:
    size, batch = 80, 4
    done: list[list[int]] = []
    others_idle, joined = threading.Event(), barrier(3)

    def script(worker: Worker) -> int:
        trainer = Trainer(worker)
        sampler = trainer.sampler(size, batch)
        joined.wait()
        for number, indices in enumerate(sampler):
            if worker.number == 1 and number == dies:
                wait(others_idle)
                if dies:
                    worker.die()
            done.append(trainer.step(indices))
            if sum(map(len, done)) == size - batch:
                others_idle.set()
        return trainer.steps

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
        sampler = trainer.sampler(size, batch)
        joined.wait()
        for number, indices in enumerate(ahead(sampler, depth)):
            if number == 2:
                wait(dead) if worker.number != 1 else worker.die()
            done.append(trainer.step(indices))

    with Job(3, journal=str(tmp_path / "journal")) as job:
        job.run_past_death(script, 1, dead)
    (report,) = finished(job, tmp_path / "journal")
    assert once(done, size)
    assert report["folded"] == size and report["returned"] == depth * batch


@pytest.mark.parametrize(("sync", "servers"), [("bsp", 1), ("full", 1), ("psp(c=2)", 2), *((rule, 1) for rule in spelled(GossipRule))])
def test_a_gradient_that_is_not_finite_stays_out_of_everything_and_its_worker_goes_on(tmp_path: Path, sync: str, servers: int) -> None:
    def script(worker: Worker) -> list[float]:
        trainer = Trainer(worker, sync)
        for number, batch in enumerate(trainer.sampler(40, 4, deal="even")):
            trainer.step(batch, scale=float("nan") if worker.number == 1 and number == 2 else 1.0)
        return [p.item() for p in trainer.model.parameters()]

    results, (report,) = run(tmp_path / "journal", 2, script, servers=servers)
    assert report["rejected"] == 4 and report["folded"] == 36
    assert report["exceptions"][0]["why"] == "rejected: gradient not finite in weight"
    assert torch.isfinite(torch.tensor(results)).all()
    fates = [record["fate"] for record in of_kind(read(tmp_path / "journal"), "settle")]
    assert fates.count("rejected") == servers and fates.count("folded") == 9 * servers, "under psp each shard has a fate for it"


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_a_gradient_that_is_not_finite_can_stop_the_job(sync: str) -> None:
    joined = barrier(2)

    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, sync, nonfinite="stop")
        joined.wait()  # a worker that still joins finds the server gone
        loss = model(torch.ones(1, 1)).sum() * (float("inf") if worker.number == 1 else 1.0)
        loss.backward()
        if worker.number == 1:
            with pytest.raises(FloatingPointError, match="gradient of weight is not finite"):
                optimizer.step()

    with Job(2) as job:
        job.run(script)
        assert job.await_failure() == "worker 1 stopped the job: the gradient of weight is not finite"
