"""Define what differs between jobs with and without servers, as the coordinator sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offbeat.core.effects import Effect
from offbeat.core.events import Left, Lost
from offbeat.transport.base import Connection, Message
from offbeat.types import Seconds, WorkerId


class Plane(Protocol):
    """Carry out the coordinator's decisions and report results. `ServerPlane` with servers, `RankPlane` without."""

    @property
    def follows(self) -> bool:
        """True if ranks decide among themselves: what they have done is read before each message, and after it."""

    @property
    def has_backlog(self) -> bool:
        """True if something has happened that is not fully known yet, so that workers' requests must wait."""

    @property
    def notified_late(self) -> bool:
        """True if workers decide among themselves when to go on, so that the coordinator learns of it late."""

    def follow(self, now: Seconds) -> None:
        """Process what has happened elsewhere since the last call, and what is due."""

    def wake_at(self) -> Seconds | None:
        """Return when to call `follow` next at the latest; None: only after a message."""

    def wake(self, now: Seconds) -> None:
        """Handle the coordinator's timer."""

    def too_late(self) -> list[WorkerId]:
        """Return the workers found since the last call that cannot join any more."""
        return []

    # Messages and events.

    def check(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Check that a worker's process, which has sent this hello, can join the job.

        Raises:
            ConfigurationError: it cannot.
            ProtocolError: it brings other memory than it must.
        """

    def on_rounds(self, connection: Connection, message: Message) -> bool:
        """Handle a message to the sequencer of rounds across hosts. Returns False if it is another one.

        Raises:
            ProtocolError: its sender may not send it.
        """
        return False

    def closed(self, connection: Connection) -> None:
        """Handle the end of a worker's connection."""

    def may_request(self, worker: WorkerId) -> bool:
        """True if a living worker has been told to go on, and so may ask for samples."""

    def check_push(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Check that a worker can send this description of its gradient now.

        Raises:
            ProtocolError: it cannot.
        """

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """Count a worker's process in, or start the steps that lead to it."""

    def initial(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """Handle a worker's initial parameters."""

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """Handle a worker's description of its gradient."""

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        """Handle the end of a worker's process, or its announcement to leave."""

    # Effects.

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out the coordinator's effects."""

    def pass_on(self, now: Seconds) -> None:
        """Feed the coordinator what was measured since the last call."""

    def close(self) -> None:
        """Release the memory that the workers share. The last call, also after a failure."""
