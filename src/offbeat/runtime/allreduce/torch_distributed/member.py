"""Take part in the rule ``allreduce`` as one rank: call `torch.distributed`, and apply each mean with the rank's optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from offbeat.errors import JobError
from offbeat.runtime.allreduce.torch_distributed.process_group import Meeting, TorchAllreduce
from offbeat.runtime.ranks.member import RankMember
from offbeat.runtime.ranks.replica import Replica
from offbeat.types import Version, WorkerId

TAIL: Final = 3


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
        # Behind each gradient are its weight, its number of samples, and 1 if that is known: the mean tells what the weights add up to.
        self._gradient, self._nothing = (torch.zeros(replica.numel + TAIL, dtype=replica.dtype, device="cpu") for _ in range(2))
        self._usual: int | None = None
        """The mean number of samples of the ranks' gradients in the last round, the same on all ranks; 0: not known; None: no round yet."""
        super().__init__(rank, replica)

    def attach(self) -> None:
        """Do nothing: there is no shared state before the ranks have met."""

    def meet(self, header: Mapping[str, Any]) -> None:
        """Keep the job's ranks, ``members`` of the header. Their order is that of `torch.distributed`."""
        self._members = header["members"]

    def _enter(self) -> None:
        self._replica.aim(self._gradient[:-TAIL])
        self._group = TorchAllreduce(self._members.index(self._rank), len(self._members), self._meeting, host=self._interface)

    def resume(self) -> None:
        """Do nothing: only the coordinator keeps which ranks compute."""

    def contribute(self, usable: bool, samples: int) -> None:
        """Take part in a round with the gradient, or with zeros."""
        usual = self._agree(samples if usable else 0)
        if usable:
            weight = samples / usual if samples and usual else 1.0
            if weight != 1.0:  # with equal numbers no bit differs from the mean of DistributedDataParallel
                self._gradient[:-TAIL].mul_(weight)
            self._gradient[-TAIL:] = torch.tensor([weight, samples, samples > 0], device="cpu")
        else:
            self._gradient.zero_()
        self._round(self._gradient)

    def sit_out(self) -> None:
        """Take part in a round of the others with zeros. A gradient that is being accumulated is not touched."""
        self._agree(0)
        self._round(self._nothing.zero_())

    def _agree(self, samples: int) -> int:
        """Return the number of samples that has the weight 1. Before the first round the ranks exchange their numbers."""
        if self._usual is None:
            assert self._group is not None
            numbers = torch.tensor([samples, samples > 0], dtype=torch.float64, device="cpu")
            self._group.mean(numbers)
            self._usual = _quotient(numbers)
        return self._usual

    def _round(self, vector: torch.Tensor) -> None:
        assert self._group is not None, "a round before begin(): the ranks have not met"
        self._group.mean(vector)
        self.version += 1
        self._usual = _quotient(vector[-2:]) or self._usual
        if (share := float(vector[-TAIL])) > 0.0:
            # The mean is over all ranks; the step needs that over the samples of the ranks with a gradient.
            mean = vector[:-TAIL]
            self._replica.step(mean if math.isclose(share, 1.0, rel_tol=1e-6) else mean.div_(share))

    def catch_up(self, goal: Version = 0, *, exactly: bool = False) -> None:
        """Do nothing: results only come from rounds in which this rank takes part."""

    def _admit(self, rank: WorkerId, ticket: Sequence[int]) -> None:
        raise JobError(f"worker {rank} cannot join a running job with sync=allreduce; use sync=full, where workers can join")

    def close(self) -> None:
        """Close the process group. Called once, and last."""
        if self._group is not None:
            self._group.close()


def _quotient(numbers: torch.Tensor) -> int:
    """Return the mean number of samples, to the next whole number, from the means of these numbers and of the ranks that know theirs."""
    samples, known = (float(number) for number in numbers)
    return round(samples / known) if known else 0
