"""How many gradients backup workers wait for, on simulated times whose order statistics are known."""

from __future__ import annotations

from statistics import fmean
from typing import Final

import numpy as np

from experiments._dbw import WORKERS, law
from experiments._training.quadratic import Quadratic
from experiments.claims import Claim, mechanism, near
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.types import Seconds

ALPHAS: Final = (0.2, 0.7)
BACKUP: Final = 4
TOGETHER: Final = "obsolete=push_and_interrupt"
"""All workers begin each version together."""
VERSIONS: Final = 300


def expected(alpha: float, k: int) -> Seconds:
    """Return the mean time of the k-th of 16 round trips of ``1 - alpha + alpha * Exp(1)`` seconds.

    >>> round(expected(1.0, 16), 3)
    3.381
    """
    return 1.0 - alpha + alpha * sum(1.0 / i for i in range(WORKERS - k + 1, WORKERS + 1))


def most_per_second(alpha: float) -> int:
    """Return the k with the most gradients per second.

    >>> [most_per_second(alpha) for alpha in ALPHAS]
    [14, 9]
    """
    return max(range(1, WORKERS + 1), key=lambda k: k / expected(alpha, k))


SLOW: Final = "per_worker(law='constant(seconds=1)', factors=(" + ", ".join(["1"] * (WORKERS - BACKUP) + ["1.5"] * BACKUP) + "))"
"""Four workers that are always last."""

CLAIMS: Final = mechanism(
    near("bsp: seconds of a version", expected(0.7, WORKERS), 0.05, f"the mean of the last of {WORKERS}; {VERSIONS} versions"),
    near(
        f"backup(b={BACKUP}): seconds of a version", expected(0.7, WORKERS - BACKUP), 0.03, f"the mean of the {WORKERS - BACKUP}th arrival"
    ),
    Claim(
        row=f"backup(b={BACKUP}): gradients of the {BACKUP} workers that are always last",
        at_most=0,
        why="the last are dropped",
    ),
    Claim(
        row=f"backup(b={BACKUP}): least share of another worker",
        at_least=1 / (WORKERS - BACKUP) - 1e-9,
        why="each fold has all others",
    ),
    *(
        claim
        for alpha in ALPHAS
        for claim in (
            Claim(
                row=f"b_dbw, a={alpha:g}: gradients per second over the most that a constant k has",
                at_least=0.96,
                at_most=1.03,
                why="k / T(k) is flat near its maximum; 3 % for the noise of 300 versions",
            ),
            Claim(
                row=f"b_dbw, a={alpha:g}: mean k",
                at_least=most_per_second(alpha) - 2,
                at_most=most_per_second(alpha) + 2,
                why=f"k / E[T(k)] is greatest at {most_per_second(alpha)}, and within 2 % of it two to each side",
            ),
        )
    ),
)


def rows() -> list[Row]:
    """Return what is claimed, in simulated seconds."""
    backup = f"backup(b={BACKUP})"
    _, steady = wait(backup, SLOW)
    shares = [0.0] * WORKERS
    for fold in steady.folds:
        for part in fold.parts:
            shares[part.worker] += part.weight / len(steady.folds)
    found = [
        Row("bsp: seconds of a version", None, wait("bsp", law(0.7))[0], "s"),
        Row(f"{backup}: seconds of a version", None, wait(f"backup(b={BACKUP}, {TOGETHER})", law(0.7))[0], "s", "all begin together"),
        Row(
            f"{backup}: gradients of the {BACKUP} workers that are always last",
            None,
            sum(part.worker >= WORKERS - BACKUP for fold in steady.folds for part in fold.parts),
            "",
        ),
        Row(f"{backup}: least share of another worker", 1 / (WORKERS - BACKUP), min(shares[: WORKERS - BACKUP]), ""),
    ]
    for alpha in ALPHAS:
        seconds, blind = wait(f"b_dbw({TOGETHER})", law(alpha))
        most, mean = most_per_second(alpha) / expected(alpha, most_per_second(alpha)), fmean(blind.k)
        name = f"b_dbw, a={alpha:g}"
        found += [
            Row(f"{name}: gradients per second over the most that a constant k has", None, mean / seconds / most, "x"),
            Row(f"{name}: mean k", most_per_second(alpha), fmean(blind.k[10:]), "", "in theory, and chosen"),
        ]
    return found


def wait(sync: str, compute: str) -> tuple[Seconds, Quadratic]:
    """Return the seconds of a version, and the run."""
    run = Quadratic(np.ones(1), variance=1.0, lr=0.1)
    result = simulate(sync, Cluster(workers=WORKERS, compute=compute), Work(versions=VERSIONS), content=run, counted=False)
    return result.seconds / VERSIONS, run
