"""The elastic batch sampler, live: each index of an epoch is used once, or the epoch's report says why not."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import cycle, islice
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch
from tests.live.harness import APART, Job, Worker, barrier, wait
from tests.live.samples import Trainer, Used, ahead, all_is_pushed, finished, once, pushes, run

from offbeat.errors import ConfigurationError
from offbeat.journal.file import read


@pytest.mark.parametrize(
    ("sync", "loaders", "job"),
    [
        ("bsp", 0, {}),
        ("asp", 0, {}),
        ("ssp(staleness=1)", 0, {}),
        ("asp", 2, {}),
        ("ensemble(steps=5)", 0, {}),
        ("ensemble(steps=5)", 1, {}),
        ("ensemble(steps=5)", 0, {"hosts": APART, "servers": 2}),
    ],
)
def test_every_index_once(tmp_path: Path, sync: str, loaders: int, job: dict[str, Any]) -> None:
    """Also where a loader fetches ahead, or where local steps do not divide an epoch."""

    def script(worker: Worker) -> tuple[Used, int]:
        trainer = Trainer(worker, sync)
        loader = trainer.loader(101, 4, num_workers=loaders)
        used = [trainer.through(loader, pause_s=0.001) for _ in range(3)]
        trainer.optimizer.pull()
        return used, trainer.steps

    results, reports = run(tmp_path / "journal", 3, script, **job)
    for epoch in range(3):
        assert once((used[epoch] for used, _ in results), 101)
    assert results[0][0][0] != results[0][0][1], "each epoch has an order of its own"
    assert [report["folded"] for report in reports] == [101] * 3
    all_is_pushed(tmp_path / "journal", [steps for _, steps in results])


@pytest.mark.parametrize("sync", ["asp", "bsp", "majority"])
def test_a_pull_in_the_middle_of_a_loop_loads_parameters_and_the_loop_goes_on(tmp_path: Path, sync: str) -> None:
    """For instance before an evaluation. Here every batch that a worker gets is followed by one, as the other takes batches, too."""
    together = barrier(2)

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, sync)
        used: Used = [[]]
        for (batch,) in trainer.loader(40, 4):
            if len(used[0]) < 12:
                together.wait()
            used[0] += trainer.step(batch)
            trainer.optimizer.pull()
        return used

    results, reports = run(tmp_path / "journal", 2, script)
    assert once((used[0] for used in results), 40)
    assert min(len(used[0]) for used in results) >= 12, "the loop of one of them has ended at its pull"
    assert [report["folded"] for report in reports] == [40]


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(("sync", "steps", "sizes"), [("bsp", 3, [1, 1, 1]), ("ensemble(steps=5)", 7, [5, 2])])
def test_a_loop_left_early(tmp_path: Path, depth: int, sync: str, steps: int, sizes: list[int]) -> None:
    """Also in the middle of local steps, which are pushed then."""

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, sync)
        sampler = trainer.sampler(100, 5)
        return [trainer.through(islice(ahead(sampler, depth), steps)), trainer.through(ahead(sampler, depth))]

    results, (first, second) = run(tmp_path / "journal", 2, script)
    assert first["folded"] == sum(len(used[0]) for used in results) == 10 * steps
    assert first["unused"] == 100 - 10 * steps
    assert {e["why"] for e in first["exceptions"]} == {"unused: no worker took it"}
    assert once((used[1] for used in results), 100) and second["folded"] == 100
    for worker in range(2):
        assert [push["steps"] for push in pushes(tmp_path / "journal") if push["worker"] == worker][: len(sizes)] == sizes


def test_two_samplers_in_turn(tmp_path: Path) -> None:
    def script(worker: Worker) -> list[Used]:
        trainer = Trainer(worker)
        loaders = [trainer.loader(30, 4), trainer.loader(45, 7)]
        used: list[Used] = [[], []]
        for _ in range(2):
            for loader, into in zip(loaders, used, strict=True):
                into.append(trainer.through(loader))
        return used

    results, reports = run(tmp_path / "journal", 2, script)
    for epoch in range(2):
        assert once((used[0][epoch] for used in results), 30)
        assert once((used[1][epoch] for used in results), 45)
    assert sorted((r["pool"], r["epoch"], r["folded"]) for r in reports) == [(0, 0, 30), (0, 1, 30), (1, 0, 45), (1, 1, 45)]


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


@pytest.mark.parametrize("sync", ["bsp", "full"])
def test_the_second_of_two_samplers_ends_first(tmp_path: Path, sync: str) -> None:
    """Then each worker holds a batch of the first one, of which no step comes, where it is told that the epoch of the second is over."""

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, sync)
        loaders = trainer.loader(64, 4), trainer.loader(16, 4)
        for _ in range(3):
            for a, b in zip(*loaders, strict=False):
                trainer.step(a, b)
        trainer.optimizer.pull()

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run(script)
    reports = finished(job, tmp_path / "journal")
    assert [report["folded"] for report in reports if report["pool"] == 1] == [16] * 3


def test_batches_of_two_samplers_are_no_group(tmp_path: Path) -> None:
    """As ``zip(cycle(small), large)``: the first steps are of a batch of each, and later ones repeat those of the small one."""

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, "bsp")
        for a, b in zip(cycle(trainer.loader(16, 4)), trainer.loader(64, 4), strict=False):
            trainer.step(a, b)

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run(script)
    assert job.summary is not None and job.summary["warnings"] == []


@pytest.mark.parametrize("sync", ["bsp", "asp", "full"])
def test_a_thread_that_fetches_batches(tmp_path: Path, sync: str) -> None:
    """As ``prefetch_generator.BackgroundGenerator``: it asks for samples while the script makes steps, and is some batches ahead."""

    def fetch(batches: Any, fetched: Queue[Any]) -> None:
        for batch in batches:
            fetched.put(batch)
        fetched.put(None)

    def script(worker: Worker) -> tuple[Used, int]:
        trainer = Trainer(worker, sync)
        loader = trainer.loader(96, 4)
        used: Used = []
        for _ in range(3):
            fetched = Queue[Any](2)
            threading.Thread(target=fetch, args=(iter(loader), fetched), daemon=True).start()
            used.append(trainer.through(iter(fetched.get, None)))
        trainer.optimizer.pull()
        return used, trainer.steps

    results, reports = run(tmp_path / "journal", 2, script)
    for epoch in range(3):
        assert once((used[epoch] for used, _ in results), 96)
    assert [report["folded"] for report in reports] == [96] * 3
    assert {(len(push["leases"]), push["samples"]) for push in pushes(tmp_path / "journal")} == {(1, 4)}
    all_is_pushed(tmp_path / "journal", [steps for _, steps in results])


def test_resuming_at_an_epoch(tmp_path: Path) -> None:
    def script(worker: Worker) -> tuple[Used, Used, int]:
        trainer = Trainer(worker)
        first, second = (trainer.sampler(25, 2, seed=5) for _ in range(2))
        first.set_epoch(3)
        begun = [trainer.through(first) for _ in range(2)]
        second.load_state_dict({"epoch": 4})
        resumed = [trainer.through(second)]
        assert first.state_dict() == second.state_dict() and first.state_dict()["epoch"] == 5
        return begun, resumed, len(first)

    results, reports = run(tmp_path / "journal", 2, script)
    assert [(r["pool"], r["epoch"]) for r in reports] == [(0, 3), (0, 4), (1, 4)]
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


# Splits of the workers' own.


def test_each_worker_goes_through_its_own_split_in_an_order_of_its_own(tmp_path: Path) -> None:
    def script(worker: Worker) -> tuple[list[int], Used]:
        trainer = Trainer(worker, "ensemble(steps=3, overlap=0.5)")
        sampler = trainer.sampler(60, 4)
        lengths, used = [len(sampler)], Used()
        for _ in range(3):
            used.append(trainer.through(sampler))
            lengths.append(len(sampler))
        return lengths, used

    results, reports = run(tmp_path / "journal", 3, script)
    for lengths, used in results:
        assert lengths == [10] * 4 and all(len(set(epoch)) == len(epoch) == 40 for epoch in used)
        assert set(used[0]) == set(used[1]) == set(used[2]), "the split is the same in each epoch"
        assert used[0] != used[1] != used[2], "its order is not"
    splits = [set(used[0]) for _, used in results]
    assert splits[0] | splits[1] | splits[2] == set(range(60))
    assert len(splits[0] & splits[1] & splits[2]) == len(splits[0] & splits[1]) == 30, "half of the data is everybody's"
    common = [[index for index in used[0] if index in splits[0] & splits[1]] for _, used in results]
    assert common[0] != common[1], "each worker has an order of its own"
    for report in reports:
        assert report["indices"] == report["folded"] == 120 and len(report["splits"]) == 3


def test_without_shuffling_splits_are_cut_from_the_data_as_they_are(tmp_path: Path) -> None:
    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "ensemble(steps=2, overlap=0.25)")
        return [trainer.through(trainer.sampler(16, 3, shuffle=False))]

    results, _ = run(tmp_path / "journal", 2, script)
    assert results == [[list(range(10))], [[*range(4), *range(10, 16)]]]


@pytest.mark.parametrize("depth", [1, 4])
def test_workers_push_at_equal_fractions_of_their_splits_with_the_batches_that_the_rule_wants(tmp_path: Path, depth: int) -> None:
    """60 samples each, 6 times in 2 epochs; a budget of 15 is 8 and 7 whatever the script says, whoever asks for batches ahead."""

    def script(worker: Worker) -> list[list[int]]:
        trainer = Trainer(worker, "ensemble(per_epoch=6, overlap=0.0, budget=15)")
        sampler = trainer.sampler(120, 50)
        return [[len(trainer.step(batch)) for batch in ahead(sampler, depth)] for _ in range(2)]

    results, reports = run(tmp_path / "journal", 2, script)
    assert results == [[[8] * 7 + [4]] * 2, [[7] * 8 + [4]] * 2]
    assert [report["folded"] for report in reports] == [120, 120]
    folds = [record for record in read(tmp_path / "journal") if record["kind"] == "fold"]
    assert [len(fold["parts"]) for fold in folds] == [2] * 12


def test_batches_change_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """Worker 1 takes many times as long for a step: in the second epoch it has more of the budget, from the first batch on."""

    def script(worker: Worker) -> list[list[int]]:
        trainer = Trainer(worker, "ensemble(per_epoch=2, overlap=0.0, budget=16, reallocate=inverse, batch_min=2)")
        sampler = trainer.sampler(64, 4)

        def step(batch: torch.Tensor) -> int:
            threading.Event().wait(0.08 * worker.number)
            return len(trainer.step(batch))

        return [[step(batch) for batch in ahead(sampler, 3)] for _ in range(2)]

    results, _ = run(tmp_path / "journal", 2, script)
    assert [epochs[0] for epochs in results] == [[8] * 4, [8] * 4]
    sizes = [epochs[1][0] for epochs in results]
    assert sum(sizes) == 16 and sizes[1] > sizes[0], results
    assert all(sum(epochs[1]) == 32 for epochs in results)


def test_the_split_of_the_dead_goes_to_the_living_at_the_next_epoch(tmp_path: Path) -> None:
    joined, dead = barrier(2), threading.Event()
    used: list[Used] = [[[], []], [[], []]]

    def script(worker: Worker) -> None:
        trainer = Trainer(worker, "ensemble(steps=2, overlap=0.0)")
        sampler = trainer.sampler(40, 2)
        joined.wait()
        for epoch in range(2):
            for number, batch in enumerate(sampler):
                if (epoch, number) == (0, 4):
                    worker.die() if worker.number == 1 else wait(dead)
                used[worker.number][epoch] += trainer.step(batch)

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.run_past_death(script, 1, dead)
    first, second = finished(job, tmp_path / "journal")
    assert len(used[0][0]) == 20 and sorted(used[0][1]) == list(range(40))
    assert (first["indices"], first["folded"], first["unused"]) == (40, 28, 12)
    assert {e["why"] for e in first["exceptions"]} == {"unused: its worker died or left before"}
    assert second["folded"] == second["indices"] == 40
