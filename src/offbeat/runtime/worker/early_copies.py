"""Find copies of the model that the script made before wrapping it: they have this worker's initial parameters instead of the job's.

A script that averages its weights (EMA, stochastic weight averaging, a target network) copies the model. All workers begin with one
worker's parameters; an earlier copy has those of its own worker, which differ unless the script seeds all workers alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from offbeat.runtime.worker.process_state import instances_of

LOOKED_AT = 8
"""Number of parameters, from the first, of which a sample is kept."""
SAMPLE = 16
"""Most elements in a sample."""


class EarlyCopies:
    """Remember a sample of the model's parameters from before it gets the job's.

    Args:
        model: the model before the wrapping.

    >>> import copy
    >>> model = nn.Linear(2, 1)
    >>> early, average = EarlyCopies(model), copy.deepcopy(model)
    >>> early.found(model)
    False
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(1.0)
    >>> early.found(model)
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._samples = _samples(model.parameters())

    def found(self, model: nn.Module) -> bool:
        """Return True if a copy has the earlier parameters while the model itself has others now."""
        if not self._samples or self._same(model):
            return False
        return any(type(one) is type(model) and one is not model and self._same(one) for one in instances_of(type(model)))

    def _same(self, model: nn.Module) -> bool:
        samples = _samples(model.parameters())
        return len(samples) == len(self._samples) and all(map(torch.equal, samples, self._samples))


def _samples(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    first = [parameter for parameter, _ in zip(parameters, range(LOOKED_AT), strict=False)]
    return [one.detach().reshape(-1)[:SAMPLE].cpu().clone() for one in first]
