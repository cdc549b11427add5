"""Learning rates ride along with the gradients, so that every rank makes the step of a round with the same ones.

Each rank has an optimizer of its own, and schedulers that count its own steps: a slow one is behind, one that has come back begins anew.
Were each result applied with the rank's own settings, replicas would drift apart. So a gradient carries its rank's settings, in a few
numbers behind it that a sum cannot mix up, since each rank has its own place there; and all ranks use those of the rank that has made the
most steps, as servers do.
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
"""What schedulers change; other settings are the same everywhere, and stay so."""
_WORDS = 4
"""A number of 64 bits travels as so many small whole numbers, which survive being divided by the ranks, and scaled down."""
_SMALL = 2.0**-70
"""They are sent as multiples of this: nothing, in the norm of a gradient."""
_ROOM = 2.0**20
"""How far above the least normal number they must be when they come, to have kept all their digits on the way."""


class PiggybackedHyperparameters:
    """The settings of all ranks, as far as the results so far have told.

    Args:
        optimizer: whose settings.
        rank: this one.
        ranks: how many there may be.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rank: WorkerId, ranks: int) -> None:
        self._optimizer, self._rank, self._ranks = optimizer, rank, ranks
        self._width = 1 + _WORDS * (1 + len(self._own()))
        self._parity = 0
        self.known: dict[WorkerId, tuple[float, ...]] = {}
        """By rank: its number of steps when it handed in the last gradient that was folded, and its settings then."""

    @property
    def numel(self) -> int:
        """Elements behind each gradient."""
        return BUFFERS * self._ranks * self._width

    def write(self, place: torch.Tensor, steps: int) -> None:
        """Say this rank's settings, of its step number ``steps``, behind its gradient."""
        numbers = np.array([float(steps), *self._own()], dtype=np.float64).view(np.uint16)
        row = torch.as_tensor(np.concatenate(([1.0], numbers)) * _SMALL, dtype=place.dtype)
        place.zero_()
        place.view(self._ranks, BUFFERS, self._width)[self._rank, self._parity] = row
        self._parity = 1 - self._parity  # of two gradients in one round, the one after the other

    def read(self, place: torch.Tensor) -> None:
        """Take note of the settings behind a result, of those whose gradients are in it.

        Those of a gradient that was scaled down almost to nothing (``carry_clip``) have lost digits, and are passed over by every rank.
        """
        least = torch.finfo(place.dtype).tiny * _ROOM
        rows = place.to(torch.float64).reshape(self._ranks * BUFFERS, self._width).numpy()
        for at in np.flatnonzero(rows[:, 0] >= least).tolist():
            # The first number was 1: what has become of it has become of the others.
            words = np.rint(rows[at, 1:] / rows[at, 0]).astype(np.uint16)
            found, rank = tuple(words.view(np.float64).tolist()), at // BUFFERS
            steps_before = self.known[rank][0] if rank in self.known and at % BUFFERS and rows[at - 1, 0] else -1.0
            if found[0] > steps_before:
                self.known[rank] = found

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Inside, the optimizer has the settings of the rank that has made the most steps; of several, of the lowest."""
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
    """These numbers in the form of a setting: a number, a tensor of one, or a tuple of such."""
    if isinstance(value, tuple | list):
        return type(value)(_like(item, [numbers.pop(0) for _ in _numbers(item)]) for item in value)
    if not numbers:
        return value
    return torch.full_like(value, numbers[0]) if isinstance(value, torch.Tensor) else numbers[0]
