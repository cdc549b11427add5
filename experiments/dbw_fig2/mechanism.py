"""How DBW works, where all that it estimates is known: on a quadratic loss, with one learning rate for all rules.

All coordinates curve the same, so that later steps undo the noise of a step no faster than the loss falls. The loss falls by a factor of
50,000, to a level that fewer than about 14 gradients do not reach: far from it few gradients are best, near it many.
"""

from __future__ import annotations

from statistics import fmean
from typing import Final

import numpy as np

from experiments._dbw import WORKERS, law
from experiments._training.quadratic import Quadratic
from experiments.claims import Claim, mechanism
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.types import Seconds

ALPHA: Final = 0.7
LR, VARIANCE, COORDINATES = 0.1, 0.01, 200
REACHED_BY: Final = 14.5
"""The number of gradients whose noise keeps the loss at the target."""
TARGET: Final = Quadratic.reached_by(REACHED_BY, np.ones(COORDINATES), variance=VARIANCE, lr=LR)
CONSTANT: Final = (12, 14, 16)
SEEDS: Final = 3
LIMIT_S: Final = 300.0
PROPORTIONAL: Final = "dbw(lr_rule=proportional)"

CLAIMS: Final = mechanism(
    Claim(
        row="quadratic: DBW over the best constant k",
        at_least=1.1,
        at_most=1.4,
        why="1.20; one learning rate; the way to V / n takes as many versions with one gradient, each in an eighth of the time",
    ),
    Claim(
        row="quadratic: loss of B-DBW over DBW's, when DBW arrives",
        at_least=1.3,
        at_most=2.2,
        why=f"it stays at about 9 gradients, whose noise keeps the loss at {REACHED_BY:g} / 9 of the target",
    ),
    Claim(row="quadratic: mean k of DBW while |g|^2 > V", at_most=2.5, why="then (1 - V / (N k)) / T(k) is greatest at 1 or 2"),
    Claim(row="quadratic: mean k of DBW while |g|^2 < V / 16", at_least=14.0, why="N <= V / k for all k: no k promises a gain, k = n"),
    Claim(
        row=f"{PROPORTIONAL}: largest error of a learning rate",
        at_most=1e-9,
        why="k / 16 of the script's for a fold of k gradients",
    ),
)


def rows() -> list[Row]:
    """Return times, losses and chosen k, means over the seeds."""
    constant = {k: fmean(race(f"backup(b={WORKERS - k})", seed)[0] for seed in range(SEEDS)) for k in CONSTANT}
    times, losses, few, many = list[Seconds](), list[float](), list[int](), list[int]()
    for seed in range(SEEDS):
        t, run = race("dbw", seed)
        times.append(t)
        chosen = list(zip(run.k, run.norms, strict=True))[5:]  # after the warm-up, with all norms
        few += [k for k, norm in chosen if norm > VARIANCE]
        many += [k for k, norm in chosen if norm < VARIANCE / WORKERS]
        _, blind = race("b_dbw", seed, t)
        losses.append(blind.loss(len(blind.folds)) / run.loss(len(run.folds)))
    _, scaled = race(PROPORTIONAL, 0, 50.0)
    best = min(constant, key=lambda k: constant[k])
    return [
        Row("quadratic: DBW over the best constant k", None, constant[best] / fmean(times), "x", f"k = {best} of {CONSTANT}"),
        Row("quadratic: loss of B-DBW over DBW's, when DBW arrives", None, fmean(losses), "x"),
        Row("quadratic: mean k of DBW while |g|^2 > V", None, fmean(few), "", f"of {WORKERS}"),
        Row("quadratic: mean k of DBW while |g|^2 < V / 16", None, fmean(many or [0]), "", f"of {WORKERS}"),
        Row(
            f"{PROPORTIONAL}: largest error of a learning rate",
            None,
            max(abs(fold.scale - len(fold.parts) / WORKERS) for fold in scaled.folds),
            "",
            f"k from {min(scaled.k)} to {max(scaled.k)}",
        ),
    ]


def race(sync: str, seed: int, limit_s: Seconds = LIMIT_S) -> tuple[Seconds, Quadratic]:
    """Run a rule until the loss is at the target; return the simulated seconds, and the run."""
    run = Quadratic(np.ones(COORDINATES), variance=VARIANCE, lr=LR, target=TARGET)
    cluster = Cluster(workers=WORKERS, compute=law(ALPHA), seed=seed)
    result = simulate(sync, cluster, Work(time_s=limit_s), content=run, counted=False)
    return result.seconds, run
