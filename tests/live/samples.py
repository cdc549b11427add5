"""What the tests of samplers share: a worker that trains on the indices themselves, and the checks of an epoch's books."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.device import DEVICE
from tests.live.harness import Job, Script, Worker, seeded
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.optimizer import DistributedOptimizer
from offbeat.sampler import ElasticBatchSampler

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
        self.steps = 0

    def sampler(self, size: int, batch: int, **options: Any) -> ElasticBatchSampler:
        return self.optimizer.batch_sampler(data(size), batch_size=batch, **options)

    def loader(self, size: int, batch: int, **options: Any) -> DataLoader[Any]:
        return DataLoader(data(size), batch_sampler=self.sampler(size, batch), **options)

    def step(self, *batches: Any, scale: float = 1.0) -> list[int]:
        """Train on the batches of samplers or loaders. Returns their indices."""
        used = [index for batch in batches for index in indices(batch)]
        self.optimizer.zero_grad()
        (self.model(torch.tensor(used).float().unsqueeze(1)).square().mean() * scale).backward()
        self.optimizer.step()
        self.steps += 1
        return used

    def through(self, batches: Iterable[Any], pause_s: float = 0.0) -> list[int]:
        """Train on all of these batches; workers that pause have different speeds. Returns their indices."""
        used: list[int] = []
        for batch in batches:
            used += self.step(batch)
            threading.Event().wait(pause_s * self.worker.number)
        return used


def indices(batch: Any) -> list[int]:
    """The indices in a batch of a sampler or of a loader."""
    return torch.as_tensor(batch[0] if isinstance(batch, list) and isinstance(batch[0], Tensor) else batch).tolist()


class Training:
    """A worker that trains on random numbers with Adam; its model has four tensors, so that it can be spread over some servers."""

    def __init__(self, worker: Worker, sync: str, lr: float = 0.01) -> None:
        self.worker = worker
        with seeded(worker.number):
            self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(DEVICE)
        self.optimizer: DistributedOptimizer = worker.distribute(torch.optim.Adam(self.model.parameters(), lr=lr), self.model, sync)

    def step(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        with self.optimizer.interruptible():
            (self.model(torch.randn(4, 6, device=DEVICE)).square().mean() * scale).backward()
        self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def everything(self) -> tuple[int, list[Tensor]]:
        """The version, and all that is of this version: the parameters, and the optimizer's state."""
        state = [entry[key] for entry in self.optimizer.state_dict()["state"].values() for key in ("exp_avg", "exp_avg_sq", "step")]
        return self.optimizer.version, [*self.parameters(), *(part.clone() for part in state)]


def of_kind(records: Iterable[dict[str, Any]], kind: str, worker: int | None = None) -> list[dict[str, Any]]:
    """The records of a kind, of all workers or of one."""
    return [record for record in records if record["kind"] == kind and (worker is None or record["worker"] == worker)]


def once(used: Iterable[Iterable[int]], size: int) -> bool:
    return sorted(index for part in used for index in part) == list(range(size))


def audited(journal: Path) -> list[dict[str, Any]]:
    """The records of a journal, in which every push has one fate at each shard that has heard of it."""
    records = list(read(journal))
    assert Tally.of(records).problems() == []
    pushed, settled = (Counter(record.get("shard") for record in of_kind(records, kind)) for kind in ("pushed", "settle"))
    assert pushed == settled
    return records


def finished(job: Job, journal: Path) -> list[dict[str, Any]]:
    """The epochs' reports, after the books have been checked."""
    audited(journal)
    assert job.summary is not None
    reports: list[dict[str, Any]] = job.summary["epochs"]
    for report in reports:
        assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"]
        assert sum(e["stop"] - e["start"] for e in report["exceptions"]) == report["indices"] - report["folded"]
    return reports


def run(journal: Path, workers: int, script: Script, **options: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """Let all workers of a job run a script; what it returned, by worker, and the epochs' reports, after the books have been checked."""
    with Job(workers, journal=str(journal), **options) as job:
        results = job.run(script)
    return results, finished(job, journal)


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


def pushes(journal: Path) -> list[dict[str, Any]]:
    return [{"steps": 1, **record} for record in read(journal) if record["kind"] == "pushed"]


def all_is_pushed(journal: Path, used: list[int]) -> None:
    """Every step that the workers have made is in a push, with its samples and its lease."""
    steps = Counter[int]()
    for push in pushes(journal):
        steps[push["worker"]] += push["steps"]
        assert len(push["leases"]) == push["steps"] and push["samples"] <= 4 * push["steps"]
    assert [steps[worker] for worker in range(len(used))] == used
