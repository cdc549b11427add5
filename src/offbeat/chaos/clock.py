"""The one clock of a run: seconds that only grow, and waiting. Tests hand in one that jumps."""

from __future__ import annotations

import time
from typing import Protocol

from offbeat.types import Seconds


class Clock(Protocol):
    """Tells the time and waits."""

    def now(self) -> Seconds:
        """Return seconds, monotonic."""

    def wait(self, seconds: Seconds) -> None:
        """Return after this time."""


class RealClock:
    """The machine's clock."""

    def now(self) -> Seconds:
        return time.monotonic()

    def wait(self, seconds: Seconds) -> None:
        time.sleep(seconds)
