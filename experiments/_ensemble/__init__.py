"""The cluster of EnsembleSync's experiments: two workers, ResNet-10 on CIFAR-10, parameters over RPC.

Its costs follow from the paper's own table of times: 37,500 images for each worker in batches of 128 are 293 steps in an epoch, and
``293 * (step + exchange)`` seconds under Sync SGD and ``293 * step + 10 * exchange`` under EnsembleSync give 0.099 s for a step and 0.745 s
for a pull and a push.
"""

from __future__ import annotations

from typing import Any, Final

from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import Result, simulate
from offbeat.sim.training.workload import Workload

WORKERS: Final = 2
BATCH: Final = 128
IMAGES: Final = 50_000
SPLIT: Final = 37_500
"""Of each worker: 25,000 images are common, half of the rest is its own."""
STEP_S: Final = 0.099
EXCHANGE_S: Final = 0.745
"""A pull and a push."""
TIMEOUT_S: Final = 30.0
ENSEMBLE: Final = "ensemble(per_epoch=10, overlap=0.5)"
EPOCHS: Final = 100
SYNC_EPOCH_S: Final = 293 * (STEP_S + EXCHANGE_S)
ENSEMBLE_EPOCH_S: Final = 293 * STEP_S + 10 * EXCHANGE_S


def timed(sync: str, *, epochs: int = EPOCHS, content: Workload | None = None, **settings: Any) -> Result:
    """A run in which only times count. Both workers together go through 75,000 images in an epoch, whatever the rule."""
    half = f"constant(seconds={EXCHANGE_S / 2})"
    given = {"workers": WORKERS, "compute": f"constant(seconds={STEP_S})", "delay": half, "push_delay": half, "timeout_s": TIMEOUT_S}
    samples = IMAGES if "overlap" in sync else WORKERS * SPLIT
    return simulate(sync, Cluster(**{**given, **settings}), Work(epochs=epochs, samples=samples, batch=BATCH), content=content)


def epoch_ends(result: Result) -> list[float]:
    """When each epoch ended, in simulated seconds."""
    return [float(epoch["t"]) for epoch in result.summary["epochs"]]
