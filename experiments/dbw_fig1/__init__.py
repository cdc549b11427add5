"""What DBW believes of a training run, beside the truth: the gradient's norm, the gradients' variance, and the gain of each version."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from experiments import data
from experiments._dbw import BATCH, WORKERS, law, network
from experiments.claims import MECHANISM, Claim
from experiments.dbw_fig1 import mechanism, steps
from experiments.dbw_fig1.noted import NotedDBW
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training

PAPER = "DBW, figure 1: estimates of the gradient's norm, its variance and the gain beside exact values, MNIST, n = 16, eta = 0.01"
SEED: Final = 0
LR: Final = 0.01
ALPHA: Final = 0.7
"""The round trips of figure 2; the paper does not say which ones figure 1 has."""
AT_A_TIME: Final = 100
"""Images whose gradients are in memory together."""


class Truth(NamedTuple):
    """Over the whole data set, at one version."""

    norm: float
    """|grad F|^2."""
    variance: float
    """Of the mean gradient over a batch drawn with replacement, summed over the coordinates."""


def exact(module: nn.Module, x: Tensor, y: Tensor, batch: int) -> Truth:
    """From the gradient of each sample: ``variance = (mean of |grad f_i|^2 - |grad F|^2) / batch``."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def loss(values: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(module, values, (image[None],)), target[None])

    each: Callable[..., dict[str, Tensor]] = vmap(grad(loss), in_dims=(None, 0, 0))
    total, squares = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64), 0.0
    for images, targets in zip(x.split(AT_A_TIME), y.split(AT_A_TIME), strict=True):
        gradients = torch.cat([g.flatten(1) for g in each(parameters, images, targets).values()], dim=1).double()
        total += gradients.sum(dim=0)
        squares += float(gradients.square().sum())
    norm = float((total / len(x)).square().sum())
    return Truth(norm, (squares / len(x) - norm) / batch)


class Course(NamedTuple):
    """One run, by version; gains and decreases in units of the loss."""

    version: NDArray[np.int64]
    k: NDArray[np.int64]
    estimated: NDArray[np.float64]
    """(2, versions) norm and variance."""
    true: NDArray[np.float64]
    gain: NDArray[np.float64]
    """At the k that was chosen."""
    decrease: NDArray[np.float64]
    """F at this version minus F at the next."""


def train(size: int, versions: int, every: int) -> Course:
    """Train under DBW in virtual time; the truth is found at each so many versions."""
    images = data.mnist(size, 100)
    x, y = images.train_x, images.train_y
    truths, losses = dict[int, Truth](), dict[int, float]()
    passed = count(1)

    def evaluate(module: nn.Module) -> dict[str, float]:
        version = next(passed)
        if version % every == 0:
            truths[version] = exact(module, x, y, BATCH)
        if version % every in (0, 1):  # of these and the next
            losses[version] = float(nn.functional.cross_entropy(torch.cat([module(part) for part in x.split(2000)]).double(), y))
        return {}

    torch.manual_seed(SEED)
    model, policy = network(), NotedDBW()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    training = Training(model, nn.functional.cross_entropy, (x, y), optimizer, evaluate=evaluate)
    simulate(policy, Cluster(workers=WORKERS, compute=law(ALPHA), seed=SEED), Work(versions=versions, batch=BATCH), content=training)
    known = [e for e in policy.estimates if e.version in truths and e.version + 1 in losses and e.version + 1 in policy.parts]
    k = np.array([policy.parts[e.version + 1] for e in known])
    estimated = np.array([(e.norm, e.variance) for e in known]).T
    return Course(
        version=np.array([e.version for e in known]),
        k=k,
        estimated=estimated,
        true=np.array([truths[e.version] for e in known]).T,
        gain=LR / 2 * (estimated[0] - estimated[1] / k),
        decrease=np.array([losses[e.version] - losses[e.version + 1] for e in known]),
    )


CLAIMS: Final = (
    Claim(row="norm: median of estimate / exact", at_least=0.85, at_most=1.25, why="paper: very accurate; a mean of five folds lags"),
    Claim(row="variance: median of estimate / exact", at_least=0.9, at_most=1.15, why="paper: very accurate; a mean of five folds lags"),
    Claim(row="gain below the decrease of the loss", at_least=80.0, mode="quick", why="paper: always; 92 %"),
    Claim(row="gain below the decrease of the loss", at_least=93.0, mode="full", why="paper: always; 98 %"),
    Claim(row="decrease / gain: median", at_least=1.5, at_most=4.0, why="2 where the learning rate is far below 1/L, as 0.01 is here"),
    Claim(row="correlation of gain and decrease", at_least=0.7, why="paper: almost proportional; 0.97 in a quick run, 0.84 in a full one"),
    *mechanism.CLAIMS,
)


VARIANTS: Final = {"steps": steps.run, MECHANISM: lambda quick, out: mechanism.rows()}


def run(quick: bool, out: Path) -> list[Row]:
    """One run of training; the truth is found at every second version, in a full run at every fifth."""
    size, versions, every = (2_000, 50, 2) if quick else (10_000, 240, 5)
    course = train(size, versions, every)
    picture(course, out)
    note = f"{len(course.version)} versions of {versions}, {size:,} images"
    ratio = course.estimated / course.true
    aligned = float(np.corrcoef(course.gain, course.decrease)[0, 1])
    return [
        Row("norm: median of estimate / exact", "very accurate", float(np.median(ratio[0])), "", note),
        Row("norm: median error", "very accurate", 100 * float(np.median(np.abs(ratio[0] - 1))), "%"),
        Row("variance: median of estimate / exact", "very accurate", float(np.median(ratio[1])), ""),
        Row("variance: median error", "very accurate", 100 * float(np.median(np.abs(ratio[1] - 1))), "%"),
        Row("gain below the decrease of the loss", "always", 100 * float(np.mean(course.gain <= course.decrease)), "%", "of the versions"),
        Row("decrease / gain: median", "nearly constant", float(np.median(course.decrease / course.gain)), ""),
        Row("correlation of gain and decrease", "almost proportional", aligned, ""),
        Row("mean k", None, float(course.k.mean()), "", f"of {WORKERS}"),
        *mechanism.rows(),
    ]


def picture(course: Course, out: Path) -> None:
    """Three panels, as in the paper: solid the estimates, dashed the truth."""
    figure = new_figure(10.0, 3.6)
    left, middle, right = figure.subplots(1, 3)
    for axes, row, name in ((left, 0, "squared norm of the gradient"), (middle, 1, "variance of a worker's gradient")):
        axes.plot(course.version, course.estimated[row], color=COLOURS[0], label="estimate")
        axes.plot(course.version, course.true[row], color=COLOURS[1], linestyle="--", label="exact")
        axes.set_yscale("log")
        label(axes, title=name, x="version", y="")
    right.plot(course.version, course.gain, color=COLOURS[0], label="estimated gain")
    right.plot(course.version, course.decrease, color=COLOURS[1], linestyle="--", label="decrease of the loss")
    right.set_yscale("symlog", linthresh=1e-4)
    label(right, title="gain", x="version", y="")
    save(figure, out / "dbw_fig1.png")
