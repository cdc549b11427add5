"""Name the signals that tell a process to leave: notices, which anybody may send, and orders, which only the job's launcher sends.

A notice to one process is a plan of the job: the process reports it, and goes on until the launcher orders it to leave. For a cluster that
takes an allocation away signals all processes of a job at once, and a process that left by itself would be missing in the last checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

NOTICES: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""SIGTERM; SIGUSR1, which Slurm sends if asked to (``--signal=USR1@120``); SIGHUP, of a closed terminal, which ``nohup`` has ignored."""
REAL_TIME: Final = int(getattr(signal, "SIGRTMIN", 34))
"""The first real-time signal. Where there are none no job runs, but a journal can be read."""
LEAVE: Final = REAL_TIME + 6
"""The order to leave after the step, SIGRTMIN+6."""
INTERRUPT: Final = REAL_TIME + 7
"""The order to raise `KeyboardInterrupt`."""


def ordered(pid: int, number: int) -> int:
    """Return the signal with which a launcher orders a process what ``number`` means, SIGTERM or SIGINT.

    A process that has not joined the job, or whose script handles the signal, gets ``number`` itself. If no descriptor is free to see which
    it is, it gets the order: for a worker ``number`` is a notice, after which it trains on, and a process without a handler ends by both.
    """
    order = {int(signal.SIGTERM): LEAVE, int(signal.SIGINT): INTERRUPT}.get(number)
    return order if order is not None and catches(pid, order, unknown=True) else number


def catches(pid: int, number: int, *, unknown: bool = False) -> bool:
    """Return True if a process has a handler for this signal, and ``unknown`` if its state cannot be read."""
    caught = process_status(pid).get("SigCgt")
    return unknown if caught is None else bool(int(caught, 16) >> (number - 1) & 1)


def process_status(pid: int) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``; none if it cannot be read."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


_before: dict[int, Any] = {}
"""What happened at each signal before `sit_out`."""


def heeded(numbers: Iterable[int]) -> list[int]:
    """Return those signals that this process does not ignore."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def sit_out() -> None:
    """Let notices and Ctrl-C pass by: somebody else decides when this process ends. A program that it starts gets the defaults back."""
    for number in heeded((*NOTICES, signal.SIGINT)):
        if (before := signal.signal(number, pass_by)) is not pass_by:
            _before[number] = before


def heed_again() -> None:
    """Undo `sit_out`, in a fork that is a process of its own."""
    while _before:
        signal.signal(*_before.popitem())


def pass_by(number: int, frame: object) -> None:
    """Do nothing."""


def ends_in_order() -> list[signal.Signals]:
    """Return the signals on which a command that starts processes ends with them in order: Ctrl-C, the notices, and a closed terminal's
    SIGHUP, unless it is ignored already, as ``nohup`` has it."""
    return [signal.SIGINT, *(number for number in NOTICES if number != signal.SIGHUP or heeded([number]))]
