"""Read what the operating system has done to this process: taken its processor away, stolen time, reclaimed memory, throttled it.

If a process uses far less processor time than wall time while it computes, it has a neighbour, sleeps, or reads. These readings show which.
Each is a counter that only grows; an account has its growth since the last account. A reading that this system lacks is left out.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from offbeat.runtime.job.control_groups import UNIFIED, folders, processors
from offbeat.types import Seconds

OFTEN_S: Final[Seconds] = 0.25
"""Seconds between two readings of the files about the whole host, which are longer and change slowly."""
GAUGES_S: Final[Seconds] = 1.0
PROC = Path("/proc")

Reader = Callable[[], float]


class HostReadings:
    """Read the counters of this process and its host.

    Args:
        own: counters of the process, by name; read each time.
        host: counters of the host and of the process's cgroup, by name; read every `OFTEN_S` seconds.
        facts: values that do not change, by name; only the first account has them.
        clock: returns the time in seconds.

    >>> counts = iter([10.0, 12.0, 12.0]).__next__
    >>> readings = HostReadings({"preempted": counts}, {}, clock=lambda: 0.0)
    >>> readings.take(), readings.take()
    ({'preempted': 2.0}, None)
    """

    def __init__(
        self,
        own: Mapping[str, Reader],
        host: Mapping[str, Reader],
        facts: Mapping[str, float] = {},
        clock: Callable[[], Seconds] = time.monotonic,
    ) -> None:
        self._facts = dict(facts)
        self._clock = clock
        self._own, self._host = _there(own), _there(host)
        self._next = clock() + OFTEN_S
        self._gauges: Mapping[str, Reader] = {}
        self._next_gauges = 0.0

    @classmethod
    def of_process(cls) -> HostReadings:
        """Return an object with the readings of the calling process."""
        usage = partial(resource.getrusage, resource.RUSAGE_SELF)
        own: dict[str, Reader] = {
            "preempted": lambda: float(usage().ru_nivcsw),
            "major_faults": lambda: float(usage().ru_majflt),
            "queued_s": _File(PROC / "self/schedstat", lambda text: int(text.split()[1]) * 1e-9),
        }
        group = next(iter(folders(UNIFIED)), Path("/sys/fs/cgroup"))
        cores = float(len(os.sched_getaffinity(0)))
        host: dict[str, Reader] = {
            "stolen_s": _File(PROC / "stat", lambda text: int(text.split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")),
            "memory_stalled_s": _File(_first(group / "memory.pressure", PROC / "pressure/memory"), _pressure),
            "throttled_s": _File(group / "cpu.stat", _throttled),
            "children_s": _Children(),
        }
        return cls(own, host, {"cores": min(cores, processors() or cores)})

    def follow(self, gauges: Mapping[str, Reader]) -> None:
        """Read these values too, every `GAUGES_S` seconds; accounts have the values themselves and not their growth."""
        self._gauges = gauges

    def take(self) -> dict[str, float] | None:
        """Return the growth of each counter since the last call, and the gauges that were due; None: there are neither."""
        grown, self._facts = self._facts | _grown(self._own), {}
        if (now := self._clock()) >= self._next:
            self._next = now + OFTEN_S
            grown |= _grown(self._host)
        if self._gauges and now >= self._next_gauges:
            self._next_gauges = now + GAUGES_S
            for name, reader in self._gauges.items():
                with suppress(OSError):
                    grown[name] = reader()
        return grown or None


def _there(readers: Mapping[str, Reader]) -> dict[str, tuple[Reader, float]]:
    """Return the readers that work on this system, each with its first value."""
    found = {}
    for name, reader in readers.items():
        with suppress(OSError, ValueError, IndexError):
            found[name] = reader, reader()
    return found


def _grown(readers: dict[str, tuple[Reader, float]]) -> dict[str, float]:
    grown = {}
    for name, (reader, before) in readers.items():
        with suppress(OSError, ValueError, IndexError):
            now = reader()
            if now != before:
                readers[name] = reader, now
                grown[name] = round(now - before, 6)
    return grown


class _File:
    """Read a number from a small file of the kernel, which stays open.

    Args:
        path: the file's path.
        number: finds the number in the file's text.
    """

    def __init__(self, path: Path, number: Callable[[str], float]) -> None:
        self._path, self._number = path, number
        self._open: int | None = None

    def __call__(self) -> float:
        if self._open is None:
            self._open = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        return self._number(os.pread(self._open, 4096, 0).decode("ascii", "replace"))


class _Children:
    """Read the processor seconds of this process's descendants, such as the processes of a ``DataLoader``."""

    def __init__(self) -> None:
        self._seconds: dict[int, Seconds] = {}
        """By process: its processor seconds when it was last read. An ended process keeps its entry, so that the sum never falls."""

    def __call__(self) -> float:
        found = [os.getpid()]
        for parent in found:
            with suppress(OSError):  # the process has ended
                found += map(int, (PROC / f"{parent}/task/{parent}/children").read_text().split())
        for child in found[1:]:
            with suppress(OSError):
                self._seconds[child] = int((PROC / f"{child}/schedstat").read_text().split(maxsplit=1)[0]) * 1e-9
        return sum(self._seconds.values())


def _first(*paths: Path) -> Path:
    return next((path for path in paths if path.exists()), paths[-1])


def _pressure(text: str) -> float:
    """Return the seconds for which some task has waited for memory, from the text of a pressure stall file."""
    return int(text.split("total=", 1)[1].split(maxsplit=1)[0]) * 1e-6


def _throttled(text: str) -> float:
    """Return the seconds for which a cgroup had used up its share of the processors, from the text of ``cpu.stat``."""
    return int(text.split("throttled_usec", 1)[1].split(maxsplit=1)[0]) * 1e-6
