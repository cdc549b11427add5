"""Run the coordinator's side of rounds among the ranks of one host: write to their shared memory which ranks take part."""

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
    """Follow a job whose ranks are all on the host of server 0."""

    backend = "one_host"


class OneHostGroup:
    """Hold the rounds of one job, and the rounds that average parameters if the rule has them.

    Args:
        policy: the job's rule.
        ranks: the greatest number of ranks.
        numel, size: elements of a gradient with its hyperparameters, and the number of parameters.
        dtype: of both.
        seed: seed of the rule's draws.

    Raises:
        ConfigurationError: there is not enough memory.
    """

    def __init__(self, policy: RoundRule, ranks: int, numel: int, size: int, dtype: torch.dtype, seed: int) -> None:
        self._rounds = OneHostRounds.create(policy, ranks, numel, dtype=dtype, seed=seed, followed=True)
        self._all_rounds = [self._rounds]
        if policy.model_sync_every is not None:
            self._all_rounds.append(OneHostRounds.create(Full(), ranks, means_numel(size), dtype=dtype))
        self.follow, self.present = self._rounds.follow, self._rounds.present
        self.pause, self.resume = self._rounds.pause, self._rounds.resume

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """Return the shared blocks: that of the gradients' rounds first."""
        return tuple(rounds.block for rounds in self._all_rounds)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with."""
        for rank in ranks:
            self.enter(rank, 0)

    def enter(self, rank: WorkerId, version: Version) -> None:
        """Let a rank take part from now on, with the parameters of this version."""
        self._rounds.enter(rank, version)
        for rounds in self._all_rounds[1:]:
            rounds.enter(rank, rounds.done)

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return the numbers that authorise another rank to admit `rank`'s current process, one for each of the rounds."""
        return [rounds.ticket(rank) for rounds in self._all_rounds]

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the tickets of a rank that does not take part and whose process is gone."""
        for rounds in self._all_rounds:
            rounds.forget(rank)

    def leave(self, rank: WorkerId, incarnation: Incarnation) -> tuple[Effect, ...]:
        """Remove a rank. Gradients that it has handed in stay."""
        for rounds in self._all_rounds:
            rounds.leave(rank)
        return ()

    def close(self) -> None:
        """Release the memory at the end of the job."""
        for rounds in self._all_rounds:
            rounds.close()
