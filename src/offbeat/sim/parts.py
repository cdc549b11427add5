"""Choose the simulated servers and workers that go with a rule."""

from __future__ import annotations

from typing import NamedTuple

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.sim.cluster import Cluster
from offbeat.sim.event_queue import EventQueue
from offbeat.sim.gossip_links import Links
from offbeat.sim.servers import Servers
from offbeat.sim.shard_workers import ShardWorker
from offbeat.sim.transfers import Transfers, round_s
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


def parts_of(policy: Policy, cluster: Cluster, queue: EventQueue) -> Parts:
    """Return the servers and workers that a run under this rule, one of the three families, needs."""
    if isinstance(policy, ServerRule):
        servers = Servers(cluster)
        if cluster.link is not None:
            servers.share_links(Transfers(cluster, servers, queue))
        asks_again = type(policy.start()).wake_at is not ServerRule.wake_at
        return Parts(servers, ShardWorker if policy.scope == "shard" else JobWorker, policy.measures != "nothing", asks_again)
    if isinstance(policy, GossipRule):
        return Parts(Links(cluster), JobWorker)
    return Parts(Servers(cluster, 0.0 if cluster.link is None else round_s(cluster)), JobWorker)
