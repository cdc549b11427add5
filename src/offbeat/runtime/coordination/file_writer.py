"""Write the files of checkpoints in a thread, and report each result to the server's loop.

The messages of a server do not determine when a write is done. So the result of a write is an event like a message: a server that outlives
its process writes the result down before the result is handled (``runtime/recovery``), and the next process of the server handles it again.
The next process begins no write that an earlier process has begun. A write without a result was cut off by the death, and is reported as
cut off, unless all of its files are on the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple

from offbeat.errors import OffbeatError
from offbeat.files import system_error, why
from offbeat.types import Seconds, Version

log = logging.getLogger(__name__)

NICE: Final = 10
"""The priority of a thread that writes: training goes before."""


class Written(NamedTuple):
    """The result of one write."""

    number: int
    """Of the optimizer."""
    version: Version
    failed: str | None
    """Why the files are not complete; None: they are."""
    cut_off: bool = False
    """True if the process that wrote them has died."""


class FileWriter:
    """Write one set of files after another.

    Args:
        wake: wakes the server's loop, from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.open: dict[tuple[int, Version], Callable[[], bool] | None] = {}
        """Writes whose result has not been handled, by optimizer and version; how to find out on the disk whether one is complete. The
        writer of the next process, or of a standby, takes them over: see `follow`."""
        self.replays = False
        """True while this process handles what another one has handled, its predecessor or its leader: no write begins."""
        self._futures: dict[tuple[int, Version], Future[Any]] = {}
        self._last: Future[Any] | None = None
        self._pool = ThreadPoolExecutor(1, "offbeat-checkpoint", _make_way)

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise TypeError("each process has a thread of its own, see `follow`")

    def follow(self, writes: Mapping[tuple[int, Version], Callable[[], bool] | None]) -> None:
        """Take over the open writes of another server's writer, which are its own business until `replays` becomes False."""
        self.open, self.replays = dict(writes), True

    def begin(self, number: int, version: Version, write: Callable[[], Any], is_complete: Callable[[], bool] | None = None) -> None:
        """Begin to write the files of ``version`` of an optimizer.

        Args:
            number: of the optimizer.
            version: of its parameters. A job makes one checkpoint of a version at most.
            write: called in the thread; what it raises is the reason of the failure.
            is_complete: returns True if a process that has died had completed the files; None: they count as cut off then.
        """
        key = number, version
        self.open[key] = is_complete
        if not self.replays:
            self._futures[key] = self._last = self._pool.submit(_logged, write)
            self._futures[key].add_done_callback(lambda _: self._wake())

    def aside(self, work: Callable[[], Any]) -> None:
        """Do something after the present write whose result is of no interest, such as to remove files."""
        if not self.replays:
            self._last = self._pool.submit(work)

    def results(self) -> list[Written]:
        """Return the results that are known and not handled (see `handled`)."""
        return [self._result(key) for key in self.open if key not in self._futures or self._futures[key].done()]

    def _result(self, key: tuple[int, Version]) -> Written:
        if key in self._futures:
            error = self._futures[key].exception()
            return Written(*key, None if error is None else why(error)[:1000])
        is_complete = self.open[key]
        if is_complete is not None and is_complete():
            return Written(*key, None)
        return Written(*key, "its writer has died", cut_off=True)

    def handled(self, result: Written) -> None:
        """Forget a write whose result is handled now."""
        key = result.number, result.version
        self.open.pop(key, None)
        self._futures.pop(key, None)

    def wait(self, timeout_s: Seconds) -> None:
        """Wait until all that this process has begun is done, for at most ``timeout_s`` seconds."""
        wait([] if self._last is None else [self._last], timeout=timeout_s)  # one thread does them in order

    def close(self) -> None:
        """End with the server: what has not begun is not written any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _logged(write: Callable[[], Any]) -> None:
    """Write, and log an error that is a mistake of ours with its traceback."""
    try:
        write()
    except Exception as error:
        if not isinstance(error, OffbeatError) and system_error(error) is None:
            log.exception("the files of a checkpoint could not be written")
        raise


def _make_way() -> None:
    """Let this thread wait for the processor while others of the machine want it, where the system has priorities of threads."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
