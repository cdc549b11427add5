"""Set replicas that drift apart to their mean from time to time, in rounds of parameters that wait for every rank.

One round averages the parameters, and one each of the optimizers' averages (momenta, Adam's moments). Behind each vector is a 1; the mean
of these ones tells how many vectors were summed for each living rank: more than one if a rank has died after it handed its own in. A rank
that joins in between, with another rank's replica, continues at that rank's place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offbeat.runtime.allreduce.multi_host.rounds import MultiHostRounds
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.runtime.ranks.member import LOOK_S
from offbeat.runtime.ranks.replica import Replica
from offbeat.types import Version, WorkerId


def means_numel(size: int) -> int:
    """Return the elements of the vectors that are averaged, for a model with ``size`` parameters."""
    return size + 1


class ModelMeans:
    """Take part in these rounds as one rank.

    Args:
        rounds: rounds of parameters; `close` closes them.
        rank: this rank.
        every: average after this many rounds of gradients.
        replica: owns the parameters.
        hear: called while this rank waits.
    """

    def __init__(
        self, rounds: OneHostRounds | MultiHostRounds, rank: WorkerId, every: int, replica: Replica, hear: Callable[[], None]
    ) -> None:
        self._rounds = rounds
        self._rank, self._every, self._replica, self._hear = rank, every, replica, hear
        self._taken: Version | None = None

    def due(self, version: Version) -> bool:
        """Return True if ``version`` has passed a multiple of ``every`` whose mean this rank has not taken."""
        return version // self._every > self._known // self._replica.shares

    def keep(self, version: Version) -> None:
        """Take the mean if ``version`` has passed a multiple of ``every``, as all ranks do there.

        A rank never passes two multiples at once: at the first it waits for all others, and without them there is no second.

        Raises:
            Fenced: this rank does not take part any more.
        """
        rounds, shares = self._rounds, self._replica.shares
        while self.due(version):
            means = rounds.catch_up()  # a mean that was complete when this rank received its replica
            if not means:
                vector = rounds.send()
                self._replica.read_share(self._known % shares, vector)
                vector[-1] = 1.0
                rounds.arrive()
                while not rounds.wait(LOOK_S):
                    self._hear()
                means = rounds.results()
            for number, mean in means:
                if bool(torch.isfinite(mean[0])):  # otherwise the round is void: every rank keeps its own parameters
                    count = float(mean[-1])
                    self._replica.write_share(number % shares, mean if count == 1.0 else mean / count)
                self._taken = number + 1
            rounds.read()

    @property
    def _known(self) -> Version:
        """Return how many means this rank has taken."""
        if self._taken is None:
            self._taken = self._rounds.version(self._rank)
        return self._taken

    def admit(self, rank: WorkerId, ticket: int) -> None:
        """Let another rank, which gets this rank's replica, take part from the same mean on."""
        self._rounds.admit(rank, self._known, ticket, pause=False)

    def close(self) -> None:
        self._rounds.close()
