"""Replicas that drift apart are set to their mean from time to time: in rounds of their own, of parameters, that wait for every rank.

First the parameters, then each of the optimizers' averages: momenta, Adam's moments. Behind each vector is a 1, whose mean says how many
vectors there are for each living rank: more than one where a rank has died after it had handed in its own. A rank that comes to it in the
midst, with the replica of one that is there, goes on where that is.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.ranks.replica import Replica
from offbeat.types import Seconds, Version, WorkerId

LOOK_S: Seconds = 0.05


def means_numel(size: int) -> int:
    """Elements of what the ranks of a model with so many parameters hand in."""
    return size + 1


class ModelMeans:
    """One rank's part in these rounds.

    Args:
        rounds: of the parameters; this part closes them.
        rank: this one.
        every: after so many rounds of gradients.
        replica: whose parameters.
        hear: called while this rank waits.
    """

    def __init__(
        self, rounds: OneHostRounds | MultiHostRounds, rank: WorkerId, every: int, replica: Replica, hear: Callable[[], None]
    ) -> None:
        self._rounds = rounds
        self._rank, self._every, self._replica, self._hear = rank, every, replica, hear
        self._taken: Version | None = None

    def keep(self, version: Version) -> None:
        """This rank has come to a version: if it has passed a multiple of ``every`` it takes on the mean, as everybody does there.

        Nobody passes two, for who has passed one waits for the others, and without them there is no other.

        Raises:
            Fenced: this rank does not take part any more.
        """
        rounds, shares = self._rounds, self._replica.shares
        while version // self._every > self._known // shares:
            means = rounds.catch_up()  # one that was complete when this rank was given its replica
            if not means:
                vector = rounds.send()
                self._replica.read_share(self._known % shares, vector)
                vector[-1] = 1.0
                rounds.arrive()
                while not rounds.wait(LOOK_S):
                    self._hear()
                means = rounds.results()
            for number, mean in means:
                if bool(torch.isfinite(mean[0])):  # else the round is void: every rank keeps its own
                    count = float(mean[-1])
                    self._replica.write_share(number % shares, mean if count == 1.0 else mean / count)
                self._taken = number + 1
            rounds.read()

    @property
    def _known(self) -> Version:
        """How many means this rank has; the table counts one that is there and has not been taken."""
        if self._taken is None:
            self._taken = self._rounds.version(self._rank)
        return self._taken

    def let_in(self, rank: WorkerId, ticket: int) -> None:
        """Let another rank, which gets this one's replica, take part from the same mean on."""
        self._rounds.let_in(rank, self._known, ticket, pause=False)

    def close(self) -> None:
        self._rounds.close()
