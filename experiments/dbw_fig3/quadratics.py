"""On which losses DBW is faster than the best static k at one learning rate for all: quadratics, whose curvatures and noise are set.

Varied is what the rule assumes. Its L is 1 / learning rate, ten times the largest eigenvalue at 0.1, unless it is estimated. It has one L
for the gradient and the noise, as if all eigenvalues were equal. The wanted loss decides whether few gradients reach it.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import numpy as np

from experiments._dbw import WORKERS, law
from experiments._training.quadratic import Quadratic
from experiments._training.runs import side_by_side
from experiments.claims import Claim
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.types import Seconds

SEED: Final = 0
ALPHA: Final = 0.7
VARIANCE: Final = 0.01
"""The loss begins at 1."""
COORDINATES: Final = 100
STATIC: Final = tuple(f"backup(b={WORKERS - k})" for k in (1, 2, 4, 6, 8, 10, 12, 14, 16))
DBW, AUTO = "dbw", "dbw(smoothness=auto)"
RULES: Final = (*STATIC, DBW, AUTO, "b_dbw")
GIVE_UP_S: Final = 600.0


class Task(NamedTuple):
    """A loss, a learning rate for all rules, and the loss that ends a race."""

    lowest: float
    """The least eigenvalue; they go up to 1 in equal ratios."""
    lr: float
    reached_by: float
    """The number of gradients whose noise keeps the loss at the target."""

    @property
    def name(self) -> str:
        """The beginning of its rows' names."""
        spread = "all eigenvalues 1" if self.lowest == 1.0 else f"eigenvalues {self.lowest:g} to 1"
        return f"{spread}, lr {self.lr:g}, target of k = {self.reached_by:g}"


TASKS: Final = (
    Task(1.0, 0.1, 1.2),
    Task(1.0, 0.1, 5.0),
    Task(1.0, 0.1, 14.5),
    Task(1.0, 0.5, 14.5),
    Task(0.1, 0.1, 1.2),
    Task(0.1, 0.1, 5.0),
)
QUADRATICS: Final = (
    Claim(
        row=f"{Task(1.0, 0.1, 14.5).name}: DBW over the best static k",
        at_least=1.3,
        variant="quadratics",
        why="no small k reaches it, and the way there is long: 1.69",
    ),
    Claim(
        row=f"{Task(0.1, 0.1, 1.2).name}: DBW over the best static k",
        at_most=0.7,
        variant="quadratics",
        why="it charges ten times the cost of the noise, L being 1 / lr, and a small k is enough: 0.42",
    ),
    Claim(
        row=f"{Task(0.1, 0.1, 1.2).name}: DBW over the best static k, smoothness=auto",
        at_least=0.8,
        variant="quadratics",
        why="the cost of the noise is right: 1.08",
    ),
)


class Run(NamedTuple):
    """One race."""

    task: Task
    sync: str
    seed: int


def seconds(run: Run) -> Seconds:
    """Return the simulated seconds to the target; infinity if it is not reached."""
    curvatures = np.geomspace(run.task.lowest, 1.0, COORDINATES)
    target = Quadratic.reached_by(run.task.reached_by, curvatures, variance=VARIANCE, lr=run.task.lr)
    loss = Quadratic(curvatures, variance=VARIANCE, lr=run.task.lr, target=target)
    cluster = Cluster(workers=WORKERS, compute=law(ALPHA), seed=run.seed)
    found = simulate(run.sync, cluster, Work(time_s=GIVE_UP_S), content=loss, counted=False).seconds
    return found if found < GIVE_UP_S else math.inf


def quadratics(quick: bool, out: Path) -> list[Row]:
    """Race static k, DBW with its own L and with an estimated one, over two seeds, in a full run over ten."""
    seeds = 2 if quick else 10
    runs = [Run(task, sync, SEED + seed) for task in TASKS for sync in RULES for seed in range(seeds)]
    times = dict(zip(runs, side_by_side(seconds, runs), strict=True))
    rows, ratios = list[Row](), list[tuple[float, float]]()
    for task in TASKS:
        mean = {
            sync: fmean(t for run, t in times.items() if (run.task, run.sync) == (task, sync)) for sync in (*STATIC, DBW, AUTO, "b_dbw")
        }
        best = min(STATIC, key=lambda sync: mean[sync])
        ratios.append((mean[best] / mean[DBW], mean[best] / mean[AUTO]))
        k = WORKERS - int(best.removeprefix("backup(b=").removesuffix(")"))
        for name, sync in ((f"static k={k}, the best", best), ("DBW", DBW), ("DBW, smoothness=auto", AUTO), ("B-DBW", "b_dbw")):
            reached = math.isfinite(mean[sync])
            rows.append(Row(f"{task.name}: {name}", None, mean[sync] if reached else "not reached by all seeds", "s"))
        rows += [
            Row(f"{task.name}: DBW over the best static k", None, ratios[-1][0], "x", "more than 1: DBW is faster; 0: it does not arrive"),
            Row(f"{task.name}: DBW over the best static k, smoothness=auto", None, ratios[-1][1], "x"),
        ]
    picture(ratios, out)
    return rows


def picture(ratios: list[tuple[float, float]], out: Path) -> None:
    """Bars, two for each task."""
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    for number, name in enumerate((DBW, AUTO)):
        axes.barh(
            [row + 0.4 * number for row in range(len(TASKS))], [pair[number] for pair in ratios], 0.4, color=COLOURS[number], label=name
        )
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks([row + 0.2 for row in range(len(TASKS))], [task.name for task in TASKS])
    label(axes, x="speed over the best static k, one learning rate", y="")
    save(figure, out / "dbw_fig3.png")
