"""A rule of the gossip family that exists in tests only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.about import About, Row
from offbeat.core.gossip.push_sum import Exchange, GossipRule
from offbeat.core.gossip.topology import Graph
from offbeat.core.settings import whole_number


@dataclass(frozen=True, kw_only=True)
class ToyGossip(GossipRule):
    """After its step a rank sends shares of its parameters to the ranks after it on a ring.

    Source: none, made up for a test.
    """

    about = About(
        examples=("toygossip", "toygossip(peers=2)"),
        draws=lambda workers: [{"peers": (1, 2)}],
        row=Row("`toygossip`", "its own, and what its neighbours have sent", "who has what its neighbours have sent", "a test"),
    )

    exchange: ClassVar[Exchange] = "push"
    always_spelled = ()

    peers: int = 1
    """How many ranks a share goes to, at least 1."""

    def __post_init__(self) -> None:
        whole_number("toygossip", "peers", self.peers, least=1)

    @property
    def edges(self) -> Graph:
        return Graph("ring", self.peers)
