"""What `benchmarks.race` runs: tasks, traces, systems, and the learning rates that ``--tune`` has chosen on other seeds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import nn

from experiments import data

WORKERS: Final = 8
TRAIN: Final = 12_800
TEST: Final = 2_000
"""Images: the first ones of each set. An epoch is 12,800 images drawn."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, its data, and the accuracy on the test images at which the clock stops."""

    batch: int
    """Samples of one worker's iteration."""
    target: float
    """Chosen from the curve of DDP on seed 100."""
    bare_s: float
    """DDP's step without stragglers on two cores, measured beforehand and rounded. The median of every trace is scaled to it."""
    limit_s: float
    """A run that has not reached the target after so long is given up."""
    rates: tuple[float, ...]
    """The learning rates that ``--tune`` tries."""


TASKS: Final = {
    "mnist": Task(batch=32, target=0.90, bare_s=0.025, limit_s=30.0, rates=(0.025, 0.05, 0.1, 0.2, 0.4, 0.8)),
    "cifar": Task(batch=16, target=0.30, bare_s=0.045, limit_s=40.0, rates=(0.05, 0.1, 0.2, 0.4, 0.8)),
}
TRACES: Final = {
    "none": "",
    "light": "traces/alibaba-pai-minibatch/job_1_norm.csv.gz",
    "heavy": "traces/alibaba-pai-minibatch/job_4_norm.csv.gz",
}
"""Of the four recorded jobs of Alibaba PAI those whose slowest of ten workers is least and most above the mean (by the median of all
iterations 1.09 and 1.86 times); their first eight workers."""
SYSTEMS: Final = {
    "DDP": "ddp",
    "torchft": "torchft",
    "bsp": "bsp",
    "backup(b=1)": "backup(b=1)",
    "backup(b=2)": "backup(b=2)",
    "backup(b=4)": "backup(b=4)",
    "dbw": "dbw",
    "psp(c=4)": "psp(c=4)",
    "psp(c=4, b=0.75)": "psp(c=4, b=0.75)",
    "auto(allow=biased)": "auto(allow=biased)",
    "ssp(staleness=3)": "ssp(staleness=3)",
    "asp": "asp",
    "majority": "majority",
    "solo": "solo",
    "ensemble(steps=8)": "ensemble(steps=8)",
}
SAME: Final = {"torchft": "DDP", "bsp": "DDP", "backup(b=1)": "DDP", "backup(b=2)": "DDP", "auto(allow=biased)": "DDP"}
"""Systems that have the learning rate of another one, whose steps are the same, or means of nearly as many gradients."""
RATES: Final[dict[str, dict[str, float]]] = {
    "mnist": {
        "DDP": 0.4,
        "backup(b=4)": 0.4,
        "dbw": 0.4,
        "psp(c=4)": 0.1,
        "psp(c=4, b=0.75)": 0.1,
        "ssp(staleness=3)": 0.05,
        "asp": 0.05,
        "majority": 0.4,
        "solo": 0.4,
        "ensemble(steps=8)": 0.4,
    },
    "cifar": {"DDP": 0.4, "backup(b=4)": 0.2, "asp": 0.1},
}
"""Learning rates that ``python -m benchmarks.race --tune`` has chosen."""


def slow(task: Task, trace: str) -> str | None:
    """Return the value of ``--slow`` for a trace; None: nobody waits."""
    return f"trace={data.locate(TRACES[trace])},median={task.bare_s}" if TRACES[trace] else None


def model(task: str) -> nn.Module:
    """Return the task's model: 51 thousand parameters, or 6 thousand."""
    if task == "mnist":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]

    return nn.Sequential(*block(3, 8), *block(8, 16), *block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def prepare(task: str, folder: Path) -> Path:
    """Write the task's images to a file that all workers map, and return its path."""
    path = folder / f"{task}.pt"
    if not path.exists():
        images = {"mnist": data.mnist, "cifar": data.cifar10}[task](TRAIN, TEST)
        torch.save({name: value.clone() for name, value in images._asdict().items()}, path)
    return path


def batch(seed: int, worker: int, iteration: int, size: int) -> torch.Tensor:
    """Return the indices of a batch: each epoch is one permutation, dealt out to the workers in turn. The same in every system."""
    epoch, at = divmod(iteration * size * WORKERS, TRAIN)
    return _order(seed * 100_003 + epoch)[at + worker * size : at + (worker + 1) * size]


@lru_cache(maxsize=2)
def _order(seed: int) -> torch.Tensor:
    return torch.randperm(TRAIN, generator=torch.Generator().manual_seed(seed))
