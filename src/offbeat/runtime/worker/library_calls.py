"""Whether a worker's script is inside a call of the library, and how often it has called: what progress is judged by.

A script that waits for others does so inside a call. One that is outside, and calls no more, computes, or hangs; only time tells which.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from offbeat.types import Seconds

HOLD_S: Seconds = 3.0
"""How long Ctrl-C waits for the call that it came in to end by itself: the others have had it too, and leave, or go on."""

P = ParamSpec("P")
R = TypeVar("R")


class Calls:
    """The calls that a script's main thread makes. That thread writes, the heartbeat's reads.

    >>> calls = Calls(iter([0.0, 5.0, 7.0, 8.0]).__next__)
    >>> calls.stuck(most_s=3.0), calls.stuck(most_s=3.0)
    (3.0, 5.0)
    >>> calls.count += 1
    >>> calls.stuck(most_s=3.0)
    0.0
    """

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock = clock
        self.count = 0
        """Number of calls so far."""
        self.depth = 0
        """Number of calls under way: a call may make others."""
        self.interrupted: Seconds | None = None
        """The time of a Ctrl-C inside a call, which must not be broken off in the middle of a message."""
        self._seen = 0
        self._stuck_s: Seconds = 0.0
        self._looked_at = clock()

    def overdue(self, now: Seconds) -> Seconds | None:
        """Return for how many seconds a wait may continue before Ctrl-C ends it; None: there was no Ctrl-C. Zero or less: end it now."""
        return None if self.interrupted is None else self.interrupted + HOLD_S - now

    def stuck(self, most_s: Seconds) -> Seconds:
        """For how long there has been no progress; to be called at regular intervals.

        Args:
            most_s: what the time since the last look counts for at most: a process that was stopped has not been stuck meanwhile.
        """
        before, self._looked_at = self._looked_at, self._clock()
        if self.depth > 0 or self.count != self._seen:
            self._stuck_s = 0.0
        else:
            self._stuck_s += min(most_s, self._looked_at - before)
        self._seen = self.count
        return self._stuck_s


class TakesPart(Protocol):
    """What else happens at a call, where the worker consists of several processes that all make it."""

    def before(self, call: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]: ...

    def after(self, call: str, result: Any) -> Any: ...

    def failed(self, call: str, error: BaseException) -> None: ...


class _Linked(Protocol):
    @property
    def _calls(self) -> Calls: ...

    @property
    def group(self) -> TakesPart | None: ...

    def entered(self) -> None: ...

    def left(self) -> None: ...


S = TypeVar("S", bound=_Linked)


def own_mode() -> AbstractContextManager[object]:
    """Return a context in which tensors that this package makes can be used in a backward pass, also inside the script's
    ``torch.inference_mode()``."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def library_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Count a method of a session as a call of the library; Ctrl-C inside it is raised when it returns, and all is as after any call."""

    @functools.wraps(method)
    def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        calls = self._calls
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
            raise
        if calls.depth == 0 and calls.interrupted is not None:
            calls.interrupted = None
            raise KeyboardInterrupt
        return result

    return called
