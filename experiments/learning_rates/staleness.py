"""One learning rate under staleness: a noisy quadratic, eight equal workers, plain SGD, momentum and Adam, all at a rate for ``bsp``."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import nn

from experiments.claims import Claim, mechanism
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training
from offbeat.sim.training.model import Model
from offbeat.sim.training.workload import Step
from offbeat.types import WorkerId

WORKERS: Final = 8
CURVATURES: Final = torch.logspace(-1.5, 0.0, 16)
"""Of the loss in each direction: from 0.03 to 1."""
NOISE: Final = 0.5
"""Standard deviation of each element of a worker's gradient."""
COMPUTE: Final = "lognormal(mean=1, sd=0.3)"
GRADIENTS: Final = 3200
"""Of all workers together."""
RULES: Final = (
    "bsp",
    "backup(b=1)",
    "rennala(batch=8)",
    "majority",
    "solo",
    "ssp(staleness=3)",
    "asp",
    "asp(discount=inverse)",
    "ringmaster(threshold=4)",
)
FACTORS: Final = (1.0, 0.5, 0.25, 0.125, 0.0625)
QUICK: Final = ("bsp", "asp", "asp(discount=inverse)", "ringmaster(threshold=4)")
_MANY: Final = "staleness of about 7, of at most 3 under ringmaster"
CLAIMS: Final = mechanism(
    Claim(row="momentum 0.9: asp", over="momentum 0.9: bsp", at_least=1000, why="diverges: " + _MANY),
    Claim(row="momentum 0.9: ringmaster(threshold=4)", over="momentum 0.9: bsp", at_least=1000, why="diverges: " + _MANY),
    Claim(row="momentum 0.9: asp(discount=inverse)", over="momentum 0.9: bsp", at_least=1, at_most=4, why="steps of an eighth; 2.2"),
    Claim(row="Adam: asp", over="Adam: bsp", at_least=5, at_most=25, why="does not diverge, as steps have a length; 11"),
    Claim(row="Adam: ringmaster(threshold=4)", over="Adam: bsp", at_least=3, at_most=15, why="7.3"),
    Claim(row="Adam: asp(discount=inverse)", over="Adam: bsp", at_least=0.7, at_most=1.5, why="1.04"),
)


class Method(NamedTuple):
    """An optimizer with the learning rate of ``bsp``."""

    name: str
    lr: float
    make: Callable[[nn.Module, float], torch.optim.Optimizer]


METHODS: Final = (
    Method("SGD", 0.5, lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr)),
    Method("momentum 0.9", 0.05, lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)),
    Method("Adam", 0.1, lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr)),
)


class Quadratic(nn.Module):
    """The loss ``sum_i h_i w_i^2 / 2``, beginning at ``w = 3``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((len(CURVATURES),), 3.0))

    def loss(self) -> float:
        """Return the loss without noise; infinity if a parameter is not finite."""
        found = float((CURVATURES * self.w.detach().double() ** 2).sum() / 2)
        return found if math.isfinite(found) else math.inf


class _NoisyModel(Model):
    def __init__(self, module: Quadratic, optimizer: torch.optim.Optimizer, seed: int) -> None:
        nothing = torch.zeros(1)
        super().__init__(module, lambda output, target: output, (nothing, nothing), optimizer)
        self._w, self._noise_seed = module.w, seed

    def gradient(self, worker: WorkerId, step: Step) -> tuple[list[torch.Tensor | None], float]:
        noise = np.random.Generator(np.random.Philox(key=self._noise_seed, counter=[0, 0, worker, step.number]))
        drawn = torch.from_numpy(noise.standard_normal(len(CURVATURES)).astype(np.float32))
        return [CURVATURES * self._w.detach() + NOISE * drawn], 1.0


class _NoisyTraining(Training):
    def __init__(self, module: Quadratic, optimizer: torch.optim.Optimizer, seed: int) -> None:
        nothing = torch.zeros(1)

        def evaluate(module: nn.Module) -> dict[str, float]:
            assert isinstance(module, Quadratic)
            return {"loss": module.loss()}

        super().__init__(module, lambda output, target: output, (nothing, nothing), optimizer, evaluate=evaluate, every=WORKERS)
        self.model = _NoisyModel(module, optimizer, seed)


def final_loss(sync: str, method: Method, factor: float = 1.0, seed: int = 0, gradients: int = GRADIENTS) -> float:
    """Return the mean loss of the versions in the last quarter of a run."""
    module = Quadratic()
    training = _NoisyTraining(module, method.make(module, factor * method.lr), seed)
    end_s = gradients / WORKERS
    result = simulate(sync, Cluster(workers=WORKERS, compute=COMPUTE, seed=seed), Work(time_s=end_s), content=training, counted=False)
    return fmean(point.values["loss"] for point in result.curve if point.t > 0.75 * end_s)


def rows(quick: bool) -> list[Row]:
    """Return the losses of the rules at the rate of ``bsp``; unless ``quick`` of all rules and two seeds, and their best factors of it."""
    made = []
    for method in METHODS[1:] if quick else METHODS:
        for sync in QUICK if quick else RULES:
            if quick:
                made.append(
                    Row(f"{method.name}: {sync}", None, final_loss(sync, method, gradients=GRADIENTS // 2), "", f"rate {method.lr}")
                )
                continue
            losses = {factor: fmean(final_loss(sync, method, factor, seed) for seed in range(2)) for factor in FACTORS}
            best = min(losses, key=losses.__getitem__)
            made += [
                Row(f"{method.name}: {sync}", None, losses[1.0], "", f"rate {method.lr}"),
                Row(f"{method.name}: {sync}, best factor", None, best, "", f"of {method.lr}; loss {losses[best]:.3f}"),
            ]
    return made
