"""`offbeat.barrier`, `offbeat.steps`, `offbeat.JobEnded` and the parts of `offbeat.save` in jobs, under rules of every family."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.harness import APART, DEADLINE_S, HALVES, TOGETHER, Job, Worker
from tests.live.samples import Trainer, data, finished, once

import offbeat
from offbeat.place import _steps
from offbeat.session import Barrier


def made(worker: Worker, sync: str) -> tuple[Any, Any]:
    model = torch.nn.Linear(3, 1)
    return worker.distribute(torch.optim.SGD(model.parameters(), lr=0.05), model, sync), model


def step(optimizer: Any, model: Any, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step(samples=4)


def vector(model: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).clone()


def serve_until(optimizer: Any, event: threading.Event) -> None:
    """Wait, and give a rank that joins a copy of the replica, which happens in calls of the library."""
    deadline = time.monotonic() + DEADLINE_S
    while not event.wait(0.01):
        optimizer._session.pull()
        assert time.monotonic() < deadline, "waited in vain"


SERVED = ("bsp", "asp", "ssp(staleness=2)", "psp(c=2,b=0.5)", "rennala(batch=4)", "ensemble", "adacomm")
ROUNDS = ("majority", "solo", "full")


@pytest.mark.parametrize(
    ("sync", "hosts"),
    [*((sync, TOGETHER) for sync in (*SERVED, *ROUNDS, "dpsgd")), ("asp", APART), ("solo", HALVES), ("majority", APART)],
    ids=lambda value: value if isinstance(value, str) else "apart" if value is APART else "halves" if value is HALVES else "together",
)
def test_all_have_one_version_after_a_barrier(sync: str, hosts: dict[int, str]) -> None:
    def script(worker: Worker) -> list[tuple[Barrier, torch.Tensor]]:
        optimizer, model = made(worker, sync)
        met = []
        for at in range(9):
            step(optimizer, model, 10 * at + worker.number)
            if at % 3 == 2:
                passed = optimizer._session.barrier()
                assert passed.version == optimizer.version
                met.append((passed, vector(model)))
        return met

    with Job(3, hosts=hosts) as job:
        results = job.run(script)
    for meeting in zip(*results, strict=True):
        barriers, models = zip(*meeting, strict=True)
        assert {one.number for one in barriers} == {results[0].index(meeting[0])} and not any(one.past for one in barriers)
        some_blocks = "b=0.5" in sync  # a worker goes on with a part of the newest blocks
        assert all(one.shared == (sync != "dpsgd") for one in barriers) or some_blocks
        if all(one.shared for one in barriers):
            assert len({one.version for one in barriers}) == 1, barriers
            assert all(torch.equal(model, models[0]) for model in models)
    assert job.summary is not None and sum(job.summary["fates"].values()) == job.summary["pushes"]


@pytest.mark.parametrize("sync", ["bsp", "asp", "majority", "ensemble"])
def test_one_dies_while_the_others_are_in_a_barrier_and_comes_back_to_the_next(sync: str) -> None:
    dies, back = threading.Event(), threading.Event()

    def stay(worker: Worker) -> list[Barrier]:
        optimizer, model = made(worker, sync)
        for at in range(4):
            step(optimizer, model, at)
        met = [optimizer._session.barrier()]
        dies.set()
        serve_until(optimizer, back)
        step(optimizer, model, 9)
        return [*met, optimizer._session.barrier()]

    def die(worker: Worker) -> None:
        optimizer, model = made(worker, sync)
        step(optimizer, model, 7)
        worker.die()

    def come_back(worker: Worker) -> list[Any]:
        optimizer, model = made(worker, sync)
        session = optimizer._session
        numbers = _steps(session, 100, 1)
        first = next(numbers)
        back.set()
        step(optimizer, model, 8)
        return [first, session.restarted, session.barrier()]

    with Job(3) as job:
        job.start(0, stay)
        job.start(1, stay)
        job.start(2, die)
        job.until(dies.is_set, "the others to pass the barrier without it")
        again = job.start(2, come_back)
        job.join(again)
        job.join()
        (zero, _), (first, restarted, next_one) = job.results(0)[0], job.results(2)[0]
    assert zero.number == 0 and zero.workers == (0, 1)
    assert restarted and first >= 4, "it goes on where the slowest of the others is"
    assert next_one.number == 1 and next_one.workers == (0, 1, 2) and not next_one.past


@pytest.mark.parametrize("sync", ["bsp", "asp", "majority", "ensemble(steps=1)", "dpsgd"])
def test_an_iteration_may_have_several_steps(sync: str) -> None:
    """As one of reinforcement learning has for each rollout. Who dies in the middle of one goes on with the next one."""
    there, back = threading.Event(), threading.Event()

    def stay(worker: Worker) -> list[int]:
        optimizer, model = made(worker, sync)
        for at in _steps(optimizer._session, 6, 1):
            if at == 4:
                there.set()
                serve_until(optimizer, back)
            for number in range(1 + at % 3):
                step(optimizer, model, 10 * at + number)
        return [optimizer._session.made]

    def die(worker: Worker) -> None:
        optimizer, model = made(worker, sync)
        for at in _steps(optimizer._session, 6, 1):
            for number in range(1 + at % 3):
                step(optimizer, model, 10 * at + number)
                if (at, number) == (2, 1):
                    worker.die()

    def come_back(worker: Worker) -> list[int]:
        optimizer, model = made(worker, sync)
        first = next(_steps(optimizer._session, 6, 1))
        back.set()
        step(optimizer, model, 7)
        return [first]

    with Job(2) as job:
        job.start(0, stay)
        job.join(job.start(1, die))
        job.until(there.is_set, "the other one to come to its fifth iteration")
        job.start(1, come_back)
        job.join()
        assert (job.results(0), job.results(1)) == ([[6]], [[4]])


@pytest.mark.parametrize(
    ("sync", "source"), [("bsp", "sampler"), ("asp", "loader"), ("majority", "sampler"), ("full", "loader"), ("asp", "stream")]
)
def test_a_restarted_worker_begins_with_the_epoch_that_goes_on(tmp_path: Path, sync: str, source: str) -> None:
    """It does nothing of what belongs to the epochs before: no barrier, no warm-up, no mean over batches that it did not get."""
    died, back = threading.Event(), threading.Event()

    def begun(worker: Worker) -> tuple[Trainer, Any, Any]:
        trainer = Trainer(worker, sync)
        optimizer = trainer.optimizer
        kinds: dict[str, Callable[[], Any]] = {
            "sampler": lambda: optimizer.batch_sampler(data(40), batch_size=2),
            "loader": lambda: trainer.loader(40, 2),
            "stream": lambda: offbeat.elastic(lambda epoch: ([index] for index in range(40)), batch_size=2, optimizer=optimizer),
        }
        return trainer, kinds[source](), torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def epochs(worker: Worker, halt: Callable[[Any, int], None]) -> list[tuple[int, float, list[int], Barrier]]:
        trainer, loader, scheduler = begun(worker)
        seen = []
        for epoch in offbeat.epochs(4, loader):
            rate, used = trainer.optimizer.param_groups[0]["lr"], []
            for batch in loader:
                halt(trainer.optimizer, epoch)
                used += trainer.step(torch.as_tensor(batch if source == "sampler" else batch[0]))
            assert used or epoch > 1, "the others may be faster"
            seen.append((epoch, rate, used, trainer.optimizer._session.barrier()))
            scheduler.step()
        return seen

    def stay(worker: Worker) -> Any:
        return epochs(worker, lambda optimizer, epoch: serve_until(optimizer, back) if epoch == 1 else None)

    def die(worker: Worker) -> None:
        def halt(optimizer: Any, epoch: int) -> None:
            if epoch == 1:
                died.set()
                worker.die()

        epochs(worker, halt)

    with Job(2, journal=str(tmp_path / "journal")) as job:
        job.start(0, stay)
        first = job.start(1, die)
        job.until(died.is_set, "worker 1 to come to the second epoch")
        job.join(first)
        job.await_state(1, "dead")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            job.join(job.start(1, lambda worker: epochs(worker, lambda *_: back.set())))
            job.join()
        stayed, returned = job.results(0)[0], job.results(1)[-1]
    assert [epoch for epoch, *_ in stayed] == [0, 1, 2, 3]
    assert [epoch for epoch, *_ in returned] == [1, 2, 3]
    for epoch, rate, _, met in stayed + returned:
        assert rate == pytest.approx(1e-6 * 0.5**epoch)
        assert met.number == epoch and not met.past
    for epoch in (2, 3):
        assert once((used for at, _, used, _ in stayed + returned if at == epoch), 40)
    assert [report["folded"] for report in finished(job, tmp_path / "journal")] == [40] * 4


@pytest.mark.parametrize("counts", [False, True])
def test_an_empty_pass_is_followed_by_the_line_that_says_why(counts: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A script that divides by its number of batches fails there, before the step that would print it. One that counts needs no line."""
    died, back = threading.Event(), threading.Event()

    def begun(worker: Worker) -> tuple[Trainer, Any]:
        trainer = Trainer(worker, "bsp")
        return trainer, trainer.loader(40, 2)

    def stay(worker: Worker) -> None:
        trainer, loader = begun(worker)
        for epoch in range(2):
            for (batch,) in loader:
                if epoch == 1:
                    serve_until(trainer.optimizer, back)
                trainer.step(batch)

    def die(worker: Worker) -> None:
        trainer, loader = begun(worker)
        for (batch,) in loader:
            trainer.step(batch)
        next(iter(loader))
        died.set()
        worker.die()

    def come(worker: Worker) -> str:
        try:
            trainer, loader = begun(worker)
            if counts:
                _steps(trainer.optimizer._session, 40, 1)  # of which it takes a number with each batch
            assert list(loader) == []
            return capsys.readouterr().err
        finally:
            back.set()

    with Job(2) as job:
        job.start(0, stay)
        first = job.start(1, die)
        job.until(died.is_set, "worker 1 to come to the second epoch")
        job.join(first)
        job.await_state(1, "dead")
        job.start(1, come)
        job.join()
        said = job.results(1)[-1]
    assert said.count("worker 1 begins its script after") == said.count("offbeat.epochs") == (not counts)


@pytest.mark.parametrize("sync", ["bsp", "asp", "majority", "dpsgd"])
def test_a_worker_that_comes_when_the_others_have_finished_trains_no_more(sync: str) -> None:
    left = threading.Event()

    def finish(worker: Worker) -> None:
        optimizer, model = made(worker, sync)
        step(optimizer, model, 1)
        serve_until(optimizer, left)

    def die(worker: Worker) -> None:
        optimizer, model = made(worker, sync)
        step(optimizer, model, 2)
        worker.die()

    def late(worker: Worker) -> int:
        optimizer, model = made(worker, sync)
        left.set()
        steps = 0
        try:
            while steps < 10_000:
                step(optimizer, model, steps)
                steps += 1
        except offbeat.JobEnded:
            return steps
        raise AssertionError("it trains on alone")

    with Job(2) as job:
        job.start(0, finish)
        job.join(job.start(1, die))
        job.await_state(1, "dead")
        job.start(1, late)
        job.join()


@pytest.mark.parametrize("sync", ["bsp", "dpsgd"])
def test_a_save_at_the_end_of_an_uneven_epoch_waits_for_nobody_and_has_all_parts(sync: str, tmp_path: Path) -> None:
    """15 batches for two workers: one makes a step more. The writer may be either."""

    def script(worker: Worker) -> list[str]:
        optimizer, model = made(worker, sync)
        sampler = optimizer.batch_sampler(range(60), batch_size=4)
        said: list[str] = []
        for epoch in range(3):
            for number, _ in enumerate(sampler):
                step(optimizer, model, number)
            with warnings.catch_warnings(record=True) as caught:
                offbeat.save(tmp_path / f"{epoch}.pt", model=model, optimizer=optimizer, sampler=sampler)
                offbeat.save(tmp_path / f"{epoch}-best.pt", model=model, optimizer=optimizer, sampler=sampler)
            said += [str(one.message) for one in caught if "offbeat.save" in str(one.message)]
        return said

    with Job(2) as job:
        assert job.run(script) == [[], []]
    for epoch in range(3):
        for name in (f"{epoch}.pt", f"{epoch}-best.pt"):
            random = torch.load(tmp_path / name, weights_only=True)["random"]
            assert sync == "dpsgd" or sorted(random) == [0, 1], f"{name} has the parts of {sorted(random)}"
