"""The ledger that goes with a rule: one for each family, two for rules with servers."""

from __future__ import annotations

from typing import TypeAlias

from offbeat.core.allreduce.ledger import RoundLedger
from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.ledger import FollowedGossipLedger, GossipLedger
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.core.server.ledger import Ledger
from offbeat.core.server.per_shard_ledger import ShardedLedger

AnyLedger: TypeAlias = Ledger | ShardedLedger | RoundLedger | GossipLedger


def ledger_of(policy: Policy, shards: int, seed: int, follows: bool) -> AnyLedger:
    """Return a new ledger for a rule; for the arguments see `core.job.coordinator.Coordinator`.

    Raises:
        TypeError: the rule's class extends none of the three bases.
    """
    match policy:
        case ServerRule():
            return ShardedLedger(policy, shards) if policy.scope == "shard" else Ledger(policy)
        case RoundRule():
            return RoundLedger(policy, seed, follows=follows)
        case GossipRule():
            return FollowedGossipLedger(policy, seed) if follows else GossipLedger(policy, seed)
    raise TypeError(f"{type(policy).__name__} must extend ServerRule, RoundRule or GossipRule")
