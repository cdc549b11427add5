"""The elastic batch sampler: which samples this worker computes on next, decided batch by batch while the epoch runs.

A standard ``DataLoader`` takes it as ``batch_sampler``. Workers lease positions of the epoch's order from the coordinator, so the fast take
more than the slow, and what a dead worker held is dealt out again: each index of an epoch is used once, and its report lists exceptions.
Where the rule gives each worker a split of its own, a worker goes through that, in an order of its own, and leases positions in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch.utils.data import Sampler

from offbeat.errors import ConfigurationError
from offbeat.protocol.policy import whole_number
from offbeat.protocol.splits import Parts, Splits, size_of
from offbeat.session import Grant, Progress, Session
from offbeat.types import Epoch


class ElasticBatchSampler(Sampler[list[int]]):
    """Batches of indices for a ``DataLoader``; made by `DistributedOptimizer.batch_sampler`.

    The epoch ends for all workers together: one that finds no samples left waits until every index is settled (taking over those of
    workers that die meanwhile), and then has the newest parameters. With ``num_workers > 0`` a loader takes batches ahead of their use;
    then the wait is at the start of the next epoch.

    A look at the data costs nothing: after a pass of which no batch was stepped on, such as ``next(iter(loader))``, the next pass is of the
    same epoch and begins with the batches that this worker has already been dealt.

    A rule may ask for another batch size (``Plan.batch``): then batches have that, from the next one taken on.

    Args:
        session: this worker's part in the job.
        size: the number of samples in the data set.
        batch_size: samples in a batch; the last of an epoch may be smaller.
        shuffle: a new order each epoch, the same on all workers, or of each worker's split; otherwise 0, 1, 2, ... Splits are cut from
            an order that is the same in every epoch, drawn from the seed if ``shuffle``.
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
        self._chosen = False
        """`set_epoch` has named the epoch of the next pass."""
        self._begun: Epoch | None = None
        """The epoch of the last pass."""
        self._dealt: list[Grant] = []
        """The grants of the last pass, in their order."""
        self._progress = Progress()
        self._parts: Parts | None = None
        """This worker's split in the epoch that it has taken samples of last; empty: it has none of its own."""

    @property
    def _batch(self) -> int:
        return self._session.batch or self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self._next
        kept = list(self._dealt) if self._peeked and epoch == self._begun else []
        if not kept:
            self._progress = Progress()
        self._begun, self._dealt = epoch, kept
        self._epoch, self._chosen = epoch + 1, False
        order = None
        for grant in chain(list(kept), self._grants(epoch, self._dealt, self._progress)):
            if order is None or grant.parts != self._parts:
                order = self._order(epoch, grant.parts)
                self._parts = grant.parts
            yield order[grant.start : grant.stop].tolist()

    def _grants(self, epoch: Epoch, dealt: list[Grant], progress: Progress) -> Iterator[Grant]:
        """Take new grants of an epoch until it has no more for this worker, noting each in ``dealt`` and ``progress``."""
        session = self._session
        while (grant := session.take(self._pool, epoch, self._size, self._batch_size)) is not None:
            self._check(grant)
            dealt.append(grant)
            if self._pool == 0:
                session.progress = progress
                progress.deal(grant.parts, grant.stop - grant.start, self._batch)
            yield grant

    @property
    def _peeked(self) -> bool:
        """Whether the last pass was only a look at the data: it took batches, and no step has used any of them."""
        return bool(self._dealt) and self._session.held(self._pool) == self._dealt

    @property
    def _next(self) -> Epoch:
        """The epoch of the next pass."""
        return self._begun if self._begun is not None and not self._chosen and self._peeked else self._epoch

    def __len__(self) -> int:
        """This worker's number of batches in an epoch: of its own split, or of an equal part, the slow taking fewer and the fast more."""
        parts, session = self._parts, self._session
        if parts is None and session.overlap is not None:
            parts = Splits(self._size, session.workers, session.overlap).among(range(session.workers))[session.worker]
        if parts:
            return _ceil(size_of(parts), self._batch)
        return _ceil(_ceil(self._size, self._batch), session.workers)

    def set_epoch(self, epoch: int) -> None:
        """The next pass over the loader is this epoch, for resuming; otherwise epochs count by themselves."""
        self._epoch, self._chosen = epoch, True

    def state_dict(self) -> dict[str, Any]:
        """The epoch that comes next."""
        return {"epoch": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the epoch of a `state_dict`."""
        self.set_epoch(state["epoch"])

    def _check(self, grant: Grant) -> None:
        reach = max((stop for _, stop in grant.parts), default=grant.stop)
        if reach > self._size:
            raise ConfigurationError(
                f"this worker's data set has {self._size} samples, that of the workers before it at least {reach}: "
                "every worker needs the same data set"
            )

    def _order(self, epoch: int, parts: Parts) -> torch.Tensor:
        """The indices that positions count along: of all data, or of a split."""
        if not parts:
            return self._permuted(self._size, self._seed, epoch)
        fixed = self._permuted(self._size, self._seed, -1)  # no epoch's number: the same in all
        split = torch.cat([fixed[start:stop] for start, stop in parts])
        return split[self._permuted(len(split), self._seed, epoch, 1 + self._session.worker)]

    def _permuted(self, size: int, *seeds: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(size)
        seed = reduce(lambda value, number: value * 1_000_003 + number, seeds)
        return torch.randperm(size, generator=torch.Generator().manual_seed(seed % 2**63))


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


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
