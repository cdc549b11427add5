"""Sample the processor time of the processes that a benchmark has started, by role: what a step costs, beside how long it takes.

Workers of `step_worker.py` note when each part of their run began and ended; the times are of the monotonic clock, which all processes of a
machine share.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from types import TracebackType

import psutil

PERIOD_S = 0.05
SAMPLES_PER_SEARCH = 20
ROLES: dict[str, Callable[[str], bool]] = {
    "workers": lambda shown: shown.startswith("ob-worker-") or ("step_worker.py" in shown and "offbeat.cli" not in shown),
    "servers": lambda shown: shown.startswith(("ob-server-", "ob-standby-")) or "offbeat.runtime.server" in shown,
}
"""What a process is, by its name, which forks have, and its command line. Agents and forkservers are idle beside their workers."""


class ProcessorTime:
    """Sample while the block runs.

    >>> with ProcessorTime() as cost:
    ...     pass
    >>> cost.seconds("servers", 0.0, 1.0)
    0.0
    """

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """By role: times, and the processor seconds of all its processes until then."""
        self._seen: dict[int, tuple[str, psutil.Process]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_all, daemon=True)

    def __enter__(self) -> ProcessorTime:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def seconds(self, role: str, began: float, ended: float) -> float:
        """Return the processor seconds, user and system, of all processes of this role between two times, monotonic."""
        return self._until(role, ended) - self._until(role, began)

    def _until(self, role: str, at: float) -> float:
        samples = self._samples[role]
        place = bisect_left(samples, (at, 0.0))
        return samples[min(place, len(samples) - 1)][1] if samples else 0.0

    def _sample_all(self) -> None:
        for number in count():
            if self._over.wait(PERIOD_S):
                return
            if number % SAMPLES_PER_SEARCH == 0:
                self._find()
            totals = dict.fromkeys(ROLES, 0.0)
            for pid, (role, process) in list(self._seen.items()):
                try:
                    times = process.cpu_times()
                except psutil.Error:
                    del self._seen[pid]
                    continue
                totals[role] += times.user + times.system
            now = time.monotonic()
            for role, total in totals.items():
                self._samples[role].append((now, total))

    def _find(self) -> None:
        for process in psutil.Process().children(recursive=True):
            if process.pid in self._seen:
                continue
            try:
                shown = " ".join([process.name(), *process.cmdline()])
            except psutil.Error:
                continue
            for role, matches in ROLES.items():
                if matches(shown):
                    self._seen[process.pid] = role, process
