"""What the tests of real training share: a small problem, and plain torch that follows a journal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from offbeat.core.policy import Policy
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate
from offbeat.sim.training.batches import Batches
from offbeat.sim.training.gradients import Training
from offbeat.sim.training.workload import Step
from offbeat.types import WorkerId

SIZE, BATCH, SEED = 90, 6, 4
RANDOM = "shifted_exponential(shift=0.3, scale=0.7)"


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 5, generator=generator)
    return x, (x[:, :1] - 2 * x[:, 1:2] + 0.5).squeeze(1).sign().long().add(1).div(2, rounding_mode="floor")


def loss_of(model: nn.Module) -> float:
    x, y = data()
    return functional.cross_entropy(model(x), y).item()


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 2))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    if name == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def cluster(**changes: Any) -> Cluster:
    return Cluster(**{"workers": 4, "compute": RANDOM, "seed": SEED, **changes})


def train(
    sync: str | Policy, name: str = "sgd", work: Work | None = None, over: Cluster | None = None, journal: Path | None = None, **more: Any
) -> tuple[nn.Module, Training, Result]:
    model = network(more.pop("dropout", 0.0))
    training = Training(model, functional.cross_entropy, data(), optimizer_of(name, model), **more)
    work = work if work is not None else Work(versions=12, batch=BATCH)
    return model, training, simulate(sync, over or cluster(), work, content=training, journal=journal)


class Plain:
    """Plain torch, following a journal: what each fold says, on the parameters of the versions that it names."""

    def __init__(self, name: str) -> None:
        self.model = network()
        self.optimizer = optimizer_of(name, self.model)
        self.batches = Batches(SIZE, SEED)
        self.versions = [self.parameters()]

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def gradient(self, version: int, worker: WorkerId, number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), self.versions[version], strict=True):
                p.copy_(value)
        x, y = data()
        indices = self.batches.of(worker, Step(number, BATCH))
        loss = functional.cross_entropy(self.model(x[indices]), y[indices])
        return list(torch.autograd.grad(loss, list(self.model.parameters())))

    def fold(self, parts: list[dict[str, Any]], scale: float) -> None:
        newest = len(self.versions) - 1
        gradients = [self.gradient(newest - part["staleness"], part["worker"], part["clock"] - 1) for part in parts]
        with torch.no_grad():
            for i, (p, value) in enumerate(zip(self.model.parameters(), self.versions[-1], strict=True)):
                p.copy_(value)
                p.grad = sum((part["weight"] * g[i] for part, g in zip(parts, gradients, strict=True)), torch.zeros_like(p))
        before = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= scale
            group["weight_decay"] *= sum(part["weight"] for part in parts)  # as if each gradient contained it
        self.optimizer.step()
        for group, (lr, decay) in zip(self.optimizer.param_groups, before, strict=True):
            group["lr"], group["weight_decay"] = lr, decay
        self.versions.append(self.parameters())


def close(one: Iterator[nn.Parameter] | list[torch.Tensor], other: Iterator[nn.Parameter] | list[torch.Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-4, atol=1e-6)
