"""Run the process of a server: a loop that hears what has come over a hub, and tells the supervisor that the process lives."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any

from offbeat.runtime.serving import Service
from offbeat.transport.base import Closed, Connection, Hub, Message
from offbeat.types import Seconds

STATUS_PERIOD_S = 0.2
STOOD_STILL_S: Seconds = 3.0
"""If so much time passes in which this process neither waits for messages nor computes, it stood still, and probably the whole machine.

A server that waits for a processor of a busy machine does so for 1.5 s at times: that is no stop."""


class ServerProcess(ABC):
    """The loop of one process.

    Args:
        number: of the server; server 0 hosts the coordinator.
        hub: listening already.
        launcher: the connection to the supervisor.
        clock: seconds, monotonic, from any origin.
        computed: the processor seconds of this process so far. Under a simulated clock that clock: it leaps, and nothing stands still.
        service: of a standby that takes over; None: a new one.
    """

    def __init__(
        self,
        number: int,
        hub: Hub,
        launcher: Connection,
        clock: Callable[[], Seconds] = time.monotonic,
        computed: Callable[[], Seconds] = time.process_time,
        service: Service | None = None,
    ) -> None:
        self._hub, self._launcher, self._clock, self._computed = hub, launcher, clock, computed
        self.service = service or Service(number, hub, launcher, clock)
        self._resuming: dict[Connection, Message] = {}
        """By connection: the first message of a link that has come before this process can let the link go on."""
        self._noticed: str | None = None
        """The signal by which this process was told to leave, until the supervisor has been told."""
        self._status_at: Seconds = 0.0
        """When the last status, or sign of life, was sent to the supervisor."""
        self._looked = clock(), computed()
        """When `hear` had last been called, and what this process had computed by then: the rest of the time it stood still."""

    def turn(self, timeout_s: Seconds) -> None:
        """Handle what comes within ``timeout_s``, and do what is due. Raises what `Service.handle` raises."""
        self.hear(timeout_s)
        self.service.settle()
        self.tick()

    def hear(self, timeout_s: Seconds) -> None:
        """Handle what comes within ``timeout_s``. Raises what `Service.handle` raises."""
        arrived = self._hub.poll(timeout_s)
        (then, computed), self._looked = self._looked, (self._clock(), self._computed())
        if (seconds := self._looked[0] - then - timeout_s - (self._looked[1] - computed)) > STOOD_STILL_S:
            self._stood_still(seconds)
        for connection, item in arrived:
            self._arrived(connection, item)

    @abstractmethod
    def tick(self) -> None:
        """Do what is due."""

    def wake_at(self) -> Seconds | None:
        """Return when to call `tick` at the latest, by the time of the service; None: only for messages and for the regular status."""
        return self.service.wake_at()

    @abstractmethod
    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        """Handle what has come over a connection."""

    @abstractmethod
    def _stood_still(self, seconds: Seconds) -> None:
        """Note that this process has stood still for so many seconds until now."""

    def notice(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal ``number``, which tells this process to leave: the supervisor ends the job in order."""
        self._noticed = signal.Signals(number).name
        self._hub.wake()

    def _report(self) -> None:
        """Tell the supervisor of a notice, until which this process serves on, and now and then that it lives."""
        if self._noticed is not None:
            self._launcher.send({"kind": "noticed", "signal": self._noticed})
            self._noticed = None
        if (now := self._clock()) - self._status_at >= STATUS_PERIOD_S:
            self._status_at = now
            self._launcher.send(self._status())

    def _status(self) -> dict[str, Any]:
        return {"kind": "alive"}
