"""Which part a rank takes, by the job's rule."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy
from offbeat.policies.eager import Partial
from offbeat.policies.gossip import AllReduce
from offbeat.runtime.allreduce.multi_host_member import MultiHostMember
from offbeat.runtime.allreduce.round_member import OneHostMember
from offbeat.runtime.allreduce.torch_distributed.member import TorchMember
from offbeat.runtime.gossip.member import GossipMember
from offbeat.runtime.ranks.member import RankMember
from offbeat.runtime.ranks.replica import Replica
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.transport.base import Message
from offbeat.types import Version, WorkerId


def part_of(
    policy: Policy,
    welcome: Message,
    rank: WorkerId,
    replica: Replica,
    hear: Callable[[], None],
    voided: Callable[[Version], None],
    link: WorkerConnection,
) -> RankMember:
    """A rank's part in the job to which it has been welcomed; see `RoundMember`."""
    if isinstance(policy, GossipRule):
        return GossipMember(welcome.memory, rank, replica, hear)
    if isinstance(policy, AllReduce):
        return TorchMember(rank, replica, tuple(welcome.header["meeting"]), link.interface)
    assert isinstance(policy, Partial), f"ranks were welcomed to {policy.spelling}"
    if "slots" in welcome.header:
        return MultiHostMember(welcome.header, rank, policy, replica, hear, voided, link.hub, link.interface)
    return OneHostMember(welcome.memory, rank, policy, replica, hear, voided)
