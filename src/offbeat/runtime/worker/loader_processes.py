"""Keep the processes of a ``DataLoader`` alive when a cluster signals all processes of a job: their end would be an error in the script.

They end with the loader, as always, and with their parent. Of processes that the script makes in another way nothing is changed.
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
"""PyTorch's function that a loader's process calls first, to set handlers in C."""
_set_handlers: Callable[[], None] | None = getattr(signal_handling, HOOK, None)


def guard_loaders() -> None:
    """Let the loaders' processes that this process forks from now on ignore notices and Ctrl-C, unless their parent sends them."""
    if hasattr(signal, "sigwaitinfo") and _set_handlers is not None:
        setattr(signal_handling, HOOK, _guarded)


def is_loaders_fork() -> bool:
    """Return True in a process that a loader has just forked, and that has not come to its own function yet."""
    return any(frame.f_globals.get("__name__") == "torch.utils.data.dataloader" for frame, _ in traceback.walk_stack(None))


def _guarded() -> None:
    """Set the handlers of a loader's process."""
    assert _set_handlers is not None
    _set_handlers()
    sit_out()
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)  # a handler in Python would not learn who has sent the signal
    threading.Thread(target=_wait_for_parent, name="offbeat-notices", daemon=True).start()


def _wait_for_parent() -> None:
    while signal.sigwaitinfo(NOTICES).si_pid != os.getppid():
        pass
    os._exit(0)
