"""Detect the end of a worker's process: its script ends, an exception ends it, or a signal orders it to leave.

Python has a hook for each. The session decides what to report to the job (``runtime/parameter_server/worker_side.py``). If a process ends
in any other way, killed or crashed, the job notices that its connections close.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.runtime.job.notices import INTERRUPT, LEAVE, NOTICES, pass_by, sit_out
from offbeat.runtime.worker.loader_processes import guard_loaders, is_loaders_fork


def follow(
    *,
    leave: Callable[[], None],
    fail: Callable[[BaseException], str | None],
    told: Callable[[str], None],
    notice: Callable[[], None],
    interrupt: Callable[[bool], bool],
) -> None:
    """Install handlers for the end of this process, and for signals that announce it.

    Args:
        leave: called at exit, however the script has ended, so also after ``fail``.
        fail: called when an exception ends the script. Returns a line to print in place of the traceback, or None. Not called for
            `SystemExit`: a script may end itself with a status.
        told: called on a notice (`NOTICES`) or SIGINT, which may be meant for all processes of the job: the launcher gets a report and may
            order this process to leave. Gets the signal's name.
        notice: the order to leave; called in the main thread, between any two of its instructions, and may raise. Not installed where the
            script handles SIGTERM itself, or where the caller is not the main thread, which alone may set handlers.
        interrupt: the order to raise `KeyboardInterrupt`; called where ``notice`` is. Returns True to raise it at once. A script that does
            not catch it ends without a traceback: the user has asked for the end. Called again, with True, if Python has dropped the
            exception, as it does where it is raised at a fork (each start of a loader's processes) or in a ``__del__``: else the worker
            would train on, alone, after the others have left.
    """
    atexit.register(leave)
    before, unraisable = sys.excepthook, sys.unraisablehook

    def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return  # the user has asked for the end: no traceback, and the job gets the report that this worker leaves
        line: str | None = None
        try:
            line = None if any(error is one for one in _reported) else fail(error)
            _reported.append(error)
        except Exception as unsaid:
            print(f"offbeat: the job could not be told why this process ends: {unsaid}", file=sys.stderr)
        if line is None:
            before(kind, error, trace)
        else:
            print(line, file=sys.stderr)

    def terminated(number: int, frame: Any) -> None:
        notice()

    def interrupted(number: int, frame: Any) -> None:
        if interrupt(False):
            raise KeyboardInterrupt

    def dropped(what: sys.UnraisableHookArgs) -> None:
        if _heeded and issubclass(what.exc_type, KeyboardInterrupt):
            interrupt(True)
        else:
            unraisable(what)

    def reported(number: int, frame: Any) -> None:
        told(signal.Signals(number).name)

    sys.excepthook = failed
    if threading.current_thread() is not threading.main_thread():
        return
    kinds: tuple[tuple[Sequence[int], Any, int, int, Any], ...] = (
        (NOTICES, signal.SIG_DFL, LEAVE, signal.SIGTERM, terminated),
        ((signal.SIGINT,), signal.default_int_handler, INTERRUPT, signal.SIGINT, interrupted),
    )
    for numbers, default, order, ordered, act in kinds:
        heeded = [number for number in numbers if signal.getsignal(number) is default]
        for number in heeded:
            signal.signal(number, reported)
            _heeded[number] = default
        if ordered in heeded:
            signal.signal(order, _unless_handled(ordered, reported, act))
            _heeded[order] = signal.SIG_DFL
    sys.unraisablehook = dropped
    guard_loaders()
    os.register_at_fork(after_in_child=_forget)


_reported: list[BaseException] = []
"""The exceptions that the job has been told of: the hooks of several sessions call each other with the same exception."""

_heeded: dict[int, Any] = {}
"""By number of each signal that this process handles for the job: the handler before, which a fork gets back."""


def _unless_handled(number: int, ours: Callable[..., None], act: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return the handler of an order. If the script has set its own handler of ``number`` by then, the process gets that signal instead."""

    def ordered(order: int, frame: Any) -> None:
        if signal.getsignal(number) is ours:
            act(number, frame)
        else:
            os.kill(os.getpid(), number)

    return ordered


def _forget() -> None:
    """Undo the handlers in a fork that the script makes: it is no process of the job, and SIGTERM must end it.

    A ``DataLoader``'s process is an exception: it ignores notices from its first instruction on, before `guard_loaders`' hook is called.
    """
    if is_loaders_fork():
        sit_out()
    for number, before in _heeded.items():
        if signal.getsignal(number) is not pass_by:
            signal.signal(number, before)
    _heeded.clear()
