"""Sample orders: the order of a data set's indices in an epoch, equal on every worker, drawn from a seed and the epoch's number.

An order is a list of indices; workers lease positions in it. It need not be a permutation: weighted samplers repeat and leave out.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from offbeat.errors import ConfigurationError
from offbeat.types import Epoch

BLOCK = 1 << 16
"""The number of indices drawn at a time for a sampler with replacement."""
_OF_PYTORCH = {kind.__iter__ for kind in (SequentialSampler, RandomSampler, WeightedRandomSampler, SubsetRandomSampler, DistributedSampler)}
"""How samplers choose whose order is known without asking them; one of a subclass may choose in another way."""
_SEEDING = threading.Lock()


@dataclass(frozen=True)
class Order:
    """An order of indices.

    >>> Order.plain(4, shuffle=False).indices(torch.Generator(), 0)
    tensor([0, 1, 2, 3])
    """

    size: int
    """The number of positions in an epoch."""
    draw: Callable[[torch.Generator, Epoch], Any]
    """Returns the indices, at least `size` of them, or `block` if that is set; further ones are not dealt."""
    shuffles: bool
    """Whether the order changes with the epoch."""
    splits: bool = False
    """Whether the order is a permutation of the whole data set, which rules may divide into splits of the workers."""
    block: int = 0
    """The number of positions drawn at a time, each block from a generator of its own; 0: all of the epoch. A sampler with replacement may
    have more indices than fit in memory (``RandomSampler(..., replacement=True, num_samples=10**10)``)."""
    source: Any = None
    """The data set or the sampler that the order is of, whose length should stay what it is; None: none."""
    length: int = 0
    """That of the source, when the order was made."""
    own: bool = False
    """Whether a sampler of a class that is not PyTorch's makes the order: two workers may then draw different orders."""

    def indices(self, generator: torch.Generator, epoch: Epoch) -> torch.Tensor:
        """Return the index at each position of an epoch that is drawn as a whole.

        Raises:
            ConfigurationError: the script's own order has another length than before.
        """
        drawn: torch.Tensor = self.draw(generator, epoch)
        if len(drawn) < self.size:
            raise ConfigurationError(f"order({epoch}) has {len(drawn)} indices, but order(0) has {self.size}: make them equal in number")
        return drawn[: self.size]

    def of(self, source: Any) -> Order:
        """Return this order as one of a data set or a sampler."""
        return replace(self, source=source, length=len(source))

    def check_length(self) -> None:
        """Raise `ConfigurationError` if the source has another length than when the order was made: PyTorch's loader would follow it."""
        if self.source is not None and (now := len(self.source)) != self.length:
            raise ConfigurationError(
                f"the {type(self.source).__name__} of this loader had {self.length} samples when the loader was made, and has {now} now: "
                "make the loader anew, on every worker, where its length changes"
            )

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
        """Return a sampler's order. Of those of PyTorch the generator is not used, since workers must agree; others see `Drawn`.

        Raises:
            ConfigurationError: see `Drawn`.
        """
        if getattr(type(sampler), "__iter__", None) not in _OF_PYTORCH:
            return cls._of_any(sampler)
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
        raise AssertionError(f"a {type(sampler).__name__} chooses as a sampler of PyTorch does, and is none of its classes")

    @classmethod
    def _of_any(cls, sampler: object) -> Order:
        passes = Drawn(sampler)

        def draw(generator: torch.Generator, epoch: Epoch) -> torch.Tensor:
            return torch.as_tensor(passes.of(generator, epoch), dtype=torch.int64, device="cpu")

        return cls(len(passes), draw, shuffles=True, own=True)

    @classmethod
    def _random(cls, size: int, count: int, *, replacement: bool) -> Order:
        if count <= size and not replacement:
            return replace(cls.plain(size, shuffle=True), size=count, splits=count == size)
        if replacement:
            return cls(
                count, lambda generator, _: torch.randint(size, (BLOCK,), generator=generator, device="cpu"), shuffles=True, block=BLOCK
            )
        return cls(count, lambda generator, _: torch.randperm(size, generator=generator, device="cpu"), shuffles=True, block=size)


class Drawn:
    """Draw the passes over a sampler, or a batch sampler, of any class, in such a way that all workers draw the same ones.

    For each pass the random numbers of Python, NumPy and PyTorch are seeded by the job's seed and the epoch, and are as they were
    afterwards. A sampler without ``set_epoch``, which may have random numbers of its own, is asked for the passes of earlier epochs first,
    where a worker begins later.

    Args:
        sampler: its passes have ``len(sampler)`` items, or about as many.

    Raises:
        ConfigurationError: it has no length, or has only a rank's part of the data.

    >>> class Shuffled:
    ...     def __len__(self):
    ...         return 5
    ...     def __iter__(self):
    ...         yield from random.sample(range(5), 5)
    >>> one, other = Drawn(Shuffled()), Drawn(Shuffled())
    >>> one.of(torch.Generator().manual_seed(3), 0) == other.of(torch.Generator().manual_seed(3), 0)
    True
    """

    def __init__(self, sampler: Any) -> None:
        kind = type(sampler).__name__
        if not (hasattr(sampler, "__len__") and hasattr(sampler, "__iter__")):
            raise ConfigurationError(
                f"elastic() cannot deal out what a {kind} chooses, since it has no length. If it repeats another sampler without end, "
                "pass a DataLoader with that one; else pass the data set with order=, a function that returns the indices of an epoch, the "
                "same on every worker: offbeat.elastic(dataset, batch_size=..., order=indices_of)"
            )
        if getattr(sampler, "num_replicas", 1) not in (None, 1):
            raise ConfigurationError(
                f"this {kind} chooses a part of the data for each of {sampler.num_replicas} ranks, and elastic() deals out all of it: "
                "make it with num_replicas=1 and rank=0"
            )
        self._sampler, self._passes, self._newest = sampler, 0, (-1, list[Any]())

    def __len__(self) -> int:
        return len(self._sampler)

    def of(self, generator: torch.Generator, epoch: Epoch) -> list[Any]:
        """Return the items of an epoch's pass. The generators of successive epochs have successive seeds."""
        if self._newest[0] != epoch:
            first = epoch
            if (set_epoch := getattr(self._sampler, "set_epoch", None)) is not None:
                set_epoch(epoch)
            else:
                first, self._passes = min(self._passes, epoch), epoch + 1
            for number in range(first, epoch + 1):
                self._newest = epoch, self._pass(generator.initial_seed() - epoch + number)
        return self._newest[1]

    def _pass(self, seed: int) -> list[Any]:
        expected = len(self._sampler)
        with _SEEDING:
            before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.default_generator.manual_seed(seed)
            try:
                found = list(islice(self._sampler, 2 * expected + 1))
            finally:
                random.setstate(before[0])
                np.random.set_state(before[1])
                torch.random.set_rng_state(before[2])
        return found if len(found) <= 2 * expected else found[:expected]  # it has no end


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


def checksum_of(items: Sequence[Any]) -> int:
    """Return a checksum of indices, or of batches of indices."""
    return zlib.crc32(repr([list(item) if isinstance(item, list | tuple) else int(item) for item in items]).encode())


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
