"""How a worker's process learns of its own end: the script runs out, an exception ends it, or a notice tells it to leave.

Python has a hook for each. What is said to the job then is the session's business (``runtime/parameter_server/worker_side.py``); of a
process that ends in any other way, killed or crashed, the job learns from its closed connections.
"""

from __future__ import annotations

import atexit
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from offbeat.runtime.job.notices import NOTICES


def follow(
    *, leave: Callable[[], None], fail: Callable[[BaseException], str | None], notice: Callable[[], None], interrupt: Callable[[], bool]
) -> None:
    """Call these when this process ends.

    Args:
        leave: at exit, however the script has ended, so also after ``fail``.
        fail: an exception ends the script. Returns a line that is printed in place of its traceback, or None. `SystemExit` is none: a
            script may end itself with a status.
        notice: one of `NOTICES` has come; runs in the main thread, between any two of its instructions, and may raise. Never called where
            the script handles the signal itself, or where the caller is not the main thread, which alone may set handlers.
        interrupt: SIGINT has come; runs where ``notice`` runs. Returns whether to raise `KeyboardInterrupt` there and then. A script that
            does not catch it ends without a traceback: the user has asked for the end.
    """
    atexit.register(leave)
    before = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if issubclass(kind, KeyboardInterrupt):
            return  # the user has asked for the end: no traceback, and the job hears that this worker leaves
        line: str | None = None
        try:
            line = fail(error)
        except Exception as unsaid:
            print(f"offbeat: the job could not be told why this process ends: {unsaid}", file=sys.stderr)
        if line is None:
            before(kind, error, trace)
        else:
            print(line, file=sys.stderr)

    def terminated(number: int, frame: Any) -> None:
        notice()

    def interrupted(number: int, frame: Any) -> None:
        if interrupt():
            raise KeyboardInterrupt

    sys.excepthook = failed
    if threading.current_thread() is not threading.main_thread():
        return
    for number in NOTICES:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminated)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)
