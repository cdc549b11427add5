"""A rank's replica and its place among the others, whatever they exchange.

What is said to the coordinator about that, and when, is the session's business (``worker_side.py``). Gradients are summed in
``runtime/allreduce/round_member.py``, parameters mixed in ``runtime/gossip/member.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.runtime.ranks.replica import Replica
from offbeat.transport.base import Buffer
from offbeat.types import Seconds, Version, WorkerId

LOOK_S: Seconds = 0.05
"""How often a rank that waits for others hears what the coordinator has to say."""


class RankMember(ABC):
    """One rank's part in a job. Every method raises `collective.Fenced` if it does not take part any more.

    Args:
        rank: this one.
        replica: its model and optimizer.
    """

    others_decide = False
    """Whether others may go on without this rank before the coordinator knows of it."""

    def __init__(self, rank: WorkerId, replica: Replica) -> None:
        self._rank, self._replica = rank, replica
        self.version: Version = 0
        """How many results the replica has; where parameters are mixed, how many steps all ranks had made when this one went on."""
        self._kept: tuple[Any, bytes] | None = None
        """What this rank began with in a running job, until its first step."""
        self._written: tuple[int, ...] = ()
        """See `Replica.writes`, then."""
        self.attach()

    @abstractmethod
    def attach(self) -> None:
        """Be this rank, whoever was it before."""

    @property
    def contact(self) -> dict[str, Any]:
        """What the others need to know of this rank before it can take part."""
        return {}

    def meet(self, header: Mapping[str, Any]) -> None:  # noqa: B027 on one host there is a table
        """What this rank has to know of the others before it begins."""

    def come_to(self, header: Mapping[str, Any]) -> None:
        """What it has to know of a running job before it gets a replica. Only ranks of different hosts need that."""
        raise ProtocolError("this job needs no introduction")

    def sit_out(self) -> None:
        """Take part in a round with nothing. Only a plain allreduce needs that."""
        raise ProtocolError("this job has no rounds that need all ranks")

    def begin(self, given: tuple[Any, memoryview, Version] | None, goal: Version, *, first: bool) -> None:
        """Take part, with another's replica and its version if there is one.

        Args:
            given: the replica and its version; None: this rank has them.
            goal: the results up to this version are to be taken at least.
            first: the job begins with this rank. Its script may load a state, so no result changes the replica before `start`.
        """
        if given is not None:
            plain, payload, self.version = given
            self._replica.take(plain, payload)
        self._enter()
        if first:
            return
        self.start()
        self.catch_up(goal)
        if given is not None:
            plain, mine = self._replica.give()
            self._kept, self._written = (plain, b"".join(mine)), self._replica.writes()

    @abstractmethod
    def _enter(self) -> None:
        """Write gradients where they are sent from."""

    def start(self) -> None:  # noqa: B027 gradients are of no use to others before the first step
        """Let others see what the replica has; called before the first step, and again."""

    @abstractmethod
    def resume(self) -> None:
        """This rank computes: others may wait for it."""

    @abstractmethod
    def contribute(self, usable: bool) -> None:
        """Make a step with the gradient, or without, and wait for others as far as the rule says."""

    @abstractmethod
    def catch_up(self, goal: Version = 0) -> None:
        """Take what there is for this rank while it does not step; wait for results up to this version."""

    def pull(self) -> None:
        """Take what there is by now, wherever that is."""
        self.catch_up()

    def part(self) -> None:  # noqa: B027 what ranks have put into memory that they share stays there
        """Wait until the others can do without this rank, which is about to leave."""

    def restore(self, *, again: bool = False) -> None:
        """A script that comes to a running job may have loaded an old checkpoint: the job's replica goes before.

        ``again``: it may load more after that.
        """
        kept = self._kept
        if not again:
            self._kept = None
        if kept is not None and self._replica.writes() != self._written:
            self._replica.take(kept[0], memoryview(kept[1]))
            self._written = self._replica.writes()

    def give_to(self, rank: WorkerId | None, ticket: Sequence[int]) -> tuple[Any, list[Buffer]]:
        """The replica, for another rank, which takes part from now on if its process is still the one with this ticket; or for whoever
        may come.

        Raises:
            OffbeatError: it cannot be given.
        """
        given = self._replica.give()
        if rank is not None:
            self._let_in(rank, ticket)
        return given

    @abstractmethod
    def _let_in(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        """Another rank has this one's replica. Nobody shall wait for it while it reads that."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory; to be called once, and last."""
