"""`elastic`: makes a loader whose batches the job deals out, from any source. Data sets with a length use the batch sampler.

Each worker reads the whole stream and keeps the elements at the positions granted to it: reading is repeated, computing is not. Each
element is used once, as with a sampler, if the stream is the same on every worker. An epoch ends when a worker has reached the end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, default_collate

from offbeat.core.batch_sizes import VARIABLE, Auto, size_and_auto
from offbeat.deliveries import asked_by_next
from offbeat.errors import ConfigurationError, warn
from offbeat.optimizer import DistributedOptimizer
from offbeat.orders import Order, checksum_of_part
from offbeat.sampler import ElasticBatchSampler, Passes, WholeBatches, sampler_of, unit_of
from offbeat.session import LeasedRange, Session
from offbeat.types import Epoch

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
"""The options that the elastic loader takes over from the script's loader."""


def elastic(
    data: Any,
    *,
    batch_size: int | str | None = None,
    shuffle: bool | None = None,
    drop_last: bool = False,
    order: Callable[[int], Sequence[int]] | None = None,
    seed: int | None = None,
    optimizer: DistributedOptimizer | None = None,
    deal: Literal["pool", "even"] = "pool",
    **options: Any,
) -> DataLoader[Any] | ElasticStream:
    """Make a loader whose batches are dealt out to the workers of the job while they train, each once in an epoch.

    It may be made before the optimizer, but used only after the optimizer exists. Every worker makes the same loaders in the same order, of
    the same data.

    Args:
        data: a ``DataLoader``, which keeps its data set, batch size, order and options; a data set with a length; an ``IterableDataset``
            or another iterable that can be iterated repeatedly; or a function that returns the iterable of an epoch, given
            its number.
        batch_size: samples in a batch; or ``"auto:64"``, see `DistributedOptimizer.batch_sampler`. A stream of ready batches needs none:
            then its elements are the batches. For a ``DataLoader`` only ``"auto"``: its own size is the base.
        shuffle: a new order in each epoch; default for a data set with a length: True. A stream keeps its own order.
        drop_last: leave out the last samples of an epoch if they do not fill a batch.
        order: the indices of an epoch, given its number, the same on every worker; instead of ``shuffle``.
        seed: the seed of the orders; default: the job's.
        optimizer: the optimizer in whose job the samples are dealt out; default: the first that the script has not closed.
        deal: ``"pool"``: workers take as many batches of an epoch as they can. ``"even"``: each worker has an equal share, so that
            ``len(loader)`` is the number of its batches; what a dead worker leaves goes to its next process, or is unused.
        options: options of the ``DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` ... For a stream only ``collate_fn``.

    Returns:
        A ``DataLoader``; for a stream an `ElasticStream`.

    Raises:
        ConfigurationError: the data cannot be dealt out, or an argument does not fit the data.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> [batch.tolist() for batch in elastic(range(5), batch_size=2, shuffle=False)]
    [[0, 1], [2, 3], [4]]
    >>> [batch.tolist() for batch in elastic(lambda epoch: iter(range(5)), batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """
    session = None if optimizer is None else optimizer._session
    if isinstance(data, DataLoader):
        auto = Auto() if batch_size == "auto" else None
        size = None if auto else batch_size
        if given := [name for name, value in (("batch_size", size), ("shuffle", shuffle), ("order", order)) if value is not None]:
            raise ConfigurationError(f"elastic(DataLoader, {given[0]}=...): set it on the DataLoader, or pass the data set itself")
        if drop_last or options:
            raise ConfigurationError(f"elastic(DataLoader, {next(iter(options), 'drop_last')}=...): set it on the DataLoader")
        return _of_loader(data, seed, session, deal, auto)
    if isinstance(data, IterableDataset) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        if shuffle is not None or order is not None or seed is not None:
            raise ConfigurationError("a stream keeps its own order: shuffle it where it is made, the same way on every worker")
        _check_deal(deal)
        return _of_stream(data, batch_size, drop_last, options, session)
    if batch_size is None:
        raise ConfigurationError("elastic(dataset) needs batch_size=, the number of samples in one worker's batch")
    if order is not None and shuffle is not None:
        raise ConfigurationError("elastic(dataset, order=..., shuffle=...): order= sets the whole order; leave shuffle= out")
    size, auto = size_and_auto("elastic", batch_size)
    chosen = Order.of_script(order) if order is not None else Order.plain(len(data), shuffle=shuffle is not False).of(data)
    batch_sampler = sampler_of(chosen, size, drop_last, seed, session, deal, auto, checksum_of_part(data))
    return _loader(data, batch_sampler, options)


def _check_deal(deal: str) -> None:
    if unit_of(deal, 1, whole=False):
        raise ConfigurationError("deal='even' gives each worker an equal share, which needs the length of the data: a stream has none")


def _of_loader(
    loader: DataLoader[Any], seed: int | None, session: Session | None, deal: str, auto: Auto | None
) -> DataLoader[Any] | ElasticStream:
    if isinstance(loader.batch_sampler, ElasticBatchSampler):
        raise ConfigurationError("this DataLoader has an elastic batch_sampler already: use it without elastic()")
    if isinstance(loader.dataset, IterableDataset):
        if seed is not None:
            raise ConfigurationError("a stream keeps its own order: seed it where it is made, the same on every worker")
        _check_deal(deal)
        if loader.num_workers:  # the loader's processes read and collate, so that only whole batches can be dealt out
            return ElasticStream(_again(loader), None, lambda batch: batch, session=session, auto=auto)
        of = _epochs(loader.dataset), loader.batch_size, loader.collate_fn
        return ElasticStream(*of, drop_last=loader.drop_last, session=session, auto=auto)
    if loader.batch_sampler is None:
        raise ConfigurationError(
            "elastic(DataLoader) deals out batches, but this DataLoader has batch_size=None: give it a batch size, or, where its sampler "
            "gives batches, pass that as batch_sampler"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        warn(
            f"elastic() deals out the batches of this {type(loader).__name__} with a plain DataLoader: the __iter__ of its own class is "
            f"not called. To keep it: {type(loader).__name__}(data, batch_sampler=optimizer.batch_sampler(data, batch_size=...)), without "
            "elastic()"
        )
    if type(loader.batch_sampler) is BatchSampler:
        sampler, batch_size = loader.batch_sampler.sampler, loader.batch_sampler.batch_size
        part = checksum_of_part(loader.dataset, sampler)
        drop_last = loader.batch_sampler.drop_last
        batch_sampler = sampler_of(Order.of_sampler(sampler).of(sampler), batch_size, drop_last, seed, session, deal, auto, part)
    elif auto is not None:
        raise ConfigurationError(f"batch_size='auto': the batches of a {type(loader.batch_sampler).__name__} are dealt out whole")
    else:
        unit = unit_of(deal, 1, whole=False)
        batch_sampler = WholeBatches(session, loader.batch_sampler, seed=seed, unit=unit)
    return _loader(loader.dataset, batch_sampler, {name: getattr(loader, name) for name in _KEPT})


def _loader(data: Any, batch_sampler: ElasticBatchSampler, options: Mapping[str, Any]) -> DataLoader[Any]:
    made: DataLoader[Any] = DataLoader(data, batch_sampler=batch_sampler, **options)
    made.sampler.set_epoch = batch_sampler.set_epoch  # type: ignore[attr-defined] # scripts of DDP call it there before each epoch
    return made


def _of_stream(data: Any, batch_size: int | str | None, drop_last: bool, options: dict[str, Any], session: Session | None) -> ElasticStream:
    collate = options.pop("collate_fn", None)
    if options:
        raise ConfigurationError(f"elastic(stream, {next(iter(options))}=...): wrap the stream in a DataLoader with it, and pass that")
    if batch_size is None:
        if drop_last:
            raise ConfigurationError("elastic(stream, drop_last=True) needs batch_size=")
        return ElasticStream(_epochs(data), None, collate or (lambda batch: batch), session=session)
    size, auto = size_and_auto("elastic", batch_size)
    return ElasticStream(_epochs(data), size, collate or default_collate, drop_last=drop_last, session=session, auto=auto)


def _epochs(data: Any) -> Callable[[Epoch], Iterable[Any]]:
    """Return the function that makes the stream of an epoch."""
    if isinstance(data, Iterable):
        if iter(data) is data:
            raise ConfigurationError(
                f"a {type(data).__name__} can be iterated only once, but a worker may have to read elements again for a worker that died: "
                "pass a function that makes the iterable, offbeat.elastic(lambda epoch: ...), or an IterableDataset"
            )
        return _again(data)
    if callable(data):
        return data  # type: ignore[no-any-return]
    raise ConfigurationError(
        f"elastic() got a {type(data).__name__}: pass a DataLoader, a data set, an iterable, or a function that returns an iterable"
    )


def _again(data: Iterable[Any]) -> Callable[[Epoch], Iterable[Any]]:
    stream = getattr(data, "dataset", data)
    if getattr(getattr(stream, "_distributed", None), "world_size", 1) > 1:  # of Hugging Face's streams
        raise ConfigurationError(
            "this stream gives each rank only its part (split_dataset_by_node): the job deals out the whole stream, of which each worker "
            "skips what others use, so that most of the data would be used by nobody; leave split_dataset_by_node out"
        )
    set_epoch = getattr(stream, "set_epoch", None)  # a method of Hugging Face's streams

    def epoch_of(epoch: Epoch) -> Iterable[Any]:
        if set_epoch is not None:
            set_epoch(epoch)
        return data

    return epoch_of


class ElasticStream(Passes):
    """Batches of a stream; made by `elastic`. Iterate over it once for each epoch.

    The stream of an epoch must be the same on every worker: all elements, in the same order, not a part for each worker.

    Args:
        stream: makes the stream of an epoch.
        batch_size: elements in a batch; None: the elements are batches.
        collate: makes a batch from a list of elements, or, without a batch size, from one element.
        drop_last: leave out the last elements if they do not fill a batch.
        session, auto: see `Passes`.
    """

    def __init__(
        self,
        stream: Callable[[Epoch], Iterable[Any]],
        batch_size: int | None,
        collate: Callable[[Any], Any],
        *,
        drop_last: bool = False,
        session: Session | None = None,
        auto: Auto | None = None,
    ) -> None:
        self._stream, self._collate, self._drop_last = stream, collate, drop_last
        self._single = batch_size is None
        self._size = None
        if self._single and auto is not None:
            raise ConfigurationError("batch_size='auto': the elements of this stream are ready batches, whose size the stream decides")
        if self._single and os.environ.get(VARIABLE):
            warn(f"--batch {os.environ[VARIABLE]}: the elements of this stream are ready batches, and keep the size that the stream gives")
        super().__init__(session, batch_size or 1, auto=auto, sized=not self._single)

    def _join(self, session: Session) -> None:
        if self._drop_last and self._differ:
            raise ConfigurationError(
                "drop_last=True of a stream, where workers have batches of different sizes (--batch or auto): a stream has no length from "
                "which all workers could know where its last whole batch ends; leave drop_last out"
            )
        if self._place.size > 1:
            raise ConfigurationError(
                f"this worker consists of {self._place.size} processes, which share the batches of a data set with a length, not of a "
                "stream: use a data set, or leave --procs-per-worker out"
            )
        if session.overlap is not None:
            raise ConfigurationError(
                "this rule gives each worker a split of the data set, which needs its length: use a data set, not a stream, or another rule"
            )
        super()._join(session)

    def __iter__(self) -> Iterator[Any]:
        epoch, grants = self._pass()
        self._size = None
        reader = _Reader(partial(self._stream, epoch))
        early: list[LeasedRange | None] = []
        while True:
            grant = early.pop() if early else next(grants, None)
            if grant is None and not self._moved and not self._dealt and asked_by_next():
                epoch, grant, grants = self._go_on_after(epoch)
                reader = _Reader(partial(self._stream, epoch))
            if grant is None:
                return
            if self._single and grant.stop - grant.start > 1:
                raise ConfigurationError("this rule sets the batch size: pass a stream of elements, not of batches, and batch_size=")
            found = reader.read(grant.start, grant.stop)
            amended = self._amended(grant, found)
            if self._size is None and len(found) < grant.stop - grant.start:
                self._size = self._end(reader.at)
                if amended is not None:
                    # The next request tells the job where the stream ends; the job must know that before a push over this batch.
                    early.append(next(grants, None))
            if amended is not None:
                batch = self._collate(found[0] if self._single else found)
                dealt = amended._replace(rows=_rows(batch)) if self._single else amended
                self._note(amended, dealt)
                if not self.reports_deliveries:
                    self._delivered(self.dealt, self.dealt.index(dealt), batch)
                yield batch
                del batch
            if early == [None]:  # this worker's batches have been used: the next request waits for the other workers
                early, grants = [], self._grants(self.session, epoch)

    def _go_on_after(self, epoch: Epoch) -> tuple[Epoch, LeasedRange | None, Iterator[LeasedRange]]:
        """Return the present epoch and its grants, see `_after`, the first one by itself."""
        later = self._after(epoch)
        at, grant = next(later, (epoch, None))
        return at, grant, (grant for _, grant in later)

    def _grants(self, session: Session, epoch: Epoch) -> Iterator[LeasedRange]:
        seen = session.reported
        yield from super()._grants(session, epoch)
        for report in session.reports_since(seen):
            if self._size is not None and report["epoch"] == epoch and report["indices"] != self._size:
                raise ConfigurationError(
                    f"this worker's stream has {self._size} elements in epoch {epoch}, another's {report['indices']}: "
                    "every worker needs the same stream"
                )

    def _end(self, at: int) -> int:
        """Return the number of positions that are dealt out of a stream that ends after ``at`` elements."""
        return at // self._batch_size * self._batch_size if self._drop_last else at

    def _amended(self, grant: LeasedRange, found: list[Any]) -> LeasedRange | None:
        """Return the part of a grant for which elements exist; None: there are none."""
        stop = grant.start + len(found)
        if stop == grant.stop:
            return grant
        kept = grant._replace(stop=stop) if found and not self._drop_last else None
        self._note(grant, kept)
        return kept

    def _note(self, grant: LeasedRange, by: LeasedRange | None) -> None:
        if grant is not by:
            self.session.amend(grant, by)
            at = self.dealt.index(grant)
            self.dealt[at : at + 1] = [] if by is None else [by]


class _Reader:
    """Elements of a stream by their positions; earlier elements are read and skipped."""

    def __init__(self, begin: Callable[[], Iterable[Any]]) -> None:
        self._begin = begin
        self._stream = iter(begin())
        self.at = 0
        """The number of elements read."""

    def read(self, start: int, stop: int) -> list[Any]:
        """Return the elements from ``start`` to ``stop``; fewer if the stream ends before. Going back restarts the stream."""
        if start < self.at:
            self._stream, self.at = iter(self._begin()), 0
        for _ in islice(self._stream, start - self.at):
            self.at += 1
        found = list(islice(self._stream, stop - start)) if self.at == start else []
        self.at += len(found)
        return found


def _rows(batch: Any) -> int:
    """Return the number of samples of a ready batch: the length of the first tensor in it; 0: unknown."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 0
    parts = list(batch.values()) if isinstance(batch, dict) else list(batch) if isinstance(batch, list | tuple) else []
    return next((rows for part in parts if (rows := _rows(part))), 0)
