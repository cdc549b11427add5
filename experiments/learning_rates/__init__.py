"""By what to multiply the learning rate of a single process under each rule, with four workers and the same number of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import torch

from experiments._training.runs import side_by_side
from experiments.claims import MECHANISM, Claim
from experiments.learning_rates import local_steps, staleness
from experiments.learning_rates.tasks import TASKS
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training

PAPER = "Learning rates under each rule, beside the linear scaling rule (Goyal et al. 2017: multiply by the number of workers)"
SEED: Final = 0
WORKERS: Final = 4
COMPUTE: Final = "lognormal(mean=1, sd=0.3)"
RULES: Final = ("bsp", "ssp(staleness=3)", "asp", "backup(b=1)", "majority", "solo", "dpsgd", "ensemble(steps=10)")
FACTORS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
SINGLE: Final = "one process"
_DIGITS = "digits, three seeds in full mode: "
CLAIMS: Final = (
    *local_steps.CLAIMS,
    Claim(
        row="digits: one process, best factor",
        at_least=0.5,
        at_most=2,
        why="factors are relative to this rate; seeds differ by one step of the grid",
    ),
    Claim(row="digits: bsp, best factor", at_least=2, at_most=4, why="a mean over four batches; linear scaling says 4"),
    Claim(row="digits: majority, best factor", at_least=1, at_most=4, why=_DIGITS + "2", mode="full"),
    Claim(row="digits: ssp(staleness=3), best factor", at_most=0.5, why="each version is one gradient, three versions old"),
    Claim(row="digits: asp, best factor", at_most=0.5, why="each version is one gradient, three versions old"),
    Claim(
        row="digits: ssp(staleness=3), loss at factor 1",
        over="digits: ssp(staleness=3), loss at best",
        at_least=3,
        why=_DIGITS + "2.1 over 0.125",
    ),
    Claim(row="digits: bsp, loss at factor 1", over="digits: bsp, loss at best", at_least=1, at_most=2, why=_DIGITS + "0.125 over 0.094"),
    *staleness.CLAIMS,
)


class Job(NamedTuple):
    """One run."""

    task: str
    sync: str
    factor: float
    """Of the task's learning rate, which is the best of a single process."""
    seed: int
    workers: int = WORKERS


def run_one(job: Job) -> float:
    """Train, with a rate that falls along a cosine to a twentieth; return the loss over what is not trained on."""
    task = TASKS[job.task]()
    torch.manual_seed(job.seed)
    model = task.model()

    def schedule(version: int, epochs: float) -> float:
        return 0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * min(1.0, epochs / task.epochs)))

    training = Training(model, task.loss, task.data, task.optimizer(model, job.factor * task.lr), schedule=schedule)
    cluster = Cluster(workers=job.workers, compute=COMPUTE, seed=job.seed)
    simulate(job.sync, cluster, Work(epochs=task.epochs, samples=len(task.data[0]), batch=task.batch), content=training)
    training.finish()
    model.eval()
    with torch.no_grad():
        return task.evaluate(model)


def run(quick: bool, out: Path) -> list[Row]:
    """Train under every rule with every rate; write the figure."""
    tasks, factors, seeds = (("digits",), (0.25, 1.0, 2.0), 1) if quick else (("digits", "characters"), FACTORS, 3)
    jobs = [
        Job(task, "bsp" if sync == SINGLE else sync, factor, SEED + seed, 1 if sync == SINGLE else WORKERS)
        for task in tasks
        for sync in (SINGLE, *(RULES[:3] if quick else RULES))
        for factor in factors
        for seed in range(seeds)
    ]
    found = dict(zip(jobs, side_by_side(run_one, jobs), strict=True))
    return rows_of(found, out) + mechanism(quick)


def mechanism(quick: bool) -> list[Row]:
    """Return what AdaComm's steps follow, and what one rate comes to under staleness."""
    return local_steps.rows() + staleness.rows(quick)


def rows_of(losses: dict[Job, float], out: Path) -> list[Row]:
    """The best factor of each rule, and the losses there and at the single process's rate; draws all of them."""
    rows = []
    tasks = list(dict.fromkeys(job.task for job in losses))
    figure = new_figure(4.5 * (1 + len(tasks)), 4.0)
    for number, task in enumerate(tasks, start=1):
        axes = figure.add_subplot(1, len(tasks), number)
        for index, sync in enumerate((SINGLE, *RULES)):
            named = ("bsp", 1) if sync == SINGLE else (sync, WORKERS)
            if not any((job.sync, job.workers) == named for job in losses):
                continue
            found: dict[float, list[float]] = {}
            for job, loss in losses.items():
                if (job.task, job.sync, job.workers) == (task, *named):
                    found.setdefault(job.factor, []).append(loss if math.isfinite(loss) else math.inf)
            best = min(found, key=lambda factor: fmean(found[factor]))
            linear = 4.0 if sync == "bsp" else None
            rows += [
                Row(f"{task}: {sync}, best factor", linear, best, "", "paper: the linear scaling rule" if linear else ""),
                Row(f"{task}: {sync}, loss at best", None, fmean(found[best]), "", ranged(found[best])),
                Row(f"{task}: {sync}, loss at factor 1", None, fmean(found[1.0]), "", ranged(found[1.0])),
            ]
            style = "--" if index >= len(COLOURS) else "-"
            axes.plot(
                sorted(found), [fmean(found[factor]) for factor in sorted(found)], style, color=COLOURS[index % len(COLOURS)], label=sync
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        label(axes, title=task, x="learning rate over that of one process", y="loss over data not trained on")
    save(figure, out / "learning_rates.png")
    return rows


def ranged(values: Sequence[float]) -> str:
    """The range over seeds, in words.

    >>> ranged([0.25, 0.5])
    '0.250 to 0.500 over 2 seeds'
    """
    return f"{min(values):.3f} to {max(values):.3f} over {len(values)} seed{'s' * (len(values) > 1)}"


VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism(quick)}
