"""End a fork as the interpreter would at its exit, without clearing the modules that the fork shares with its parent.

At its exit CPython clears every module and frees every object. In a fork each changed reference count copies a page: 64 forks that had
trained with 20 MB of private memory each grew to 189 MB while they ended. So a fork only does what the user can notice (wait for threads,
run exit handlers, clear the script's own names, flush open files) and leaves the rest to the kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import IO, Any, NoReturn


def run_and_exit(program: Callable[[], None]) -> NoReturn:
    """Run ``program``, then end the process with the status that Python would end with.

    Args:
        program: the function to run. ``sys.excepthook`` shows its exception, if any; `SystemExit` sets the status.
    """
    interrupted = False
    status = 0
    try:
        program()
    except SystemExit as error:
        status = _status_of(error)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        status = _show(error)
    _ignore_errors(threading._shutdown)  # type: ignore[attr-defined]
    _ignore_errors(atexit._run_exitfuncs)
    _ignore_errors(_clear_script)
    if not _flushed(sys.stdout):
        status = status or 120  # as Python
    _flushed(sys.stderr)
    end_as(-signal.SIGINT if interrupted else status)  # a waiting process must see the signal: Python ends in the same way


def end_as(status: int) -> NoReturn:
    """End this process as another one has ended, at once. ``status``: its exit status, negative for a signal."""
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _status_of(error: SystemExit) -> int:
    """Return the exit status; print a code that is not a number."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> int:
    """Show the exception that has ended the program. Returns the exit status."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as other:
        return _status_of(other)
    except BaseException:
        with contextlib.suppress(Exception):
            print("Error in sys.excepthook:", file=sys.stderr)
            traceback.print_exc()
            print("\nOriginal exception was:", file=sys.stderr)
            traceback.print_exception(error)
    return 1


def _ignore_errors(do: Callable[[], object]) -> None:
    """Call ``do``; print an exception and go on, since the process ends in any case."""
    try:
        do()
    except BaseException:
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _clear_script() -> None:
    """Free the objects that only the script holds, which flushes its files, and flush the files that other objects hold."""
    threading.excepthook = lambda _: None  # daemon threads fail from here on; at a normal exit they would have been stopped
    sys.last_type = sys.last_value = sys.last_traceback = None
    names = vars(sys.modules["__main__"])
    for name in [name for name in names if not name.startswith("__")]:
        names[name] = None
    gc.collect()  # collects only objects younger than the fork: the parent's are frozen
    files = [found for found in gc.get_objects() if issubclass(type(found), io.IOBase) and found not in (sys.stdout, sys.stderr)]
    for file in files:
        _flushed(file)


def _flushed(file: io.IOBase | IO[Any] | None) -> bool:
    """Flush a file's buffer. Returns False if that fails."""
    try:
        if file is not None and not file.closed:
            file.flush()
    except (OSError, ValueError):
        return False
    return True
