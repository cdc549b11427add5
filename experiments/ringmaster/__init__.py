"""Seconds until a loss with workers 1 to 64 times slower: barriers, backup workers, asynchronous steps, Rennala, Ringmaster."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import torch
from torch import nn

from experiments._training.runs import side_by_side
from experiments.claims import MECHANISM, Claim
from experiments.learning_rates.tasks import digits
from experiments.result import COLOURS, Row, label, new_figure, save
from experiments.ringmaster import mechanism
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gradients import Training

PAPER = "Ringmaster ASGD (Maranjyan et al. 2025) and Rennala SGD (Tyurin and Richtarik 2023): time to a loss with unequal workers"
SEED: Final = 0
WORKERS: Final = 16
FACTORS: Final = tuple(round(64 ** (worker / (WORKERS - 1)), 3) for worker in range(WORKERS))
"""How many times as long each worker's iterations are: 1, 1.3, 1.7 ... 64."""
COMPUTE: Final = f"per_worker(law='lognormal(mean=1, sd=0.3)', factors={FACTORS})"
RULES: Final = ("bsp", "asp", "backup(b=8)", "rennala(batch=8)", "ringmaster(threshold=8)", "ringmaster(threshold=16)")
ONE_BY_ONE: Final = ("asp", "ringmaster")
RATES: Final = (0.1, 0.2, 0.4, 0.8)
HIGH: Final = 0.4
"""A learning rate at which asynchronous steps without a bound on staleness fail."""
TARGET: Final = 0.3
"""The loss over the training data at which a run ends."""
LIMIT_S: Final = 400.0
SEEDS: Final = 20
BATCH: Final = 16
CLAIMS: Final = (
    Claim(
        row="rennala(batch=8): seconds", over="backup(b=8): seconds", at_most=0.8, why="fast workers give several gradients of a version"
    ),
    Claim(row="ringmaster(threshold=16): seconds", over="rennala(batch=8): seconds", at_most=0.8, why="a step with each gradient"),
    Claim(row="bsp: seconds", over="asp: seconds", at_least=4, why="each version waits 64 s for the slowest; asp makes four in a second"),
    Claim(row=f"ringmaster(threshold=8): share that arrives at lr {HIGH}", at_least=0.9, why="staleness is below 8"),
    Claim(row=f"asp: share that arrives at lr {HIGH}", at_most=0.8, why="two of four seeds; staleness has no bound"),
    *mechanism.CLAIMS,
)
VARIANTS: Final = {MECHANISM: lambda quick, out: mechanism.rows()}


class Job(NamedTuple):
    """One run."""

    sync: str
    lr: float
    seed: int


def seconds_to_target(job: Job) -> float:
    """Train under a virtual clock; return the seconds until the loss is `TARGET`, infinity if it is not within `LIMIT_S`."""
    task = digits()
    torch.manual_seed(job.seed)
    model = task.model()
    x, y = task.data

    def evaluate(module: nn.Module) -> dict[str, float]:
        return {"loss": float(task.loss(module(x), y))}

    training = Training(
        model,
        task.loss,
        task.data,
        torch.optim.SGD(model.parameters(), lr=job.lr),
        evaluate=evaluate,
        every=4 if job.sync.startswith(ONE_BY_ONE) else 1,  # four of these take a second, one of the others several
        until=lambda found: found["loss"] <= TARGET,
    )
    cluster = Cluster(workers=WORKERS, compute=COMPUTE, seed=job.seed)
    result = simulate(job.sync, cluster, Work(time_s=LIMIT_S, batch=BATCH), content=training)
    return next((point.t for point in result.curve if point.values["loss"] <= TARGET), math.inf)


def run(quick: bool, out: Path) -> list[Row]:
    """Train under every rule with every learning rate; write the figure."""
    rates, seeds = (RATES[1:], 1) if quick else (RATES, SEEDS)
    jobs = [Job(sync, lr, SEED + seed) for sync in RULES for lr in rates for seed in range(seeds)]
    return [*rows_of(dict(zip(jobs, side_by_side(seconds_to_target, jobs), strict=True)), out), *mechanism.rows()]


def rows_of(seconds: dict[Job, float], out: Path) -> list[Row]:
    """Return each rule's median at its best learning rate, and what share of the seeds arrives at a high one; draw all medians."""
    rows = []
    figure = new_figure(6.0, 4.0)
    axes = figure.add_subplot()
    for colour, sync in zip(COLOURS, RULES, strict=False):
        by_rate: dict[float, list[float]] = {}
        for job, taken_s in seconds.items():
            if job.sync == sync:
                by_rate.setdefault(job.lr, []).append(taken_s)
        best = min(by_rate, key=lambda lr: median(by_rate[lr]))
        found = sorted(by_rate[best])
        arrived = sum(math.isfinite(taken_s) for taken_s in found)
        note = f"lr {best}, {found[0]:.0f} to {found[-1]:.0f} over {len(found)} seeds" if arrived == len(found) else ""
        if arrived < len(found):
            note = f"{arrived} of {len(found)} seeds arrive within {LIMIT_S:.0f} s, which the others count as"
        high = by_rate[HIGH]
        rows += [
            Row(f"{sync}: seconds", None, min(median(found), LIMIT_S), "s", note),
            Row(f"{sync}: share that arrives at lr {HIGH}", None, sum(map(math.isfinite, high)) / len(high), ""),
        ]
        rates = sorted(by_rate)
        axes.plot(rates, [min(median(by_rate[lr]), LIMIT_S) for lr in rates], color=colour, marker="o", label=sync)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    label(axes, title=f"{WORKERS} workers, 1 to 64 times slower", x="learning rate", y=f"seconds until a loss of {TARGET}")
    save(figure, out / "ringmaster.png")
    return rows
