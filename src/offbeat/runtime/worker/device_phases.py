"""Measure how long a device computes in each phase: by events in its stream, which are read after the push without waiting for them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import torch

from offbeat.core.phases import Phase
from offbeat.types import Seconds

MEASURED: Final = frozenset({Phase.FORWARD, Phase.BACKWARD})
EVENTS: Final = 256
"""Most events between two pushes; with more, the phases of the account are not separated."""


class DevicePhases:
    """Mark the beginnings of phases in the current stream of a device.

    Args:
        event: makes an event that records its time.
    """

    def __init__(self, event: Callable[[], torch.cuda.Event]) -> None:
        self._make = event
        self._free: list[torch.cuda.Event] = []
        self._marks: list[tuple[Phase, torch.cuda.Event]] = []

    def begins(self, phase: Phase) -> None:
        """Mark that later work of the script on the device belongs to ``phase``."""
        if len(self._marks) >= EVENTS or not (phase in MEASURED or (self._marks and self._marks[-1][0] in MEASURED)):
            return
        event = self._free.pop() if self._free else self._make()
        event.record()
        self._marks.append((phase, event))

    def take(self) -> dict[Phase, Seconds] | None:
        """Return each measured phase's seconds since the last call; None: the device is still computing, or there were too many events."""
        marks, self._marks = self._marks, []
        if len(marks) >= EVENTS or (marks and not marks[-1][1].query()):
            return None  # events still in the stream must not be reused
        seconds: dict[Phase, Seconds] = {}
        for (phase, event), (_, after) in pairwise(marks):
            if phase in MEASURED:
                seconds[phase] = seconds.get(phase, 0.0) + event.elapsed_time(after) / 1e3
        self._free += [event for _, event in marks]
        return seconds
