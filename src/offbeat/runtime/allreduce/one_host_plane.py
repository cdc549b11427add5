"""Run the plane of rounds among the ranks of one host: write to their shared memory which ranks take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect
from offbeat.core.rank_log import Entry
from offbeat.policies.eager import Full
from offbeat.runtime.allreduce.model_means import means_numel
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.ranks.group import Group
from offbeat.runtime.ranks.plane import RankPlane
from offbeat.runtime.ranks.recorded_group import Note
from offbeat.runtime.recovery.survival import Survival
from offbeat.transport.base import SharedMemory
from offbeat.types import Incarnation, Version, WorkerId


class OneHostPlane(RankPlane):
    """Follow a job whose ranks are all on the host of server 0."""

    backend = "one_host"


class OneHostGroup(Group):
    """Hold the rounds of one job, and the rounds that average parameters if the rule has them.

    Args:
        policy: the job's rule.
        all_rounds: those of gradients, and of parameters if there are some.
    """

    def __init__(self, policy: RoundRule, all_rounds: Sequence[OneHostRounds]) -> None:
        self._policy, self._all_rounds, self._rounds = policy, all_rounds, all_rounds[0]

    @classmethod
    def create(
        cls, policy: RoundRule, ranks: int, numel: int, size: int, dtype: torch.dtype, seed: int, survival: Survival
    ) -> OneHostGroup:
        """Return the group of a job, in new memory, or in that of an earlier process of the coordinator.

        Args:
            policy: the job's rule.
            ranks: the greatest number of ranks.
            numel, size: elements of a gradient with its hyperparameters, and the number of parameters.
            dtype: of both.
            seed: seed of the rule's draws.
            survival: of server 0.

        Raises:
            ConfigurationError: there is not enough memory.
        """

        def kept(make: Callable[[], OneHostRounds], rule: RoundRule) -> OneHostRounds:
            return survival.once("rounds", make, lambda block: OneHostRounds.attach(block, None, rule))

        all_rounds = [kept(lambda: OneHostRounds.create(policy, ranks, numel, dtype=dtype, seed=seed, followed=True), policy)]
        if policy.model_sync_every is not None:
            all_rounds.append(kept(lambda: OneHostRounds.create(Full(), ranks, means_numel(size), dtype=dtype), Full()))
        return cls(policy, all_rounds)

    def __getstate__(self) -> dict[str, Any]:
        """Have a snapshot of the server refer to the memory, which the next process attaches."""
        return {"policy": self._policy, "memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        policy = state["policy"]
        rounds = [OneHostRounds.attach(block, None, rule) for block, rule in zip(state["memory"], (policy, Full()), strict=False)]
        self._policy, self._all_rounds, self._rounds = policy, rounds, rounds[0]

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """Return the shared blocks: that of the gradients' rounds first."""
        return tuple(rounds.block for rounds in self._all_rounds)

    def follow(self, start: int) -> list[Entry]:
        return self._rounds.follow(start)

    def present(self, rank: WorkerId) -> bool:
        return self._rounds.present(rank)

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with, and do not take part yet."""
        for rank in ranks:
            for rounds in self._all_rounds:
                if not rounds.present(rank):
                    rounds.enter(rank, 0 if rounds is self._rounds else rounds.done)

    def enter(self, rank: WorkerId, version: Version) -> None:
        self._rounds.enter(rank, version)
        for rounds in self._all_rounds[1:]:
            rounds.enter(rank, rounds.done)

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return numbers that authorise another rank to admit `rank`'s current process, one for each of the rounds."""
        # A source admits a joiner to the rounds of gradients first. The other way round here, no stale source can do only the second part.
        return [rounds.ticket(rank) for rounds in reversed(self._all_rounds)][::-1]

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the tickets of a rank whose process is gone."""
        for rounds in reversed(self._all_rounds):  # as in `ticket`: else the rank might be in the rounds of parameters alone
            rounds.forget(rank)

    def leave(self, rank: WorkerId, incarnation: Incarnation, note: Note | None = None) -> tuple[Effect, ...]:
        """Remove a rank. Gradients that it has handed in stay, and nothing is lost."""
        for rounds in self._all_rounds:
            rounds.leave(rank)
        return ()

    def pause(self, rank: WorkerId) -> None:
        self._rounds.pause(rank)

    def resume(self, rank: WorkerId) -> None:
        self._rounds.resume(rank)

    def close(self) -> None:
        for rounds in self._all_rounds:
            rounds.close()
