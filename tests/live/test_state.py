"""What lasts longer than a step: the optimizer's state, checkpoints, BatchNorm's statistics, and a worker that was thought dead."""

from __future__ import annotations

import io
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.report.tally import Tally
from offbeat.runtime.journal import read
from tests.live.harness import Job, Worker, barrier, wait

WORKERS, BATCH = 2, 8
Make = Any


def model_of(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return torch.randn(BATCH, 6, generator=generator), torch.randint(3, (BATCH,), generator=generator)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    layers = list(model.children())
    return torch.optim.AdamW([{"params": layers[2].parameters(), "lr": 0.003}, {"params": layers[0].parameters()}], lr=0.01, amsgrad=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


MAKERS = [sgd, plain_sgd, adamw, adafactor]


def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def alone(make: Make, model: nn.Module, first: int, last: int, saved: dict[str, Any] | None = None) -> torch.optim.Optimizer:
    """Plain PyTorch on the joined batch."""
    optimizer: torch.optim.Optimizer = make(model)
    schedule = halve(optimizer)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
    for step in range(first, last):
        parts = [batch(worker, step) for worker in range(WORKERS)]
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        optimizer.step()
        schedule.step()
    return optimizer


def together(
    make: Make, first: int, last: int, saved: bytes | None = None, *, model_first: bool = True, sync: str = "bsp", **job: Any
) -> dict[str, Any]:
    """The same in a job; what worker 0 would save at its end, after a trip through ``torch.save``."""

    def script(worker: Worker) -> bytes:
        checkpoint = torch.load(io.BytesIO(saved), weights_only=True) if saved is not None else None
        model = model_of(worker.number if checkpoint is None else 7 + worker.number)
        if checkpoint is not None and model_first:
            model.load_state_dict(checkpoint["model"])
        optimizer = worker.distribute(make(model), model, sync)
        schedule = halve(optimizer)
        if checkpoint is not None:
            if not model_first:
                model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            schedule.load_state_dict(checkpoint["schedule"])
        for step in range(first, last):
            x, y = batch(worker.number, step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, file)
        return file.getvalue()

    with Job(WORKERS, **job) as running:
        results = running.run(script)
    checkpoints = [torch.load(io.BytesIO(result), weights_only=True) for result in results]
    assert_alike(checkpoints[0], checkpoints[1], exactly=True)
    return {**checkpoints[0], "bytes": results[0]}


def assert_alike(a: Any, b: Any, *, exactly: bool = False, at: str = "state") -> None:
    """Equal structure and values, tensors up to rounding."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape, at
        torch.testing.assert_close(a, b, rtol=0.0 if exactly else 1e-4, atol=0.0 if exactly else 1e-6, msg=at)
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), f"{at}: {a.keys()} and {b.keys()}"
        for key in a:
            assert_alike(a[key], b[key], exactly=exactly, at=f"{at}.{key}")
    elif isinstance(a, list | tuple):
        assert type(a) is type(b) and len(a) == len(b), f"{at}: {a} and {b}"
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_alike(x, y, exactly=exactly, at=f"{at}[{number}]")
    else:
        assert a == b or pytest.approx(a) == b, f"{at}: {a} and {b}"


@pytest.mark.parametrize("make", MAKERS)
def test_the_state_is_that_of_the_plain_optimizer(make: Make) -> None:
    model = model_of(0)
    optimizer = alone(make, model, 0, 10)
    result = together(make, 0, 10, servers=2)
    assert_alike(optimizer.state_dict(), result["optimizer"])
    assert_alike(dict(model.state_dict()), dict(result["model"]))


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "wrapped first"])
@pytest.mark.parametrize("job", [{}, {"servers": 2, "hosts": {1: "other"}}], ids=["shm", "mixed, 2 servers"])
def test_a_job_resumes_exactly(make: Make, model_first: bool, job: dict[str, Any]) -> None:
    whole = together(make, 0, 20, **job)
    half = together(make, 0, 10, **job)
    rest = together(make, 10, 20, half["bytes"], model_first=model_first, **job)
    for part in ("model", "optimizer", "schedule"):
        assert_alike(whole[part], rest[part], at=part)


def test_checkpoints_are_plain_pytorch() -> None:
    whole = model_of(0)
    alone(adamw, whole, 0, 20)
    half = together(adamw, 0, 10, servers=2)
    rest = model_of(9)
    alone(adamw, rest, 10, 20, half)
    assert_alike(dict(whole.state_dict()), dict(rest.state_dict()))


def test_a_checkpoint_loads_only_before_the_first_fold(tmp_path: Path) -> None:
    """Under ASP one worker may have begun when another, with the same script, loads: the job's parameters go before."""
    saved = together(sgd, 0, 10)
    pushed = threading.Event()

    def script(worker: Worker) -> None:
        model = model_of(3)
        model.load_state_dict(saved["model"])
        optimizer = worker.distribute(sgd(model), model, "asp")
        if worker.number == 1:
            wait(pushed)
        optimizer.load_state_dict(saved["optimizer"])
        if worker.number == 0:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            pushed.set()
        else:
            assert optimizer.version == 1
            for p, before in zip(model.parameters(), saved["model"].values(), strict=True):
                assert not torch.equal(p, before), "worker 1 has undone the first fold"

    with Job(2, servers=2) as job:
        job.run(script)


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


@pytest.mark.parametrize("hosts", [{}, {1: "other"}], ids=["shm", "mixed"])
def test_statistics_are_averaged_at_the_end_of_an_epoch(hosts: dict[int, str]) -> None:
    def script(worker: Worker) -> list[tuple[Tensor, Tensor, int]]:
        model = WithNorm(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
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
    died, others_stand, joined = threading.Event(), barrier(2), threading.Event()
    standing: list[tuple[Tensor, Tensor, int]] = []

    def stay(worker: Worker) -> None:
        model = WithNorm(worker.number)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
        for _ in range(3):
            model.step(optimizer)
        if worker.number == 2:
            worker.die()
        standing.append(model.statistics())
        others_stand.wait()
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
        for number in range(3):
            job.start(number, stay)
        job.await_state(2, "dead")
        died.set()
        job.start(2, join)
        job.join()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
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
        for number in range(3):
            job.start(number, script)
        job.await_state(1, "dead")
        thought_dead.set()
        job.join()
    records = list(read(tmp_path / "journal"))
    assert Tally.of(records).problems() == []
    mine = [record for record in records if record["kind"] == "settle" and record["worker"] == 1]
    late = [record["reason"] for record in mine if record["fate"] == "rejected"]
    assert late == ["sent by incarnation 1, which was declared dead"]
    assert sum(record["fate"] == "folded" and record["incarnation"] == 2 for record in mine) == 4
    states = [record["state"] for record in records if record["kind"] == "state_changed" and record["worker"] == 1]
    assert states == ["alive", "dead", "recovered", "alive", "finished"]


def test_stale_samples_of_a_returned_worker_are_rejected(tmp_path: Path) -> None:
    """A loader has fetched batches ahead when its worker is declared dead: they are somebody else's by the time it uses them."""
    thought_dead, size = threading.Event(), 60

    def script(worker: Worker) -> None:
        model = nn.Linear(1, 1)
        optimizer = worker.distribute(torch.optim.SGD(model.parameters(), lr=1e-6), model, "asp")
        sampler = optimizer.batch_sampler(range(size), batch_size=4)
        fetched = iter(sampler)
        ahead = [next(fetched) for _ in range(3)]
        if worker.number == 1:
            worker.freeze()
            wait(thought_dead)
            worker.thaw()
        else:
            wait(thought_dead)
        for indices in itertools.chain(ahead, fetched):
            optimizer.zero_grad()
            model(torch.tensor(indices).float().unsqueeze(1)).sum().backward()
            optimizer.step()

    with Job(2, timeout_s=1.0, journal=str(tmp_path / "journal")) as job:
        threads = [job.start(number, script) for number in range(2)]
        job.await_state(1, "dead")
        thought_dead.set()
        job.join(*threads)
    records = list(read(tmp_path / "journal"))
    assert Tally.of(records).problems() == []
    reasons = [r["reason"] for r in records if r["kind"] == "settle" and r["worker"] == 1 and r["fate"] == "rejected"]
    assert reasons[0].startswith("sent by incarnation 1")
    assert reasons[1:] == ["its samples have gone to another worker"] * 2
    (report,) = [record["report"] for record in records if record["kind"] == "epoch_ended"]
    assert report["folded"] == size and report["returned"] == 12
