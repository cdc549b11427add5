"""The coordinator's side of gossip: who takes part is written into the memory that the ranks share, and steps are counted as versions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.core.effects import Effect, Source, WrittenOff
from offbeat.core.events import Event, Pushed
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.rank_log import Entry
from offbeat.errors import ProtocolError
from offbeat.runtime.gossip.exchange import OneHostGossip
from offbeat.runtime.ranks.coordinator_side import RankCoordinatorSide
from offbeat.types import Incarnation, Seconds, Version, WorkerId


class GossipGroup:
    """The gossip of one job.

    Args:
        policy: the job's rule.
        ranks: how many there may be.
        size: parameters.
        dtype: in which they are mixed.
        seed: of what the rule draws.

    Raises:
        ConfigurationError: there is not enough memory.
    """

    def __init__(self, policy: GossipRule, ranks: int, size: int, dtype: torch.dtype, seed: int) -> None:
        self._gossip = gossip = OneHostGossip.create(policy, ranks, size, dtype=dtype, seed=seed, followed=True)
        self.follow, self.present, self.close = gossip.follow, gossip.present, gossip.close
        self.pause, self.resume = gossip.pause, gossip.resume
        self.memory = (gossip.block,)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """These ranks take part from the beginning."""
        for rank in ranks:
            self.enter(rank, 0)

    def enter(self, rank: WorkerId, version: Version) -> None:
        """A rank takes part from now on, with whatever parameters it comes."""
        self._gossip.enter(rank)

    def ticket(self, rank: WorkerId) -> list[int]:
        """What a rank needs to let in the process that is this one now."""
        return [self._gossip.ticket(rank)]

    def forget(self, rank: WorkerId) -> None:
        """The process of a rank that does not take part is gone: nobody lets it in."""
        self._gossip.forget(rank)

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """A rank is gone, and what it had is written off."""
        loss = self._gossip.leave(rank)
        if loss is None or self._gossip.rule.exchange != "push":
            return ()
        messages = tuple(Source(message.sender, message.steps, message.weight) for message in loss.messages)
        return (WrittenOff(rank, incarnation, loss.mass, messages, "its replica is gone with it"),)


class GossipCoordinatorSide(RankCoordinatorSide):
    """Follows a job whose ranks count the steps of all, used or not; its versions count gradients that were used."""

    backend = "gossip"

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._steps = 0
        """That have been dealt with."""
        self._unused: list[int] = []
        """Which of them were of no use, ascending."""

    def voided(self, number: Version, now: Seconds) -> None:
        raise ProtocolError("a job that mixes parameters has no rounds that could be void")

    def _placed(self, event: Pushed) -> Pushed:
        """What a rank calls a version is the number of steps when it went on."""
        steps = min(event.version, self._steps)
        return event._replace(version=steps - bisect_right(self._unused, steps))

    def _deal_with(self, entry: Entry, events: tuple[Event, ...]) -> None:
        before = self._coordinator.version
        super()._deal_with(entry, events)
        for event in events:
            if isinstance(event, Pushed):
                self._steps += 1
                if self._coordinator.version == before:
                    self._unused.append(self._steps)
