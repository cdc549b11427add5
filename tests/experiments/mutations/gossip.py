"""Broken gossip: replicas that are not mixed, shares that are taken for whole parameters, ranks that wait for nobody or for all."""

from __future__ import annotations

from typing import Final

from tests.experiments.mutations import Mutation, replaced

from offbeat.core.gossip.push_sum import Gossip, Mixture
from offbeat.types import WorkerId

mix, took = Gossip.mix, Gossip.took


def unweighted(self: Gossip, rank: WorkerId) -> Mixture:
    """Give a rank's own parameters half of the weight, and the neighbours' what the mean gives them."""
    return mix(self, rank)._replace(own=0.5)


def biased(self: Gossip, rank: WorkerId, mixture: Mixture) -> Mixture:
    """Take a rank's parameters for its model, whatever its mass."""
    return took(self, rank, mixture)._replace(mass=1.0)


def waits(self: Gossip, rank: WorkerId) -> tuple[WorkerId, ...]:
    """Wait for all that have made fewer steps."""
    return tuple(other for other in self.active if self.steps(other) < self.steps(rank))


ALONE: Final = replaced(Gossip, "_at", lambda self, edges, rank, step: ())

MUTATIONS: Final = (
    Mutation("dpsgd", "no mixing", "eager_table2", ALONE),
    Mutation("dpsgd", "weights whose sum is not 1", "eager_table2", replaced(Gossip, "mix", unweighted)),
    Mutation("dpsgd", "no waiting for neighbours", "eager_table2", replaced(Gossip, "behind", lambda self, rank: ())),
    Mutation("sgp", "no mixing", "eager_table2", ALONE),
    Mutation("sgp", "not divided by the mass", "eager_table2", replaced(Gossip, "took", biased)),
    Mutation("adpsgd", "no mixing", "eager_table2", replaced(Gossip, "partner", lambda self, rank: None)),
    Mutation("adpsgd", "waits for slower ranks", "eager_table2", replaced(Gossip, "behind", waits)),
)
