"""What a job has of a worker besides its gradients: BatchNorm's statistics, and settings, which do not count once it is dead."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker, barrier, wait
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


def test_the_settings_of_the_dead_do_not_count() -> None:
    """The learning rate is that of the worker furthest on, among the living."""
    thought_dead = threading.Event()

    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.5), model, "asp")
        if worker.number == 1:
            for _ in range(3):
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            worker.freeze()
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
        job.run_past_death(script, 1, thought_dead)
