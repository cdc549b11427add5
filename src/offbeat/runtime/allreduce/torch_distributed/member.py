"""Take part in the rule ``allreduce`` as one rank: call `torch.distributed`, and apply each mean with the rank's optimizer."""

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
    """Take part as one rank.

    Args:
        rank: this rank.
        replica: means are applied to it.
        meeting: where the ranks meet.
        interface: network interface of this rank's connections to the others.
    """

    def __init__(self, rank: WorkerId, replica: Replica, meeting: Meeting, interface: str) -> None:
        self._meeting, self._interface = meeting, interface
        self._group: TorchAllreduce | None = None
        self._members: Sequence[WorkerId] = ()
        # Behind each gradient is a 1, so that the mean tells how many ranks had a gradient.
        self._gradient, self._nothing = (torch.zeros(replica.numel + 1, dtype=replica.dtype, device="cpu") for _ in range(2))
        super().__init__(rank, replica)

    def attach(self) -> None:
        """Do nothing: there is no shared state before the ranks have met."""

    def meet(self, header: Mapping[str, Any]) -> None:
        """Keep the job's ranks, ``members`` of the header. Their order is that of `torch.distributed`."""
        self._members = header["members"]

    def _enter(self) -> None:
        self._replica.aim(self._gradient[:-1])
        self._group = TorchAllreduce(self._members.index(self._rank), len(self._members), self._meeting, host=self._interface)

    def resume(self) -> None:
        """Do nothing: only the coordinator keeps which ranks compute."""

    def contribute(self, usable: bool) -> None:
        """Take part in a round with the gradient, or with zeros."""
        if usable:
            self._gradient[-1] = 1.0
        else:
            self._gradient.zero_()
        self._round(self._gradient)

    def sit_out(self) -> None:
        """Take part in a round of the others with zeros. A gradient that is being accumulated is not touched."""
        self._round(self._nothing.zero_())

    def _round(self, vector: torch.Tensor) -> None:
        assert self._group is not None, "a round before begin(): the ranks have not met"
        self._group.mean(vector)
        self.version += 1
        if (share := float(vector[-1])) > 0.0:
            # The mean is over all ranks; the step needs that over the ranks with a gradient.
            self._replica.step(vector[:-1] if round(share * len(self._members)) == len(self._members) else vector[:-1].div_(share))

    def catch_up(self, goal: Version = 0, *, exactly: bool = False) -> None:
        """Do nothing: results only come from rounds in which this rank takes part."""

    def _admit(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        raise JobError(f"worker {rank} cannot join a running job with sync=allreduce; use sync=full, where workers can join")

    def close(self) -> None:
        """Close the process group. Called once, and last."""
        if self._group is not None:
            self._group.close()
