"""Keep a series of numbers over time in bounded memory: the least, the mean and the greatest in equal parts of the time. Pure."""

from __future__ import annotations

import math

from offbeat.types import Seconds


class Series:
    """Numbers by time.

    Args:
        most: in how many parts the time is divided at most; a part becomes twice as long whenever there would be more.
        width: how long a part is at first.

    >>> series = Series(most=4, width=1.0)
    >>> for t, value in ((0.0, 1.0), (0.5, 3.0), (3.0, 5.0), (7.5, 4.0)):
    ...     series.add(t, value)
    >>> series.width, series.points()
    (2.0, [(1.0, 1.0, 2.0, 3.0), (3.0, 5.0, 5.0, 5.0), (7.0, 4.0, 4.0, 4.0)])
    """

    def __init__(self, most: int, width: Seconds) -> None:
        self.width = width
        """How long a part is."""
        self._most = most
        self._parts: dict[int, list[float]] = {}
        """By their place: the least number, the sum, the greatest, and how many there are."""

    def add(self, t: Seconds, value: float) -> None:
        """Add a number; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        while int(t / self.width) >= self._most:
            self.width *= 2.0
            halves, self._parts = self._parts, {}
            for at, part in halves.items():
                self._put(at // 2, part)
        self._put(int(t / self.width), [value, value, value, 1])

    def _put(self, at: int, part: list[float]) -> None:
        mine = self._parts.setdefault(at, part)
        if mine is not part:
            mine[0] = min(mine[0], part[0])
            mine[1] += part[1]
            mine[2] = max(mine[2], part[2])
            mine[3] += part[3]

    def since(self, share: float) -> Seconds | None:
        """Return when the first part begins in which the numbers' sum was at least a share of the time; None: in no part."""
        return min((at * self.width for at, (_, total, *_) in self._parts.items() if total >= share * self.width), default=None)

    def points(self) -> list[tuple[Seconds, float, float, float]]:
        """Return the middle of each part that has a number, and its least, mean and greatest number."""
        return [((at + 0.5) * self.width, least, total / count, most) for at, (least, total, most, count) in sorted(self._parts.items())]
