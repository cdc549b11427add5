"""Bound the time that peers without the token may take of the thread that polls."""

from __future__ import annotations

SHARE = 0.25
"""Most of the time that strangers take, in the long run."""
BURST_S = 0.05
"""What they may take at once, such as for the handshakes of a job that begins."""
SLICE_S = 0.005
"""What they may take in one turn, in which others wait."""


class TimeShare:
    """Seconds that may be spent, which come back at the rate `SHARE`, up to `BURST_S`.

    >>> share = TimeShare(now=0.0)
    >>> share.left(0.0), share.next_at(0.0)
    (0.05, 0.0)
    >>> share.spend(0.06, now=0.06)
    >>> share.left(0.06) < 0.0, share.next_at(0.06) > 0.06
    (True, True)
    """

    def __init__(self, now: float) -> None:
        self._left, self._at = BURST_S, now

    def left(self, now: float) -> float:
        """Return how many seconds may be spent now; negative: more than these have been."""
        self._left = min(BURST_S, self._left + SHARE * max(0.0, now - self._at))
        self._at = now
        return self._left

    def spend(self, seconds: float, now: float) -> None:
        """Note that so many seconds have been spent."""
        self._left = self.left(now) - seconds

    def next_at(self, now: float) -> float:
        """Return when to go on: now if there is something left, otherwise when a slice has come back."""
        left = self.left(now)
        return now if left > 0.0 else now + (SLICE_S - left) / SHARE
