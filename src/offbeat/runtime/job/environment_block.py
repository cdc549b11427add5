"""Erase a variable from the memory in which a process has got its environment, which ``ps e`` and ``/proc/<pid>/environ`` show.

``os.environ.pop`` changes what this process and its new children see, but not that memory, which forks of this process inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

_START, _STOP = 50 - 3, 51 - 3
"""Places of ``env_start`` and ``env_end`` in ``/proc/self/stat`` (proc(5)), after the name of the program, which is the second field."""


def erase(name: str) -> bool:
    """Overwrite a variable's value with dashes, after the variable was removed from ``os.environ``.

    Returns:
        True if the variable was there. Always False where there is no ``/proc``.
    """
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, stop = int(fields[_START]), int(fields[_STOP])
        if 0 < start < stop:  # 0: the kernel does not say
            return _overwrite(start, ctypes.string_at(start, stop - start), name.encode() + b"=")
    return False


def _overwrite(start: int, block: bytes, key: bytes) -> bool:
    found, at = False, 0
    for variable in block.split(b"\0"):
        if variable.startswith(key):
            ctypes.memset(start + at + len(key), ord("-"), len(variable) - len(key))
            found = True
        at += len(variable) + 1
    return found
