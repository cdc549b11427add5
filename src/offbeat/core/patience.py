"""Learn how long a worker may be silent before it counts as dead, from the intervals between its signs of life.

Update rule, once the worker has been observed for ``OBSERVED * cap`` seconds, and the cap before::

    patience = min(cap, max(floor, FACTOR * longest interval))        floor = max(FLOOR_S, FLOOR * cap)

A worker sends a sign of life ten times in the cap, from a thread of its own. So a frozen one is found dead in less than half of the cap.
One that has paused for long, because some call held Python's lock, keeps more patience: a mistake is not made twice.

The idea of a timeout that grows after each mistake is that of Chandra and Toueg, Unreliable Failure Detectors for Reliable Distributed
Systems, Journal of the ACM 1996. Here it grows to a multiple of the interval that was seen, and at most to the cap. Nothing is forgotten,
since pauses may come once in an epoch, and thousands of short intervals between them.
"""

from __future__ import annotations

from typing import Final

from offbeat.types import Seconds

OBSERVED: Final = 3.0
FACTOR: Final = 4.0
FLOOR: Final = 0.4
"""Share of the cap: four signs of life that have not come."""
FLOOR_S: Final = 2.0
"""A machine with more processes than cores may leave one of them standing for that long."""


class Patience:
    """The patience with one worker.

    Args:
        cap_s: most seconds; what the user sets.

    >>> patience = Patience(10.0)
    >>> for _ in range(30):
    ...     patience.interval(1.01)
    >>> patience.seconds
    4.04
    >>> patience.interval(2.2)
    >>> patience.seconds
    8.8
    """

    __slots__ = ("_cap_s", "_longest_s", "_observed_s", "seconds")

    def __init__(self, cap_s: Seconds) -> None:
        self._cap_s, self._observed_s, self._longest_s = cap_s, 0.0, 0.0
        self.seconds: Seconds = cap_s
        """How long the worker may be silent."""

    def interval(self, seconds: Seconds) -> None:
        """Note that a sign of life has come so many seconds after the one before."""
        self._observed_s += seconds
        self._longest_s = max(self._longest_s, seconds)
        if self._observed_s >= OBSERVED * self._cap_s:
            self.seconds = min(self._cap_s, max(FLOOR_S, FLOOR * self._cap_s, FACTOR * self._longest_s))
