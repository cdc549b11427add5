"""Eager-SGD's learning experiments: eight ranks, each rule until the same number of gradients is folded, evaluated once in an epoch.

An epoch is so many gradients as make up the data set, whatever the rule's rounds: under `solo` there are more rounds in it than under
`full`, and each adds up fewer gradients. Samples are drawn from the whole set and not dealt out, so no epoch ends with all waiting for the
last, and the times are those of the rules alone. What the paper's timing model says of the same delays is in ``timing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from experiments.result import Row
from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training
from offbeat.types import Seconds, Version

RANKS: Final = 8
NAMES: Final = {"full": "synchronous", "majority": "eager, majority", "solo": "eager, solo"}
"""The three rules, and what the paper calls them."""


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What is learned, and how, whatever the rule."""

    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    data: tuple[Tensor, ...]
    """Inputs and targets, with a row for each sample."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: int
    """Samples of one gradient."""
    epochs: int
    evaluate: Callable[[nn.Module], float]
    """One number, of the newest parameters."""
    schedule: Callable[[float], float] | None = None
    """The factor of the learning rate after so many epochs."""

    @property
    def gradients(self) -> float:
        """In one epoch."""
        return len(self.data[0]) / self.batch


class Learned(NamedTuple):
    """What came of one run."""

    seconds: Seconds
    """Simulated, until the last of its gradients was folded."""
    rounds: Version
    gradients: int
    fresh: int
    """Gradients folded onto the version from which they were computed."""
    times: tuple[Seconds, ...]
    """The end of each epoch."""
    values: tuple[float, ...]
    """What was evaluated then."""

    @property
    def steps_per_s(self) -> float:
        """Steps of all ranks, that is as many gradients as there are ranks, in a simulated second."""
        return self.gradients / RANKS / self.seconds


class Paced(Training):
    """Evaluates at each epoch's end and stops at the last, both counted in gradients folded."""

    def __init__(self, lesson: Lesson) -> None:
        model = lesson.model()
        schedule = lesson.schedule
        super().__init__(
            model,
            lesson.loss,
            lesson.data,
            lesson.optimizer(model),
            schedule=None if schedule is None else lambda version, epochs: schedule(epochs),
            evaluate=lambda module: {"value": lesson.evaluate(module)},
            until=lambda values: self.over,
        )
        self._lesson = lesson
        self.gradients = self.fresh = self._evaluated = 0

    @property
    def over(self) -> bool:
        """Whether the last epoch is."""
        return self.gradients >= self._lesson.epochs * self._lesson.gradients

    def fold(self, effect: Fold) -> Folded:
        self.gradients += len(effect.parts)
        self.fresh += sum(part.staleness == 0 for part in effect.parts)
        return super().fold(effect)

    def evaluate(self, version: Version, now: Seconds) -> Mapping[str, float] | None:
        epochs = int(self.gradients / self._lesson.gradients)
        if epochs == self._evaluated:
            return None
        self._evaluated = epochs
        return super().evaluate(version, now)


def learn(sync: str, lesson: Lesson, cluster: Cluster) -> Learned:
    """One run. The cluster's seed is that of the initial parameters and of the batches too."""
    torch.manual_seed(cluster.seed)
    content = Paced(lesson)
    # the limit is none: a round folds at least one gradient
    limit = int(lesson.epochs * lesson.gradients) + 1
    result = simulate(sync, cluster, Work(versions=limit, batch=lesson.batch), content=content)
    times = tuple(point.t for point in result.curve)
    values = tuple(point.values["value"] for point in result.curve)
    return Learned(result.seconds, result.curve[-1].version, content.gradients, content.fresh, times, values)


def accuracy(inputs: Tensor, targets: Tensor) -> Callable[[nn.Module], float]:
    """Evaluates the share of these samples for which the largest output is the target's, in percent."""

    def evaluate(module: nn.Module) -> float:
        output = torch.cat([module(part) for part in inputs.split(1000)])
        return 100 * float((output.argmax(dim=1) == targets).double().mean())

    return evaluate


def speed_rows(
    found: Mapping[str, Learned], paper: Mapping[str, float], note: str, prefix: str = "", rates: Mapping[str, float] | None = None
) -> list[Row]:
    """Throughput of each rule, how much faster than ``full`` it is, and how many of a round's gradients are new.

    Args:
        found: by rule.
        paper: its speed-ups, by rule.
        note: about them.
        prefix: of the rows' names.
        rates: the paper's steps in a second, by rule.
    """
    rows = [
        Row(f"{prefix}{sync}: steps", (rates or {}).get(sync), run.steps_per_s, "1/s", f"{RANKS} gradients each; simulated")
        for sync, run in found.items()
    ]
    rows += [
        Row(f"{prefix}{sync} over full", paper.get(sync), run.steps_per_s / found["full"].steps_per_s, "x", note)
        for sync, run in found.items()
        if sync != "full"
    ]
    return rows + [
        Row(f"{prefix}{sync}: new gradients in a round", None, run.fresh / run.rounds, "", f"of {run.gradients / run.rounds:.2f}")
        for sync, run in found.items()
    ]
