"""Find copies of the model that the script made before the wrapping: they have this worker's initial parameters, and not the job's.

A script that averages its weights (EMA, stochastic weight averaging, a target network) copies the model. All workers begin with the
parameters of one; a copy from before that has those of its own worker, if the script does not seed all workers alike.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import nn

LOOKED_AT = 8
"""Most parameters, the first, of which a sample is kept."""
SAMPLE = 16
"""Elements in a sample."""


class EarlyCopies:
    """Remember what the model is before it gets the job's parameters.

    Args:
        model: before the wrapping.

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
        """Return whether there is a copy with the earlier parameters, where the model has others by now."""
        if not self._samples or self._same(model):
            return False
        return any(type(one) is type(model) and one is not model and self._same(one) for one in gc.get_objects())

    def _same(self, model: nn.Module) -> bool:
        samples = _samples(model.parameters())
        return len(samples) == len(self._samples) and all(map(torch.equal, samples, self._samples))


def _samples(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    first = [parameter for parameter, _ in zip(parameters, range(LOOKED_AT), strict=False)]
    return [one.detach().reshape(-1)[:SAMPLE].cpu().clone() for one in first]
