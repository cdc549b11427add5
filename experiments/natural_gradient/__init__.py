"""Do workers stay closer in output space, and average better, when they train apart with the natural gradient instead of SGD?

Two measurements. From the same parameters, at learning rates over a grid: how far four workers' outputs are apart after T steps, against
how much the round lowered the training loss of the averaged model. And whole trainings, each optimizer at the learning rate that suits it
best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from experiments.claims import Claim
from experiments.natural_gradient.workers import BATCH, STEPS, WORKERS, Make, Measured, Task, load, sweep, train, unequal
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.tensors.natural_gradient import NaturalGradient

PAPER = "EnsembleSync, section 3.4: the natural gradient keeps workers from diverging in output space between averaging points"
SEED: Final = 0

Curves: TypeAlias = dict[int, list[list[Measured]]]
"""By round and seed: what one round measures at each learning rate of the sweep, the largest first."""


class Method(NamedTuple):
    """An optimizer that workers run locally."""

    name: str
    make: Make
    colour: str


SGD: Final = Method("SGD", torch.optim.SGD, COLOURS[0])
NATURAL: Final = Method("natural gradient", NaturalGradient, COLOURS[3])
BOUNDED: Final = Method("SGD in bounded steps", lambda params, lr: NaturalGradient(params, lr, alpha=1e9), COLOURS[2])
"""The control: the natural gradient's bounds on a step without its directions; at this much smoothing they are SGD's."""


class Size(NamedTuple):
    """What a quick and a full run differ in."""

    seeds: int
    rounds: int
    starts: tuple[int, ...]
    """The averaging points of SGD's training from which the learning rates are swept."""
    sweep: tuple[float, ...]
    train: tuple[float, ...]
    """Learning rates for whole trainings."""


QUICK: Final = Size(1, 6, (0, 4), tuple(0.4 * 2.0**-i for i in range(7)), (0.4, 0.2))
FULL: Final = Size(3, 30, (0, 2, 8, 25), tuple(0.4 * 2.0**-i for i in range(8)), (0.4, 0.2, 0.1, 0.05))
LEVELS: Final = (0.5, 0.9)
"""Shares of SGD's largest decrease of the loss at which divergences are compared."""


class Comparison(NamedTuple):
    """SGD beside another method, from the same parameters and with the same batches."""

    method: Method
    where: str
    """How the workers' data are divided, in words for a row's name; empty for parts of equal distribution."""
    sgd: Curves
    other: Curves


class Trained(NamedTuple):
    """Whole trainings of one method at one learning rate."""

    method: Method
    lr: float
    runs: list[list[Measured]]
    """By seed, then round."""
    starts: list[list[Tensor]]
    """By seed: the parameters before each round."""

    def by_round(self, name: str) -> list[float]:
        return [fmean(getattr(measured, name) for measured in each) for each in zip(*self.runs, strict=True)]


CLAIMS: Final = (
    Claim(row="SGD / natural gradient, round 1 at 90 %", at_least=1.0, why="the paper's claim; 1.4 to 2.7 over three seeds"),
    Claim(row="SGD / natural gradient, round 9 at 90 %", at_least=1.5, mode="full", why="the paper's claim; 3.0 to 6.3 over three seeds"),
    Claim(
        row="training with natural gradient: accuracy after averaging",
        over="training with SGD: accuracy after averaging",
        at_least=0.99,
        why="97.8 % for 97.1 in a full run; quickly 96.5 for 94.1, and on another processor 97.1 for 97.7",
    ),
    Claim(row="training with natural gradient: divergence", over="training with SGD: divergence", at_most=0.8, why="half"),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Measure, draw, and return the rows."""
    size, task = QUICK if quick else FULL, load()
    trained = [best(task, method, size) for method in ((SGD, NATURAL) if quick else (SGD, NATURAL, BOUNDED))]
    comparisons = compare(task, size, trained, quick)
    draw(out / "natural_gradient.png", task, comparisons, trained)
    setting = f"{task.name}, {WORKERS} workers, {STEPS} steps of {BATCH} samples, {size.seeds} seed{'s' if size.seeds > 1 else ''}"
    rows = [row for comparison in comparisons for row in matched_rows(comparison)]
    return [rows[0]._replace(note=f"{setting}; {rows[0].note}"), *rows[1:], *trained_rows(trained)]


def best(task: Task, method: Method, size: Size) -> Trained:
    """Train at the learning rate whose average has, with the first seed, the lowest held-out loss after the last round."""
    tried = {lr: train(task, method.make, lr, rounds=size.rounds, seed=SEED) for lr in size.train}
    losses = {lr: runs[-1].loss for lr, (runs, _) in tried.items()}
    lr = min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf)
    others = [train(task, method.make, lr, rounds=size.rounds, seed=seed) for seed in range(SEED + 1, SEED + size.seeds)]
    runs, starts = zip(tried[lr], *others, strict=True)
    return Trained(method, lr, list(runs), list(starts))


def compare(task: Task, size: Size, trained: Sequence[Trained], quick: bool) -> list[Comparison]:
    """The sweeps, all from SGD's own parameters; parts that differ in a full run only."""

    def curves(method: Method, data: Task) -> Curves:
        def at(point: int) -> list[list[Measured]]:
            return [sweep(data, starts[point], method.make, size.sweep, seed=SEED + i) for i, starts in enumerate(trained[0].starts)]

        return {point: at(point) for point in size.starts}

    found = [Comparison(NATURAL, "", curves(SGD, task), curves(NATURAL, task))]
    if not quick:
        differing = unequal(task)
        found.append(Comparison(NATURAL, ", unequal parts", curves(SGD, differing), curves(NATURAL, differing)))
    return found


def at_equal_decrease(curve: Sequence[Measured], decrease: float) -> Measured | None:
    """What a method measures at the learning rate at which a round lowers the loss by so much; None where the grid has none.

    Between two neighbours on the grid, on the side of small learning rates, in the logarithm of what is measured.
    """
    for low, high in pairwise(reversed(curve)):
        if low.decrease <= decrease <= high.decrease:
            share = (decrease - low.decrease) / max(high.decrease - low.decrease, 1e-12)
            return Measured(*(math.exp((1 - share) * _log(a) + share * _log(b)) for a, b in zip(low, high, strict=True)))
    return None


def _log(x: float) -> float:
    return math.log(max(x, 1e-12))


def matched_rows(comparison: Comparison) -> list[Row]:
    """How many times another method's divergence SGD's is at an equal decrease of the loss: geometric means over seeds."""
    rows = []
    for point in comparison.sgd:
        for level in LEVELS:
            pairs = []
            for sgd, other in zip(comparison.sgd[point], comparison.other[point], strict=True):
                decrease = level * max(measured.decrease for measured in sgd)
                pairs.append((at_equal_decrease(sgd, decrease), at_equal_decrease(other, decrease)))
            name = f"SGD / {comparison.method.name}{comparison.where}, round {point + 1} at {100 * level:g} %"
            rows.append(_matched_row(name, pairs))
    return rows


def _matched_row(name: str, pairs: Sequence[tuple[Measured | None, Measured | None]]) -> Row:
    found = [(sgd, other) for sgd, other in pairs if sgd is not None and other is not None]
    if not found:
        return Row(name, "above 1", "not measured", "", "no learning rate of the grid lowers the loss by so much and no more")
    ratios = [_log(sgd.divergence) - _log(other.divergence) for sgd, other in found]
    sgd, other = (math.exp(fmean(_log(pair[i].divergence) for pair in found)) for i in (0, 1))
    spread = f" (seeds {math.exp(min(ratios)):.2f} to {math.exp(max(ratios)):.2f})" if len(found) > 1 else ""
    further = fmean(one.parameters / other.parameters for other, one in found)
    missing = (
        f"; without {len(pairs) - len(found)} of {len(pairs)} seeds, whose grid lacks that decrease" if len(found) < len(pairs) else ""
    )
    note = f"KL {sgd:.2g} / {other:.2g} nats{spread}; parameters {further:.2g} times as far apart as SGD's{missing}"
    return Row(name, "above 1", math.exp(fmean(ratios)), "times", note)


def trained_rows(trained: Sequence[Trained]) -> list[Row]:
    """Whole trainings, each at its best learning rate."""
    rows = []
    for one in trained:
        name, where = f"training with {one.method.name}", f"lr {one.lr:g}, the best of its grid; after {len(one.runs[0])} averagings"
        apart = [fmean(measured.divergence for measured in run) for run in one.runs]
        rows.append(Row(f"{name}: divergence", None, fmean(apart), "nats", f"lr {one.lr:g}, mean of all rounds{_spread(apart)}"))
        for field, words in (("accuracy", "accuracy after averaging"), ("worker_accuracy", "accuracy of workers before")):
            values = [100 * getattr(run[-1], field) for run in one.runs]
            rows.append(Row(f"{name}: {words}", None, fmean(values), "%", where + _spread(values)))
    return rows


def _spread(values: Sequence[float]) -> str:
    return f"; sd over seeds {stdev(values):.2g}" if len(values) > 1 else ""


def draw(path: Path, task: Task, comparisons: Sequence[Comparison], trained: Sequence[Trained]) -> None:
    """Divergence against decrease from common starts; divergence and accuracy by round in whole trainings."""
    figure = new_figure(13.0, 4.2)
    first, second, third = figure.subplots(1, 3)
    natural = comparisons[0]
    for method, curves in ((SGD, natural.sgd), (natural.method, natural.other)):
        for style, (point, by_seed) in zip(("-", "--", "-.", ":"), curves.items(), strict=False):
            means = [[fmean(getattr(m, name) for m in each) for name in ("decrease", "divergence")] for each in zip(*by_seed, strict=True)]
            x, y = zip(*(mean for mean in means if mean[0] > 0), strict=True)
            first.plot(x, y, style, marker=".", color=method.colour, label=f"SGD, round {point + 1}" if method is SGD else None)
        if method is not SGD:
            first.lines[-1].set_label(f"{method.name}, likewise")
    first.set_xscale("log")
    first.set_yscale("log")
    label(
        first,
        title="from the same parameters, over learning rates",
        x=f"decrease of the loss in a round of {STEPS} steps [nats]",
        y="divergence [nats]",
    )
    for axes, field, factor in ((second, "divergence", 1), (third, "accuracy", 100)):
        for one in trained:
            values = [factor * value for value in one.by_round(field)]
            axes.plot(range(1, len(values) + 1), values, color=one.method.colour, label=f"{one.method.name}, lr {one.lr:g}")
    second.set_yscale("log")
    label(second, title="whole trainings, just before each averaging", x="averaging point", y="divergence [nats]")
    label(third, title=f"the averaged model, {task.name}", x="averaging point", y="test accuracy [%]")
    third.set_ylim(bottom=third.get_ylim()[1] - 12)
    save(figure, path)
