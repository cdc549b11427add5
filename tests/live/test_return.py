"""What a job has of a worker besides its gradients: BatchNorm's statistics, and settings, which do not count once it is dead."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker, barrier, wait
from torch import Tensor, nn

from offbeat.runtime.coordination.buffers import BufferBook
from offbeat.types import WorkerId


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


@pytest.mark.parametrize("sync", ["bsp", "majority"])
def test_buffers_of_every_kind_are_averaged_and_those_that_do_not_change_are_sent_once(sync: str) -> None:
    sent: list[list[int]] = []

    def script(worker: Worker) -> list[Tensor]:
        model = WithNorm(worker.number)
        model.norm.to(torch.bfloat16)
        model.register_buffer("mask", torch.ones(1000, dtype=torch.bool))
        model.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        optimizer = worker.distribute(torch.optim.SGD(model.head.parameters(), lr=0.01), model, sync)
        mean, seen, mask = model.norm.running_mean, model.get_buffer("seen"), model.get_buffer("mask")
        assert mean is not None
        for indices in optimizer.batch_sampler(range(24), batch_size=4):
            optimizer.zero_grad()
            seen[worker.number] = True
            mean.add_(worker.number + 1)
            model.head(torch.ones(len(indices), 3)).sum().backward()
            optimizer.step()
            kept = mean.clone()
        return [kept, mean.clone(), seen.clone(), mask.clone()]

    plain = BufferBook.put

    def put(book: BufferBook, worker: WorkerId, layout: list[Any], changed: list[int], payload: Any) -> None:
        sent.append(changed)
        plain(book, worker, layout, changed, payload)

    with pytest.MonkeyPatch.context() as patch, Job(2) as job:
        patch.setattr(BufferBook, "put", put)
        results = job.run(script)
    for _, mean, seen, mask in results:
        torch.testing.assert_close(mean, torch.stack([kept.double() for kept, *_ in results]).mean(0).to(torch.bfloat16))
        assert seen.tolist() == [True, True, False] and mask.all()
    assert sorted(map(len, sent))[-2:] == [5, 5], "each worker sends all once"
    assert all(3 not in changed for changed in sent if len(changed) < 5), "the mask never changes"


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
