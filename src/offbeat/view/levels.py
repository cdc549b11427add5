"""Keep a figure over time in bounded memory: the last minutes by the second, and the whole job in levels of least, mean and most. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from offbeat.journal.series import Series
from offbeat.types import Seconds

RECENT: Final = 300
"""The number of newest samples that are kept one by one."""
PARTS: Final = 1024
"""In how many parts the job's time is divided at most: no screen has more columns."""


class Levels(Series):
    """One figure of a job.

    >>> levels = Levels()
    >>> for t in range(4000):
    ...     levels.add(t, float(t % 10))
    ...     levels.sample(t, float(t % 10))
    >>> plain = levels.plain()
    >>> len(levels.recent), plain["width"], plain["t"][1], plain["least"][1], plain["mean"][1], plain["most"][1]
    (300, 4.096, 6.144, 5.0, 6.5, 8.0)
    """

    def __init__(self) -> None:
        super().__init__(PARTS, width=1e-3)
        self.recent: deque[tuple[Seconds, float]] = deque(maxlen=RECENT)

    def sample(self, t: Seconds, value: float) -> None:
        """Keep the figure's value at a time by itself, until there are `RECENT` newer ones."""
        self.recent.append((t, value))

    def plain(self) -> dict[str, Any]:
        """Return the whole job, as JSON can carry it: the middle of each part that has a value, and its values."""
        points = [[float(f"{value:.6g}") for value in point] for point in self.points()]
        return {"width": self.width, **dict(zip(("t", "least", "mean", "most"), map(list, zip(*points, strict=True)), strict=False))}
