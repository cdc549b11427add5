"""Read the limits of this process from the files of Linux: control groups of both versions, memory, /dev/shm, open files."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from offbeat.doctor.readings import Folder, Limits

ROOT: Final = Path("/")
_UNLIMITED: Final = 1 << 60
"""Version 1 writes the greatest multiple of a page in place of "no limit"."""


def limits(root: Path = ROOT) -> Limits:
    """Return what the control groups of this process, and those around them, leave of the machine.

    Args:
        root: the folder that has ``proc`` and ``sys``.
    """
    groups = dict(_groups(root))
    mounted = root / "sys" / "fs" / "cgroup"
    quotas: list[float] = []
    sizes: list[tuple[int, int | None]] = []
    seen = None
    unified = mounted if (mounted / "cgroup.controllers").exists() else mounted / "unified"
    for folder in _upwards(unified, groups.get("", "/")):
        if (found := _words(folder / "cpu.max")) and len(found) == 2 and all(map(str.isdecimal, found)):
            quotas.append(int(found[0]) / max(1, int(found[1])))
        if (found := _words(folder / "memory.max")) and found[0].isdecimal():
            sizes.append((int(found[0]), _used(folder, "memory.current", "inactive_file")))
        seen = 2
    for folder in _upwards(_controller(mounted, "cpu"), groups.get("cpu", "/")):
        quota, period = _words(folder / "cpu.cfs_quota_us"), _words(folder / "cpu.cfs_period_us")
        if quota and period and quota[0].isdecimal() and period[0].isdecimal():
            quotas.append(int(quota[0]) / max(1, int(period[0])))
        seen = 1
    for folder in _upwards(_controller(mounted, "memory"), groups.get("memory", "/")):
        if (found := _words(folder / "memory.limit_in_bytes")) and found[0].isdecimal() and int(found[0]) < _UNLIMITED:
            sizes.append((int(found[0]), _used(folder, "memory.usage_in_bytes", "total_inactive_file")))
        seen = 1
    size, used = min(sizes, key=lambda one: one[0] - (one[1] or 0), default=(None, None))
    return Limits(cpus=min(quotas, default=None), memory_nbytes=size, used_nbytes=used, version=seen)


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the groups of this process by controller; "" is that of version 2."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            _, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            yield from ((name, path) for name in names.split(","))


def _controller(mounted: Path, name: str) -> Path:
    """Return where the controller of version 1 is mounted, perhaps together with others ("cpu,cpuacct")."""
    with contextlib.suppress(OSError):
        for folder in sorted(mounted.iterdir()):
            if name in folder.name.split(","):
                return folder
    return mounted / name


def _upwards(mounted: Path, group: str) -> list[Path]:
    """Return the folders of a group and of those around it, the innermost first. In a container its path may be that of the host."""
    if not mounted.is_dir():
        return []
    inside = mounted / group.lstrip("/")
    if ".." in inside.parts or not inside.is_dir():
        return [mounted]
    return [inside, *(folder for folder in inside.parents if folder.is_relative_to(mounted))]


def _used(folder: Path, name: str, dropped: str) -> int | None:
    """Return the memory in use that the kernel cannot get back by dropping pages of files."""
    used = _words(folder / name)
    if not used or not used[0].isdecimal():
        return None
    stat = _words(folder / "memory.stat")
    pairs = dict(zip(stat[::2], stat[1::2], strict=False))
    return max(0, int(used[0]) - int(pairs.get(dropped, "0")))


def _words(path: Path) -> list[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().split()
    return []


def memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return the machine's memory, and how much of it is available without swapping, in bytes."""
    found = _words(root / "proc" / "meminfo")
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
