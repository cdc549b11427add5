"""One run of a rule on a simulated cluster, training a real model; and many such runs, as many at a time as there are cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import nn

from experiments.data import Images
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate
from offbeat.sim.training.gradients import Training

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained, whatever the rule."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    schedule: Callable[[int, float], float] | None = None
    """The factor of the learning rate, given the version and the epochs gone through."""
    every: int = 1
    """Evaluate each so many versions."""
    on_training_data: int = 0
    """More than 0: also report the loss over so many samples of the training data."""
    until: Callable[[Mapping[str, float]], bool] | None = None
    """Given what was evaluated, whether the run is over."""


def train(sync: str, recipe: Recipe, images: Images, cluster: Cluster, work: Work, *, journal: str | None = None) -> Result:
    """One run. The seed of the cluster is that of the initial parameters and of the batches too."""
    torch.manual_seed(cluster.seed)
    model = recipe.model()

    def evaluate(module: nn.Module) -> dict[str, float]:
        output = torch.cat([module(part) for part in images.test_x.split(1000)])
        found = {"accuracy": float((output.argmax(dim=1) == images.test_y).double().mean())}
        if recipe.on_training_data:
            x, y = images.train_x[: recipe.on_training_data], images.train_y[: recipe.on_training_data]
            found["loss"] = float(nn.functional.cross_entropy(torch.cat([module(part) for part in x.split(1000)]), y))
        return found

    training = Training(
        model,
        nn.functional.cross_entropy,
        (images.train_x, images.train_y),
        recipe.optimizer(model),
        schedule=recipe.schedule,
        evaluate=evaluate,
        every=recipe.every,
        until=recipe.until,
    )
    return simulate(sync, cluster, work, content=training, journal=journal)


def side_by_side(function: Callable[[T], R], jobs: Sequence[T]) -> list[R]:
    """``function`` of each job, in order; a process for each core that this one may use, one thread in each.

    Both must be importable by name.
    """
    with ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), len(jobs)), get_context("spawn"), initializer=_alone) as pool:
        return list(pool.map(function, jobs))


def _alone() -> None:
    torch.set_num_threads(1)


def first_time(result: Result, reached: Callable[[Mapping[str, float]], bool]) -> float | None:
    """The simulated time of the first evaluation for which this is so."""
    return next((point.t for point in result.curve if reached(point.values)), None)


def series(result: Result, name: str) -> tuple[list[float], list[Any]]:
    """Times and values of one evaluated number."""
    points = [point for point in result.curve if name in point.values]
    return [point.t for point in points], [point.values[name] for point in points]
