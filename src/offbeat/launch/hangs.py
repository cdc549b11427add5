"""Detect that a worker's process hangs and must be killed, with the reason to report. (For servers see ``core/fleet.py``.)

A process hangs if its worker was declared dead and stays silent for another timeout, if its script makes no progress, if it never says
hello, or if it does not end after its goodbye. Time counts only while the supervisor runs: after a stop of the supervisor (SIGSTOP, a
suspended machine), other processes must not be blamed for silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.types import Seconds

LOOK_S: Seconds = 1.0
"""Most seconds that count between two readings of the clock, which a running supervisor reads several times a second."""
STACKS_S: Seconds = 0.5
"""Seconds that a process has to print its stacks before it is killed."""


class LivedClock:
    """Count the seconds during which this process was running.

    Args:
            clock: returns monotonic seconds.

    >>> times = iter([10.0, 10.5, 99.0])
    >>> lived = LivedClock(lambda: next(times))
    >>> lived.now(), lived.now()
    (0.5, 1.5)
    """

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock, self._looked_at, self._lived = clock, clock(), 0.0

    def now(self) -> Seconds:
        """Return the seconds so far. To be called at least every `LOOK_S` seconds."""
        before, self._looked_at = self._looked_at, self._clock()
        self._lived += min(LOOK_S, self._looked_at - before)
        return self._lived


@dataclass(slots=True)
class ProcessStanding:
    """Keep the state of one worker's process: its start, and the reports of server 0.

    Args:
        started: when the process was started, by the supervisor's `LivedClock`, as all times here.
    """

    started: Seconds
    said_hello: bool = False
    """True once server 0 has reported its hello."""
    dead_since: Seconds | None = None
    dead_because: str = ""
    stuck_s: Seconds = 0.0
    """Seconds for which its script has neither called the library nor waited in it, by its heartbeat."""
    exits_since: Seconds | None = None
    """When it said goodbye because its process ends; None: it has not."""
    early: bool = False
    """True if its script had seen an order to leave when it said goodbye."""
    told_at: Seconds | None = None
    """When it reported that a signal asks it to end; None: it has not."""
    ordered: bool = False
    """True once it was ordered to leave."""
    kill_reason: str | None = None
    """The reason for which it is being killed; None: it is not."""
    kill_at: Seconds = 0.0

    def heard(self, header: Mapping[str, Any], now: Seconds) -> None:
        """Update the state from a report of server 0."""
        self.said_hello = True
        match header["standing"]:
            case "dead":
                if self.dead_since is None:
                    self.dead_since, self.dead_because = now, header["reason"]
            case "alive" | "recovered" | "finished":
                self.dead_since = None
                self.exits_since, self.early = now if header.get("exits", False) else None, header.get("early", False)
            case "stuck":
                self.stuck_s = header["seconds"]
            case "told" if self.told_at is None:
                self.told_at = now

    def was_done(self, status: int) -> bool:
        """Return True if it said goodbye before a signal ended it (a crash in a library, or a kill): its work was done."""
        return self.exits_since is not None and status < 0

    def hung(self, now: Seconds, timeout_s: Seconds, progress_timeout_s: Seconds, exit_s: Seconds = float("inf")) -> str | None:
        """Return the reason for which the process must be killed, in words that follow its name; None: it need not be.

        Args:
            now: time by the supervisor's `LivedClock`.
            timeout_s: seconds of silence after which a worker is dead, and further seconds after which its process is killed.
            progress_timeout_s: seconds that a script may go without progress, or a process without its hello; 0: no limit.
            exit_s: seconds that a process may take to end after its goodbye.
        """
        if self.exits_since is not None and now - self.exits_since >= exit_s:
            return f"has said goodbye, and its process has not ended for another {exit_s:g} s (see --grace)"
        if self.dead_since is not None and now - self.dead_since >= timeout_s:
            return f"was declared dead ({self.dead_because}), and nothing came from it for another {timeout_s:g} s"
        if 0.0 < progress_timeout_s <= self.stuck_s:
            return f"has made no progress for {self.stuck_s:.1f} s: its script neither calls offbeat nor waits in it (--progress-timeout)"
        if not self.said_hello and 0.0 < progress_timeout_s <= now - self.started:
            return f"has made no offbeat.DistributedOptimizer within {progress_timeout_s:g} s of its start (--progress-timeout)"
        return None
