"""A look at the data before training costs nothing, and the role of chief stays with a chief whose script has ended."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from tests.live.harness import DEADLINE_S, Job, Worker, barrier, wait
from tests.live.samples import Trainer, Used, ahead, data, finished, once

FAMILIES = ["bsp", "ensemble(steps=4)", "majority", "adpsgd"]


@pytest.mark.parametrize("sync", FAMILIES)
@pytest.mark.parametrize(("depth", "told"), [(1, True), (4, False)])
def test_a_peek_costs_nothing(tmp_path: Path, sync: str, depth: int, told: bool) -> None:
    """As in PyTorch's tutorial: ``next(iter(loader))``, then ``set_epoch(epoch)``, then the loop; also where a loader fetches ahead."""

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, sync)
        sampler = trainer.optimizer.batch_sampler(data(101), batch_size=4)
        used: Used = []
        for epoch in range(2):
            seen = [next(ahead(sampler, depth)).tolist() for _ in range(2)]
            assert sampler.state_dict()["epoch"] == epoch
            if told:
                sampler.set_epoch(epoch)
            used.append([])
            for batch in ahead(sampler, depth):
                used[-1] += trainer.step(batch)
            assert seen == [used[-1][:4]] * 2, "the pass begins with what the peek has shown"
        trainer.optimizer.pull()
        return used

    with Job(3, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    for epoch in range(2):
        assert once((used[epoch] for used in results), 101)
    assert [report["folded"] for report in finished(job, tmp_path / "journal")] == [101] * 2


def test_a_pass_over_all_data_without_a_step_is_a_look_too(tmp_path: Path) -> None:
    """For instance to find the mean of the inputs. What another epoch's number says goes before."""
    both = barrier(2)

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "bsp")
        sampler = trainer.optimizer.batch_sampler(data(40), batch_size=3)
        batches = iter(sampler)
        looked = list(next(batches))
        both.wait()  # else one may find nothing left: then its look is at the next epoch
        looked += [index for batch in batches for index in batch]
        first = [index for batch in ahead(sampler, 1) for index in trainer.step(batch)]
        assert sorted(first) == sorted(looked)
        next(iter(sampler))
        sampler.set_epoch(5)
        return [first, [index for batch in ahead(sampler, 1) for index in trainer.step(batch)]]

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    assert all(once((used[epoch] for used in results), 40) for epoch in range(2))
    reports = finished(job, tmp_path / "journal")
    assert [(report["epoch"], report["folded"]) for report in reports if report["folded"]] == [(0, 40), (5, 40)]


@pytest.mark.parametrize("sync", ["asp", "psp(c=2, b=0.5)", "majority", "adpsgd"])
def test_the_chief_ends_first_and_keeps_the_role(sync: str) -> None:
    """Workers that fetch ahead see the common end of the last epoch only when they ask for more: the chief may be gone by then."""
    left = threading.Event()

    def script(worker: Worker) -> list[bool]:
        trainer = Trainer(worker, sync)
        trainer.step(torch.arange(3))
        assert worker.session is not None
        if worker.number == 0:
            return [worker.session.chief]
        wait(left)
        for _ in range(5):
            trainer.step(torch.arange(3))
        return [worker.session.chief]

    with Job(3) as job:
        for number in range(3):
            job.start(number, script)
        job.await_state(0, "finished")
        left.set()
        job.join()
        assert job.results(0, 1, 2) == [[True], [False], [False]]


@pytest.mark.parametrize("sync", ["asp", "majority"])
def test_the_role_passes_on_when_the_chief_is_told_to_leave(sync: str) -> None:
    def script(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        session = worker.session
        assert session is not None
        trainer.step(torch.arange(3))
        if worker.number == 0:
            session.link.notice()
            session._at_exit()
            return
        deadline = time.monotonic() + DEADLINE_S
        while not session.chief:
            assert time.monotonic() < deadline, "nobody has become chief"
            trainer.step(torch.arange(3))

    with Job(2) as job:
        job.run(script)
