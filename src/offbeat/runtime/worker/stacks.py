"""The Python stacks of a worker that hangs, printed to its stderr when the supervisor asks for them by a signal.

`faulthandler` prints from the signal handler itself, so it works while a thread holds the GIL. The signal is a real-time one, which scripts
leave alone; SIGUSR1 and SIGUSR2 stay theirs.
"""

from __future__ import annotations

import faulthandler
import signal
from contextlib import suppress
from pathlib import Path

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
    fields = _status(pid)
    if fields.get("State", "").startswith(("T", "t")):
        return "the process is stopped (SIGSTOP)"
    if not int(fields.get("SigCgt", "0"), 16) >> (NUMBER - 1) & 1:
        return "the process has not imported offbeat yet"
    return None


def _status(pid: int) -> dict[str, str]:
    """The fields of ``/proc/PID/status``; none if it cannot be read."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}
