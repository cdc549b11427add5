"""Take part in rounds as one rank: arrive with a gradient, and apply each result with the rank's optimizer."""

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
    """Take part in the rounds as one rank.

    Args:
        rank: this rank.
        policy: the job's rule.
        replica: results are applied to it.
        hear: called while this rank waits.
        voided: called with each round whose mean no rank can apply.
        memory: see `RankMember`.
    """

    _rounds: OneHostRounds | MultiHostRounds
    _means: ModelMeans | None
    """None if the rule does not average parameters. Like ``_rounds``, set by `attach`."""

    def __init__(
        self,
        rank: WorkerId,
        policy: RoundRule,
        replica: Replica,
        hear: Callable[[], None],
        voided: Callable[[Version], None],
        memory: Sequence[SharedMemory] = (),
    ) -> None:
        self._policy, self._hear, self._voided = policy, hear, voided
        super().__init__(rank, replica, memory)

    def _enter(self) -> None:
        self._replica.aim(self._rounds.send())

    def resume(self) -> None:
        """Let rounds wait for this rank, which computes again."""
        self._rounds.resume(self._rank)

    def contribute(self, usable: bool, samples: int) -> None:
        """Arrive with the gradient, or without one; wait for the round, unless the rank is late, and apply the results."""
        rounds = self._rounds
        self._take_means()
        rounds.arrive(usable, self._policy.carry_clip, samples)
        while not rounds.wait(LOOK_S):
            self._hear()
        self._apply(rounds.results())
        self._replica.aim(rounds.send())

    def catch_up(self, goal: Version = 0, *, exactly: bool = False) -> None:
        """Apply the available results, and wait for those up to version ``goal``.

        A rank whose wait for a round was cut by an order to leave takes no results any more: that round is not its next one.
        """
        if self._rounds.waits:
            return
        upto = goal if exactly else None
        self._apply(self._rounds.catch_up(upto=upto))
        while self.version < goal:
            self._hear()
            self._apply(self._rounds.catch_up(LOOK_S, upto=upto))

    def _apply(self, results: Sequence[tuple[Version, torch.Tensor]]) -> None:
        """Apply the results of these rounds; only the last one if the rule delivers ``latest``."""
        if not results:
            self._take_means()
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
        self._take_means()

    def _take_means(self) -> None:
        """Take the mean that is due. One is due at the beginning if this rank's replica is of a rank that waited for it.

        That rank waits for this one, and would not close the round of gradients for which this one would wait.
        """
        if self._means is not None and self._means.due(self.version):
            self.restore()
            self._means.keep(self.version)

    def _admit(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        # The other rank gets this rank's replica, so it needs the results from this rank's version on.
        self._rounds.admit(rank, self.version, ticket[0])
        if self._means is not None:
            self._means.admit(rank, ticket[1])

    def close(self) -> None:
        self._rounds.close()
        if self._means is not None:
            self._means.close()
        # Memory stays mapped while any view of it exists.
        del self._rounds, self._means, self._memory


class OneHostMember(RoundMember):
    """Take part as one rank where all ranks are on one host."""

    def attach(self) -> None:
        rounds = OneHostRounds.attach(self._memory[0], self._rank, self._policy)
        rounds.meanwhile = self._hear
        self._rounds, self._means = rounds, None
        if (every := self._policy.model_sync_every) is not None:
            means = OneHostRounds.attach(self._memory[1], self._rank)
            self._means = ModelMeans(means, self._rank, every, self._replica, self._hear)
