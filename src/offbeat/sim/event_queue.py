"""The event queue of a simulation, which is also its virtual clock: the time jumps from one entry to the next.

Entries are ordered by (time, priority, serial), as in SimPy, so that entries of one instant run in the same order in every run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final, TypeAlias

from offbeat.types import Seconds

Action: TypeAlias = Callable[[int], None]
"""Called with the serial number of its entry. An action compares this number with the latest one it expects, and ignores older entries."""

FAULT: Final = -2
"""A fault takes effect before all other entries of its instant."""
MEASURED: Final = -1
"""A server completes its own fold before it handles its next message."""
MESSAGE: Final = 0
WAKE: Final = 1
"""Timers of the coordinator run after the messages of their instant."""
SHARE: Final = 2
"""Links are shared anew once everything that begins or ends at an instant is known."""


class EventQueue:
    """A heap of entries, and the current time.

    >>> queue, ran = EventQueue(), []
    >>> _ = queue.at(2.0, lambda _: ran.append("second")), queue.at(1.0, lambda _: ran.append("first"))
    >>> while queue.step(until=10.0):
    ...     pass
    >>> ran, queue.now
    (['first', 'second'], 2.0)
    """

    __slots__ = ("_heap", "_serial", "now")

    def __init__(self) -> None:
        self._heap: list[tuple[Seconds, int, int, Action]] = []
        self._serial = 0
        self.now: Seconds = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: Seconds, action: Action, priority: int = MESSAGE) -> int:
        """Put an action into the queue and return the serial number with which it will be called.

        Args:
            time: seconds since the job began, not before `now`.
            action: called then. Entries cannot be removed: an action whose entry is obsolete must ignore the call.
            priority: entries of one time run by ascending priority, then in the order in which they were added.
        """
        self._serial += 1
        heapq.heappush(self._heap, (time, priority, self._serial, action))
        return self._serial

    def step(self, until: Seconds) -> bool:
        """Run the next entry and return True; return False if none is due before or at ``until``."""
        if not self._heap or self._heap[0][0] > until:
            return False
        self.now, _, serial, action = heapq.heappop(self._heap)
        action(serial)
        return True
