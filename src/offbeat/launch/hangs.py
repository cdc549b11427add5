"""How long the supervisor has patience with a process that hangs, and what it says of it.

A worker hangs if it was declared dead and is not heard of again within one more timeout, if its script makes no progress, or if its process
never says hello. A server hangs if it does not report. All of it is counted in seconds that the supervisor itself has lived: if it was
stopped (SIGSTOP, a suspended machine), nobody else is to blame for the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.types import Seconds

LOOK_S: Seconds = 1.0
"""What a look at the clock counts for at most: the supervisor looks several times a second while it runs."""
STACKS_S: Seconds = 0.5
"""How long a process has to print its stacks before it is killed."""
SERVER_TIMEOUTS = 6
"""A server that has not reported for so many timeouts, and at least `SERVER_S`, is taken for frozen."""
SERVER_S: Seconds = 10.0
LOADING_S: Seconds = 120.0
"""How long a server may take to start, and to import what it needs, without a report."""


class LivedClock:
    """Seconds that this process has lived while somebody looked at the clock.

    Args:
        clock: seconds, monotonic.

    >>> times = iter([10.0, 10.5, 99.0])
    >>> lived = LivedClock(lambda: next(times))
    >>> lived.now(), lived.now()
    (0.5, 1.5)
    """

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock, self._looked_at, self._lived = clock, clock(), 0.0

    def now(self) -> Seconds:
        """Seconds lived so far; to be called at least every `LOOK_S`."""
        before, self._looked_at = self._looked_at, self._clock()
        self._lived += min(LOOK_S, self._looked_at - before)
        return self._lived


@dataclass(slots=True)
class ProcessStanding:
    """How one process of a worker stands, by its start and by what server 0 says.

    Args:
        started: when the process was started.
    """

    started: Seconds
    came: bool = False
    """It has said hello."""
    dead_since: Seconds | None = None
    dead_because: str = ""
    stuck_s: Seconds = 0.0
    """For how long its script has neither called the library nor waited in it, by its heartbeat."""
    doomed: str | None = None
    """Why it is to be killed."""
    kill_at: Seconds = 0.0

    def heard(self, header: Mapping[str, Any], now: Seconds) -> None:
        """Server 0 says how the process stands."""
        self.came = True
        match header["standing"]:
            case "dead":
                if self.dead_since is None:
                    self.dead_since, self.dead_because = now, header["reason"]
            case "alive" | "recovered" | "finished":
                self.dead_since = None
            case "stuck":
                self.stuck_s = header["seconds"]

    def hung(self, now: Seconds, timeout_s: Seconds, progress_timeout_s: Seconds) -> str | None:
        """Why the process is to be killed, in words that follow its name; None: it is not.

        Args:
            now: by the supervisor's `LivedClock`.
            timeout_s: silence after which a worker is dead, and more of it after which its process is killed.
            progress_timeout_s: how long a script may go without progress, or a process without its hello; 0: for ever.
        """
        if self.dead_since is not None and now - self.dead_since >= timeout_s:
            return f"was declared dead ({self.dead_because}), and was not heard of again for {timeout_s:g} s"
        if 0.0 < progress_timeout_s <= self.stuck_s:
            return f"has made no progress for {self.stuck_s:.1f} s: its script neither calls offbeat nor waits in it (--progress-timeout)"
        if not self.came and 0.0 < progress_timeout_s <= now - self.started:
            return f"has made no offbeat.DistributedOptimizer within {progress_timeout_s:g} s of its start (--progress-timeout)"
        return None


class ServerWatch:
    """When each server has last reported.

    Args:
        timeout_s: the job's.
    """

    def __init__(self, timeout_s: Seconds) -> None:
        self._patience_s = max(SERVER_S, SERVER_TIMEOUTS * timeout_s)
        self._due: dict[int, tuple[Seconds, Seconds]] = {}
        """By server: when it last reported, and how long it may be silent from then on."""

    def heard(self, number: int, now: Seconds, *, loading: bool = False) -> None:
        """A server has reported; ``loading``: it is about to import, or was just started, and will report again after that."""
        self._due[number] = now, LOADING_S if loading else self._patience_s

    def loading(self, number: int) -> bool:
        """Whether a server starts, or imports something, and does not listen meanwhile."""
        return self._due[number][1] == LOADING_S

    def frozen(self, now: Seconds) -> str | None:
        """The sentence with which the job ends, if a server does not report; None: all do."""
        for number, (heard, patience_s) in sorted(self._due.items()):
            if now - heard >= patience_s:
                what = "the coordinator" if number == 0 else "its part of the parameters"
                return f"server {number} has not reported for {now - heard:.0f} s: its process is stopped or hangs, and {what} with it"
        return None
