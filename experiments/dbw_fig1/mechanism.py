"""What DBW estimates, on quadratic losses of which everything is known: curvature, variance, norm."""

from __future__ import annotations

from statistics import fmean
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments._dbw import WORKERS
from experiments._training.quadratic import Quadratic
from experiments.claims import Claim, mechanism
from experiments.dbw_fig1.noted import NotedDBW
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

RATES: Final = (0.05, 0.1, 0.3)
NOISES: Final = (0.0, 0.01, 100.0)
"""The variance of one gradient over the squared norm of the full gradient at the beginning."""
FLAT: Final = np.ones(500)
SPREAD: Final = np.logspace(-1.0, 1.0, 500)
"""Eigenvalues from 0.1 to 10, their mean 2.15."""
K_MIN: Final = 8
BEGINNING: Final = 50
"""Versions after which noise dominates, and from which estimates are compared."""
VERSIONS: Final = 300


def name(lr: float, noise: float) -> str:
    """Return the name of a row."""
    return f"L = 1, lr {lr:g}, V / N {noise:g}: estimate"


def tolerance(lr: float, noise: float) -> float:
    """Return how far a mean estimate may be from the truth: without noise it is exact."""
    return 0.02 / lr if noise else 1e-3


SHORT: Final = "an estimate has a standard deviation of 0.02 / lr, a mean of 250, by 20 folds each, a fourth"
CLAIMS: Final = mechanism(
    *(
        Claim(row=name(lr, noise), at_least=1 - tolerance(lr, noise), at_most=1 + tolerance(lr, noise), why=SHORT if noise else "exact")
        for lr in RATES
        for noise in NOISES
    ),
    Claim(row="eigenvalues 0.1 to 10, V / N 100: estimate", at_least=1.8, at_most=2.5, why="their mean, 2.15: the noise is equal in all"),
    Claim(row="norm over the truth, V / N 10", at_least=0.95, at_most=1.05, why="the noise of the mean gradient is subtracted"),
    Claim(row="variance over the truth, V / N 10", at_least=0.98, at_most=1.02, why="unbiased"),
)


def rows() -> list[Row]:
    """Return the mean estimates of ``dbw(smoothness=auto)`` beside the truth."""
    still = estimates(FLAT, 1e-4, 10.0)  # so low a learning rate that the norm stays
    return [
        *(Row(name(lr, noise), 1.0, estimates(FLAT, lr, noise).smoothness, "") for lr in RATES for noise in NOISES),
        Row(
            "eigenvalues 0.1 to 10, V / N 100: estimate",
            float(SPREAD.mean()),
            estimates(SPREAD, 0.03, 100.0).smoothness,
            "",
            "beside the mean eigenvalue",
        ),
        Row("norm over the truth, V / N 10", 1.0, still.norm, ""),
        Row("variance over the truth, V / N 10", 1.0, still.variance, ""),
    ]


class Means(NamedTuple):
    """Of the estimates of one run."""

    smoothness: float
    norm: float
    """Over the true norm at the same version."""
    variance: float
    """Over the true one; 1 where there is none."""


def estimates(curvatures: NDArray[np.float64], lr: float, noise: float) -> Means:
    """Return the means of a run that begins with a gradient of norm 1."""
    loss = 0.5 * len(curvatures) / float(curvatures.sum())
    run = Quadratic(curvatures, variance=noise, lr=lr, loss=loss)
    policy = NotedDBW(smoothness="auto", k_min=K_MIN)
    versions, beginning = (VERSIONS, BEGINNING) if noise else (20, 2)
    simulate(policy, Cluster(workers=WORKERS), Work(versions=versions), content=run, counted=False)
    known = policy.estimates[beginning:]
    return Means(
        smoothness=fmean(e.smoothness or 0.0 for e in known),
        norm=fmean(e.norm / run.norms[e.version - 1] for e in known),
        variance=fmean(e.variance for e in known) / noise if noise else 1.0,
    )
