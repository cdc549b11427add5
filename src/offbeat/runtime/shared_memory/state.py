"""Changes to the state that the processes of a host share: one after the other, each complete or not at all, whichever process dies.

A process that changes something takes the lock, brings the older of the two copies up to date, changes it, and as its last step counts up
the number of changes, which says which copy is the newest. A process that dies before this step has changed nothing; the kernel gives its
lock to the next one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar, TypeVarTuple

from offbeat.core.rank_log import Entry
from offbeat.errors import JobError
from offbeat.runtime.shared_memory.layout import SharedLayout
from offbeat.runtime.shared_memory.log import EntryLog
from offbeat.transport.futex import Futex, RobustLock
from offbeat.types import Seconds

C = TypeVar("C")
"""A copy of the state, as the family's code sees it."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FOLLOWER_TIMEOUT_S = 60.0
"""How long the ranks wait for a coordinator that does not read the log."""
TICK_S = 0.05
"""How often a process that waits looks again, even if it is not woken: the process that was to wake it may have died."""


class SharedState(ABC, Generic[C]):
    """The shared state of one job, as one process sees it.

    A family says what a copy is, how one is brought up to date (`_update`), and which waiters a change concerns (`_complete`).

    Args:
        memory: the parts of the block, as ``layout`` has them; the block must outlive this.
        layout: of the block.
        copy: makes the object for one of the two copies, from its memory and the log.
        fresh: whether the block is new, and its lock is to be made.
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
        """How many changes were made; then, for each copy, how many entries the log has with it."""
        self._followed = memory["followed"].cast("q")
        """How many entries of the log were read."""
        self._use = layout.USE
        # Each rank may come past `make_room` at the same moment, and then write a few entries.
        self._room = layout.log_entries - 4 * (layout.ranks + 16) if layout.followed else None

    @abstractmethod
    def _update(self, new: C, newest: C) -> None:
        """Make ``new`` equal to ``newest``, before a change."""

    @abstractmethod
    def _complete(self, new: C, before: C) -> int:
        """Do what every change ends with. Returns how many waiters to wake: 0, if none waits for this change."""

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
        """Read something as it was at one moment, without the lock: ``what`` is called again if the state changed meanwhile."""
        while True:
            commits = self._commits[0]
            try:
                result = what(self._copies[commits & 1])
            except Exception:
                # A state that is half overwritten may cause any error.
                if self._commits[0] == commits:
                    raise
                continue
            if self._commits[0] == commits:
                return result

    def hold(self, what: Callable[[C], T]) -> T:
        """Read something while nothing changes: for what cannot be read from a state that is half overwritten."""
        self.lock.acquire()
        try:
            return what(self._copies[self._commits[0] & 1])
        finally:
            self.lock.release()

    def follow(self, start: int) -> list[Entry]:
        """Return the entries of the log from number ``start`` on; those before it may be overwritten from now on."""
        self._followed[0] = start
        if self._end() <= start:
            return []
        return self.hold(lambda _: self._log.entries(start, self._end()))

    def make_room(self) -> None:
        """Wait until the log has room for what a rank may do next.

        Raises:
            JobError: the coordinator has read nothing for `FOLLOWER_TIMEOUT_S`.
        """
        if self._room is None or self._end() - self._followed[0] < self._room:
            return
        before, deadline = self._followed[0], time.monotonic() + FOLLOWER_TIMEOUT_S
        while self._end() - self._followed[0] >= self._room:
            time.sleep(0.0005)
            if self._followed[0] != before:
                before, deadline = self._followed[0], time.monotonic() + FOLLOWER_TIMEOUT_S
            if time.monotonic() > deadline:
                raise JobError(
                    f"the coordinator has read nothing of the log of {self._use} for {FOLLOWER_TIMEOUT_S:g} s, and the log is full: "
                    "its process is stopped or overloaded; look at its output, and start the job again"
                )

    def sleep(self, events: int, deadline: Seconds | None) -> bool:
        """Sleep until ``events.value`` is another than this, for `TICK_S` at most.

        Args:
            events: the value before the caller looked at the state.
            deadline: by the monotonic clock; None: there is none.

        Returns:
            False if the deadline has passed, without having slept.
        """
        remaining = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
        if remaining <= 0.0:
            return False
        self.events.sleep(events, remaining)
        return True

    def _end(self) -> int:
        """How many entries the log has. Without the lock it may be out of date, and too small, by a change or two."""
        return self._commits[1 + (self._commits[0] & 1)]
