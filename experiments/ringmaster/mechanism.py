"""How the rules for unequal workers work, on simulated times alone: what they fold, how stale, with which factor, and who waits."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Final

import numpy as np

from experiments._training.quadratic import Quadratic
from experiments.claims import Claim, mechanism, near
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

SPEEDS: Final = (1, 2, 4, 8)
"""How many times as long each worker's iterations are."""
TIME_S: Final = 400.0
THRESHOLD: Final = 4
BATCH: Final = 8
PER_SECOND: Final = sum(1 / factor for factor in SPEEDS)
"""What all workers compute, if none waits."""

CLAIMS: Final = mechanism(
    near("asp: gradients folded in a second", PER_SECOND, 0.02, "1 + 1/2 + 1/4 + 1/8: no worker waits and no gradient is lost"),
    Claim(row="asp: greatest staleness", at_least=14, at_most=20, why="the others make 8 + 4 + 2 steps in one of the slowest"),
    Claim(row="asp(discount=inverse): largest error of a factor", at_most=1e-9, why="1 / (1 + staleness)"),
    Claim(row="asp(discount=sqrt): largest error of a factor", at_most=1e-9, why="1 / sqrt(1 + staleness)"),
    Claim(row=f"ringmaster(threshold={THRESHOLD}): greatest staleness", at_least=3, at_most=3, why="below it, and up to it"),
    near(
        f"ringmaster(threshold={THRESHOLD}): gradients computed in a second",
        PER_SECOND,
        0.02,
        "no worker waits, some are dropped",
    ),
    Claim(row=f"rennala(batch={BATCH}): greatest staleness", at_most=0, why="all gradients of a fold are of the newest version"),
    Claim(row=f"rennala(batch={BATCH}): gradients in a fold", at_least=BATCH, at_most=BATCH, why="each fold has a full batch"),
    Claim(row=f"rennala(batch={BATCH}): gradients of the fastest worker in a fold", at_least=4, at_most=6, why="it has 8 of 15 steps"),
    near(f"rennala(batch={BATCH}): gradients computed in a second", PER_SECOND, 0.02, "no worker waits for the fold"),
    near("bsp: gradients folded in a second", len(SPEEDS) / max(SPEEDS), 0.03, "each version waits for the slowest"),
)


def rows() -> list[Row]:
    """Return what is claimed of each rule."""
    asp, _ = go("asp")
    bsp, _ = go("bsp")
    ringmaster, ringmaster_pushes = go(f"ringmaster(threshold={THRESHOLD})")
    rennala, rennala_pushes = go(f"rennala(batch={BATCH})")
    discounts: dict[str, Callable[[int], float]] = {"inverse": lambda s: 1 / (1 + s), "sqrt": lambda s: 1 / sqrt(1 + s)}
    in_a_fold = [len(fold.parts) for fold in rennala.folds]
    fastest = [sum(part.worker == 0 for part in fold.parts) for fold in rennala.folds]
    return [
        Row("asp: gradients folded in a second", PER_SECOND, len(asp.staleness) / TIME_S, ""),
        Row("asp: greatest staleness", None, max(asp.staleness), "versions"),
        *(
            Row(
                f"asp(discount={name}): largest error of a factor",
                None,
                max(abs(fold.scale - factor(fold.parts[0].staleness)) for fold in go(f"asp(discount={name})")[0].folds),
                "",
            )
            for name, factor in discounts.items()
        ),
        Row(f"ringmaster(threshold={THRESHOLD}): greatest staleness", None, max(ringmaster.staleness), "versions"),
        Row(f"ringmaster(threshold={THRESHOLD}): gradients computed in a second", PER_SECOND, ringmaster_pushes / TIME_S, ""),
        Row(f"rennala(batch={BATCH}): greatest staleness", None, max(rennala.staleness), "versions"),
        Row(f"rennala(batch={BATCH}): gradients in a fold", None, max(in_a_fold, key=lambda k: abs(k - BATCH)), "", "farthest from it"),
        Row(f"rennala(batch={BATCH}): gradients of the fastest worker in a fold", None, sum(fastest) / len(fastest), "", "mean"),
        Row(f"rennala(batch={BATCH}): gradients computed in a second", PER_SECOND, rennala_pushes / TIME_S, ""),
        Row("bsp: gradients folded in a second", len(SPEEDS) / max(SPEEDS), len(bsp.staleness) / TIME_S, ""),
    ]


def go(sync: str) -> tuple[Quadratic, int]:
    """Run a rule; return what it folded, and the number of pushes."""
    run = Quadratic(np.ones(1), variance=1.0, lr=0.01)
    compute = f"per_worker(law='lognormal(mean=1, sd=0.05)', factors={SPEEDS})"
    result = simulate(sync, Cluster(workers=len(SPEEDS), compute=compute), Work(time_s=TIME_S), content=run)
    return run, result.summary["pushes"]
