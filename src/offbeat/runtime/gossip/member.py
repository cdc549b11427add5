"""Take part in gossip as one rank: its optimizer applies its own gradient, and then parameters are mixed with those of other ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.runtime.allreduce.multi_host.connections import SequencerCall
from offbeat.runtime.allreduce.multi_host_member import Meeting
from offbeat.runtime.gossip.exchange import GossipRank
from offbeat.runtime.gossip.multi_host import MultiHostGossip
from offbeat.runtime.gossip.one_host import OneHostGossip
from offbeat.runtime.ranks.member import RankMember
from offbeat.runtime.ranks.replica import Replica
from offbeat.transport.base import Hub, SharedMemory
from offbeat.types import Version, WorkerId


class GossipMember(RankMember):
    """Take part in the gossip as one rank.

    Args:
        rank: this rank.
        replica: its parameters are mixed.
        hear: called while this rank waits.
        memory: see `RankMember`.
    """

    mixes_parameters = True
    _gossip: GossipRank

    def __init__(self, rank: WorkerId, replica: Replica, hear: Callable[[], None], memory: Sequence[SharedMemory] = ()) -> None:
        self._hear = hear
        self._gradient = torch.zeros(replica.numel, dtype=replica.dtype, device="cpu")
        self._moved = torch.zeros(replica.size, dtype=replica.dtype, device="cpu")
        super().__init__(rank, replica, memory)

    def attach(self) -> None:
        self._gossip = self._make()
        self._started = False
        self._gossip.meanwhile = self._hear

    @abstractmethod
    def _make(self) -> GossipRank:
        """Return a new part in the gossip for this rank's process."""

    def _enter(self) -> None:
        self._replica.aim(self._gradient)
        self._started = False

    def start(self) -> None:
        """Let other ranks mix with the replica's parameters. Called before the first step, since a script may load parameters until
        then."""
        if not self._started:
            self._started = True
            self._replica.read_share(0, self._moved)
            self._gossip.begin(self._moved)
            self._gossip.resume()
            self.version = self._gossip.steps

    def resume(self) -> None:
        """Let other ranks wait for this rank, which computes again."""
        if self._started:
            self._gossip.resume()

    def contribute(self, usable: bool, samples: int) -> None:
        """Let the optimizer make its step, if the gradient is usable, and exchange parameters as the rule says.

        Every change of the parameters since the last exchange counts, including changes made by the script.
        """
        if usable:
            self._replica.step_alone()
        self._replica.read_share(0, self._moved)
        self._gossip.step(self._moved.sub_(self._gossip.model))
        self._replica.write_share(0, self._gossip.model)
        self.version = self._gossip.steps

    def catch_up(self, goal: Version = 0, *, exactly: bool = False) -> None:
        """Mix in the messages for this rank, if it is paused."""
        if self._started and self._gossip.catch_up():
            self._replica.write_share(0, self._gossip.model)
        self.version = self._gossip.steps

    def _admit(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        self._gossip.admit(rank, ticket[0])

    def close(self) -> None:
        """Release the memory. Called once, and last."""
        self._gossip.close()
        del self._gossip, self._memory


class OneHostGossipMember(GossipMember):
    """Take part where all ranks are on one host."""

    def _make(self) -> GossipRank:
        return OneHostGossip(self._memory[0], self._rank)


class MultiHostGossipMember(Meeting, GossipMember):
    """Take part where ranks are on several hosts.

    Args:
        ranks: the greatest number of ranks.
        policy: the job's rule.
        hub: of this process; the gossip uses one of its own, made from it.
        interface: network interface on which this rank listens.
        call: how to reach server 0.
        others: as for `GossipMember`.
    """

    others_decide = True

    def __init__(self, ranks: int, policy: GossipRule, hub: Hub, interface: str, call: SequencerCall, *others: Any) -> None:
        self._ranks, self._policy, self._hub, self._interface, self._call = ranks, policy, hub, interface, call
        super().__init__(*others)

    def _make(self) -> GossipRank:
        size, dtype, hub = self._replica.size, self._replica.dtype, self._hub.another()
        made = MultiHostGossip(self._policy, self._ranks, size, rank=self._rank, hub=hub, call=self._call, dtype=dtype)
        self._listen([made], self._interface)
        return made
