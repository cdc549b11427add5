"""DBW's learning experiments: MNIST, 16 workers with 500 images each, a network with two 5x5 convolutions and two linear layers."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import nn

from experiments import data
from experiments._training.runs import Recipe, first_time, train
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result

WORKERS: Final = 16
BATCH: Final = 500
LR: Final = 0.08
"""Of the dynamic rules, and of waiting for all: 0.005 k at k = 16."""
TARGET: Final = 0.2
"""The training loss that ends a race; in a quick one it is `QUICK_TARGET`."""
QUICK_TARGET: Final = 0.3
GIVE_UP: Final = 3000
"""Versions."""
GIVE_UP_S: Final = 3000.0
"""Simulated; the slowest race to `TARGET` takes a tenth of it."""


def static(k: int) -> str:
    """Wait for k, with the paper's learning rate for that, 0.005 k.

    >>> static(10)
    'backup(b=6, lr_rule=proportional)'
    """
    return f"backup(b={WORKERS - k}, lr_rule=proportional)"


def law(alpha: float) -> str:
    """The paper's round-trip times: ``1 - alpha + alpha * Exp(1)`` seconds.

    >>> law(0.2)
    'shifted_exponential(shift=0.8, scale=0.2)'
    """
    return f"shifted_exponential(shift={1 - alpha:g}, scale={alpha:g})" if alpha else "constant(seconds=1.0)"


class Race(NamedTuple):
    """One run, until the training loss is below the target."""

    sync: str
    alpha: float
    seed: int
    quick: bool
    journal: str | None = None
    lr: float = LR
    images: int | None = None
    """Of one gradient; None: the paper's number, or a fifth of it in a quick run."""
    give_up_s: float = GIVE_UP_S

    @property
    def batch(self) -> int:
        """Images of one gradient."""
        return self.images or (BATCH // 5 if self.quick else BATCH)

    @property
    def target(self) -> float:
        """The training loss that ends it."""
        return QUICK_TARGET if self.quick else TARGET


def network() -> nn.Module:
    """30,840 parameters. Strided convolutions instead of pooling, which on one core would take most of the time; He's initialisation."""
    model = nn.Sequential(
        nn.Conv2d(1, 10, 5, stride=2, padding=2), nn.ReLU(),
        nn.Conv2d(10, 20, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(500, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    return model


def run_race(race: Race) -> Result:
    """Run it; the curve has the training loss of each version, over 1,000 images."""
    images = data.mnist(12_000 if race.quick else 60_000, 100)
    recipe = Recipe(
        model=network,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=race.lr),
        on_training_data=1000,
        until=lambda values: values["loss"] < race.target or not math.isfinite(values["loss"]),
    )
    cluster = Cluster(workers=WORKERS, compute=law(race.alpha), seed=race.seed)
    return train(
        race.sync,
        recipe,
        images,
        cluster,
        Work(versions=GIVE_UP, time_s=race.give_up_s, batch=race.batch),
        journal=race.journal,
    )


def time_to_target(race: Race, result: Result) -> float:
    """Simulated seconds; infinity if it never got there."""
    found = first_time(result, lambda values: values["loss"] < race.target)
    return float("inf") if found is None else found
