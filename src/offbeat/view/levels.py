"""Keep a figure over time in bounded memory: the last minutes by the second, and the whole job in levels of least, mean and most. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

from offbeat.types import Seconds

RECENT: Final = 300
"""The number of newest samples that are kept one by one."""
PARTS: Final = 300
"""In how many parts the job's time is divided at most; a part becomes twice as long whenever there would be more."""


class _Part(NamedTuple):
    least: float
    total: float
    most: float
    values: int

    def with_(self, other: _Part) -> _Part:
        return _Part(min(self.least, other.least), self.total + other.total, max(self.most, other.most), self.values + other.values)


class Levels:
    """One figure of a job.

    >>> levels = Levels()
    >>> for t in range(1000):
    ...     levels.add(t, float(t % 10))
    >>> plain = levels.plain()
    >>> len(levels.recent), levels.width, plain["t"][1], plain["least"][1], plain["mean"][1], plain["most"][1]
    (300, 4.0, 6.0, 4.0, 5.5, 7.0)
    """

    def __init__(self) -> None:
        self.recent: deque[tuple[Seconds, float]] = deque(maxlen=RECENT)
        self.width: Seconds = 1.0
        """How long a part is."""
        self._parts: dict[int, _Part] = {}

    def add(self, t: Seconds, value: float) -> None:
        """Take the figure's value at a time, which is at least the time of the value before."""
        self.recent.append((t, value))
        while int(t / self.width) >= PARTS:
            self.width *= 2.0
            halves, self._parts = self._parts, {}
            for at, part in halves.items():
                self._put(at // 2, part)
        self._put(int(t / self.width), _Part(value, value, value, 1))

    def _put(self, at: int, part: _Part) -> None:
        self._parts[at] = self._parts[at].with_(part) if at in self._parts else part

    def plain(self) -> dict[str, Any]:
        """Return the whole job, as JSON can carry it: the middle of each part that has a value, and its values."""
        parts = sorted(self._parts.items())
        return {
            "width": self.width,
            "t": [(at + 0.5) * self.width for at, _ in parts],
            "least": [part.least for _, part in parts],
            "mean": [part.total / part.values for _, part in parts],
            "most": [part.most for _, part in parts],
        }
