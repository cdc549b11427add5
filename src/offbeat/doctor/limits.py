"""Read the limits of this process from the files of Linux: control groups of both versions, memory, /dev/shm, open files."""

from __future__ import annotations

import os
import resource
from itertools import pairwise
from pathlib import Path
from typing import Final

from offbeat.doctor.readings import Folder, Limits
from offbeat.runtime.job.control_groups import ROOT, UNIFIED, folders, processors, words

_FILES: Final = {
    UNIFIED: ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By controller: the files with the limit and with what is used, and the line of ``memory.stat`` with what the kernel can drop of that."""
_UNLIMITED: Final = 1 << 60
"""Version 1 writes the greatest multiple of a page in place of "no limit"."""


def limits(root: Path = ROOT) -> Limits:
    """Return what the control groups of this process, and those around them, leave of the machine.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    sizes: list[tuple[int, int | None]] = []
    for controller, (most, used, dropped) in _FILES.items():
        for folder in folders(controller, root):
            if (found := words(folder / most)) and found[0].isdecimal() and int(found[0]) < _UNLIMITED:
                sizes.append((int(found[0]), _used(folder, used, dropped)))
    size, used_nbytes = min(sizes, key=lambda one: one[0] - (one[1] or 0), default=(None, None))
    return Limits(cpus=processors(root), memory_nbytes=size, used_nbytes=used_nbytes)


def _used(folder: Path, name: str, dropped: str) -> int | None:
    """Return the memory in use that the kernel cannot get back by dropping pages of files."""
    used = words(folder / name)
    if not used or not used[0].isdecimal():
        return None
    stat = words(folder / "memory.stat")
    pairs = dict(zip(stat[::2], stat[1::2], strict=False))
    return max(0, int(used[0]) - int(pairs.get(dropped, "0")))


def memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return the machine's memory, and how much of it is available without swapping, in bytes."""
    found = words(root / "proc" / "meminfo")
    values = {name: int(value) * 1024 for name, value in pairwise(found) if name.endswith(":") and value.isdecimal()}
    return values.get("MemTotal:"), values.get("MemAvailable:")


def shm(folder: Path = Path("/dev/shm")) -> Folder | None:
    """Return the size of the folder in which PyTorch's DataLoader shares batches; None: there is no such folder."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Folder(nbytes=found.f_blocks * found.f_frsize, free_nbytes=found.f_bavail * found.f_frsize)


def affinity() -> int | None:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def open_files() -> tuple[int | None, int | None]:
    """Return how many files a process may have open, and up to which limit its user may raise this; None: any number."""
    soft, hard = (None if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard
