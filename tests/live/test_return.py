"""BatchNorm's statistics at an epoch's end, and workers that come late, come back, or were thought dead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker, barrier, wait
from tests.live.samples import audited
from torch import Tensor, nn


class WithNorm(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, optimizer: Any, size: int = 4) -> None:
        optimizer.zero_grad()
        x = torch.randn(size, 3, generator=self.generator) * (1 + self.generator.initial_seed())
        self.head(self.norm(x)).square().mean().backward()
        optimizer.step()

    def statistics(self) -> tuple[Tensor, Tensor, int]:
        norm = self.norm
        assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
        return norm.running_mean.clone(), norm.running_var.clone(), int(norm.num_batches_tracked)


@pytest.mark.parametrize(("sync", "hosts"), [("bsp", {}), ("bsp", {1: "other"}), ("majority", {})], ids=["shm", "mixed", "ranks"])
def test_statistics_are_averaged_at_the_end_of_an_epoch(sync: str, hosts: dict[int, str]) -> None:
    def script(worker: Worker) -> list[tuple[Tensor, Tensor, int]]:
        model = WithNorm(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, sync)
        own = model.statistics()
        sampler = optimizer.batch_sampler(range(30), batch_size=4)
        for indices in sampler:
            model.step(optimizer, len(indices) + 1)
            own = model.statistics()
        return [own, model.statistics()]

    with Job(3, hosts=hosts) as job:
        results = job.run(script)
    owns, afters = zip(*results, strict=True)
    for after in afters:
        for part in (0, 1):
            torch.testing.assert_close(after[part], torch.stack([own[part] for own in owns]).mean(dim=0))
        assert after[2] == max(own[2] for own in owns) > 0


def test_a_joiner_gets_the_mean() -> None:
    stand, joined = barrier(3), threading.Event()
    standing: list[tuple[Tensor, Tensor, int]] = []

    def stay(worker: Worker) -> None:
        model = WithNorm(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for _ in range(3):
            model.step(optimizer)
        if worker.number == 2:
            worker.die()
        standing.append(model.statistics())
        stand.wait()
        wait(joined)

    def join(worker: Worker) -> None:
        model = WithNorm(worker.number)
        worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
        mean, variance, count = model.statistics()
        torch.testing.assert_close(mean, torch.stack([m for m, _, _ in standing]).mean(dim=0))
        torch.testing.assert_close(variance, torch.stack([v for _, v, _ in standing]).mean(dim=0))
        assert count == 3
        joined.set()

    with Job(3) as job:
        job.start_all(stay)
        job.await_state(2, "dead")
        stand.wait()
        job.start(2, join)
        job.join()


def test_a_returning_worker_cannot_undo_what_the_others_have_learnt() -> None:
    """Its script wraps first and then loads an old checkpoint into the model, as it did at the start."""
    stand, joined = barrier(2), threading.Event()

    def stay(worker: Worker) -> None:
        model = WithNorm(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
        model.step(optimizer)
        if worker.number == 1:
            worker.die()
        before = [p.detach().clone() for p in model.parameters()]
        stand.wait()
        wait(joined)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        model.step(optimizer)

    def join(worker: Worker) -> None:
        model = WithNorm(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        joined.set()
        model.step(optimizer)
        assert optimizer.version == 2 and all(bool(p.any()) for p in model.parameters())

    with Job(2, servers=2) as job:
        job.start_all(stay)
        job.await_state(1, "dead")
        stand.wait()
        job.start(1, join)
        job.join()


def test_the_settings_of_the_dead_do_not_count() -> None:
    """The learning rate is that of the worker furthest on, among the living."""
    stopped, thought_dead = threading.Event(), threading.Event()

    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.5), model, "asp")
        if worker.number == 1:
            for _ in range(3):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            worker.freeze()
            stopped.set()
            wait(thought_dead)
            worker.die()
        wait(thought_dead)
        optimizer.pull()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        assert optimizer.version == 4
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))

    with Job(2, timeout_s=1.0) as job:
        job.start_all(script)
        wait(stopped)
        job.await_state(1, "dead")
        thought_dead.set()
        job.join()


@pytest.mark.parametrize("sync", ["bsp", "asp", "psp(c=3, b=0.5)"])
@pytest.mark.parametrize("hosts", [{}, {1: "other"}], ids=["shm", "tcp"])
def test_a_worker_that_was_thought_dead_comes_back(tmp_path: Path, sync: str, hosts: dict[int, str]) -> None:
    thought_dead, back = threading.Event(), threading.Event()

    def script(worker: Worker) -> list[float]:
        model = WithNorm(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model, sync)
        if worker.number != 1:
            while not back.is_set():
                model.step(optimizer)
            return []
        model.step(optimizer)
        worker.freeze()
        wait(thought_dead)
        worker.thaw()
        for _ in range(5):  # the first is the late one
            model.step(optimizer)
        back.set()
        return []

    with Job(3, servers=2, hosts=hosts, timeout_s=1.0, journal=str(tmp_path / "journal")) as job:
        job.start_all(script)
        job.await_state(1, "dead")
        thought_dead.set()
        job.join()
    records = audited(tmp_path / "journal")
    mine = [record for record in records if record["kind"] == "settle" and record["worker"] == 1]
    late = {record.get("shard"): record["reason"] for record in reversed(mine) if record["fate"] == "rejected"}  # the first of each shard
    assert late == dict.fromkeys((0, 1) if "psp" in sync else (None,), "sent by incarnation 1, which was declared dead")
    assert sum(record["fate"] == "folded" and record["incarnation"] > 1 for record in mine) > 0
    states = [record["state"] for record in records if record["kind"] == "state_changed" and record["worker"] == 1]
    assert states[:4] == ["alive", "dead", "recovered", "alive"] and states[-1] == "finished"
