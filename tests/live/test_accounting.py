"""A sample counts in the step whose gradient contains it, in jobs; scripts in one process: ``tests/test_accounting.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker
from tests.live.samples import audited
from torch import nn
from torch.utils.data import TensorDataset

import offbeat
from offbeat.core.leases import adds_up
from offbeat.types import Reduction

SIZE, BATCH, EPOCHS = 40, 8, 4


class OneHot:
    """A worker whose parameters tell, after steps with lr=1, how often each sample has been used."""

    def __init__(self, worker: Worker, sync: str, reduction: Reduction = "mean", **options: Any) -> None:
        self.model = nn.Linear(SIZE, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optimizer = worker.distribute(optimizer, self.model, sync, reduction=reduction)
        data = TensorDataset(torch.eye(SIZE), torch.arange(SIZE))
        self.loader: Any = offbeat.elastic(data, batch_size=BATCH, optimizer=self.optimizer, **options)

    def backward(self, x: torch.Tensor) -> None:
        self.model(x).sum().backward()

    def used(self) -> list[int]:
        self.optimizer.pull()
        return [round(-weight) for weight in self.model.weight.detach()[0].tolist()]


def books(job: Job, journal: Path) -> list[dict[str, Any]]:
    audited(journal)
    assert job.summary is not None
    reports: list[dict[str, Any]] = job.summary["epochs"]
    assert all(adds_up(report) for report in reports)
    return reports


@pytest.mark.smoke
@pytest.mark.parametrize("sync", ["asp", "bsp", "majority", "ensemble"])
def test_a_group_that_crosses_the_end_and_a_batch_that_is_left_out(tmp_path: Path, sync: str) -> None:
    """Each worker takes groups of two batches from an endless loader, and leaves one out, not the first of its pass.

    A worker may be dealt a single batch of an epoch: a pass that leaves it out is a look, and the next pass begins with that batch.
    """
    left_out: list[int] = []

    def script(worker: Worker) -> list[int]:
        one = OneHot(worker, sync)

        def cycle() -> Iterator[Any]:
            while True:
                yield from enumerate(one.loader)

        batches, leaves = cycle(), True
        for _ in range(EPOCHS * SIZE // BATCH // 4):
            taken = 0
            while taken < 2:
                number, (x, index) = next(batches)
                if leaves and number > 0:
                    leaves = False
                    left_out.extend(index.tolist())
                    continue
                one.backward(x)
                taken += 1
            one.optimizer.step()
            one.optimizer.zero_grad()
        one.optimizer._session.barrier()
        return one.used()

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    reports = books(job, tmp_path / "journal")
    assert sum(report["skipped"] for report in reports) == len(left_out) == 2 * BATCH
    assert sum(report["folded"] for report in reports) == EPOCHS * SIZE
    assert all(report["rejected"] == report["dropped"] == 0 for report in reports)
    if sync == "asp":  # each fold is of one gradient, so that weights are whole numbers of uses
        assert sum(results[0]) == sum(results[1]) == EPOCHS * SIZE


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_equal_shares_have_the_length_that_the_loader_says(tmp_path: Path, sync: str) -> None:
    def script(worker: Worker) -> list[int]:
        one, seen = OneHot(worker, sync, deal="even"), []
        for _ in range(2):
            for number, (x, index) in enumerate(one.loader, 1):
                one.backward(x)
                seen += index.tolist()
                if number == len(one.loader):
                    one.optimizer.step()
                    one.optimizer.zero_grad()
        return seen

    with Job(2, journal=str(tmp_path / "journal")) as job:
        first, second = job.run(script)
    assert len(first) == len(second) == SIZE
    for epoch in range(2):
        part = slice(epoch * SIZE // 2, (epoch + 1) * SIZE // 2)
        assert sorted(first[part] + second[part]) == list(range(SIZE))
    assert set(first[: SIZE // 2]) != set(first[SIZE // 2 :]), "new shares in the next epoch"
    assert [(report["folded"], report["indices"]) for report in books(job, tmp_path / "journal")] == [(SIZE, SIZE)] * 2


@pytest.mark.parametrize("sync", ["bsp", "full", "asp"])
def test_sums_of_unequal_batches_are_those_of_one_process(tmp_path: Path, sync: str) -> None:
    def script(worker: Worker) -> list[int]:
        one = OneHot(worker, sync, "sum")
        x = torch.eye(SIZE)[:24] if worker.number == 0 else torch.eye(SIZE)[24:]
        one.backward(x)
        one.optimizer.step(samples=len(x))
        one.optimizer._session.barrier()
        return one.used()

    with Job(2, journal=str(tmp_path / "journal")) as job:
        assert job.run(script) == [[1] * SIZE] * 2
    books(job, tmp_path / "journal")


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_sums_use_each_sample_alike_over_the_ends_of_epochs(tmp_path: Path, sync: str) -> None:
    """Folds at an epoch's end are of fewer gradients: a mean would weigh their samples more, as a smaller last batch is weighed."""

    def script(worker: Worker) -> list[int]:
        one = OneHot(worker, sync, "sum")

        def cycle() -> Iterator[Any]:
            while True:
                yield from one.loader

        batches = cycle()
        for _ in range(EPOCHS * SIZE // BATCH // 4):
            for _ in range(2):
                one.backward(next(batches)[0])
            one.optimizer.step()
            one.optimizer.zero_grad()
        one.optimizer._session.barrier()
        return one.used()

    with Job(2, journal=str(tmp_path / "journal")) as job:
        assert job.run(script) == [[EPOCHS] * SIZE] * 2
    books(job, tmp_path / "journal")
