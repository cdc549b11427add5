"""The Python stacks of a worker that hangs, printed to its stderr when the supervisor asks for them by a signal.

`faulthandler` prints from the signal handler itself, so it works while a thread holds the GIL. The signal is a real-time one, which scripts
leave alone; SIGUSR1 and SIGUSR2 stay theirs.
"""

from __future__ import annotations

import faulthandler
import signal
from contextlib import suppress

from offbeat.runtime.job.notices import catches, process_status

NUMBER: int | None = int(signal.SIGRTMIN) + 5 if hasattr(signal, "SIGRTMIN") else None
"""The signal: SIGRTMIN+5, 39 on Linux. None where there are no real-time signals: stacks cannot be asked for."""
STDERR = 2


def register() -> None:
    """Print the stacks of all threads of this process to its stderr whenever the signal comes, unless the script handles it itself."""
    if NUMBER is not None and signal.getsignal(NUMBER) is signal.SIG_DFL:
        with suppress(OSError, RuntimeError, ValueError):  # stderr is closed: there is nowhere to print
            faulthandler.register(NUMBER, file=STDERR, all_threads=True)


def why_silent(pid: int) -> str | None:
    """Return the reason for which a process cannot print its stacks, so that the signal must not be sent; None: it can."""
    if NUMBER is None:
        return "this system has no real-time signals"
    fields = process_status(pid)
    if fields.get("State", "").startswith(("T", "t")):
        return "the process is stopped (SIGSTOP)"
    if not catches(pid, NUMBER):
        return "the process has not imported offbeat yet"
    return None
