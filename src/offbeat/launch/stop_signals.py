"""Count the signals that tell a launcher's process to end: signals close together are one notice, a later one asks for the end at once.

An engine that cancels a job signals every process, some twice: Slurm signals all processes of a step, and an agent or torchrun passes the
same signal on. So a second signal means "at once" only if it comes after the first one had time to act.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from offbeat.types import Seconds

SAME_S: Seconds = 5.0
"""Seconds within which a further SIGTERM, which engines repeat, belongs to the same notice."""
SAME_INTERRUPT_S: Seconds = 1.0


class StopSignals:
    """Keep the first signal, and whether a later one insists.

    Args:
        clock: returns monotonic seconds.

    >>> times = iter([10.0, 10.2, 12.0])
    >>> told = StopSignals(lambda: next(times))
    >>> told.note(signal.SIGINT), told.note(signal.SIGINT), told.note(signal.SIGINT)
    (False, False, True)
    """

    def __init__(self, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._clock = clock
        self.number: int | None = None
        """The first signal; None: none has come."""
        self.insists = False
        """True once a signal has come that does not belong to the first notice."""
        self._since: Seconds = 0.0

    def note(self, number: int) -> bool:
        """Note a signal. Returns True if it asks for the end at once. For signal handlers."""
        now = self._clock()
        if self.number is None:
            self._since, self.number = now, number
        elif now - self._since >= (SAME_INTERRUPT_S if number == signal.SIGINT else SAME_S):
            self.insists = True
        return self.insists
