"""Which assumption of DBW's gain fails: its terms beside what steps with few gradients really do to the loss, at once and later.

To second order a step with the mean of k gradients lowers the loss by ``eta N (1 - eta L_g / 2) - eta^2 L_v V / (2 k)``: N is the squared
norm of the gradient, V the variance of one worker's, L_g the curvature along the gradient, L_v the curvature that the noise meets. DBW has
one L for both, takes it to be ``1 / eta``, and charges the last term to each version. Measured are both curvatures, by steps from the same
parameters with the full gradient and with gradients of single batches, and what is left of the noise's cost after further steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from experiments import data
from experiments._dbw import LR, WORKERS, law, network
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.policies import DBW
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training

Vector: TypeAlias = list[Tensor]

SEED: Final = 0
ALPHA: Final = 1.0
BATCH: Final = 100
DRAWN: Final = 16
"""Gradients of single batches that are tried."""
FOLLOWED: Final = 4
"""Those of them after which further steps are made."""
LATER: Final = (1, 2, 4)
"""Steps after which the cost of the first one's noise is looked at."""
KS: Final = (1, 2, 4, 8, 16)


class Point(NamedTuple):
    """What steps from the parameters of one version do."""

    version: int
    loss: float
    norm: float
    """N."""
    variance: float
    """V."""
    decrease: float
    """Of the loss, by a step with the full gradient."""
    by: dict[int, float]
    """The decrease by a step with the mean of so many single gradients, on the mean."""
    cost: float
    """By how much less a step with a single gradient lowers it, on the mean."""
    left: dict[int, float]
    """Of this cost, the share that is left after so many further steps, all with full gradients."""

    @property
    def along_gradient(self) -> float:
        """``eta L_g``."""
        return 2.0 * (1.0 - self.decrease / (LR * self.norm))

    @property
    def along_noise(self) -> float:
        """``eta L_v``."""
        return 2.0 * self.cost / (LR * self.variance)

    def gain(self, k: int) -> float:
        """The rule's gain, with the true N and V."""
        return LR / 2 * (self.norm - self.variance / k)

    def best(self, lasts: dict[int, float], *, charged: float = 1.0) -> int:
        """The k with the largest decrease per second, if so much of the noise's cost is charged."""
        return max(KS, key=lambda k: (self.decrease - charged * self.cost / k) / lasts[k])


class Steps:
    """Trial steps on a copy of a network."""

    def __init__(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        self._module, self._x, self._y = module, x, y
        self._parameters = list(module.parameters())
        self._begin = [p.detach().clone() for p in self._parameters]

    def gradient(self, rows: Tensor | slice = slice(None)) -> tuple[float, Vector]:
        """The loss over some images and its gradient, where the module is now."""
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(self._module(self._x[rows]), self._y[rows])
            return loss.item(), list(torch.autograd.grad(loss, self._parameters))

    def losses(self, first: Vector, further: int) -> list[float]:
        """After the given step from the beginning, and after each of so many steps with full gradients; the module returns there."""
        found, step = [], first
        with torch.no_grad():
            for _ in range(further + 1):
                for p, g in zip(self._parameters, step, strict=True):
                    p.sub_(LR * g)
                loss, step = self.gradient()
                found.append(loss)
            for p, before in zip(self._parameters, self._begin, strict=True):
                p.copy_(before)
        return found


def look(version: int, module: nn.Module, x: Tensor, y: Tensor) -> Point:
    """Make trial steps from these parameters; the module is left as it is."""
    steps = Steps(module, x, y)
    loss, full = steps.gradient()
    generator = torch.Generator().manual_seed(SEED + version)
    single = [steps.gradient(torch.randint(len(x), (BATCH,), generator=generator))[1] for _ in range(DRAWN)]
    norm = sum(float(g.double().square().sum()) for g in full)
    away = [sum(float((g - f).double().square().sum()) for g, f in zip(one, full, strict=True)) for one in single]
    smooth = steps.losses(full, max(LATER))
    noisy = [steps.losses(one, max(LATER) if number < FOLLOWED else 0) for number, one in enumerate(single)]
    cost = fmean(losses[0] for losses in noisy) - smooth[0]
    followed = [fmean(losses[i] for losses in noisy[:FOLLOWED]) - smooth[i] for i in range(max(LATER) + 1)]
    left = {later: followed[later] / followed[0] for later in LATER}
    by = {}
    for k in KS:
        means = [[torch.stack(parts).mean(dim=0) for parts in zip(*single[i : i + k], strict=True)] for i in range(0, DRAWN, k)]
        by[k] = loss - fmean(steps.losses(mean, 0)[0] for mean in means)
    return Point(version, loss, norm, fmean(away), loss - smooth[0], by, cost, left)


def seconds() -> dict[int, float]:
    """What a version takes when each waits for k gradients: measured in virtual time."""
    cluster = Cluster(workers=WORKERS, compute=law(ALPHA), seed=SEED)
    return {k: simulate(f"backup(b={WORKERS - k})", cluster, Work(versions=200)).seconds / 200 for k in KS}


def run(quick: bool, out: Path) -> list[Row]:
    """Train under DBW as figure 3 does in a quick run, and look at some versions."""
    size, versions, every = (2_000, 60, 20) if quick else (10_000, 60, 5)
    images = data.mnist(size, 100)
    x, y = images.train_x, images.train_y
    points, version = list[Point](), 0

    def evaluate(module: nn.Module) -> dict[str, float]:
        nonlocal version
        version += 1
        if version % every == 0:
            points.append(look(version, module, x, y))
        return {}

    torch.manual_seed(SEED)
    model = network()
    training = Training(model, nn.functional.cross_entropy, (x, y), torch.optim.SGD(model.parameters(), lr=LR), evaluate=evaluate)
    simulate(DBW(), Cluster(workers=WORKERS, compute=law(ALPHA), seed=SEED), Work(versions=versions, batch=BATCH), content=training)
    lasts = seconds()
    picture(points, out)
    return [row for point in points for row in rows_of(point, lasts)]


def rows_of(point: Point, lasts: dict[int, float]) -> list[Row]:
    """The two curvatures beside the one that the rule assumes, and what becomes of the noise's cost."""
    name, last = f"version {point.version}", max(LATER)
    return [
        Row(f"{name}: lr x curvature along the gradient", 1.0, point.along_gradient, "", f"loss {point.loss:.3f}"),
        Row(f"{name}: lr x curvature that the noise meets", 1.0, point.along_noise, "", f"V / N = {point.variance / point.norm:.3g}"),
        Row(f"{name}: decrease by the full gradient", None, point.decrease, ""),
        Row(f"{name}: cost of one gradient's noise", LR / 2 * point.variance, point.cost, "", "paper: eta / 2 * V"),
        *(Row(f"{name}: decrease by {k} gradients", point.gain(k), by, "", "paper: the gain") for k, by in point.by.items()),
        *(Row(f"{name}: left of it after {h} steps", 1.0, share, "", "paper: charged for good") for h, share in point.left.items()),
        Row(f"{name}: best k by the decrease", None, point.best(lasts), "", f"per second, of {KS}"),
        Row(f"{name}: best k, charged what is left", None, point.best(lasts, charged=point.left[last]), "", f"after {last} steps"),
    ]


def picture(points: Sequence[Point], out: Path) -> None:
    """What is left of the cost of one gradient's noise."""
    figure = new_figure()
    axes = figure.subplots()
    for colour, point in zip(COLOURS, points[:: max(1, len(points) // 6)], strict=False):
        shares: NDArray[np.float64] = np.array([1.0, *point.left.values()])
        axes.plot([0, *point.left], point.cost * shares, color=colour, marker=".", label=f"version {point.version}")
    axes.axhline(0.0, color="grey", linewidth=0.8)
    label(axes, title="a step with one gradient instead of all", x="further steps, with the full gradient", y="loss above")
    save(figure, out / "dbw_fig1.png")
