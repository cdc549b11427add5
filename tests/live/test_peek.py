"""A look at the data before training costs nothing, and the role of chief stays with a chief whose script has ended."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import DEADLINE_S, Job, Worker, barrier, wait
from tests.live.samples import Trainer, Used, ahead, finished, indices, once, run

import offbeat

FAMILIES = ["bsp", "ensemble(steps=4)", "majority", "adpsgd"]


@pytest.mark.parametrize("sync", FAMILIES)
@pytest.mark.parametrize(("depth", "told"), [(1, True), (4, False)])
def test_a_peek_costs_nothing(tmp_path: Path, sync: str, depth: int, told: bool) -> None:
    """As in PyTorch's tutorial: ``next(iter(loader))``, then ``set_epoch(epoch)``, then the loop; also where a loader fetches ahead."""
    all_three = barrier(3)

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, sync)
        sampler = trainer.sampler(101, 4)
        used: Used = []
        for epoch in range(2):
            seen = [next(ahead(sampler, depth)).tolist() for _ in range(2)]
            assert sampler.state_dict()["epoch"] == epoch
            all_three.wait()  # else one may find nothing left
            if told:
                sampler.set_epoch(epoch)
            used.append(trainer.through(ahead(sampler, depth)))
            assert seen == [used[-1][:4]] * 2, "the pass begins with what the peek has shown"
        trainer.optimizer.pull()
        return used

    results, reports = run(tmp_path / "journal", 3, script)
    for epoch in range(2):
        assert once((used[epoch] for used in results), 101)
    assert [report["folded"] for report in reports] == [101] * 2


def test_a_pass_over_all_data_without_a_step_is_a_look_too(tmp_path: Path) -> None:
    """For instance to find the mean of the inputs. What another epoch's number says goes before."""
    both = barrier(2)

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "bsp")
        sampler = trainer.sampler(40, 3)
        batches = iter(sampler)
        looked = list(next(batches))
        both.wait()  # else one may find nothing left: then its look is at the next epoch
        looked += [index for batch in batches for index in batch]
        first = trainer.through(ahead(sampler, 1))
        assert sorted(first) == sorted(looked)
        next(iter(sampler))
        sampler.set_epoch(5)
        return [first, trainer.through(ahead(sampler, 1))]

    results, reports = run(tmp_path / "journal", 2, script)
    assert all(once((used[epoch] for used in results), 40) for epoch in range(2))
    assert [(report["epoch"], report["folded"]) for report in reports if report["folded"]] == [(0, 40), (5, 40)]


Loaded = Callable[[Trainer], Any]
SOURCES: dict[str, Loaded] = {
    "sampler": lambda trainer: trainer.sampler(40, 4),
    "loader": lambda trainer: trainer.loader(40, 4),
    "processes": lambda trainer: trainer.loader(40, 4, num_workers=1),
    "stream": lambda trainer: offbeat.elastic(lambda epoch: iter(range(40)), batch_size=4, optimizer=trainer.optimizer),
}


def stays(source: Loaded, epochs: int, *, last: int, looked: threading.Event, there: threading.Event) -> Callable[[Worker], Used]:
    """A worker that waits in its third batch of the epoch ``last`` until the other one, which has been restarted, has looked."""

    def script(worker: Worker) -> Used:
        trainer = Trainer(worker, "asp")
        loader, used = source(trainer), [[] for _ in range(epochs)]  # type: ignore[var-annotated]
        for epoch in range(epochs):
            for number, batch in enumerate(loader):
                if (epoch, number) == (last, 2):
                    there.set()
                    wait(looked)
                used[epoch] += trainer.step(batch)
        trainer.optimizer.pull()
        return used

    return script


def dies(source: Loaded) -> Callable[[Worker], None]:
    def script(worker: Worker) -> None:
        trainer = Trainer(worker, "asp")
        trainer.step(next(iter(source(trainer))))
        worker.die()

    return script


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_restarted_worker_looks_at_the_present_epoch_and_trains_on_that_batch_when_it_comes_there(source: Loaded, tmp_path: Path) -> None:
    looked, there = threading.Event(), threading.Event()

    def comes_back(worker: Worker) -> Used:
        trainer = Trainer(worker, "asp")
        loader = source(trainer)
        seen = [indices(next(iter(loader))) for _ in range(2)]
        assert seen[0] == seen[1] and len(seen[0]) == 4
        looked.set()
        used = [trainer.through(loader) for _ in range(3)]
        trainer.optimizer.pull()
        assert used[:2] == [[], []], "epochs that are over have nothing for it"
        assert used[2][:4] == seen[0]
        return used

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.start(0, stays(source, 3, last=2, looked=looked, there=there))
        job.join(job.start(1, dies(source)))
        job.until(there.is_set, "the other one to come to the last epoch")
        job.start(1, comes_back)
        job.join()
        (zero,), (one,) = job.results(0), job.results(1)
    assert once([zero[2], one[2]], 40)
    assert [report["unused"] for report in finished(job, tmp_path / "journal")][1:] == [0, 0]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_passes_that_a_script_begins_anew_by_next_never_end_at_once(source: Loaded, tmp_path: Path) -> None:
    """As semi-supervised training takes its unlabelled batches: ``next``, and where that ends, a new iterator and ``next`` again."""
    looked, there = threading.Event(), threading.Event()

    def comes_back(worker: Worker) -> None:
        trainer = Trainer(worker, "asp")
        loader = source(trainer)
        batches = iter(loader)
        for _ in range(1000):
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            trainer.step(batch)
            looked.set()

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.start(0, stays(source, 4, last=2, looked=looked, there=there))
        job.join(job.start(1, dies(source)))
        job.until(there.is_set, "the other one to come to the third epoch")
        job.start(1, ends_with_the_job(comes_back))
        job.join()
    reports = finished(job, tmp_path / "journal")
    assert len(reports) == 4 and all(report["folded"] == 40 for report in reports[2:])


def ends_with_the_job(script: Callable[[Worker], None]) -> Callable[[Worker], None]:
    def run(worker: Worker) -> None:
        with pytest.raises(offbeat.JobEnded):
            script(worker)

    return run


def test_a_look_when_the_job_is_over_ends_the_script_with_it() -> None:
    dead, trained, left = threading.Event(), threading.Event(), threading.Event()

    def finishes(worker: Worker) -> None:
        trainer = Trainer(worker, "asp")
        wait(dead)
        trainer.through(ahead(trainer.sampler(40, 4), 1))
        trained.set()
        wait(left)

    def comes_back(worker: Worker) -> None:
        sampler = Trainer(worker, "asp").sampler(40, 4)
        left.set()
        next(iter(sampler))

    with Job(2) as job:
        job.start(0, finishes)
        job.join(job.start(1, dies(SOURCES["sampler"])))
        job.await_state(1, "dead")
        dead.set()
        job.until(trained.is_set, "the other one to train")
        job.start(1, ends_with_the_job(comes_back))
        job.join()


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
        job.start_all(script)
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


def test_a_worker_that_waits_leaves_where_the_order_comes_while_garbage_is_collected() -> None:
    """Python drops what is raised inside a callback of the garbage collector, and runs signal handlers there."""

    def script(worker: Worker) -> None:
        Trainer(worker, "asp").step(torch.arange(3))
        session = worker.session
        assert session is not None
        deadline, me, link = time.monotonic() + DEADLINE_S, threading.get_ident(), session.link

        def collecting(phase: str, info: object) -> None:
            if threading.get_ident() == me:
                link.notice()

        def ready() -> bool:
            if not link.told_to_leave:
                gc.callbacks.append(collecting)
                gc.collect()
                gc.callbacks.remove(collecting)
            return time.monotonic() > deadline

        with pytest.raises(SystemExit):
            link.wait(ready, lambda: deadline)
        session._at_exit()

    with Job(1) as job:
        job.run(script)


@pytest.mark.parametrize("source", [SOURCES[name] for name in ("sampler", "loader", "processes")])
def test_a_restarted_worker_gets_as_many_batches_by_next_as_len_says(source: Loaded, tmp_path: Path) -> None:
    """As ``for step in range(len(loader)): next(batches)``: once in an epoch that is over, once in one that the others end before."""
    looked, there = threading.Event(), threading.Event()

    def comes_back(worker: Worker) -> Used:
        trainer = Trainer(worker, "asp")
        loader = source(trainer)
        used: Used = []
        for _ in range(2):
            batches = iter(loader)
            used.append([index for _ in range(len(loader)) for index in trainer.step(next(batches))])
            looked.set()
        del batches
        gc.collect()
        return used

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.start(0, stays(source, 4, last=1, looked=looked, there=there))
        job.join(job.start(1, dies(source)))
        job.until(there.is_set, "the other one to come to the second epoch")
        job.start(1, comes_back)
        job.join()
        (zero,), (one,) = job.results(0), job.results(1)
    assert [len(used) for used in one] == [20, 20]
    assert Counter(index for used in [*zero[1:], *one] for index in used) == dict.fromkeys(range(40), 3)
    assert [report["unused"] for report in finished(job, tmp_path / "journal")][1:] == [0, 0, 0]
