"""What a simulated run is made of, by its rule."""

from __future__ import annotations

from functools import singledispatch
from typing import NamedTuple

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.sim.cluster import Cluster
from offbeat.sim.gossip_links import Links
from offbeat.sim.servers import Servers
from offbeat.sim.shard_workers import ShardWorker
from offbeat.sim.workers import JobWorker


class Parts(NamedTuple):
    """What goes with a rule."""

    servers: Servers
    """Where folds take time, and from where parameters come."""
    worker: type[JobWorker] | type[ShardWorker]
    measures: bool = False
    """Whether the rule is told what was measured in each fold."""
    asks_again: bool = False
    """Whether the rule may want to be asked again though nothing has happened."""


@singledispatch
def parts_of(policy: Policy, cluster: Cluster) -> Parts:
    """Return what a run under this rule is made of.

    Raises:
        TypeError: the rule's class extends none of the three bases.
    """
    raise TypeError(f"{type(policy).__name__} must extend ServerRule, RoundRule or GossipRule")


@parts_of.register
def _of_server_rule(policy: ServerRule, cluster: Cluster) -> Parts:
    asks_again = type(policy.start()).wake_at is not ServerRule.wake_at
    return Parts(Servers(cluster), ShardWorker if policy.scope == "shard" else JobWorker, policy.measures != "nothing", asks_again)


@parts_of.register
def _of_round_rule(policy: RoundRule, cluster: Cluster) -> Parts:
    return Parts(Servers(cluster), JobWorker)


@parts_of.register
def _of_gossip_rule(policy: GossipRule, cluster: Cluster) -> Parts:
    return Parts(Links(cluster), JobWorker)
