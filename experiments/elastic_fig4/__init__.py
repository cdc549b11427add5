"""Accuracy against time of ElasticBSP and its baselines on four equal machines: once with cheap updates of the server, once with dear ones.

The paper trains AlexNet and ResNet-50 on four machines with GPUs; here a small network trains for real under virtual time, on a model of
such a cluster. What the two networks differ in, for the order of the rules, is what an update costs the server: that is what is varied.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import torch
from torch import nn

from experiments import data
from experiments._training.models import digits_cnn, small_cnn
from experiments._training.runs import Recipe, series, side_by_side, train
from experiments.claims import MECHANISM, Claim
from experiments.elastic_fig4 import mechanism
from experiments.elastic_fig4.mechanism import waiting, waits
from experiments.result import COLOURS, Row, label, new_figure, save, spread
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result

PAPER = "ElasticBSP, figure 4: test accuracy against time, four workers"
SEED: Final = 0
WORKERS: Final = 4
COMPUTE: Final = "lognormal(mean=1.0, sd=0.2, low=0.6, high=2.5)"
"""Seconds of an iteration: equal machines whose iterations vary, as the paper's did."""


class Panel(NamedTuple):
    """One half of the figure."""

    name: str
    update_s: float
    """What a fold costs the server, in seconds, a worker's iteration taking one."""
    rules: tuple[str, ...]
    order: tuple[str, ...]
    """As the paper's figure has them, the first to be done first."""


PANELS: Final = (
    Panel(
        "cheap updates",
        0.01,
        ("bsp", "ssp(staleness=3)", "asp", *(f"elastic(R={R})" for R in (15, 30, 60, 120, 240))),
        ("ssp(staleness=3)", "asp", "elastic(R=15)", "bsp"),
    ),
    Panel(
        "dear updates",
        0.5,
        ("bsp", "ssp(staleness=3)", "asp", "elastic(R=15, mode=local)", "elastic(R=15, mode=bulk)"),
        ("elastic(R=15, mode=local)", "bsp", "ssp(staleness=3)", "asp"),
    ),
)


class Job(NamedTuple):
    """One run."""

    panel: Panel
    sync: str
    quick: bool
    seed: int


def model(quick: bool) -> nn.Module:
    return digits_cnn() if quick else small_cnn()


def run_one(job: Job) -> Result:
    """Train for some epochs under one rule; evaluated about fifteen times, whatever the rule's versions are."""
    images = data.mnist(4096, 1000) if job.quick else data.cifar10(50000, 5000)
    epochs, batch = (3, 32) if job.quick else (12, 128)
    samples = len(images.train_x)
    pushes = epochs * samples // batch
    folds = pushes if job.sync != "bsp" else pushes // WORKERS
    recipe = Recipe(
        model=lambda: model(job.quick),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05),
        every=max(1, folds // 15) if "mode" not in job.sync else 2,
    )
    cluster = Cluster(workers=WORKERS, compute=COMPUTE, update_s=job.panel.update_s, seed=job.seed)
    return train(job.sync, recipe, images, cluster, Work(epochs=epochs, samples=samples, batch=batch))


CLAIMS: Final = (
    *mechanism.CLAIMS,
    Claim(
        row="cheap updates: elastic(R=15) time", over="cheap updates: asp time", at_least=1.02, why="paper's order; 1.12, of seeds alone"
    ),
    Claim(row="cheap updates: bsp time", over="cheap updates: elastic(R=15) time", at_least=1.02, why="paper's order; 1.07"),
    Claim(row="dear updates: bsp time", over="dear updates: elastic(R=15, mode=local) time", at_least=1.1, why="paper's order; 1.27"),
    Claim(row="dear updates: ssp(staleness=3) time", over="dear updates: bsp time", at_least=1.3, why="paper's order; 1.54"),
    Claim(row="cheap updates: waiting under bsp / under elastic(R=15)", at_least=1.5, why="paper: more than 1; 1.79"),
    Claim(row="dear updates: waiting under bsp / under elastic(R=15, mode=local)", at_least=1.0, why="paper: more than 1; 1.06"),
    Claim(
        row="cheap updates: elastic(R=15) accuracy", at_least=70.0, mode="quick", why="it learns; seeds are not separated from the others"
    ),
)


def run(quick: bool, out: Path, *, seeds: int = 1) -> list[Row]:
    """Train every rule of both panels, write the first seed's figure, and return the rows: means over seeds."""
    jobs = [Job(panel, sync, quick, SEED + seed) for panel in PANELS for sync in panel.rules for seed in range(seeds)]
    done = dict(zip(jobs, side_by_side(run_one, jobs), strict=True))
    picture({(job.panel.name, job.sync): result for job, result in done.items() if job.seed == SEED}, out)
    rows = []
    for panel in PANELS:
        found = {sync: [result for job, result in done.items() if (job.panel, job.sync) == (panel, sync)] for sync in panel.rules}
        rows += rows_of(panel, found, quick)
    return rows + mechanism.rows()


VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}


def rows_of(panel: Panel, found: dict[str, list[Result]], quick: bool) -> list[Row]:
    """The time to the end beside the paper's order, the accuracy, and the share of its time that a worker waits."""
    note = "3 epochs of 4,096 MNIST images" if quick else "12 epochs of CIFAR-10, a small network"
    seconds = {sync: fmean(result.seconds for result in results) for sync, results in found.items()}
    ranked = sorted(panel.order, key=lambda sync: seconds[sync])
    rows = []
    for sync, results in found.items():
        place = f"done {panel.order.index(sync) + 1}. of {len(panel.order)}" if sync in panel.order else None
        here = f"done {ranked.index(sync) + 1}." if sync in ranked else "not ranked in the paper"
        rows.append(Row(f"{panel.name}: {sync} time", place, seconds[sync], "s", f"{here}; {note}"))
        accuracies = [100 * series(result, "accuracy")[1][-1] for result in results]
        rows.append(Row(f"{panel.name}: {sync} accuracy", None, fmean(accuracies), "%", " ".join((note, spread(accuracies)))))
        share = 100 * fmean(waiting(result) for result in results)
        rows.append(Row(f"{panel.name}: {sync} waiting", None, share, "%", "of the workers' time, for the rule or the server"))
    elastic = next(sync for sync in found if sync.startswith("elastic"))
    saved = sum(map(waited, found["bsp"])) / sum(map(waited, found[elastic]))
    rows.append(Row(f"{panel.name}: waiting under bsp / under {elastic}", "more than 1", saved, "x", "total seconds of all workers"))
    return rows


def waited(result: Result) -> float:
    """Seconds that all workers together have waited to be admitted."""
    return float(sum(waits(result)))


def picture(found: dict[tuple[str, str], Result], out: Path) -> None:
    """A panel for each cost of an update."""
    figure = new_figure(9.0, 4.0)
    for number, panel in enumerate(PANELS, start=1):
        axes = figure.add_subplot(1, len(PANELS), number)
        for colour, sync in zip(COLOURS, panel.rules, strict=False):
            times, accuracies = series(found[panel.name, sync], "accuracy")
            axes.plot(times, [100 * value for value in accuracies], color=colour, label=sync)
        label(axes, title=f"{panel.name}: {panel.update_s:g} s each", x="simulated seconds", y="test accuracy, %", legend=True)
    save(figure, out / "elastic_fig4.png")
