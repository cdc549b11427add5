"""Run the coordinator's side of gossip: write to the ranks' shared memory which of them take part, and count their steps as versions."""

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
    """Hold the gossip of one job.

    Args:
        policy: the job's rule.
        ranks: the greatest number of ranks.
        size: the number of parameters.
        dtype: dtype in which they are mixed.
        seed: seed of the rule's draws.

    Raises:
        ConfigurationError: there is not enough memory.
    """

    def __init__(self, policy: GossipRule, ranks: int, size: int, dtype: torch.dtype, seed: int) -> None:
        self._gossip = gossip = OneHostGossip.create(policy, ranks, size, dtype=dtype, seed=seed, followed=True)
        self.follow, self.present, self.close = gossip.follow, gossip.present, gossip.close
        self.pause, self.resume = gossip.pause, gossip.resume
        self.memory = (gossip.block,)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with."""
        for rank in ranks:
            self.enter(rank, 0)

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part from now on. Any parameters will do, so ``version`` is ignored."""
        self._gossip.enter(rank)

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return the number that authorises another rank to admit `rank`'s current process."""
        return [self._gossip.ticket(rank)]

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the ticket of a rank that does not take part and whose process is gone."""
        self._gossip.forget(rank)

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """Remove a rank. Returns, for push-sum, the effect that writes off its mass and the messages for it."""
        loss = self._gossip.leave(rank)
        if loss is None or self._gossip.rule.exchange != "push":
            return ()
        messages = tuple(Source(message.sender, message.steps, message.weight) for message in loss.messages)
        return (WrittenOff(rank, incarnation, loss.mass, messages, "its replica is gone with it"),)


class GossipCoordinatorSide(RankCoordinatorSide):
    """Follow a gossip job. Its ranks count the steps of all ranks; its versions count only gradients that were used."""

    backend = "gossip"

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._steps = 0
        """Steps processed so far."""
        self._unused: list[int] = []
        """The numbers of steps whose gradients were not used, ascending."""

    def voided(self, number: Version, now: Seconds) -> None:
        raise ProtocolError(f"round {number} is reported void, and a job that mixes parameters has no rounds")

    def _placed(self, event: Pushed) -> Pushed:
        """Replace the number of steps, which a rank sends as the version, by the version at that time."""
        steps = min(event.version, self._steps)
        return event._replace(version=steps - bisect_right(self._unused, steps))

    def _process(self, entry: Entry, events: tuple[Event, ...]) -> None:
        before = self._coordinator.version
        super()._process(entry, events)
        for event in events:
            if isinstance(event, Pushed):
                self._steps += 1
                if self._coordinator.version == before:
                    self._unused.append(self._steps)
