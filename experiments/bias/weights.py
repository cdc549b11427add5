"""Train a model that counts: each batch adds its weight to the parameter of its kind, through the rule and the engine of a real job.

The loss is minus the parameter of the batch's kind, so that the gradient is minus one there and zero elsewhere. Under plain SGD a parameter
is then the sum of the weights with which batches of its kind have entered the model, times the learning rate, whatever the rule makes of
them: folds with weights, discounted steps, averages of parameters, mixed replicas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeAlias

import torch
from torch import nn

from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.latency.base import Law, Sampler
from offbeat.sim.latency.registry import law
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training
from offbeat.sim.training.model import Model
from offbeat.sim.training.workload import Step
from offbeat.types import WorkerId

Kind: TypeAlias = Callable[[WorkerId, int], int]
"""Returns the kind of the batch of a worker's iteration, by its number."""
JITTER: Final = "lognormal(mean=1, sd=0.1)"
FACTORS: Final = (1, 1, 2, 4)
"""How many times as long the iterations of the four workers are, each of which has data of its own."""
LONG: Final = 3
"""How many times as long a long batch is. A quarter of the batches of the common pool is long."""


class Counting(nn.Module):
    """One parameter for each kind of batch."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(kinds))

    def forward(self, kind: torch.Tensor) -> torch.Tensor:
        """Return minus the parameter of each sample's kind."""
        return -self.weight[kind]

    def shares(self) -> list[float]:
        """Return the share of each kind in all weights."""
        found = self.weight.detach().double()
        return [float(share) for share in found / found.sum()]


class _CountingModel(Model):
    """Compute the gradients of `Counting`, which do not depend on its parameters."""

    def __init__(self, module: Counting, optimizer: torch.optim.Optimizer, kind: Kind) -> None:
        nothing = torch.zeros(1)
        super().__init__(module, lambda output, target: output.mean(), (nothing, nothing), optimizer)
        self._kind = kind
        self._gradients = -torch.eye(len(module.weight))

    def gradient(self, worker: WorkerId, step: Step) -> tuple[list[torch.Tensor | None], float]:
        return [self._gradients[self._kind(worker, step.number)]], 1.0


class _CountingTraining(Training):
    def __init__(self, module: Counting, kind: Kind) -> None:
        nothing = torch.zeros(1)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        super().__init__(module, lambda output, target: output.mean(), (nothing, nothing), optimizer)
        self.model = _CountingModel(module, optimizer, kind)


@cache
def is_long(worker: WorkerId, number: int) -> bool:
    """Return whether an iteration's batch is long: one of each four of a worker is, drawn at random."""
    return random.Random(f"{worker} {number // 4}").randrange(4) == number % 4


@dataclass(frozen=True, kw_only=True)
class LongBatches(Law):
    """Iterations of `JITTER`, `LONG` times longer with a long batch."""

    def start(self, seed: int, workers: int) -> Sampler:
        inner = law(JITTER).start(seed, workers)
        return Sampler(lambda worker, clock, now: inner.draw(worker, clock, now) * (LONG if is_long(WorkerId(worker), clock) else 1))


def of_the_slowest(sync: str, time_s: float, *, servers: int = 1) -> float:
    """Return the share of the slowest of four workers in all weights."""
    compute = f"per_worker(law='{JITTER}', factors={FACTORS})"
    cluster = Cluster(workers=len(FACTORS), servers=servers, compute=compute)
    return shares(sync, cluster, time_s, len(FACTORS), lambda worker, number: worker)[-1]


def of_long_batches(sync: str, time_s: float, *, servers: int = 1) -> float:
    """Return the share of long batches in all weights, of eight equal workers."""
    cluster = Cluster(workers=8, servers=servers, compute=LongBatches())
    return shares(sync, cluster, time_s, 2, lambda worker, number: int(is_long(worker, number)))[1]


def shares(sync: str, cluster: Cluster, time_s: float, kinds: int, kind: Kind) -> Sequence[float]:
    """Return the share of each kind of batch in all weights, from a simulated run of so many seconds."""
    module = Counting(kinds)
    simulate(sync, cluster, Work(time_s=time_s), content=_CountingTraining(module, kind), counted=False)
    return module.shares()
