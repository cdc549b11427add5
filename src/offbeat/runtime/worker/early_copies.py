"""Find copies of the model that the script made before wrapping it: they have this worker's initial parameters instead of the job's.

A script that averages its weights (EMA, stochastic weight averaging, a target network) copies the model. All workers begin with one
worker's parameters; an earlier copy has those of its own worker, which differ unless the script seeds all workers alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import torch
from torch import nn

from offbeat.runtime.worker.process_state import instances_of

LOOKED_AT = 8
"""Number of trainable parameters, from the first, of which a sample is kept. Frozen ones do not change, and may have any dtype."""
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

    Of models in a list each may have a copy:

    >>> critics = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    >>> early, target = EarlyCopies(critics), copy.deepcopy(critics[1])
    >>> with torch.no_grad():
    ...     _ = critics[1].weight.fill_(1.0)
    >>> early.found(critics)
    True
    """

    def __init__(self, model: nn.Module) -> None:
        self._samples = [_samples(part, _names(part)) for part in _parts(model)]

    def found(self, model: nn.Module) -> bool:
        """Return True if a copy of it, or of a part, has the earlier parameters while the model itself has others now."""
        return any(_copied(part, samples) for part, samples in zip(_parts(model), self._samples, strict=True))


def _parts(model: nn.Module) -> list[nn.Module]:
    """Return what a script copies: of models that are wrapped in a list, beside one optimizer, each on its own."""
    return [model, *model.children()] if isinstance(model, nn.ModuleList | nn.ModuleDict) else [model]


def _names(part: nn.Module) -> list[str]:
    trained = (name for name, parameter in part.named_parameters() if parameter.requires_grad)
    return list(islice(trained, LOOKED_AT))


def _copied(part: nn.Module, samples: Mapping[str, torch.Tensor]) -> bool:
    # Of a norm all instances begin with ones.
    if not any(sample.unique().numel() > 1 for sample in samples.values()) or _same(part, samples):
        return False
    return any(type(one) is type(part) and one is not part and _same(one, samples) for one in instances_of(type(part)))


def _same(model: nn.Module, samples: Mapping[str, torch.Tensor]) -> bool:
    present = _samples(model, samples)
    return present.keys() == samples.keys() and all(torch.equal(present[name], sample) for name, sample in samples.items())


def _samples(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return samples of the parameters of these names; of a copy they may be frozen, or (on the meta device, lazy) have no values yet."""
    known = {name: one for name, one in model.named_parameters() if not (isinstance(one, nn.UninitializedParameter) or one.is_meta)}
    return {name: known[name].detach().reshape(-1)[:SAMPLE].cpu().clone() for name in names if name in known}
