"""Say when to try again what has failed: a lack of descriptors or memory may pass."""

from __future__ import annotations

from offbeat.types import Seconds

FIRST_S: Seconds = 1.0
LONGEST_S: Seconds = 30.0
"""Between two attempts; each pause is twice as long as the one before."""
GIVE_UP_S: Seconds = 60.0
"""How long a start is tried that nothing else in the job waits for."""


class Backoff:
    """Say when to try again what has failed.

    >>> backoff = Backoff()
    >>> [backoff.failed(now) for now in (10.0, 11.0, 13.0)], backoff.due(16.9), backoff.due(17.0)
    ([1.0, 2.0, 4.0], False, True)
    """

    def __init__(self) -> None:
        self._failures = 0
        self._due: Seconds = 0.0
        self._first: Seconds | None = None

    def failed(self, now: Seconds) -> Seconds:
        """Note a failure. Returns the seconds until the next attempt."""
        pause_s = min(LONGEST_S, FIRST_S * 2.0**self._failures)
        self._failures += 1
        self._due = now + pause_s
        self._first = now if self._first is None else self._first
        return pause_s

    def due(self, now: Seconds) -> bool:
        """Return True if the next attempt is due."""
        return now >= self._due

    def hopeless(self, now: Seconds) -> bool:
        """Return True if attempts have failed for `GIVE_UP_S`."""
        return self._first is not None and now - self._first >= GIVE_UP_S

    @property
    def failing(self) -> bool:
        """True after a failure."""
        return self._failures > 0
