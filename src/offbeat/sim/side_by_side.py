"""Run simulations side by side: short ones here, one after the other; longer ones in several processes.

A process takes a second to start, which is longer than most simulations. So the first one begins here, and only if simulations are still
under way after `SHORT_S` do other processes take some of those that have not begun.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

from offbeat.types import Seconds

T = TypeVar("T")
R = TypeVar("R")
Watch: TypeAlias = Callable[[float], None]
"""Called now and then with the part of the work that is done, from 0 to 1."""

SHORT_S: Final[Seconds] = 1.0
LOOK_S: Final[Seconds] = 0.2
"""How often this process asks how far the others are."""


def side_by_side(run: Callable[[Any, T, Watch], R], common: Any, items: Sequence[T], jobs: int, done: Watch) -> list[R]:
    """Return ``run(common, item, watch)`` for each item, in their order.

    Args:
        run: a function of a module, which other processes can import.
        common: what all calls share; each process gets it once.
        items: what the calls differ in.
        jobs: the most processes at a time, this one among them.
        done: told how many items are done, with parts of those under way.

    >>> side_by_side(lambda common, item, watch: common * item, 10, [1, 2, 3], jobs=1, done=lambda items: None)
    [10, 20, 30]
    """
    return _Team(run, common, items, jobs, done).results()


class _Team(Generic[T, R]):
    def __init__(self, run: Callable[[Any, T, Watch], R], common: Any, items: Sequence[T], jobs: int, done: Watch) -> None:
        self._run, self._common, self._items, self._jobs, self._done = run, common, items, jobs, done
        self._parts: Any = [0.0] * len(items)
        """The part of each item that is done; in memory that processes share, once there are some."""
        self._pool: ProcessPoolExecutor | None = None
        self._elsewhere: dict[int, Future[R]] = {}
        """The items that other processes take, unless this one comes to them first."""
        self._begun = 0
        self._began = time.monotonic()

    def results(self) -> list[R]:
        found: dict[int, R] = {}
        try:
            for place in self._here():
                found[place] = self._run(self._common, self._items[place], partial(self._watch, place))
                self._watch(place, 1.0)
            for place, future in self._elsewhere.items():
                while wait([future], LOOK_S).not_done:
                    self._tell()
                found[place] = future.result()
            self._done(len(self._items))
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
        return [found[place] for place in range(len(self._items))]

    def _here(self) -> Iterator[int]:
        """Give this process an item after the other: the next, or, once there are other processes, the last that none of them has begun."""
        while self._pool is None and self._begun < len(self._items):
            self._begun += 1
            yield self._begun - 1
        while (mine := next((one for one, future in reversed(self._elsewhere.items()) if future.cancel()), None)) is not None:
            del self._elsewhere[mine]
            yield mine

    def _watch(self, place: int, part: float) -> None:
        self._parts[place] = part
        left = len(self._items) - self._begun
        if self._pool is None and left and self._jobs > 1 and time.monotonic() > self._began + SHORT_S:
            # Not forked: a progress bar has a thread.
            context = multiprocessing.get_context("spawn")
            self._parts = context.Array("d", list(self._parts), lock=False)
            self._pool = ProcessPoolExecutor(min(self._jobs - 1, left), context, _begin, (self._run, self._common, self._parts))
            for one in range(self._begun, len(self._items)):
                self._elsewhere[one] = self._pool.submit(_call, one, self._items[one])
        self._tell()

    def _tell(self) -> None:
        self._done(sum(self._parts))


_CALL: list[Any] = []
"""In another process: what to run, with what all calls share, and where to say how far it is."""


def _begin(*call: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends this process without a traceback; the first one says what is to be said
    _CALL[:] = call


def _call(place: int, item: Any) -> Any:
    run, common, parts = _CALL
    return run(common, item, partial(parts.__setitem__, place))
