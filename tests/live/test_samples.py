"""The elastic batch sampler, live: each index of an epoch is used once, or the epoch's report says why not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat.data import ElasticBatchSampler
from offbeat.errors import ConfigurationError
from offbeat.optimizer import DistributedOptimizer
from offbeat.report.tally import Tally
from offbeat.runtime.journal import read
from tests.live.harness import Job, Worker, barrier, wait

Used = list[list[int]]
"""The indices that one worker used, epoch by epoch."""


def data(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


class Trainer:
    """A worker with a model of one number per kind of sample, so that a step is cheap."""

    def __init__(self, worker: Worker, sync: str = "asp") -> None:
        self.worker = worker
        self.model = nn.Linear(1, 1)
        self.optimizer: DistributedOptimizer = worker.distribute(torch.optim.SGD(self.model.parameters(), lr=1e-6), self.model, sync)

    def loader(self, size: int, batch: int, **options: Any) -> DataLoader[Any]:
        dataset = data(size)
        return DataLoader(dataset, batch_sampler=self.optimizer.batch_sampler(dataset, batch_size=batch), **options)

    def step(self, *batches: Tensor, scale: float = 1.0) -> list[int]:
        self.optimizer.zero_grad()
        (self.model(torch.cat(batches).float().unsqueeze(1)).square().mean() * scale).backward()
        self.optimizer.step()
        return [int(index) for batch in batches for index in batch]

    def pause(self) -> None:
        """Workers of different speeds."""
        threading.Event().wait(0.001 * self.worker.number)


def once(used: Iterable[Iterable[int]], size: int) -> bool:
    return sorted(index for part in used for index in part) == list(range(size))


def finished(job: Job, journal: Path) -> list[dict[str, Any]]:
    """The epochs' reports, after the books have been checked."""
    assert Tally.of(read(journal)).problems() == []
    assert job.summary is not None
    reports: list[dict[str, Any]] = job.summary["epochs"]
    for report in reports:
        assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"]
        assert sum(e["stop"] - e["start"] for e in report["exceptions"]) == report["indices"] - report["folded"]
    return reports


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp(staleness=1)"])
def test_every_index_once(tmp_path: Path, sync: str) -> None:
    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, sync)
        used: Used = []
        for _ in range(3):
            used.append([])
            for (batch,) in loader_of(trainer):
                used[-1] += trainer.step(batch)
                trainer.pause()
        return used

    def loader_of(trainer: Trainer) -> DataLoader[Any]:
        if not hasattr(trainer, "kept"):
            trainer.kept = trainer.loader(101, 4)  # type: ignore[attr-defined]
        kept: DataLoader[Any] = trainer.kept  # type: ignore[attr-defined]
        return kept

    with Job(3, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    for epoch in range(3):
        assert once((used[epoch] for used in results), 101)
    assert results[0][0] != results[0][1], "each epoch has an order of its own"
    assert [report["folded"] for report in finished(job, tmp_path / "journal")] == [101] * 3


def test_a_loader_that_fetches_ahead(tmp_path: Path) -> None:
    def script(worker: Worker) -> Used:
        trainer = Trainer(worker)
        loader = trainer.loader(60, 3, num_workers=2)
        used: Used = []
        for _ in range(2):
            used.append([])
            for (batch,) in loader:
                used[-1] += trainer.step(batch)
                trainer.pause()
        trainer.optimizer.pull()
        return used

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    for epoch in range(2):
        assert once((used[epoch] for used in results), 60)
    assert [report["folded"] for report in finished(job, tmp_path / "journal")] == [60] * 2


def ahead(sampler: ElasticBatchSampler, depth: int) -> Iterator[Tensor]:
    """Batches as a `DataLoader` with worker processes asks for them, without the processes."""
    fetched: list[Tensor] = []
    batches = iter(sampler)
    more = True
    while more or fetched:
        while more and len(fetched) < depth:
            indices = next(batches, None)
            more = indices is not None
            if indices is not None:
                fetched.append(torch.tensor(indices))
        if fetched:
            yield fetched.pop(0)


@pytest.mark.parametrize("depth", [1, 4])
def test_a_loop_left_early(tmp_path: Path, depth: int) -> None:
    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "bsp")
        sampler = trainer.optimizer.batch_sampler(data(100), batch_size=5)
        used: Used = [[], []]
        for number, batch in enumerate(ahead(sampler, depth)):
            used[0] += trainer.step(batch)
            if number == 2:
                break
        for batch in ahead(sampler, depth):
            used[1] += trainer.step(batch)
        return used

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    first, second = finished(job, tmp_path / "journal")
    assert first["folded"] == sum(len(used[0]) for used in results) == 30
    assert first["unused"] == 70
    assert {e["why"] for e in first["exceptions"]} == {"unused: no worker took it"}
    assert once((used[1] for used in results), 100) and second["folded"] == 100


def test_who_has_no_samples_left_takes_those_of_the_dead(tmp_path: Path) -> None:
    size, batch = 80, 4
    done: list[list[int]] = []
    others_idle, joined = threading.Event(), barrier(3)

    def script(worker: Worker) -> None:
        trainer = Trainer(worker)
        sampler = trainer.optimizer.batch_sampler(data(size), batch_size=batch)
        joined.wait()
        for number, indices in enumerate(sampler):
            if worker.number == 1 and number == 1:
                wait(others_idle)
                worker.die()
            done.append(trainer.step(torch.tensor(indices)))
            if sum(map(len, done)) == size - batch:
                others_idle.set()

    with Job(3, journal=str(tmp_path / "journal")) as job:
        job.run(script)
    (report,) = finished(job, tmp_path / "journal")
    assert once(done, size)
    assert report["folded"] == size and report["returned"] == batch
    assert job.summary is not None and job.summary["per_worker"][1]["deaths"] == 1


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
        threads = [job.start(number, script) for number in range(3)]
        job.await_state(1, "dead")
        dead.set()
        job.join(*threads)
    (report,) = finished(job, tmp_path / "journal")
    assert once(done, size)
    assert report["folded"] == size and report["returned"] == depth * batch


def test_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    def script(worker: Worker) -> list[float]:
        trainer = Trainer(worker, "bsp")
        for number, (batch,) in enumerate(trainer.loader(40, 4)):
            trainer.step(batch, scale=float("nan") if worker.number == 1 and number == 2 else 1.0)
        return [p.item() for p in trainer.model.parameters()]

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    (report,) = finished(job, tmp_path / "journal")
    assert report["rejected"] == 4 and report["folded"] == 36
    assert report["exceptions"][0]["why"] == "rejected: gradient not finite in weight"
    assert torch.isfinite(torch.tensor(results)).all()


def test_a_gradient_that_is_not_finite_can_stop_the_job() -> None:
    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model, nonfinite="stop")
        loss = model(torch.ones(1, 1)).sum() * (float("inf") if worker.number == 1 else 1.0)
        loss.backward()
        if worker.number == 1:
            with pytest.raises(FloatingPointError, match="gradient of weight is not finite"):
                optimizer.step()

    with Job(2) as job:
        job.run(script)
        job._until(lambda: job.failure is not None, "the failure")
    assert job.failure == "worker 1 stopped the job: the gradient of weight is not finite"


def test_two_samplers_in_turn(tmp_path: Path) -> None:
    def script(worker: Worker) -> list[Used]:
        trainer = Trainer(worker)
        loaders = [trainer.loader(30, 4), trainer.loader(45, 7)]
        used: list[Used] = [[], []]
        for _ in range(2):
            for loader, into in zip(loaders, used, strict=True):
                into.append([index for (batch,) in loader for index in trainer.step(batch)])
        return used

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    for epoch in range(2):
        assert once((used[0][epoch] for used in results), 30)
        assert once((used[1][epoch] for used in results), 45)
    assert sorted((r["pool"], r["epoch"], r["folded"]) for r in finished(job, tmp_path / "journal")) == [
        (0, 0, 30),
        (0, 1, 30),
        (1, 0, 45),
        (1, 1, 45),
    ]


def test_two_samplers_at_once(tmp_path: Path) -> None:
    """As in training on labelled and unlabelled samples: each step takes a batch of both."""

    def script(worker: Worker) -> list[Counter[int]]:
        trainer = Trainer(worker, "bsp")
        loaders = trainer.loader(48, 4), trainer.loader(72, 6)
        used: list[Counter[int]] = [Counter(), Counter()]
        for (a,), (b,) in zip(*loaders, strict=False):
            trainer.step(a, b)
            used[0].update(a.tolist())
            used[1].update(b.tolist())
        trainer.optimizer.pull()
        return used

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    finished(job, tmp_path / "journal")
    for pool, size in enumerate((48, 72)):
        assert results[0][pool] + results[1][pool] == Counter(range(size))
    assert job.summary is not None
    assert sorted((r["pool"], r["folded"], r["unused"]) for r in job.summary["epochs"]) == [(0, 48, 0), (1, 72, 0)]


def test_resuming_at_an_epoch(tmp_path: Path) -> None:
    def script(worker: Worker) -> tuple[Used, Used, int]:
        trainer = Trainer(worker)
        first, second = (trainer.optimizer.batch_sampler(data(25), batch_size=2, seed=5) for _ in range(2))
        first.set_epoch(3)
        batches: list[Used] = [[], []]
        for _ in range(2):
            batches[0].append([i for indices in first for i in trainer.step(torch.tensor(indices))])
        second.load_state_dict({"epoch": 4})
        batches[1].append([i for indices in second for i in trainer.step(torch.tensor(indices))])
        assert first.state_dict() == second.state_dict() == {"epoch": 5}
        return batches[0], batches[1], len(first)

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    assert [(r["pool"], r["epoch"]) for r in finished(job, tmp_path / "journal")] == [(0, 3), (0, 4), (1, 4)]
    assert [length for _, _, length in results] == [7, 7]
    assert once((first[0] for first, _, _ in results), 25) and once((second[0] for _, second, _ in results), 25)


def test_impossible_data() -> None:
    def script(worker: Worker) -> None:
        trainer = Trainer(worker)
        with pytest.raises(ConfigurationError, match="1 samples for 2 workers"):
            trainer.loader(1, 1)
        with pytest.raises(ConfigurationError, match="batch_size"):
            trainer.loader(10, 0)
        with pytest.raises(ConfigurationError, match="length"):
            trainer.optimizer.batch_sampler(iter([1, 2]), batch_size=1)  # type: ignore[arg-type]

    with Job(2) as job:
        job.run(script)
