"""The plain allreduce: means, its own meeting point, and a sentence where a rank does not come."""

from __future__ import annotations

import pytest
import torch
from tests.together import together

from offbeat.errors import JobError
from offbeat.runtime.allreduce.torch_distributed.process_group import MeetingPoint, TorchAllreduce


def test_everybody_gets_the_mean() -> None:
    means: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(3)}

    def work(rank: int) -> None:
        group = TorchAllreduce(rank, 3, point.address, timeout_s=30.0)
        for step in range(4):
            gradient = torch.full((2, 5), float(rank + step))
            group.mean(gradient)
            means[rank].append(gradient)
        group.close()

    with MeetingPoint() as point:
        together(3, work)
    for got in means.values():
        for step, mean in enumerate(got):
            torch.testing.assert_close(mean, torch.full((2, 5), 1.0 + step))
    assert all(torch.equal(a, b) for a, b in zip(means[0], means[2], strict=True))


def test_who_meets_alone_is_told_so() -> None:
    with MeetingPoint() as point, pytest.raises(JobError, match="rank 0 did not meet the 1 others"):
        TorchAllreduce(0, 2, point.address, timeout_s=0.5)


def test_a_rank_that_goes_ends_it_with_a_sentence() -> None:
    def work(rank: int) -> None:
        group = TorchAllreduce(rank, 2, point.address, timeout_s=5.0)
        group.mean(torch.zeros(3))
        if rank == 0:
            group.mean(torch.zeros(3))

    with MeetingPoint() as point, pytest.raises(JobError, match="sync=full computes the same"):
        together(2, work)
