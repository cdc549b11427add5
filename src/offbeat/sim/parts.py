"""Choose the simulated servers and workers that go with a rule."""

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
    """The parts of a simulation that depend on the rule's family and scope."""

    servers: Servers
    """Models how long folds take and when messages arrive; `gossip_links.Links` for the gossip family."""
    worker: type[JobWorker] | type[ShardWorker]
    measures: bool = False
    """Whether the coordinator receives a `Folded` event with the norms measured in each fold."""
    asks_again: bool = False
    """Whether the rule sets timers (``wake_at``), so that the coordinator must be woken without an event."""


@singledispatch
def parts_of(policy: Policy, cluster: Cluster) -> Parts:
    """Return the servers and workers that a run under this rule needs.

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
