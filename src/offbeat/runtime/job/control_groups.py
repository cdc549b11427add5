"""Find the control groups of this process and those around them, of both versions, and the processors that they leave."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
UNIFIED: Final = ""
"""Stands for version 2 where version 1 has a controller's name."""


def folders(controller: str, root: Path = ROOT) -> list[Path]:
    """Return the folders of this process's group and of those around it, the innermost first; empty: there is no such controller.

    In a container the path of the group may be that of the host; then the folder is the one that is mounted.

    Args:
        controller: of version 1, ``cpu`` for instance; or `UNIFIED`.
        root: the folder that has ``proc`` and ``sys``.
    """
    mounted = _mounted(root / "sys" / "fs" / "cgroup", controller)
    if not mounted.is_dir():
        return []
    inside = mounted / _group(controller, root).lstrip("/")
    if ".." in inside.parts or not inside.is_dir():
        return [mounted]
    return [inside, *(folder for folder in inside.parents if folder.is_relative_to(mounted))]


def processors(root: Path = ROOT) -> float | None:
    """Return how many processors' time the groups leave; None: they set no limit."""
    quotas = [words(folder / "cpu.max") for folder in folders(UNIFIED, root)]
    quotas += [words(folder / "cpu.cfs_quota_us")[:1] + words(folder / "cpu.cfs_period_us")[:1] for folder in folders("cpu", root)]
    numbers = [[int(word) for word in found] for found in quotas if len(found) == 2 and all(map(str.isdecimal, found))]
    return min((quota / max(1, period) for quota, period in numbers), default=None)


def words(path: Path) -> list[str]:
    """Return the words of a small file; empty: it cannot be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().split()
    return []


def _mounted(groups: Path, controller: str) -> Path:
    """Return where a controller is mounted, of version 1 perhaps together with others ("cpu,cpuacct")."""
    if controller == UNIFIED:
        return groups if (groups / "cgroup.controllers").exists() else groups / "unified"
    with contextlib.suppress(OSError):
        for folder in sorted(groups.iterdir()):
            if controller in folder.name.split(","):
                return folder
    return groups / controller


def _group(controller: str, root: Path) -> str:
    """Return the group of this process for a controller."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in (root / "proc" / "self" / "cgroup").read_text().splitlines():
            _, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            if controller in names.split(","):
                return path
    return "/"
