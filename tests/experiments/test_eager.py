"""What the experiments of the Eager-SGD paper share that train: gradients are counted, epochs are evaluated, and the ranks learn."""

from __future__ import annotations

import pytest
import torch
from experiments._eager import RANKS, Lesson, learn, speed_rows
from torch import nn

from offbeat.sim.cluster import Cluster

pytestmark = pytest.mark.usefixtures("a_single_thread")


def test_ranks_learn_whatever_the_rule() -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(dim=1, keepdim=True)
    lesson = Lesson(
        model=lambda: nn.Linear(3, 1),
        loss=nn.functional.mse_loss,
        data=(x, y),
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        batch=2,
        epochs=3,
        evaluate=lambda module: float(nn.functional.mse_loss(module(x), y)),
        schedule=lambda epochs: 1.0 - epochs / 4,
    )
    cluster = Cluster(workers=RANKS, compute="uniform(low=0.5, high=1.5)")
    found = {sync: learn(sync, lesson, cluster) for sync in ("full", "majority", "solo")}
    for one in found.values():
        assert 96 <= one.gradients < 96 + RANKS and one.seconds >= one.times[-1]
        assert len(one.values) == 3 and one.values[-1] < one.values[0] / 4
    assert found["full"].rounds == 12 and found["full"].fresh == found["full"].gradients and found["solo"].fresh < found["solo"].gradients
    faster = {row.name: row.measured for row in speed_rows(found, {}, "")}
    assert all(float(faster[f"{sync} over full"]) > 1.1 for sync in ("majority", "solo")), faster
