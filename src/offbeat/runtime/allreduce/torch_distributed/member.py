"""A rank's place in a plain allreduce: it calls `torch.distributed`, and its optimizer makes the step of each mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbeat.errors import JobError
from offbeat.runtime.allreduce.torch_distributed.process_group import Meeting, TorchAllreduce
from offbeat.runtime.ranks.member import RankMember
from offbeat.runtime.ranks.replica import Replica
from offbeat.types import Version, WorkerId


class TorchMember(RankMember):
    """One rank's part.

    Args:
        rank: this one.
        replica: what means are applied to.
        meeting: where the ranks meet.
        interface: of this rank's own connections with the others.
    """

    def __init__(self, rank: WorkerId, replica: Replica, meeting: Meeting, interface: str) -> None:
        self._meeting, self._interface = meeting, interface
        self._group: TorchAllreduce | None = None
        self._members: Sequence[WorkerId] = ()
        # Behind each gradient is a 1, so that the mean tells how many there are.
        self._gradient, self._nothing = (torch.zeros(replica.numel + 1, dtype=replica.dtype) for _ in range(2))
        super().__init__(rank, replica)

    def attach(self) -> None:
        """There is nothing to attach to before the ranks have met."""

    def meet(self, header: Mapping[str, Any]) -> None:
        """The ``members``, in this order, are all that ever take part."""
        self._members = header["members"]

    def _enter(self) -> None:
        self._replica.aim(self._gradient[:-1])
        self._group = TorchAllreduce(self._members.index(self._rank), len(self._members), self._meeting, host=self._interface)

    def resume(self) -> None:
        """Whether this rank computes is the coordinator's to say."""

    def contribute(self, usable: bool) -> None:
        """Take part in a round with the gradient, or without it."""
        if usable:
            self._gradient[-1] = 1.0
        else:
            self._gradient.zero_()
        self._round(self._gradient)

    def sit_out(self) -> None:
        """Take part in a round of the others with nothing: a gradient that is being accumulated stays where it is."""
        self._round(self._nothing.zero_())

    def _round(self, vector: torch.Tensor) -> None:
        assert self._group is not None, "the ranks have not met"
        self._group.mean(vector)
        self.version += 1
        if (share := float(vector[-1])) > 0.0:
            # Of those with a gradient; the mean is over all ranks.
            self._replica.step(vector[:-1] if round(share * len(self._members)) == len(self._members) else vector[:-1].div_(share))

    def catch_up(self, goal: Version = 0) -> None:
        """Nothing comes but in rounds in which this rank takes part."""

    def _let_in(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        raise JobError(f"worker {rank} cannot come to a plain allreduce that is under way")

    def close(self) -> None:
        """This rank calls no more; to be called once, and last."""
        if self._group is not None:
            self._group.close()
