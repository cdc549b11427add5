"""Scripts that cannot work, one for each word on the command line."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import offbeat

ODD_ONE = os.environ.get("OFFBEAT_WORKER") == "1"


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def frozen() -> None:
    """Nothing to train."""
    model = nn.Linear(4, 1).requires_grad_(False)
    offbeat.DistributedOptimizer(sgd(model), model)


def foreign() -> None:
    """An optimizer over another model's parameters."""
    offbeat.DistributedOptimizer(sgd(nn.Linear(4, 1)), nn.Linear(4, 1))


def models() -> None:
    """One worker's model has another layer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3 if ODD_ONE else 2))
    offbeat.DistributedOptimizer(sgd(model), model)


def optimizers() -> None:
    """One worker's optimizer is another."""
    model = nn.Linear(4, 1)
    offbeat.DistributedOptimizer(torch.optim.Adam(model.parameters()) if ODD_ONE else sgd(model), model)


def rules() -> None:
    """A rule that does not fit the number of workers."""
    model = nn.Linear(4, 1)
    offbeat.DistributedOptimizer(sgd(model), model, sync="backup(b=4)")


def samples() -> None:
    """Fewer samples than workers."""
    model = nn.Linear(4, 1)
    offbeat.DistributedOptimizer(sgd(model), model).batch_sampler([0], batch_size=1)


def infinite() -> None:
    """A gradient that is not finite, where the script wants the job to stop then."""
    model = nn.Linear(4, 1)
    optimizer = offbeat.DistributedOptimizer(sgd(model), model, nonfinite="stop")
    (model(torch.ones(1, 4)).sum() * float("inf")).backward()
    optimizer.step()


def large() -> None:
    """16 MB of parameters; the test allows less."""
    model = nn.Linear(2000, 2000)
    offbeat.DistributedOptimizer(sgd(model), model)


MISTAKES = {f.__name__: f for f in (frozen, foreign, models, optimizers, rules, samples, infinite, large)}

if __name__ == "__main__":
    MISTAKES[sys.argv[1]]()
