"""Keep a figure over time in bounded memory: the last minutes by the second, and the whole job in levels of least, mean and most. Pure."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from offbeat.report.series import Series
from offbeat.types import Seconds

RECENT: Final = 300
"""The number of newest samples that are kept one by one."""
PARTS: Final = 300
"""In how many parts the job's time is divided at most."""


class Levels(Series):
    """One figure of a job.

    >>> levels = Levels()
    >>> for t in range(1000):
    ...     levels.add(t, float(t % 10))
    >>> plain = levels.plain()
    >>> len(levels.recent), levels.width, plain["t"][1], plain["least"][1], plain["mean"][1], plain["most"][1]
    (300, 4.0, 6.0, 4.0, 5.5, 7.0)
    """

    def __init__(self) -> None:
        super().__init__(PARTS, width=1.0)
        self.recent: deque[tuple[Seconds, float]] = deque(maxlen=RECENT)

    def add(self, t: Seconds, value: float) -> None:
        """Take the figure's value at a time, which is at least the time of the value before."""
        self.recent.append((t, value))
        super().add(t, value)

    def plain(self) -> dict[str, Any]:
        """Return the whole job, as JSON can carry it: the middle of each part that has a value, and its values."""
        times, least, mean, most = zip(*self.points(), strict=True)
        return {"width": self.width, "t": times, "least": least, "mean": mean, "most": most}
