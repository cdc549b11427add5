"""Sample orders: the order of a data set's indices in an epoch, equal on every worker, drawn from a seed and the epoch's number.

An order is a list of indices; workers lease positions in it. It need not be a permutation: weighted samplers repeat and leave out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from offbeat.errors import ConfigurationError
from offbeat.types import Epoch

BLOCK = 1 << 16
"""The number of indices drawn at a time for a sampler with replacement."""


@dataclass(frozen=True)
class Order:
    """An order of indices.

    >>> Order.plain(4, shuffle=False).indices(torch.Generator(), 0)
    tensor([0, 1, 2, 3])
    """

    size: int
    """The number of positions in an epoch."""
    draw: Callable[[torch.Generator, Epoch], torch.Tensor]
    """Returns the indices, at least `size` of them, or `block` if that is set; further ones are not dealt."""
    shuffles: bool
    """Whether the order changes with the epoch."""
    splits: bool = False
    """Whether the order is a permutation of the whole data set, which rules may divide into splits of the workers."""
    block: int = 0
    """The number of positions drawn at a time, each block from a generator of its own; 0: all of the epoch. A sampler with replacement may
    have more indices than fit in memory (``RandomSampler(..., replacement=True, num_samples=10**10)``)."""

    def indices(self, generator: torch.Generator, epoch: Epoch) -> torch.Tensor:
        """Return the index at each position of an epoch that is drawn as a whole.

        Raises:
            ConfigurationError: the script's own order has another length than before.
        """
        drawn = self.draw(generator, epoch)
        if len(drawn) < self.size:
            raise ConfigurationError(f"order({epoch}) has {len(drawn)} indices, but order(0) has {self.size}: make them equal in number")
        return drawn[: self.size]

    def whole_batches(self, batch_size: int) -> Order:
        """Return this order without its last positions, so that no batch of an epoch is smaller than the others.

        Raises:
            ConfigurationError: nothing would be left.
        """
        size = self.size // batch_size * batch_size
        if size == 0:
            raise ConfigurationError(f"drop_last=True leaves no batch: {self.size} samples are less than batch_size={batch_size}; lower it")
        return replace(self, size=size, splits=self.splits and size == self.size)

    @classmethod
    def plain(cls, size: int, *, shuffle: bool) -> Order:
        """Return the order of indices 0 to ``size`` - 1, shuffled for each epoch or ascending."""

        def draw(generator: torch.Generator, epoch: Epoch) -> torch.Tensor:
            return torch.randperm(size, generator=generator, device="cpu") if shuffle else torch.arange(size, device="cpu")

        return cls(size, draw, shuffle, splits=True)

    @classmethod
    def of_script(cls, order: Callable[[Epoch], Sequence[int]]) -> Order:
        """Return the order that the script's function gives for each epoch."""

        def draw(generator: torch.Generator, epoch: Epoch) -> torch.Tensor:
            return torch.as_tensor(list(order(epoch)), dtype=torch.int64, device="cpu")

        return cls(len(order(0)), draw, shuffles=True)

    @classmethod
    def of_sampler(cls, sampler: object) -> Order:
        """Return the order of a PyTorch sampler; its own generator is not used, since workers must agree.

        Raises:
            ConfigurationError: the sampler is of another class, whose order cannot be known.
        """
        match sampler:
            case SequentialSampler():
                return cls.plain(len(sampler), shuffle=False)
            case RandomSampler():
                return cls._random(len(sampler.data_source), sampler.num_samples, replacement=sampler.replacement)
            case WeightedRandomSampler():
                weights, count, again = sampler.weights, sampler.num_samples, sampler.replacement
                block = BLOCK if again and count > BLOCK else 0
                drawn = block or count
                return cls(count, lambda generator, _: torch.multinomial(weights, drawn, again, generator=generator), True, block=block)
            case SubsetRandomSampler():
                indices = torch.as_tensor(list(sampler.indices), dtype=torch.int64, device="cpu")
                return cls(
                    len(indices),
                    lambda generator, epoch: indices[torch.randperm(len(indices), generator=generator, device="cpu")],
                    shuffles=True,
                )
            case DistributedSampler():  # its division of the data by rank is not used: the job deals out the whole data set
                return cls.plain(len(sampler.dataset), shuffle=sampler.shuffle)  # type: ignore[arg-type]
        raise ConfigurationError(
            f"elastic() does not know the order of a {type(sampler).__name__}: pass the data set with order=, a function that returns the "
            "indices of an epoch, the same on every worker: offbeat.elastic(dataset, batch_size=..., order=lambda epoch: indices)"
        )

    @classmethod
    def _random(cls, size: int, count: int, *, replacement: bool) -> Order:
        if count <= size and not replacement:
            return replace(cls.plain(size, shuffle=True), size=count, splits=count == size)
        if replacement:
            return cls(
                count, lambda generator, _: torch.randint(size, (BLOCK,), generator=generator, device="cpu"), shuffles=True, block=BLOCK
            )
        return cls(count, lambda generator, _: torch.randperm(size, generator=generator, device="cpu"), shuffles=True, block=size)


class DrawnOrder:
    """The indices of one epoch of an order that is drawn in blocks, each block when it is needed.

    Args:
        order: an order with ``block`` above 0.
        generator: makes a generator from the number of an epoch and of a block.
        epoch: the number of the epoch.

    >>> order = Order.of_sampler(RandomSampler(range(3), num_samples=7))
    >>> drawn = DrawnOrder(order, lambda epoch, block: torch.Generator().manual_seed(block), 0)
    >>> [sorted(drawn[start : start + 3].tolist()) for start in (0, 3)], len(drawn[2:7])
    ([[0, 1, 2], [0, 1, 2]], 5)
    """

    def __init__(self, order: Order, generator: Callable[[Epoch, int], torch.Generator], epoch: Epoch) -> None:
        self._order, self._generator, self._epoch = order, generator, epoch
        self._number, self._newest = -1, torch.empty(0, dtype=torch.int64, device="cpu")

    def __getitem__(self, positions: slice) -> torch.Tensor:
        parts, at, block = [], positions.start, self._order.block
        while at < positions.stop:
            number, offset = divmod(at, block)
            if number != self._number:  # leases come in ascending order, except returned ones: keeping one block is enough
                self._number, self._newest = number, self._order.draw(self._generator(self._epoch, number), self._epoch)
            parts.append(self._newest[offset : offset + positions.stop - at])
            at += len(parts[-1])
        return torch.cat(parts)


def checksum_of_part(data: object, sampler: object = None) -> int | None:
    """Return a checksum of the indices of a part of a data set, which workers should have alike; None: it is no part, or its indices are no
    numbers.

    >>> checksum_of_part(range(3)), checksum_of_part(Subset(range(3), [0, 2])) == checksum_of_part(range(3), SubsetRandomSampler([0, 2]))
    (None, True)
    """
    parts = [sampler.indices] if isinstance(sampler, SubsetRandomSampler) else []
    while isinstance(data, Subset):
        parts.append(data.indices)
        data = data.dataset
    crc = 0
    try:
        for indices in parts:
            crc = zlib.crc32(np.asarray(indices, dtype=np.int64).tobytes(), crc)
    except (TypeError, ValueError):
        return None
    return crc if parts else None


def batches_of(batch_sampler: Sampler[list[int]] | object) -> tuple[object, int, bool]:
    """Return a batch sampler's sampler, its batch size, and whether it leaves out a last smaller batch.

    Raises:
        ConfigurationError: it is of another class than `torch.utils.data.BatchSampler`.
    """
    if type(batch_sampler) is not BatchSampler:
        raise ConfigurationError(
            f"elastic() cannot deal out the batches of a {type(batch_sampler).__name__}: pass the data set with batch_size=, and order= "
            "if it has an order of its own; its batches, if all are of one size, are dealt out whole where order= has them one after the "
            "other (docs/data.md)"
        )
    return batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last
