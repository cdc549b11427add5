"""Track the script's calls into the library: a script inside a call waits, one outside that calls no more computes or hangs.

The heartbeat reports the time without a call; the supervisor decides from it whether the script hangs.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from offbeat.types import Seconds

if TYPE_CHECKING:
    from offbeat.runtime.worker.job_session import JobSession

HOLD_S: Seconds = 3.0
"""Seconds that a call may go on after Ctrl-C: the other workers got the signal too, so it usually ends by itself."""

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="JobSession")


class Calls:
    """Count the library calls of a script, of one thread at a time. That thread writes the counters; the heartbeat's thread reads them.

    >>> calls = Calls(iter([0.0, 5.0, 7.0, 8.0]).__next__)
    >>> calls.stuck(most_s=3.0), calls.stuck(most_s=3.0)
    (3.0, 5.0)
    >>> calls.count += 1
    >>> calls.stuck(most_s=3.0)
    0.0
    """

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock = clock
        self.turn = threading.RLock()
        """Held by the thread that makes a call. A script may fetch its batches in a thread of its own (``BackgroundGenerator``), which asks
        for samples while the main thread makes a step: each would take the other's answers."""
        self.count = 0
        """Number of calls so far."""
        self.depth = 0
        """Number of nested calls in progress; 0: the script is outside the library."""
        self.interrupted: Seconds | None = None
        """Monotonic time of a Ctrl-C inside a call, in seconds. It is deferred, since it must not cut a message in two. None: no Ctrl-C."""
        self._seen = 0
        self._stuck_s: Seconds = 0.0
        self._looked_at = clock()

    def overdue(self, now: Seconds) -> Seconds | None:
        """Return the seconds for which a wait may continue after Ctrl-C, zero or less once it must end; None: there was no Ctrl-C."""
        return None if self.interrupted is None else self.interrupted + HOLD_S - now

    def stuck(self, most_s: Seconds) -> Seconds:
        """Return the seconds for which the script has been outside the library without a call. To be called at regular intervals.

        Args:
            most_s: most seconds that one interval may add: a process that was stopped (SIGSTOP) was not stuck meanwhile.
        """
        before, self._looked_at = self._looked_at, self._clock()
        if self.depth > 0 or self.count != self._seen:
            self._stuck_s = 0.0
        else:
            self._stuck_s += min(most_s, self._looked_at - before)
        self._seen = self.count
        return self._stuck_s


class TakesPart(Protocol):
    """Run around a library call in a worker of several processes, all of which make the same call."""

    def before(self, call: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]: ...

    def after(self, call: str, result: Any) -> Any: ...

    def failed(self, call: str, error: BaseException) -> None: ...


def own_mode() -> AbstractContextManager[object]:
    """Return a context, for use inside the script's ``torch.inference_mode()`` too, in which new tensors can take part in a backward
    pass."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def library_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Count a session's method as a library call. KeyboardInterrupt is raised when the call returns, with the session consistent.

    It is raised in the thread that made the session. Another thread, which fetches batches, ends without a word once the job is left.
    """

    @functools.wraps(method)
    def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        calls, own = self._calls, threading.get_ident() == self.thread
        with calls.turn:
            outermost = calls.depth == 0
            group = self.group if outermost else None
            try:
                given: Any = args if group is None else group.before(method.__name__, args)
                calls.count += 1
                if outermost:
                    self.entered()
                calls.depth += 1
                try:
                    with own_mode():
                        result = method(self, *given, **kwargs)
                finally:
                    calls.depth -= 1
                    if outermost:
                        self.left()
                if group is not None:
                    result = group.after(method.__name__, result)
            except BaseException as error:
                if group is not None:
                    group.failed(method.__name__, error)
                if not own and self.link.closed.is_set():
                    raise SystemExit from None
                raise
            if own and calls.depth == 0 and calls.interrupted is not None:
                calls.interrupted = None
                raise KeyboardInterrupt
            return result

    return called
