"""The timing model of the paper's rounds: when each closes, if every rank takes part in every round with a gradient of its own.

The simulator does not know this model, and the rules differ from it in one thing: there a late rank owes the round that it has missed one
step, and makes it; here its late gradient goes into the next round, and it goes on with the newest.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offbeat.sim.cluster import Cluster
from offbeat.sim.latency.registry import derived


class Rounds(NamedTuple):
    """What the model says of a run."""

    per_s: float
    """Rounds in a second."""
    active: float
    """Ranks that have arrived as a round closes, on average."""


def modelled(rule: Literal["full", "majority", "solo"], seconds_TP: NDArray[np.float64], seed: int = 0) -> Rounds:
    """``fin = start + seconds``; a round closes at ``A = min(fin)``, ``fin[rand]`` or ``max(fin)``; ``start' = max(fin, A)``.

    Args:
        rule: whose.
        seconds_TP: what step t of rank p takes.
        seed: of the initiators that majority draws.

    >>> modelled("full", np.array([[1.0, 2.0], [2.0, 1.0]])), modelled("solo", np.array([[1.0, 2.0], [2.0, 1.0]]))
    (Rounds(per_s=0.5, active=2.0), Rounds(per_s=0.6666666666666666, active=1.5))
    """
    steps, ranks = seconds_TP.shape
    generator = np.random.default_rng(seed)
    start, closed, active = np.zeros(ranks), 0.0, 0
    for seconds in seconds_TP:
        finish = start + seconds
        due = {"full": finish.max(), "majority": finish[generator.integers(ranks)], "solo": finish.min()}[rule]
        closed = max(closed, float(due))
        active += int((finish <= closed).sum())
        start = np.maximum(finish, closed)
    return Rounds(steps / closed, active / steps)


def drawn(cluster: Cluster, steps: int) -> NDArray[np.float64]:
    """The seconds (steps, ranks) that the simulator draws for this cluster."""
    law = cluster.law("compute").start(derived(cluster.seed, "compute"), cluster.workers)
    return np.array([[law.draw(rank, step, 0.0) for rank in range(cluster.workers)] for step in range(steps)])
