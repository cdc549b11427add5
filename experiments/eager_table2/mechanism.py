"""How gossip mixes, on small gradients: replicas approach each other as the graph says, and their mean is that of synchronous training.

Eight ranks in step have gradients that do not depend on the parameters, for some steps, and none after that: what is left is the mixing. As
each rank draws the same gradients under every rule, the mean of the replicas is to be what ``full`` comes to.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from experiments._eager.rounds import counted
from experiments._training.straight import Straight
from experiments.claims import Claim, mechanism, near
from experiments.result import Row
from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.gossip_replicas import GossipReplicas

RANKS: Final = 8
STEPS, QUIET = 6, 18
"""Steps of each rank with gradients, and without."""
LAST: Final = 8
"""The last quiet steps, in which only the slowest of the modes is left."""
RING: Final = (1 + 2 * math.cos(2 * math.pi / RANKS)) / 3
"""The second eigenvalue of the mean of three neighbours on a ring, 0.805."""
RINGS: Final = ("dpsgd", "sgp(graph=ring, out_degree=2)")
OTHERS: Final = ("sgp", "sgp(out_degree=2, overlap=1)", "adpsgd")
HOPS: Final = 3
"""Of 1, 2 and 4 places: after a step with each, a rank of 8 has an equal share of all."""
SLOWER: Final = 4.0
"""How many times as long the steps of the one slow rank take where waiting is measured."""
LEADS: Final = {"dpsgd": RANKS // 2, "sgp(graph=ring, out_degree=2)": RANKS // 2 - 1}
"""Steps by which the rank across the ring is ahead of a slow one: one for each hop, and none for the first where mixing ends a step."""
LEAD: Final = "lead of the rank across the ring over a slow one"
ASYNCHRONOUS: Final = "adpsgd: steps of a rank over those of one 4 times as slow"
FULL: Final = "full: ranks that have arrived as a round closes"

CLAIMS: Final = mechanism(
    *(near(f"{sync}: spread of the replicas, factor of a step", RING, 0.003, "the mixing matrix's second eigenvalue") for sync in RINGS),
    Claim(row=f"sgp: spread left after {HOPS} steps", at_most=1e-9, why=f"{RANKS} ranks are a power of two: hops of 1, 2, 4 make the mean"),
    Claim(row=f"sgp(out_degree=2, overlap=1): spread left after {QUIET} steps", at_most=0.01, why="1 without mixing; 0.002"),
    Claim(row=f"adpsgd: spread left after {QUIET} steps", at_most=0.01, why="1 without mixing; 0.001, of pairs that are drawn"),
    *(
        Claim(
            row=f"{sync}: mean of the replicas, distance from full",
            at_most=1e-3,
            why="mixing keeps the mean; 0 but for what is spread",
        )
        for sync in (*RINGS, *OTHERS)
    ),
    *(
        Claim(row=f"{sync}: {LEAD}", at_least=lead, at_most=lead, why="a rank waits for its neighbours only")
        for sync, lead in LEADS.items()
    ),
    near(ASYNCHRONOUS, SLOWER, 0.03, "nobody waits"),
    Claim(row=FULL, at_least=RANKS, at_most=RANKS, why="all, each time"),
)


class Mixing(Straight):
    """The spread of the replicas after each step of all ranks."""

    def __init__(self) -> None:
        super().__init__(lambda version, epochs: self._on(version))
        self.spreads: list[float] = []

    @property
    def gossips(self) -> bool:
        """Whether ranks have replicas, and each fold is a step of one of them."""
        return isinstance(self.engine, GossipReplicas)

    def _on(self, version: int) -> float:
        """Return the factor of the learning rate: 0 after the last step with gradients."""
        return float(version <= STEPS * (RANKS if self.gossips else 1))

    def fold(self, effect: Fold) -> Folded:
        folded = super().fold(effect)
        if isinstance(self.engine, GossipReplicas) and effect.version % RANKS == 0:
            models = [self.engine.model_of(rank).parts[0] for rank in self.engine.replicas]
            self.spreads.append(float(torch.stack(models).std(dim=0, correction=0).norm()))
        return folded


def mixed(sync: str) -> Mixing:
    """Run a rule; the content has the final mean and the spreads."""
    content = Mixing()
    simulate(sync, Cluster(workers=RANKS), Work(time_s=STEPS + QUIET + 0.5), content=content, counted=False)
    return content


def steps_of(sync: str) -> list[int]:
    """Return the steps that each of the ranks has made beside a slow one, the first."""
    factors = ", ".join([f"{SLOWER:g}", *["1"] * (RANKS - 1)])
    cluster = Cluster(workers=RANKS, compute=f"per_worker(law='uniform(low=0.99, high=1.01)', factors=({factors}))")
    return [worker["pushes"] for worker in simulate(sync, cluster, Work(time_s=100.0)).summary["per_worker"]]


def rows() -> list[Row]:
    """Return what is claimed. Spreads are the replicas' standard deviation, distances are over the way that training has gone."""
    found = {sync: mixed(sync) for sync in (*RINGS, *OTHERS)}
    full = mixed("full")
    made = []
    for sync in RINGS:
        before, after = found[sync].spreads[-1 - LAST], found[sync].spreads[-1]
        made.append(Row(f"{sync}: spread of the replicas, factor of a step", RING, (after / before) ** (1 / LAST), "", f"{RANKS} ranks"))
    for sync in OTHERS:
        steps = HOPS if sync == "sgp" else QUIET
        spreads = found[sync].spreads
        made.append(Row(f"{sync}: spread left after {steps} steps", None, spreads[STEPS - 1 + steps] / spreads[STEPS - 1], "", "of before"))
    for sync, content in found.items():
        made.append(
            Row(f"{sync}: mean of the replicas, distance from full", 0, content.distance(full), "", "of the way from the beginning")
        )
    uneven = {sync: steps_of(sync) for sync in (*LEADS, "adpsgd")}
    made += [Row(f"{sync}: {LEAD}", lead, uneven[sync][RANKS // 2] - uneven[sync][0], "steps") for sync, lead in LEADS.items()]
    made.append(Row(ASYNCHRONOUS, SLOWER, uneven["adpsgd"][RANKS // 2] / uneven["adpsgd"][0], "x"))
    equal = Cluster(workers=RANKS, compute="uniform(low=0.99, high=1.01)")
    return [*made, Row(FULL, RANKS, counted("full", equal, 100).arrivals, "")]
