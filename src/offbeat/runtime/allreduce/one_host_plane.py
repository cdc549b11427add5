"""Run the plane of rounds among the ranks of one host: write to their shared memory which ranks take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect
from offbeat.core.policy import Policy
from offbeat.core.rank_log import Entry
from offbeat.policies import rule_of
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
    """Hold what the ranks of one host share: the rounds of one job and, if the rule has them, the rounds that average parameters.

    Args:
        shared: the rounds of gradients, and of parameters if there are some.
    """

    def __init__(self, shared: Sequence[Any]) -> None:
        self._shared, self._first = shared, shared[0]

    @classmethod
    def of_rounds(
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
            found: OneHostRounds = survival.once("rounds", make, lambda block: cls.attached(block, rule))
            return found

        shared = [kept(lambda: OneHostRounds.create(policy, ranks, numel, dtype=dtype, seed=seed, followed=True), policy)]
        if policy.model_sync_every is not None:
            shared.append(kept(lambda: OneHostRounds.create(Full(), ranks, means_numel(size), dtype=dtype), Full()))
        return cls(shared)

    @staticmethod
    def attached(block: SharedMemory, rule: Policy) -> Any:
        """Return what an earlier process of the coordinator has made in this block."""
        return OneHostRounds.attach(block, None, rule_of(RoundRule, rule))  # type: ignore[type-abstract]

    def __getstate__(self) -> dict[str, Any]:
        """Have a snapshot of the server refer to the memory, which the next process attaches."""
        return {"rules": [shared.rule for shared in self._shared], "memory": self.memory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        OneHostGroup.__init__(self, [self.attached(*each) for each in zip(state["memory"], state["rules"], strict=True)])

    @property
    def memory(self) -> tuple[SharedMemory, ...]:
        """Return the shared blocks: that of the gradients' rounds first."""
        return tuple(shared.block for shared in self._shared)

    def follow(self, start: int) -> list[Entry]:
        found: list[Entry] = self._first.follow(start)
        return found

    def present(self, rank: WorkerId) -> bool:
        return bool(self._first.present(rank))

    def begin(self, ranks: Sequence[WorkerId]) -> None:
        """Enter the ranks that the job begins with, and do not take part yet."""
        for rank in ranks:
            for shared in self._shared:
                if not shared.present(rank):
                    shared.enter(rank, 0 if shared is self._first else shared.done)

    def enter(self, rank: WorkerId, version: Version) -> None:
        self._first.enter(rank, version)
        for shared in self._shared[1:]:
            shared.enter(rank, shared.done)

    def ticket(self, rank: WorkerId) -> list[int]:
        """Return numbers that authorise another rank to admit `rank`'s current process, one for each of the rounds."""
        # A source admits a joiner to the rounds of gradients first. The other way round here, no stale source can do only the second part.
        return [shared.ticket(rank) for shared in reversed(self._shared)][::-1]

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the tickets of a rank whose process is gone."""
        for shared in reversed(self._shared):  # as in `ticket`: else the rank might be in the rounds of parameters alone
            shared.forget(rank)

    def leave(self, rank: WorkerId, incarnation: Incarnation, note: Note | None = None) -> tuple[Effect, ...]:
        """Remove a rank. Gradients that it has handed in stay, and nothing is lost."""
        for shared in self._shared:
            shared.leave(rank)
        return ()

    def pause(self, rank: WorkerId) -> None:
        self._first.pause(rank)

    def resume(self, rank: WorkerId) -> None:
        self._first.resume(rank)

    def close(self) -> None:
        for shared in self._shared:
            shared.close()
