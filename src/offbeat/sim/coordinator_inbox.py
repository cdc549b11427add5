"""Queue the messages sent to the simulated coordinator, and handle them one by one.

Equal seeds give the same order of messages. Control messages arrive at once, but wait while server 0 folds or is stopped. The coordinator
is also woken when a timer that it has set expires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from offbeat.core.effects import Effect
from offbeat.core.events import Event, Folded, Heard
from offbeat.core.job.coordinator import Coordinator
from offbeat.journal.file import Journal
from offbeat.sim.event_queue import MEASURED, WAKE, EventQueue
from offbeat.sim.process import BEATS
from offbeat.sim.servers import Servers
from offbeat.types import NO_CAUSE, RecordId, Seconds

PATIENCE: Final = 3.0
"""The number of timeouts with no event but heartbeats after which the run counts as stuck."""
WAKES: Final = 10_000
"""The number of consecutive wake-ups without another event after which the run counts as stuck."""


class CoordinatorInbox:
    """The coordinator and its incoming messages.

    Args:
        coordinator: the coordinator of the run.
        queue: the event queue of the run.
        servers: say when server 0 is free.
        journal: records events and effects; None: nothing is recorded.
        carry_out: carries out the coordinator's effects; its second argument is the effects' record numbers in the journal.
        stuck: called when only heartbeats and timers are left to happen.
        timeout_s: silence after which a worker is dead; None: no heartbeats are simulated.
        wakes: whether the rule or the membership sets timers.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        queue: EventQueue,
        servers: Servers,
        journal: Journal | None,
        carry_out: Callable[[list[Effect], list[RecordId]], None],
        stuck: Callable[[], None],
        timeout_s: Seconds | None,
        wakes: bool,
    ) -> None:
        self.handled = 0
        """The number of events that the coordinator handled, plus the effects that it answered with."""
        self._coordinator, self._queue, self._servers, self._journal = coordinator, queue, servers, journal
        self._carry_out, self._stuck = carry_out, stuck
        self._timeout_s, self._may_wake = timeout_s, wakes
        self._inbox: deque[tuple[Event, RecordId]] = deque()
        """Events that server 0 has not handled yet, with the record that caused each."""
        self._measured: list[tuple[Folded, RecordId]] = []
        """Measurements of folds that take no time; delivered once the current effects are carried out."""
        self._busy = False
        self._free_at: Seconds = 0.0
        self._closed = False
        self._wake_due: Seconds | None = None
        self._wake_serial = 0
        self._wakes = 0
        """The number of timers in the event queue."""
        self._beats = 0
        """The number of heartbeats in the event queue."""
        self._idle_wakes = 0
        self._active_at: Seconds = 0.0
        """When the last event other than a heartbeat was handled."""

    def send(self, event: Event, cause: RecordId = NO_CAUSE) -> None:
        """Send a message to server 0. It handles one message after the other, several at one instant if it is free."""
        self._inbox.append((event, cause))
        if not self._busy:
            self._work()

    def measured(self, folded: Folded, done: Seconds, cause: RecordId) -> None:
        """Deliver a fold's measurements at this time, before server 0 handles its next message."""
        if done > self._queue.now:
            self._queue.at(done, partial(self._measured_now, folded, cause), MEASURED)
        else:
            self._measured.append((folded, cause))

    def beat(self, again: Callable[[int], None]) -> None:
        """Schedule a worker's next heartbeat. Report the run as stuck if for long only heartbeats and timers have been left to happen."""
        assert self._timeout_s is not None

        def once(serial: int) -> None:
            self._beats -= 1
            again(serial)

        self._beats += 1
        self._queue.at(self._queue.now + self._timeout_s / BEATS, once)
        only = len(self._queue) == self._beats + self._wakes
        if only and self._queue.now > self._active_at + PATIENCE * self._timeout_s:
            self._stuck()

    def close(self, reason: str) -> None:
        """End the run: close the coordinator, and ignore later messages."""
        self._closed = True
        self._inbox.clear()
        self._answer(self._coordinator.close(self._queue.now, reason))

    def stop(self) -> None:
        """Handle no further message after the current effects are carried out."""
        self._closed = True

    def _work(self, serial: int = 0) -> None:
        self._busy = True
        inbox, queue = self._inbox, self._queue
        while inbox and not self._closed:
            if not self._servers.never_busy:
                free = self._servers.free(0, queue.now)
                if free > queue.now:
                    if free != self._free_at:
                        self._free_at = free
                        queue.at(free, self._work)
                    break
            event, cause = inbox.popleft()
            if self._journal is not None:
                cause = self._journal.log(event, queue.now, cause)
            if type(event) is not Heard:
                self._active_at, self._idle_wakes = queue.now, 0
            self.handled += 1
            self._answer(self._coordinator.on(event, queue.now), cause)
        self._busy = False

    def _answer(self, effects: list[Effect], cause: RecordId = NO_CAUSE) -> None:
        """Record and carry out effects; ``cause`` is the record of the event that caused them, NO_CAUSE for a timer."""
        self.handled += len(effects)
        journal, now = self._journal, self._queue.now
        numbers = [journal.log(effect, now, cause) for effect in effects] if journal is not None else [NO_CAUSE] * len(effects)
        self._carry_out(effects, numbers)
        if self._measured:
            self._inbox.extendleft(reversed(self._measured))
            self._measured.clear()
        if self._may_wake:
            self._arm()

    def _measured_now(self, folded: Folded, cause: RecordId, serial: int) -> None:
        self._inbox.appendleft((folded, cause))
        self._work()

    def _arm(self) -> None:
        due = self._coordinator.wake_at()
        if due is None:
            self._wake_due, self._wake_serial = None, 0
        elif (due := max(due, self._queue.now)) != self._wake_due:
            self._wake_up_at(due)

    def _wake_up_at(self, due: Seconds) -> None:
        self._wake_due = due
        self._wakes += 1
        self._wake_serial = self._queue.at(due, self._wake, WAKE)

    def _wake(self, serial: int) -> None:
        self._wakes -= 1
        if serial != self._wake_serial or self._closed:
            return
        now = self._queue.now
        free = self._servers.free(0, now)
        if free > now:
            self._wake_up_at(free)
            return
        self._wake_due = None
        self._idle_wakes += 1
        if self._idle_wakes > WAKES:
            self._stuck()
            return
        self._busy = True
        self._answer(self._coordinator.wake(now))
        self._work()
