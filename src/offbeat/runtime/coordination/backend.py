"""What differs between jobs with and without servers, as the coordinator's shell sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offbeat.core.effects import Effect
from offbeat.core.events import Left, Lost
from offbeat.transport.base import Message
from offbeat.types import Seconds, WorkerId


class Backend(Protocol):
    """Carries out what the coordinator decides, and tells it what comes of that: `ServerCoordinatorSide` with servers,
    `RankCoordinatorSide` without."""

    @property
    def behind(self) -> bool:
        """Whether something has happened of which not everything is known yet."""

    @property
    def hears_late(self) -> bool:
        """Whether workers decide for themselves when to go on, so that the coordinator hears of it late."""

    def lacks(self, worker: WorkerId) -> bool:
        """Whether something that happened before a message of this worker is not known yet: its questions have to wait."""

    def follow(self, now: Seconds) -> None:
        """Deal with what has happened elsewhere since this was last called, and with what is due."""

    def wake_at(self) -> Seconds | None:
        """When to `follow` at the latest; None: only messages matter."""

    def wake(self, now: Seconds) -> None:
        """It is the time at which the coordinator wanted to look around."""

    # What comes in.

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """A worker's process asks to be counted."""

    def initial(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """A worker has provided the initial parameters."""

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """A worker says what its gradient is of."""

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        """A worker's process has ended, or is about to."""

    # What is to be done.

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out what the coordinator has decided."""

    def pass_on(self, now: Seconds) -> None:
        """Tell the coordinator what was measured meanwhile."""

    def close(self) -> None:
        """The last thing, however the job has ended: let go of what its workers have had in common."""
