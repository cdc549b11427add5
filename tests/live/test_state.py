"""The optimizer's state, gathered from the servers and given back to them: plain PyTorch's, in form and values."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.live.harness import Job, Worker
from torch import Tensor, nn

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
    groups: list[dict[str, Any]] = [{"params": layers[2].parameters(), "lr": 0.003}, {"params": layers[0].parameters()}]
    return torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=0.01)


MAKERS = [sgd, plain_sgd, adamw, adafactor]


def halve(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.StepLR:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def alone(make: Make, model: nn.Module, steps: int) -> torch.optim.Optimizer:
    """Plain PyTorch on the joined batch."""
    optimizer: torch.optim.Optimizer = make(model)
    schedule = halve(optimizer)
    for step in range(steps):
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
    optimizer = alone(make, model, 10)
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
