"""Choose the samples of each iteration of a simulated worker, independently of the rule and of the order of calls."""

from __future__ import annotations

from functools import reduce

import numpy as np
import torch

from offbeat.core.partitions import Parts
from offbeat.sim.latency.registry import derived
from offbeat.sim.training.workload import Step
from offbeat.types import NO_WORKER, Epoch, WorkerId

REMEMBERED = 64
"""The number of epoch orders kept; where workers have splits of their own, each has its own order."""


class Batches:
    """Indices into a data set of ``size`` samples, for each iteration of each worker.

    Samples dealt out in leases are those of a live job's sampler (``sampler.py``). Otherwise each iteration draws its samples from the
    whole data set, independently and with replacement.

    >>> batches = Batches(100, seed=0)
    >>> bool((batches.of(2, Step(number=7, samples=8)) == Batches(100, seed=0).of(2, Step(7, 8))).all())
    True
    """

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._key = derived(seed, "batches")
        self._orders: dict[tuple[Epoch, WorkerId, Parts], torch.Tensor] = {}

    def of(self, worker: WorkerId, step: Step) -> torch.Tensor:
        """Return the indices of one iteration's samples, a flat tensor of int64."""
        if step.epoch is None:
            generator = np.random.Generator(np.random.Philox(key=self._key, counter=[0, 0, worker, step.number]))
            return torch.from_numpy(generator.integers(self._size, size=step.samples))
        key = step.epoch, worker if step.parts else NO_WORKER, step.parts
        order = self._orders.get(key)
        if order is None:
            order = self._order(*key)
            self._orders[key] = order
            if len(self._orders) > REMEMBERED:
                del self._orders[next(iter(self._orders))]
        return order[step.start : step.stop]

    def _order(self, epoch: Epoch, worker: WorkerId, parts: Parts) -> torch.Tensor:
        """Return the same order as `sampler.ElasticBatchSampler`."""
        if not parts:
            return _permuted(self._size, self._seed, epoch)
        fixed = _permuted(self._size, self._seed, -1)
        split = torch.cat([fixed[start:stop] for start, stop in parts])
        return split[_permuted(len(split), self._seed, epoch, 1 + worker)]


def _permuted(size: int, *seeds: int) -> torch.Tensor:
    seed = reduce(lambda value, number: value * 1_000_003 + number, seeds)
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed % 2**63))
