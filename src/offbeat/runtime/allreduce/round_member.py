"""A rank's place in the shared rounds: it arrives with a gradient, and its optimizer makes the step of each result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.runtime.allreduce.model_means import ModelMeans
from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.ranks.member import LOOK_S, RankMember
from offbeat.runtime.ranks.replica import Replica
from offbeat.transport.base import SharedMemory
from offbeat.types import Version, WorkerId


class RoundMember(RankMember):
    """One rank's part in the rounds.

    Args:
        rank: this one.
        policy: the job's rule.
        replica: what results are applied to.
        hear: called while this rank waits.
        voided: called with each round whose mean cannot be used: no rank makes a step with it.
    """

    _rounds: OneHostRounds | MultiHostRounds
    _means: ModelMeans | None
    """Both are made when this rank attaches."""

    def __init__(
        self, rank: WorkerId, policy: RoundRule, replica: Replica, hear: Callable[[], None], voided: Callable[[Version], None]
    ) -> None:
        self._policy, self._hear, self._voided = policy, hear, voided
        super().__init__(rank, replica)

    def _enter(self) -> None:
        self._replica.aim(self._rounds.send())

    def resume(self) -> None:
        """This rank computes: rounds may wait for it."""
        self._rounds.resume(self._rank)

    def contribute(self, usable: bool) -> None:
        """Arrive with the gradient, or without; wait for the round, unless it is late, and apply what there is."""
        rounds = self._rounds
        rounds.arrive(usable, clip=self._policy.carry_clip)
        while not rounds.wait(LOOK_S):
            self._hear()
        self._apply(rounds.results())
        self._replica.aim(rounds.send())

    def catch_up(self, goal: Version = 0) -> None:
        """Apply the results that there are; wait for those up to this version."""
        self._apply(self._rounds.catch_up())
        while self.version < goal:
            self._hear()
            self._apply(self._rounds.catch_up(LOOK_S))

    def _apply(self, results: Sequence[tuple[Version, torch.Tensor]]) -> None:
        """Make the steps of these rounds, of the last alone where the rule says so."""
        if not results:
            return
        self.restore()
        usable = []
        for number, result in results:
            if self._replica.fits(result):
                usable.append(result)
            else:
                self._voided(number)
        for result in usable if self._policy.delivery == "replay" else usable[-1:]:
            self._replica.step(result)
        self.version = results[-1][0] + 1
        self._rounds.read()
        if self._means is not None:
            self._means.keep(self.version)

    def _let_in(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        # It will have the results from this one's version on.
        self._rounds.let_in(rank, self.version, ticket[0])
        if self._means is not None:
            self._means.let_in(rank, ticket[1])

    def close(self) -> None:
        """Let go of the memory; to be called once, and last."""
        self._rounds.close()
        if self._means is not None:
            self._means.close()
        # What is mapped stays so until the last view of it is gone.
        del self._rounds, self._means


class OneHostMember(RoundMember):
    """One rank's part where all ranks are on one host.

    Args:
        memory: what came with the welcome.
        rank, policy, replica, hear, voided: as for `RoundMember`.
    """

    def __init__(
        self,
        memory: Sequence[SharedMemory],
        rank: WorkerId,
        policy: RoundRule,
        replica: Replica,
        hear: Callable[[], None],
        voided: Callable[[Version], None],
    ) -> None:
        self._memory = memory
        super().__init__(rank, policy, replica, hear, voided)

    def attach(self) -> None:
        """Be this rank, whoever was it before."""
        self._rounds, self._means = OneHostRounds.attach(self._memory[0], self._rank, self._policy), None
        if (every := self._policy.model_sync_every) is not None:
            means = OneHostRounds.attach(self._memory[1], self._rank)
            self._means = ModelMeans(means, self._rank, every, self._replica, self._hear)

    def close(self) -> None:
        """Let go of the memory; to be called once, and last."""
        super().close()
        self._memory = ()
