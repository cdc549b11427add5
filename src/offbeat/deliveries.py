"""Follow a ``DataLoader``: the batches that its iterator has given to the script, and the caller that asks for its length.

A sampler only sees that indices are asked for. A loader with worker processes, or one that is iterated ahead, asks long before the script
gets the batch.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from dis import opname
from itertools import count
from types import FrameType
from typing import Any, Final

from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from offbeat.errors import NOT_OWN, ConfigurationError

LOADER_DEPTH: Final = 5
"""Calls between a ``DataLoader``'s iterator and the sampler, of samplers that wrap it."""
SHOWING: Final = ("tqdm", "rich", "fastprogress", "alive_progress", "progressbar")
"""Packages that ask for the length of a loader to show how far it is."""


def follow_loader(deliver: Callable[..., None]) -> Callable[[int], None] | None:
    """Have the iterator of the ``DataLoader`` that asks the calling sampler for indices report its batches, when the script gets them.

    Args:
        deliver: called with the number of each batch, from 0, and the batch.

    Returns:
        What the sampler calls with each number itself, because no loader asks; None: nothing.

    Raises:
        ConfigurationError: the iterator has asked for another pass before this one, and may not have given all of its batches.
    """
    iterator: Any = _iterator_above(sys._getframe(1))
    if iterator is None:
        return deliver
    passes = iterator._sampler_iter  # a loader with persistent processes keeps its iterator, with a new one of these for each pass
    if getattr(iterator, "_offbeat_passes", None) is passes:
        raise ConfigurationError(
            "one iterator of a DataLoader asks the elastic batch_sampler for a second pass, as where a sampler repeats it without end "
            "(InfiniteDataLoader, _RepeatSampler): it would fetch batches of the next epoch before those of this one are used. Use a plain "
            "DataLoader, with persistent_workers=True if its processes are to live on, and begin each epoch with 'for batch in loader'"
        )
    iterator._offbeat_passes = passes
    _report(iterator, deliver)
    return None


def raised_later(error: BaseException) -> bool:
    """Have the iterator of a ``DataLoader`` with worker processes that asks the calling sampler raise an exception when the script asks it.

    It asks the sampler while it is made, and would be left half-made. Returns False if no such iterator asks.
    """
    iterator = _iterator_above(sys._getframe(1))
    if iterator is None or hasattr(iterator, "_dataset_fetcher"):
        return False
    kind, arguments = type(error), error.args

    def next_data() -> Any:
        raise kind(*arguments)  # a new one: what is raised holds the iterator

    iterator._next_data = next_data  # type: ignore[method-assign]
    return True


def fetch_when_asked(batches: Iterator[list[int]], deliver: Callable[[Any], None]) -> bool:
    """Have the iterator of a ``DataLoader`` with worker processes that asks the calling sampler fetch more batches in this process.

    It asks the sampler before the script asks it: whether the script calls ``next`` is known only then. Returns False if no such iterator
    asks.

    Args:
        batches: the indices of each batch after those of the pass.
        deliver: called with each of these batches.
    """
    iterator = _iterator_above(sys._getframe(1))
    if iterator is None or hasattr(iterator, "_dataset_fetcher"):
        return False
    again = weakref.ref(iterator)
    data_of: Callable[[Any], Any] = type(iterator)._next_data
    if getattr(iterator, "_offbeat_passes", None) is iterator._sampler_iter:  # it has batches of this pass to report
        report = iterator._next_data
        data_of = lambda _: report()  # noqa: E731
    kind = iterator._dataset_kind, iterator._dataset, iterator._auto_collation, iterator._collate_fn, iterator._drop_last
    fetcher = _DatasetKind.create_fetcher(*kind)

    def next_data() -> Any:
        try:
            return data_of(again())
        except StopIteration:
            if not asked_by_next() or (indices := next(batches, None)) is None:
                raise
        batch = fetcher.fetch(indices)
        deliver(batch)
        return batch

    iterator._next_data = next_data  # type: ignore[method-assign]
    return True


def asked_by_next() -> bool:
    """Return whether the script's own line asks for a batch by calling ``next``, without saying what else it takes if there is none.

    A loop does not, nor does a library, which has an answer to the end of a pass.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("offbeat.", "torch.utils.data")):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(NOT_OWN):
        return False
    code = frame.f_code
    operation, arguments = code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return opname[operation] in ("CALL", "PRECALL") and arguments < 2 and "next" in code.co_names


def _iterator_above(sampler: FrameType) -> _BaseDataLoaderIter | None:
    """Return the iterator of a ``DataLoader`` that has called a sampler; None: a ``DataLoader`` has not."""
    frame = sampler.f_back
    for _ in range(LOADER_DEPTH):
        if frame is None:
            break
        iterator = frame.f_locals.get("self")
        if isinstance(iterator, _BaseDataLoaderIter):
            return iterator
        frame = frame.f_back
    return None


def _report(iterator: _BaseDataLoaderIter, deliver: Callable[..., None]) -> None:
    again, pins = weakref.ref(iterator), iterator._pin_memory  # no cycle: the end of the iterator ends its processes
    numbers = count()
    data_of: Callable[[Any], Any] = type(iterator)._next_data

    def next_data() -> Any:
        batch = data_of(again())
        deliver(next(numbers), batch)
        return batch

    iterator._next_data = next_data  # type: ignore[method-assign]
    fetcher: Any = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is None:
        return

    def first(indices: Any) -> Any:
        """Fetch the first batch of a loader without processes, in the call of the real ``_next_data`` that is under way."""
        del fetcher.fetch
        batch = fetcher.fetch(indices)
        deliver(next(numbers), None if pins else batch)  # the script gets a copy of one to be pinned
        return batch

    fetcher.fetch = first


def asked_to_show() -> bool:
    """Return whether the length of the calling sampler was asked by a progress bar, or by PyTorch for itself."""
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.utils.data"):
        frame = frame.f_back
    return frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in SHOWING
