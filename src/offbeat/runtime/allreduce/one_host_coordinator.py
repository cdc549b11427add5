"""The coordinator's side of rounds among the ranks of one host: who takes part is written into the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import means_numel
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.ranks.coordinator_side import RankCoordinatorSide
from offbeat.transport.base import SharedMemory
from offbeat.types import Incarnation, Version, WorkerId


class OneHostCoordinatorSide(RankCoordinatorSide):
    """Follows a job whose ranks are all on the host of server 0."""

    backend = "one_host"


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

    def __init__(self, policy: RoundRule, ranks: int, numel: int, size: int, dtype: torch.dtype, seed: int) -> None:
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
