"""What the ranks of a job have in common, by its rule: rounds in which gradients are summed, or parameters that are mixed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offbeat.core.effects import Effect, Source, WrittenOff
from offbeat.core.events import Event, Pushed
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Policy
from offbeat.core.rank_log import Entry
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.policies.eager import Full, Partial
from offbeat.policies.gossip import AllReduce
from offbeat.runtime.allreduce.model_means import means_numel
from offbeat.runtime.allreduce.multi_host_coordinator import MultiHostCoordinatorSide, MultiHostGroup, interface_of
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.allreduce.torch_distributed.coordinator_side import TorchCoordinatorSide
from offbeat.runtime.coordination.notifier import Notifier
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.gossip.exchange import OneHostGossip
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.ranks.coordinator_side import RankCoordinatorSide
from offbeat.transport.base import Hub, SharedMemory
from offbeat.types import Incarnation, Seconds, Version, WorkerId

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class OneHostGroup:
    """The rounds of one job, and those in which parameters are averaged where the rule has such.

    Args:
        policy: the job's rule.
        ranks: how many there may be.
        numel, size: elements of a gradient with what goes with it, and parameters.
        dtype: of both.
        seed: of what the rule draws.

    Raises:
        ConfigurationError: there is not enough memory.
    """

    def __init__(self, policy: Partial, ranks: int, numel: int, size: int, dtype: torch.dtype, seed: int) -> None:
        self._rounds = OneHostRounds.create(policy, ranks, numel, dtype=dtype, seed=seed, followed=True)
        self._tables = [self._rounds]
        if policy.model_sync_every is not None:
            self._tables.append(OneHostRounds.create(Full(), ranks, means_numel(size), dtype=dtype))
        self.follow, self.present = self._rounds.follow, self._rounds.present
        self.pause, self.resume = self._rounds.pause, self._rounds.resume

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """The tables' blocks."""
        return tuple(table.block for table in self._tables)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """These ranks take part from the beginning."""
        for rank in ranks:
            self.enter(rank, 0)

    def enter(self, rank: WorkerId, version: Version) -> None:
        """A rank takes part from now on, with the parameters of this version."""
        self._rounds.enter(rank, version)
        for table in self._tables[1:]:
            table.enter(rank, table.done)

    def ticket(self, rank: WorkerId) -> list[int]:
        """What a rank needs to let in the process that is this one now."""
        return [table.ticket(rank) for table in self._tables]

    def forget(self, rank: WorkerId) -> None:
        """The process of a rank that does not take part is gone: nobody lets it in."""
        for table in self._tables:
            table.forget(rank)

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """A rank is gone; what it has handed in stays."""
        for table in self._tables:
            table.leave(rank)
        return ()

    def close(self) -> None:
        """The job is over."""
        for table in self._tables:
            table.close()


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


def host_of(
    policy: Policy,
    vector: Mapping[str, Any],
    settings: JobSettings,
    coordinator: Coordinator,
    roster: Peers,
    announcer: Notifier,
    feed: Callable[[Event, Seconds], None],
    perform: Callable[[list[Effect], Seconds], None],
    now: Callable[[], Seconds],
    hub: Hub,
    together: bool,
) -> RankCoordinatorSide:
    """The coordinator's side of a job under this rule. See `RankCoordinatorSide`.

    Args:
        vector: what a gradient is, from the first rank's hello.
        hub: where this process listens.
        together: whether all ranks are on this host.

    Raises:
        ConfigurationError: there is not enough memory, or the rule needs all ranks on one host.
    """
    ranks, dtype, size = settings.workers, DTYPES[vector["dtype"]], vector["size"]
    parts = coordinator, roster, announcer, feed, perform, now
    if isinstance(policy, AllReduce):
        return TorchCoordinatorSide(interface_of(hub), *parts)
    if isinstance(policy, GossipRule):
        if not together:
            raise ConfigurationError(
                f"the workers are on different hosts, and {policy.spelling} needs all of them on the host of server 0; use a rule of the "
                "allreduce family, such as full or majority, or one with servers, such as bsp"
            )
        return GossipCoordinatorSide(GossipGroup(policy, ranks, size, dtype, settings.seed), *parts)
    assert isinstance(policy, Partial), f"{policy.spelling} has servers"
    if not together:
        return MultiHostCoordinatorSide(MultiHostGroup(policy, ranks, vector["numel"], size, dtype, settings.seed, hub), *parts)
    return RankCoordinatorSide(OneHostGroup(policy, ranks, vector["numel"], size, dtype, settings.seed), *parts)


def checked_vector(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a rank says of its gradients.

    Raises:
        ConfigurationError: it comes from a worker that takes this job for one with servers.
    """
    vector: Mapping[str, Any] | None = header.get("vector")
    if vector is None or vector["dtype"] not in DTYPES:
        raise ConfigurationError(
            f"worker {header['worker']} asks for a rule with servers, and the job's has none: give every worker the same rule, "
            "or choose with --sync"
        )
    return vector
