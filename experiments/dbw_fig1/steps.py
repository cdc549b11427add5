"""Which assumption of DBW's gain holds: its two terms beside what steps with k gradients really do to the loss.

To second order a step with the mean of k gradients lowers the loss by ``eta N (1 - eta L_g / 2) - eta^2 L_v V / (2 k)``: N is the squared
norm of the gradient, V the variance of one worker's, L_g the curvature along the gradient, L_v the curvature that the noise meets. DBW has
one L for both and takes it to be ``1 / eta``. Here both are measured, by steps from the same parameters: one with the full gradient, and
many with gradients of single batches.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from experiments import data
from experiments._dbw import LR, WORKERS, law, network
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.policies import DBW
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.gradients import Training
from offbeat.sim.run import simulate

SEED: Final = 0
ALPHA: Final = 1.0
BATCH: Final = 100
AT_A_TIME: Final = 100
"""Images whose gradients are in memory together."""
DRAWN: Final = 32
"""Gradients of one batch that are tried, alone and as means of some."""


class Point(NamedTuple):
    """What steps from the parameters of one version do."""

    version: int
    norm: float
    """N."""
    variance: float
    """V."""
    decrease: float
    """Of the loss, by a step with the full gradient."""
    by_k: dict[int, float]
    """The same by a step with k gradients, on the mean."""

    @property
    def along_gradient(self) -> float:
        """``eta L_g``."""
        return 2.0 * (1.0 - self.decrease / (LR * self.norm))

    @property
    def along_noise(self) -> float:
        """``eta L_v``, from steps with single gradients."""
        return 2.0 * (self.decrease - self.by_k[1]) / (LR * self.variance)

    def gains(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """What the rule expects of 1, 2, ... gradients, were N and V known exactly."""
        return LR / 2 * (self.norm - self.variance / np.arange(1, WORKERS + 1))

    def decreases(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """What they do: between the full gradient's step and a single one's."""
        return self.decrease - (self.decrease - self.by_k[1]) / np.arange(1, WORKERS + 1)


def look(version: int, module: nn.Module, x: Tensor, y: Tensor) -> Point:
    """Make trial steps from these parameters; the module is left as it is."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(module, values, (image[None],)), target[None])

    each: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, 0, 0))
    generator = torch.Generator().manual_seed(SEED + version)
    drawn = torch.randint(len(x), (DRAWN, BATCH), generator=generator)
    weights = torch.zeros(DRAWN + 1, len(x)).scatter_add_(1, torch.cat([drawn, drawn[:1]]), torch.full((DRAWN + 1, BATCH), 1.0 / BATCH))
    weights[DRAWN] = 1.0 / len(x)
    sums, squares = torch.zeros(DRAWN + 1, sum(p.numel() for p in parameters.values())), 0.0
    for start in range(0, len(x), AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        gradients = torch.cat([g.flatten(1) for g in each(parameters, x[part], y[part]).values()], dim=1)
        sums += weights[:, part] @ gradients
        squares += float(gradients.double().square().sum())
    norm = float(sums[DRAWN].double().square().sum())

    def value(step: Tensor | None) -> float:
        values, place = {}, 0
        for name, p in parameters.items():
            values[name] = p if step is None else p - LR * step[place : place + p.numel()].view_as(p)
            place += p.numel()
        with torch.no_grad():
            output = torch.cat([functional_call(module, values, (images,)) for images in x.split(1000)])
            return float(nn.functional.cross_entropy(output.double(), y))

    before = value(None)
    by_k = {k: fmean(before - value(mean) for mean in sums[:DRAWN].view(-1, k, sums.shape[1]).mean(dim=1)) for k in (1, 4)}
    return Point(version, norm, (squares / len(x) - norm) / BATCH, before - value(sums[DRAWN]), by_k)


def seconds() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What a version takes when each waits for 1, 2, ... gradients: measured in virtual time."""
    cluster = Cluster(workers=WORKERS, compute=law(ALPHA), seed=SEED)
    return np.array([simulate(f"backup(b={WORKERS - k})", cluster, Work(versions=1000)).seconds / 1000 for k in range(1, WORKERS + 1)])


def run(quick: bool, out: Path) -> list[Row]:
    """Train under DBW as figure 3 does in a quick run, and look at some versions."""
    size, versions, every = (2_000, 60, 10) if quick else (10_000, 60, 5)
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
    picture(points, lasts, out)
    return [row for point in points for row in rows_of(point, lasts)]


def rows_of(point: Point, lasts: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[Row]:
    """The two curvatures beside the one that the rule assumes, and which k each would choose."""
    name = f"version {point.version}"
    gains, real = point.gains(), point.decreases()
    expected = int(np.argmax(gains / lasts)) + 1 if gains.max() > 0 else WORKERS
    found = {k: f"{real[k - 1] / lasts[k - 1]:.2g}" for k in (1, 4, 16)}
    return [
        Row(f"{name}: lr x curvature along the gradient", 1.0, point.along_gradient, "", "paper: the rule's assumption"),
        Row(f"{name}: lr x curvature that the noise meets", 1.0, point.along_noise, "", f"V / N = {point.variance / point.norm:.3g}"),
        Row(f"{name}: gain of k=1, as the rule has it", None, 1e3 * float(gains[0]), "1e-3", "N and V exact"),
        Row(
            f"{name}: decrease by k=1",
            None,
            1e3 * point.by_k[1],
            "1e-3",
            f"k=4 {1e3 * point.by_k[4]:.3g}, all {1e3 * point.decrease:.3g}",
        ),
        Row(f"{name}: best k by the rule's gain", None, expected, "", "per second"),
        Row(f"{name}: best k by the decrease", None, int(np.argmax(real / lasts)) + 1, "", f"per second: {found}"),
    ]


def picture(points: list[Point], lasts: np.ndarray[tuple[int], np.dtype[np.float64]], out: Path) -> None:
    """What the rule expects of k gradients and what they do, per second."""
    figure = new_figure(9.0, 4.0)
    left, right = figure.subplots(1, 2)
    ks = np.arange(1, WORKERS + 1)
    for colour, point in zip(COLOURS, points[:: max(1, len(points) // 6)], strict=False):
        left.plot(ks, point.gains() / lasts, color=colour, label=f"version {point.version}")
        right.plot(ks, point.decreases() / lasts, color=colour, label=f"version {point.version}")
    for axes, title in ((left, "expected by the rule, N and V exact"), (right, "real decrease")):
        axes.set_yscale("symlog", linthresh=1e-3)
        label(axes, title=title, x="k", y="loss per second")
    save(figure, out / "dbw_fig1.png")
