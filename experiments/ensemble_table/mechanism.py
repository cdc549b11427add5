"""How EnsembleSync works, on small gradients: T local steps between two exchanges, and the mean of what all workers have come to."""

from __future__ import annotations

from typing import Final

from experiments._ensemble import ENSEMBLE, WORKERS, timed
from experiments._training.straight import Straight
from experiments.claims import Claim, mechanism, near
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

STEPS: Final = 5
FOLDS: Final = 4
EPOCHS: Final = 2
TIME: Final = f"EnsembleSync over Sync SGD, {EPOCHS} epochs"
MEAN: Final = f"ensemble(steps={STEPS}): parameters, distance from full"
LOCAL: Final = f"ensemble(steps={STEPS}): local steps of an exchange"
EXCHANGES: Final = "EnsembleSync: exchanges of a worker in an epoch"

CLAIMS: Final = mechanism(
    Claim(row=MEAN, at_most=1e-9, why="gradients do not depend on the parameters: a mean of sums is a sum of means"),
    Claim(row=LOCAL, at_least=STEPS, at_most=STEPS, why="by construction"),
    Claim(row=EXCHANGES, at_least=10, at_most=10, why="by construction"),
    near(TIME, 6.76, 0.015, "paper; costs calibrated"),
)


def rows() -> list[Row]:
    """Return what is claimed."""
    cluster = Cluster(workers=WORKERS)
    averaged, full = Straight(), Straight()
    result = simulate(f"ensemble(steps={STEPS})", cluster, Work(versions=FOLDS), content=averaged)
    simulate("full", cluster, Work(versions=FOLDS * STEPS), content=full)
    sync, ensemble = timed("bsp", epochs=EPOCHS), timed(ENSEMBLE, epochs=EPOCHS)
    return [
        Row(MEAN, 0, averaged.distance(full), "", f"of the way from the beginning; {FOLDS} folds"),
        Row(LOCAL, STEPS, averaged.engine.computed / result.summary["pushes"], ""),
        Row(EXCHANGES, 10, ensemble.summary["pushes"] / WORKERS / EPOCHS, ""),
        Row(TIME, 6.76, sync.seconds / ensemble.seconds, "x"),
    ]
