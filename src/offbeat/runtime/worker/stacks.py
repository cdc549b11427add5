"""Print the Python stacks of a hanging worker to its stderr when the supervisor asks for them by a signal.

`faulthandler` prints from the signal handler itself, so it works while a thread holds the GIL. The signal is a real-time signal, which
scripts rarely use; SIGUSR1 and SIGUSR2 stay free for them.
"""

from __future__ import annotations

import faulthandler
import signal
from contextlib import suppress
from typing import Final

from offbeat.runtime.job.notices import REAL_TIME, catches, process_status

NUMBER: Final = REAL_TIME + 5
"""The number of the signal, SIGRTMIN+5, 39 on Linux."""
STDERR = 2


def register() -> None:
    """Print the stacks of all threads to stderr whenever the signal comes, unless the script handles the signal itself."""
    if signal.getsignal(NUMBER) is signal.SIG_DFL:
        with suppress(OSError, RuntimeError, ValueError):  # stderr is closed: there is nowhere to print
            faulthandler.register(NUMBER, file=STDERR, all_threads=True)


def why_silent(pid: int) -> str | None:
    """Return the reason for which a process cannot print its stacks, and must not get the signal, which would end it; None: it can."""
    fields = process_status(pid)
    if fields.get("State", "").startswith(("T", "t")):
        return "the process is stopped (SIGSTOP)"
    if not catches(pid, NUMBER):
        return "the process has not imported offbeat yet"
    return None
