"""Run the plane of gossip: say which ranks take part, and count their steps as versions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offbeat.core.effects import Effect, WrittenOff
from offbeat.core.events import Event, Pushed
from offbeat.core.gossip.ledger import sources_of
from offbeat.core.gossip.push_sum import GossipRule, Loss
from offbeat.core.policy import Policy
from offbeat.core.rank_log import Entry
from offbeat.errors import ProtocolError
from offbeat.policies import rule_of
from offbeat.runtime.allreduce.multi_host_plane import MultiHostGroup, MultiHostPlane
from offbeat.runtime.allreduce.one_host_plane import Note, OneHostGroup
from offbeat.runtime.gossip.one_host import GossipMemory, GossipState
from offbeat.runtime.gossip.sequenced import SequencedGossip
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.runtime.recovery.survival import Survival
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.types import NO_CAUSE, NOT_JOINED, Incarnation, Seconds, Version, WorkerId


class GossipGroup(OneHostGroup):
    """Hold the gossip of one job whose ranks are all on one host.

    A rank's step is an arrival in the log, whose version is the number of its steps after it. A `GossipLedger` that gets the same events
    makes the same decisions, with one exception: messages under way while a rank leaves may be mixed in a step sooner or later than the log
    says.
    """

    @classmethod
    def of_gossip(cls, policy: GossipRule, ranks: int, size: int, dtype: torch.dtype, seed: int, survival: Survival) -> GossipGroup:
        """Return the group of a job, in new memory, or in that of an earlier process of the coordinator.

        Args:
            policy: the job's rule.
            ranks: the greatest number of ranks.
            size: the number of parameters.
            dtype: dtype in which they are mixed.
            seed: seed of the rule's draws.
            survival: of server 0.

        Raises:
            ConfigurationError: there is not enough memory.
        """

        def make() -> GossipMemory:
            return GossipMemory.create(policy, ranks, size, dtype=dtype, seed=seed, followed=True)

        return cls([survival.once("gossip", make, lambda block: cls.attached(block, policy))], survival)

    @staticmethod
    def attached(block: SharedMemory, rule: Policy) -> GossipMemory:
        return GossipMemory(block, rule_of(GossipRule, rule))  # type: ignore[type-abstract]

    def _leave(self, rank: WorkerId, incarnation: Incarnation, note: Note) -> tuple[Effect, ...]:
        """Remove a rank. Returns, for push-sum, the effect that writes off its mass and the messages for it.

        ``note`` is called with these effects, under the lock and before the change is complete.
        """
        gossip: GossipMemory = self._first

        def leave(state: GossipState) -> tuple[Effect, ...]:
            # It may have died between the count of its last step and the end of writing the parameters.
            loss = state.leave(rank, lambda receiver, message: not gossip.holds(rank, message.steps))
            effects = () if loss is None else _written_off(gossip.rule, rank, incarnation, loss)
            if effects:
                note(effects)
            return effects

        return gossip.change(leave)


class MultiHostGossipGroup(MultiHostGroup):
    """Hold the gossip of one job whose ranks are on several hosts. Its table is in this process.

    Args:
        policy: the job's rule.
        ranks: the greatest number of ranks.
        seed: seed of the rule's draws.
        now: the job's clock.
    """

    _rounds: SequencedGossip

    def __init__(self, policy: GossipRule, ranks: int, seed: int, now: Callable[[], Seconds]) -> None:
        self._policy = policy
        self._hold(ranks, [SequencedGossip(policy, ranks, now, seed)])

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """Remove a rank, as on one host. The messages that it has sent are gone, too, where nobody has got them."""
        super().leave(rank, incarnation)
        loss = self._rounds.loss_of(rank)
        return () if loss is None else _written_off(self._policy, rank, incarnation, loss)

    def missed(self, incarnations: Mapping[WorkerId, Incarnation]) -> list[Effect]:
        """Return the effects that write off what ranks could not get since the last call."""
        found, self._rounds.missed = self._rounds.missed, []
        reason = "its sender is gone"
        return [
            WrittenOff(rank, incarnations.get(rank, NOT_JOINED), sum(m.mass for m in messages), sources_of(messages), reason)
            for rank, messages in found
        ]


def _written_off(policy: GossipRule, rank: WorkerId, incarnation: Incarnation, loss: Loss) -> tuple[Effect, ...]:
    if policy.exchange != "push":
        return ()
    return (WrittenOff(rank, incarnation, loss.mass, sources_of(loss.messages), "its replica is gone with it"),)


class GossipPlane(RankPlane):
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


class MultiHostGossipPlane(GossipPlane, MultiHostPlane):
    """Follow a gossip job whose ranks are on several hosts."""

    backend = "gossip_multi_host"
    _group: MultiHostGossipGroup

    def on_rounds(self, connection: Connection, message: Message) -> bool:
        handled = super().on_rounds(connection, message)
        effects = self._group.missed(self._incarnations)
        if effects:
            self._perform(effects, self._now(), NO_CAUSE)
        return handled
