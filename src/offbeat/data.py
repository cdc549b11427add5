"""The elastic batch sampler: which samples this worker computes on next, decided batch by batch while the epoch runs.

A standard ``DataLoader`` takes it as ``batch_sampler``. Workers lease positions of the epoch's order from the coordinator, so the fast take
more than the slow, and what a dead worker held is dealt out again: each index of an epoch is used once, and its report lists exceptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from offbeat.errors import ConfigurationError
from offbeat.protocol.policy import whole_number
from offbeat.session import Session


class ElasticBatchSampler(Sampler[list[int]]):
    """Batches of indices for a ``DataLoader``; made by `DistributedOptimizer.batch_sampler`.

    The epoch ends for all workers together: one that finds no samples left waits until every index is settled (taking over those of
    workers that die meanwhile), and then has the newest parameters. With ``num_workers > 0`` a loader takes batches ahead of their use;
    then the wait is at the start of the next epoch.

    Args:
        session: this worker's part in the job.
        size: the number of samples in the data set.
        batch_size: samples in a batch; the last of an epoch may be smaller.
        shuffle: a new order each epoch, the same on all workers; otherwise 0, 1, 2, ...
        seed: of the orders.
    """

    def __init__(self, session: Session, size: int, batch_size: int, *, shuffle: bool, seed: int) -> None:
        self._session = session
        self._size = size
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._pool = session.new_pool()
        self._epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        order = self._order(epoch)
        while (grant := self._session.take(self._pool, epoch, self._size, self._batch_size)) is not None:
            if grant.stop > self._size:
                raise ConfigurationError(
                    f"this worker's data set has {self._size} samples, that of the workers before it at least {grant.stop}: "
                    "every worker needs the same data set"
                )
            yield order[grant.start : grant.stop].tolist()

    def __len__(self) -> int:
        """An equal worker's number of batches in an epoch; a slow worker takes fewer, a fast one more."""
        batches = (self._size + self._batch_size - 1) // self._batch_size
        return (batches + self._session.workers - 1) // self._session.workers

    def set_epoch(self, epoch: int) -> None:
        """The next pass over the loader is this epoch, for resuming; otherwise epochs count by themselves."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The epoch that comes next."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the epoch of a `state_dict`."""
        self._epoch = state["epoch"]

    def _order(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self._size)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        return torch.randperm(self._size, generator=generator)


def elastic_batch_sampler(session: Session, dataset: Sized, batch_size: int, *, shuffle: bool, seed: int | None) -> ElasticBatchSampler:
    """Check the user's arguments and make the sampler.

    Raises:
        ConfigurationError: a batch size below 1, a data set without a length, or with fewer samples than the job has workers.
    """
    whole_number("batch_sampler", "batch_size", batch_size, least=1)
    try:
        size = len(dataset)
    except TypeError:
        raise ConfigurationError(
            f"batch_sampler needs a data set with a length, not a {type(dataset).__name__}: "
            "leave it out for an iterable data set, and give each worker its own part"
        ) from None
    if size < session.workers:
        raise ConfigurationError(
            f"the data set has {size} samples for {session.workers} workers: each needs at least one, use fewer workers"
        )
    return ElasticBatchSampler(session, size, batch_size, shuffle=shuffle, seed=session.seed if seed is None else seed)
