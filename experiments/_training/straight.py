"""A model whose gradients do not depend on its parameters: what workers come to together shows how a rule combines what they compute.

The batches that a worker draws depend on nothing but its number and the step's, so the sum of all gradients is the same under every rule.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from offbeat.sim.training.engine import Schedule
from offbeat.sim.training.gradients import Training

INITIAL: Final = 1.0
"""Each parameter at the beginning."""


class Straight(Training):
    """Sixteen parameters with normally distributed gradients.

    Args:
        schedule: returns the factor of the learning rate; 0 ends the way.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        data = torch.randn(256, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.module = nn.Linear(16, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            self.module.weight.fill_(INITIAL)
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        super().__init__(self.module, lambda output, _: output.mean(), (data, data[:, :1]), optimizer, schedule=schedule)

    @property
    def parameters(self) -> Tensor:
        """Return the newest, after the run."""
        return self.module.weight.detach()

    def distance(self, other: Straight) -> float:
        """Return how far this run has ended from another, in lengths of the other's way from the beginning."""
        return float((self.parameters - other.parameters).norm() / (other.parameters - INITIAL).norm())
