"""Which member a rank is of its job, by the plane that the coordinator has chosen (``runtime/planes.py``)."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy
from offbeat.errors import ProtocolError
from offbeat.policies import rule_of
from offbeat.runtime.allreduce.multi_host.connections import SequencerCall
from offbeat.runtime.allreduce.multi_host_member import MultiHostMember
from offbeat.runtime.allreduce.round_member import OneHostMember
from offbeat.runtime.gossip.member import MultiHostGossipMember, OneHostGossipMember
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
    """Return a rank's part in the job to which it has been welcomed; for the arguments see `RoundMember`.

    Raises:
        ProtocolError: this version of offbeat does not know the plane.
        ConfigurationError: the plane is for rounds, and the rule is of another family.
    """
    header = welcome.header
    match header.get("backend"):
        case "gossip":
            return OneHostGossipMember(rank, replica, hear, welcome.memory)
        case "gossip_multi_host":
            mixed = rule_of(GossipRule, policy)  # type: ignore[type-abstract]
            call = SequencerCall(link.call_coordinator, link.number_of_optimizer)
            return MultiHostGossipMember(header["ranks"], mixed, link.hub, link.interface, call, rank, replica, hear)
        case "one_host":
            chosen = rule_of(RoundRule, policy)  # type: ignore[type-abstract]
            return OneHostMember(rank, chosen, replica, hear, voided, welcome.memory)
        case "multi_host":
            chosen = rule_of(RoundRule, policy)  # type: ignore[type-abstract]
            call = SequencerCall(link.call_coordinator, link.number_of_optimizer)
            return MultiHostMember(header, link.hub, link.interface, call, rank, chosen, replica, hear, voided)
        case other:
            known = "gossip, gossip_multi_host, one_host or multi_host"
            raise ProtocolError(f"server 0 sent 'welcome' with backend = {other!r} (expected {known})")
