"""Keep a ``DataLoader``'s processes alive when a cluster signals all processes of a job: the script would fail if they ended.

They end with their loader, as usual, or with their parent. Other child processes of the script are not changed.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable

from torch.utils.data._utils import signal_handling

from offbeat.runtime.job.notices import NOTICES, sit_out

HOOK = "_set_worker_signal_handlers"
"""The PyTorch function that a loader's process calls first, to set signal handlers in C."""
_set_handlers: Callable[[], None] | None = getattr(signal_handling, HOOK, None)


def guard_loaders() -> None:
    """Let loader processes forked from now on ignore notices and Ctrl-C, unless their parent sends the signal."""
    if _set_handlers is not None:
        setattr(signal_handling, HOOK, _guarded)


def is_loaders_fork() -> bool:
    """Return True in a process that a loader has just forked and that has not reached the loader's own function."""
    return any(frame.f_globals.get("__name__") == "torch.utils.data.dataloader" for frame, _ in traceback.walk_stack(None))


def _guarded() -> None:
    """Set the signal handlers of a loader's process. Replaces PyTorch's `HOOK`."""
    assert _set_handlers is not None
    _set_handlers()
    sit_out()
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)  # sigwaitinfo returns the sender; a Python handler does not get it
    threading.Thread(target=_wait_for_parent, name="offbeat-notices", daemon=True).start()


def _wait_for_parent() -> None:
    while signal.sigwaitinfo(NOTICES).si_pid != os.getppid():
        pass
    os._exit(0)
