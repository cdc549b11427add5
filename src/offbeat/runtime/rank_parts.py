"""Which part a rank takes, by the job's rule."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.policies.eager import Partial
from offbeat.policies.gossip import AllReduce
from offbeat.protocol.gossip import GossipRule
from offbeat.protocol.policy import Policy
from offbeat.runtime.rank_across import RankAcross
from offbeat.runtime.rank_gossip import RankGossip
from offbeat.runtime.rank_part import RankPart
from offbeat.runtime.rank_plain import RankPlain
from offbeat.runtime.rank_rounds import RankTogether
from offbeat.runtime.replica import Replica
from offbeat.runtime.worker_link import WorkerLink
from offbeat.transport.base import Message
from offbeat.types import Version, WorkerId


def part_of(
    policy: Policy,
    welcome: Message,
    rank: WorkerId,
    replica: Replica,
    hear: Callable[[], None],
    voided: Callable[[Version], None],
    link: WorkerLink,
) -> RankPart:
    """A rank's part in the job to which it has been welcomed; see `RankRounds`."""
    if isinstance(policy, GossipRule):
        return RankGossip(welcome.memory, rank, replica, hear)
    if isinstance(policy, AllReduce):
        return RankPlain(rank, replica, tuple(welcome.header["meeting"]), link.interface)
    assert isinstance(policy, Partial), f"ranks were welcomed to {policy.spelling}"
    if "slots" in welcome.header:
        return RankAcross(welcome.header, rank, policy, replica, hear, voided, link.hub, link.interface)
    return RankTogether(welcome.memory, rank, policy, replica, hear, voided)
