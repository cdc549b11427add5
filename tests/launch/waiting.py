"""What tests of real processes wait with, and see them by."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import psutil

from offbeat.launch.engine import Child

DEADLINE_S = 30.0


def until(what: str, ready: Callable[[], object]) -> None:
    """Wait until it is so; fails with ``what`` after `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, what
        os.sched_yield()


def alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def ended(child: Child) -> int:
    """Wait until a process has ended, and return its status."""
    until("its end", lambda: child.ended() is not None)
    status = child.ended()
    assert status is not None
    return status


def output(child: Child, wait: Callable[[str, Callable[[], object]], None] = until) -> list[bytes]:
    """All that a captured process prints to stdout, and to stderr, until its end. ``wait``: serves whoever is between, meanwhile."""
    pieces: list[tuple[bool, bytes]] = []

    def over() -> bool:
        child.ended()
        pieces.extend(child.read())
        return child.drained

    wait("its end", over)
    return [b"".join(data for error, data in pieces if error == wanted) for wanted in (False, True)]


def printed(child: Child) -> list[str]:
    """All lines that a captured process prints until its end, those of stderr last."""
    return [line for data in output(child) for line in data.decode().splitlines()]
