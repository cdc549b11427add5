"""Change state that the processes of a host share: one change after the other, each complete or not at all, even if a process dies.

A process that makes a change takes the lock, brings the older of the two copies up to date, changes it, and as its last step increments the
number of changes, which says which copy is the newest. A process that dies before this step has changed nothing; the kernel passes its lock
to the next one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar, TypeVarTuple

from offbeat.core.rank_log import Entry
from offbeat.runtime.shared_memory.layout import SharedLayout
from offbeat.runtime.shared_memory.log import EntryLog
from offbeat.transport.futex import Futex, RobustLock
from offbeat.types import Seconds

C = TypeVar("C")
"""A copy of the state, as the family's code sees it."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TICK_S = 0.05
"""Seconds after which a waiting process checks again even if it is not woken: the process that was to wake it may be dead."""


class SharedState(ABC, Generic[C]):
    """Access the shared state of one job from one process.

    A family defines what a copy is, how it is brought up to date (`_update`), and which waiters a change concerns (`_complete`).

    Args:
        memory: the parts of the block, by ``layout``; the block must outlive this object.
        layout: of the block.
        copy: makes the object for one of the two copies, from its memory and the log.
        fresh: True if the block is new, so that its lock must be initialised.
    """

    def __init__(
        self, memory: dict[str, memoryview], layout: SharedLayout, copy: Callable[[memoryview, EntryLog], C], *, fresh: bool
    ) -> None:
        self.events = Futex(memory["events"])
        self.lock = RobustLock(memory["lock"], fresh=fresh)
        self._log = EntryLog(memory["log"], layout.log_entries)
        self._copies = copy(memory["copy 0"], self._log), copy(memory["copy 1"], self._log)
        # Memoryviews, whose items are Python's own integers: a rank that has computed for a while has neither NumPy's code nor its types
        # in the processor's caches.
        self._commits = memory["commits"].cast("q")
        """The number of changes; then, for each copy, the number of log entries with it."""
        self._followed = memory["followed"].cast("q")
        """The number of log entries that were read."""
        # All ranks may pass `make_room` at the same moment, and each then writes a few entries.
        self._room = layout.log_entries - 4 * (layout.ranks + 16) if layout.followed else None

    @abstractmethod
    def _update(self, new: C, newest: C) -> None:
        """Make ``new`` equal to ``newest``, before a change."""

    @abstractmethod
    def _complete(self, new: C, before: C) -> int:
        """Do what ends every change. Returns how many waiters to wake; 0 if none waits for this change."""

    def change(self, what: Callable[[C, *Ts], T], *args: *Ts) -> T:
        """Make a change, and wake the waiters that it concerns. If ``what`` raises, nothing has changed.

        Args:
            what: makes the change, given the copy to change and ``args``.

        Returns:
            What ``what`` returns.
        """
        cells = self._commits
        self.lock.acquire()
        try:
            commits = cells[0]
            newest = commits & 1
            old, new = self._copies[newest], self._copies[1 - newest]
            self._log.end = cells[1 + newest]
            self._update(new, old)
            result = what(new, *args)
            waiters = self._complete(new, old)
            cells[2 - newest] = self._log.end
            cells[0] = commits + 1
            if waiters:
                self.events.change()
        finally:
            self.lock.release()
        if waiters:
            self.events.wake(waiters)
        return result

    def look(self, what: Callable[[C], T]) -> T:
        """Read a consistent state without the lock: ``what`` is called again if the state changed meanwhile."""
        while True:
            commits = self._commits[0]
            try:
                result = what(self._copies[commits & 1])
            except Exception:
                # A half-overwritten state may cause any error.
                if self._commits[0] == commits:
                    raise
                continue
            if self._commits[0] == commits:
                return result

    def hold(self, what: Callable[[C], T]) -> T:
        """Read under the lock: for what cannot be read from a half-overwritten state."""
        self.lock.acquire()
        try:
            return what(self._copies[self._commits[0] & 1])
        finally:
            self.lock.release()

    def follow(self, start: int) -> list[Entry]:
        """Return the log entries from number ``start`` on; earlier ones may be overwritten from now on."""
        self._followed[0] = start
        if self._end() <= start:
            return []
        return self.hold(lambda _: self._log.entries(start, self._end()))

    def make_room(self, meanwhile: Callable[[], None] | None) -> None:
        """Wait until the log has room for a rank's next entries.

        Args:
            meanwhile: called now and then while this rank waits, without a limit: a coordinator that is frozen is replaced after some
                timeouts of the job. The function raises once the job is over.
        """
        call_at = 0.0
        while self._room is not None and self._end() - self._followed[0] >= self._room:
            time.sleep(0.0005)
            if meanwhile is not None and time.monotonic() >= call_at:
                meanwhile()
                call_at = time.monotonic() + TICK_S

    def sleep(self, events: int, deadline: Seconds | None) -> bool:
        """Sleep until ``events.value`` changes, for at most `TICK_S`.

        Args:
            events: the value before the caller read the state.
            deadline: by the monotonic clock; None: there is none.

        Returns:
            False, without sleeping, if the deadline has passed.
        """
        remaining = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
        if remaining <= 0.0:
            return False
        self.events.sleep(events, remaining)
        return True

    def _end(self) -> int:
        """Return the number of log entries. Without the lock it may be too small by a change or two."""
        return self._commits[1 + (self._commits[0] & 1)]
