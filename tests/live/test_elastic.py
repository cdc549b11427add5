"""`offbeat.elastic`, live: streams of which each element is used once, whoever reads, ends or dies."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import Job, Worker, wait
from tests.live.samples import Trainer, Used, finished, once, run
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from offbeat.errors import ConfigurationError, OffbeatWarning
from offbeat.loaders import elastic


class Numbers(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


@pytest.mark.parametrize("sync", ["bsp", "asp", "psp(c=3, b=1.0)", "ensemble(steps=3)", "majority", "adpsgd"])
@pytest.mark.parametrize("size", [50, 48, 3])
def test_each_element_of_a_stream_once(tmp_path: Path, sync: str, size: int) -> None:
    """Of a length that nobody has been told, a whole number of batches or not, or less than a batch for each."""

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, sync)
        loader: Any = elastic(Numbers(size), batch_size=4, optimizer=trainer.optimizer)
        used: Used = []
        for epoch in range(2):
            if size > 12:  # else there is not a batch for everybody
                next(iter(loader))
                loader.set_epoch(epoch)
            used.append(trainer.through(loader))
        return used

    results, reports = run(tmp_path / "journal", 3, script)
    assert all(once((used[epoch] for used in results), size) for epoch in range(2))
    assert [(report["indices"], report["folded"]) for report in reports] == [(size, size)] * 2


@pytest.mark.parametrize("sync", ["asp", "solo"])
def test_what_a_dead_worker_held_is_read_again(tmp_path: Path, sync: str) -> None:
    """Also when the others are far beyond it: they go through the stream once more."""
    others = threading.Event()

    def script(worker: Worker) -> list[int]:
        trainer = Trainer(worker, sync)
        used: list[int] = []
        for batch in elastic(Numbers(61), batch_size=4, optimizer=trainer.optimizer):
            if worker.number == 0 and len(used) == 8:
                wait(others)
                worker.die()
            used += trainer.step(batch)
            if len(used) == 24:
                others.set()
            if worker.number == 0:
                kept[0] = used
        return used

    kept: dict[int, list[int]] = {}
    results, (report,) = run(tmp_path / "journal", 2, script)
    assert once([kept[0], results[1]], 61)
    assert report["returned"] == 4 and report["folded"] == 61


def test_a_stream_of_ready_batches_and_one_without_its_rest(tmp_path: Path) -> None:
    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "bsp")
        ready = elastic(lambda epoch: (torch.arange(5 * n, 5 * n + 5) for n in range(7)), optimizer=trainer.optimizer)
        whole = elastic(DataLoader(Numbers(50), batch_size=4, drop_last=True), optimizer=trainer.optimizer)
        return [trainer.through(loader) for loader in (ready, whole)]

    with Job(2, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    assert once((used[0] for used in results), 35) and once((used[1] for used in results), 48)
    assert [(r["pool"], r["folded"]) for r in finished(job, tmp_path / "journal")] == [(0, 7), (1, 48)]
    assert job.summary is not None and job.summary["samples"] == 35 + 48, "of ready batches the rows are counted"


def test_streams_that_differ_are_found_out() -> None:
    def script(worker: Worker) -> str:
        trainer = Trainer(worker, "bsp")
        try:
            trainer.through(elastic(Numbers(20 + 4 * worker.number), batch_size=4, optimizer=trainer.optimizer))
        except ConfigurationError as error:
            return str(error)
        return ""

    with Job(2) as job:
        said = "".join(job.run(script))
    assert not said or "every worker needs the same stream" in said


def test_a_loader_with_a_length(tmp_path: Path) -> None:
    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "bsp")

        def double(batch: list[int]) -> Tensor:
            return torch.tensor(batch) * 2

        loader = elastic(DataLoader(range(30), 4, shuffle=True, collate_fn=double), optimizer=trainer.optimizer)  # type: ignore[arg-type]
        assert isinstance(loader, DataLoader) and loader.collate_fn is double
        return [[index // 2 for batch in loader for index in trainer.step(batch)] for _ in range(2)]

    results, reports = run(tmp_path / "journal", 2, script)
    assert all(once((used[epoch] for used in results), 30) for epoch in range(2))
    assert [report["folded"] for report in reports] == [30] * 2


def test_a_script_that_counts_on_len_hears_of_a_batch_beyond_it_before_it_has_it() -> None:
    """As timm's script, which divides by the size of the last group of batches: there its traceback was all that it saw."""
    done = threading.Event()

    def script(worker: Worker) -> int:
        trainer = Trainer(worker, "asp")
        loader: Any = elastic(DataLoader(range(24), 4), optimizer=trainer.optimizer)  # type: ignore[arg-type]
        if worker.number == 1:
            wait(done)
            return 0
        for number, batch in enumerate(loader):
            if number == len(loader):
                break
            trainer.step(batch)
        done.set()
        return number

    with pytest.warns(OffbeatWarning, match=r"len\(\) of this loader was 3, and this worker is dealt more batches"), Job(2) as job:
        assert job.run(script) == [3, 0]


class Uneven:
    """A batch sampler of the script: batches of one to five samples, shuffled by random numbers of its own."""

    def __init__(self, size: int) -> None:
        self.batches, self.random = list[list[int]](), random.Random(3)
        left = list(range(size))
        while left:
            self.batches.append([left.pop() for _ in range(min(len(left), 1 + len(self.batches) % 5))])

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        self.random.shuffle(self.batches)
        return iter([list(batch) for batch in self.batches])


@pytest.mark.parametrize("sync", ["bsp", "ssp(staleness=2)", "full"])
@pytest.mark.parametrize("deal", ["pool", "even"])
def test_whole_batches_of_different_sizes(tmp_path: Path, sync: str, deal: Any) -> None:
    """Each sample of each epoch once, also where a worker dies; and pushes weigh by their samples."""

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, sync)
        whole = {tuple(batch) for batch in Uneven(47)}
        loader: Any = elastic(DataLoader(range(47), batch_sampler=Uneven(47)), optimizer=trainer.optimizer, deal=deal)  # type: ignore[arg-type]
        used: Used = []
        for _ in range(2):
            used.append([])
            for batch in loader:
                assert tuple(sorted(batch.tolist())) in {tuple(sorted(one)) for one in whole}
                used[-1] += trainer.step(batch)
        return used

    with Job(3, journal=str(tmp_path / "journal")) as job:
        results = job.run(script)
    assert all(once((used[epoch] for used in results), 47) for epoch in range(2))
    assert [report["folded"] for report in finished(job, tmp_path / "journal")] == [len(Uneven(47))] * 2
    assert job.summary is not None and job.summary["samples"] == 2 * 47
