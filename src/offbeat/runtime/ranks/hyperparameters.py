"""Send each rank's learning rate along with its gradients, so that every rank makes a round's step with the same hyperparameters.

Each rank has its own optimizer, and schedulers that count its own steps: those of a slow rank are behind, and those of a restarted one
begin at 0. If each rank applied results with its own settings, replicas would drift apart. So a few numbers behind each gradient hold its
rank's settings; each rank has its own place there, so that the sum does not mix them. All ranks use the settings of the rank that has made
the most steps, as servers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from offbeat.core.allreduce.rounds import BUFFERS
from offbeat.types import WorkerId

SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""Settings that schedulers change; all others are the same everywhere and do not change."""
_WORDS = 4
"""A 64-bit number is sent as this many 16-bit integers, which survive the division by the number of ranks and scaling down."""
_SMALL = 2.0**-70
"""The integers are sent as multiples of this, which adds nothing to the norm of a gradient."""
_ROOM = 2.0**20
"""Received integers must exceed the smallest normal number by this factor to have kept all their digits."""


class PiggybackedHyperparameters:
    """Hold the settings of all ranks, as far as results have carried them.

    Args:
        optimizer: of this rank.
        rank: this rank.
        ranks: the greatest number of ranks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: WorkerId, ranks: int) -> None:
        self._optimizer, self._rank, self._ranks = optimizer, rank, ranks
        self._width = 1 + _WORDS * (1 + len(self._own()))
        self._parity = 0
        self.known: dict[WorkerId, tuple[float, ...]] = {}
        """By rank: its step number at its last gradient that was folded, and its settings then."""

    @property
    def numel(self) -> int:
        """Return the number of elements behind each gradient."""
        return BUFFERS * self._ranks * self._width

    def write(self, place: torch.Tensor, steps: int) -> None:
        """Write this rank's settings, and the number ``steps`` of its step, into the elements behind its gradient."""
        numbers = np.array([float(steps), *self._own()], dtype=np.float64).view(np.uint16)
        row = torch.as_tensor(np.concatenate(([1.0], numbers)) * _SMALL, dtype=place.dtype, device="cpu")
        place.zero_()
        place.view(self._ranks, BUFFERS, self._width)[self._rank, self._parity] = row
        self._parity = 1 - self._parity  # a round may contain two gradients of a rank: they use different places

    def read(self, place: torch.Tensor) -> None:
        """Read, from behind a result, the settings of the ranks whose gradients are in it.

        Settings of a gradient that was scaled down to almost nothing (``carry_clip``) have lost digits; every rank ignores them.
        """
        least = torch.finfo(place.dtype).tiny * _ROOM
        rows = place.to(torch.float64).reshape(self._ranks * BUFFERS, self._width).numpy()
        for at in np.flatnonzero(rows[:, 0] >= least).tolist():
            # The first number was 1: the factor that it was multiplied by applies to the others, too.
            words = np.rint(rows[at, 1:] / rows[at, 0]).astype(np.uint16)
            found, rank = tuple(words.view(np.float64).tolist()), WorkerId(at // BUFFERS)
            steps_before = self.known[rank][0] if rank in self.known and at % BUFFERS and rows[at - 1, 0] else -1.0
            if found[0] > steps_before:
                self.known[rank] = found

    def divisor(self, place: torch.Tensor) -> int:
        """Return the number by which the sum of the gradients in a result was divided; 1 if no gradient is in it."""
        factor = float(place.view(-1, self._width)[:, 0].max())
        return round(_SMALL / factor) if factor else 1

    def weight(self, place: torch.Tensor) -> float:
        """Return the sum of the weights of the gradients in a result: 1 if each living rank has one in it, of its usual size."""
        return float(place.view(-1, self._width)[:, 0].to(torch.float64).sum()) / _SMALL

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Give the optimizer, inside the ``with`` block, the settings of the rank with the most steps (the lowest of several)."""
        settings = max(self.known.items(), key=lambda item: (item[1][0], -item[0]))[1][1:] if self.known else None
        if settings is None or list(settings) == self._own():
            yield
            return
        groups = self._optimizer.param_groups
        before = [{key: group[key] for key in SCHEDULED if key in group} for group in groups]
        self._set(settings)
        try:
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)

    def _own(self) -> list[float]:
        return [float(number) for group in self._optimizer.param_groups for key in SCHEDULED for number in _numbers(group.get(key))]

    def _set(self, settings: Sequence[float]) -> None:
        numbers = iter(settings)
        for group in self._optimizer.param_groups:
            for key in SCHEDULED:
                if key in group:
                    group[key] = _like(group[key], [next(numbers) for _ in _numbers(group[key])])


def _numbers(value: Any) -> Sequence[Any]:
    if isinstance(value, tuple | list):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool) else []


def _like(value: Any, numbers: list[float]) -> Any:
    """Return these numbers in the form of a setting: a number, a tensor with one element, or a tuple of them."""
    if isinstance(value, tuple | list):
        return type(value)(_like(item, [numbers.pop(0) for _ in _numbers(item)]) for item in value)
    if not numbers:
        return value
    return torch.full_like(value, numbers[0]) if isinstance(value, torch.Tensor) else numbers[0]
