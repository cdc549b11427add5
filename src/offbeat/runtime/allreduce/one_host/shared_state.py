"""Changes to what the ranks share: one after the other, each complete or not at all, whoever dies in the middle of it.

Whoever changes something takes the lock, copies the newest of the two states over the other, changes that, and as the last step counts up
the number of changes, which says which of the two is the newest. A process that dies before has changed nothing; the kernel gives its
lock to the next. Reading needs no lock: what was read counts if the number of changes is still the same afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import numpy as np

from offbeat.core.allreduce.policy import CLOSED, DONE, RoundRule
from offbeat.core.rank_log import Entry
from offbeat.errors import JobError
from offbeat.runtime.allreduce.one_host.layout import SharedLayout, rule_spelled
from offbeat.runtime.allreduce.one_host.layout import pieces as pieces_of
from offbeat.runtime.allreduce.one_host.reduce import CORES, Folder
from offbeat.runtime.allreduce.one_host.state import Closing, State
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import Futex, RobustLock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FOLLOWER_TIMEOUT_S = 60.0
"""How long the ranks wait for a follower that does not keep up with the log."""


class Shared:
    """The shared state of one job, as one process sees it.

    Args:
        block: the memory; it must outlive this.
        rule: of a new block; None: what the header names.
        layout: of a new block, which is made; None: the block has been made by somebody else.
    """

    def __init__(self, block: SharedMemory, rule: RoundRule | None, layout: SharedLayout | None) -> None:
        fresh = layout is not None
        if layout is None:
            layout, spelled = SharedLayout.read(block.view)
            rule = rule_spelled(spelled) if rule is None else rule
        assert rule is not None
        self.layout, self.rule = layout, rule
        memory = pieces_of(block, layout)
        self.events = Futex(memory["events"])
        self.owners = np.frombuffer(memory["owners"], np.int64, 2 * layout.ranks).reshape(layout.ranks, 2)
        self.folder = Folder(memory, layout, fresh=fresh)
        self.lock = RobustLock(memory["lock"], fresh=fresh)
        self._commits = memory["commits"].cast("q")
        self._followed = memory["read"].cast("q")
        words = np.frombuffer(memory["states"], np.int64, 2 * layout.state_words)
        log = np.frombuffer(memory["log"], np.int64, layout.log_entries * 8)
        self._states = tuple(State(half, log, layout, rule) for half in np.split(words, 2))
        self._room = layout.log_entries - 4 * (layout.ranks + 16)
        if fresh:
            layout.write(block.view, rule)

    def change(self, what: Callable[[State, *Ts], T], *args: *Ts) -> T:
        """Make a change; if what it does raises, nothing has changed. A small round that is closed with it is folded at once."""
        self.lock.acquire()
        try:
            commits = self._commits[0]
            old, new = self._states[commits & 1], self._states[~commits & 1]
            cells = new.cells
            cells[:] = old.cells
            number, done = cells[CLOSED], cells[DONE]
            result = what(new, *args)
            while cells[DONE] < cells[CLOSED] and self.folder.inline:
                closing = new.closing()
                assert closing is not None
                if not self.folder.sum(closing):
                    self.folder.void(closing)
                new.fold_done()
            number, done = cells[CLOSED] - number, cells[DONE] - done
            self._commits[0] = commits + 1
            if done or number:
                self.events.change()
        finally:
            self.lock.release()
        if done:
            self.events.wake()
        elif number:
            self.events.wake(CORES - 1 or 1)
        return result

    def look(self, what: Callable[[State], T]) -> T:
        """Read something, without the lock, as it was at one moment."""
        while True:
            commits = self._commits[0]
            try:
                result = what(self._states[commits & 1])
            except Exception:
                # Of a state that is half overwritten anything may be said.
                if self._commits[0] == commits:
                    raise
                continue
            if self._commits[0] == commits:
                return result

    def help(self) -> bool:
        """Take part in the fold that is under way, if one is. Returns whether anything was done."""
        closing = self.look(lambda state: state.closing())
        if closing is None:
            return False
        count, complete = self.folder.help(closing)
        if complete:
            self.change(self._finish, closing)
        return bool(count) or complete

    def _finish(self, state: State, closing: Closing) -> None:
        """This round is folded. Everybody who was there for its last slice says so."""
        if state.rounds.done == closing.round.number < state.rounds.number:
            self.folder.settle(closing)
            state.fold_done()

    def follow(self, start: int) -> list[Entry]:
        """The entries of the log from there on; those before are no more needed."""
        self._followed[0] = start
        if self.look(lambda state: state.seq) <= start:
            return []
        self.lock.acquire()
        try:
            return self._states[self._commits[0] & 1].entries(start)
        finally:
            self.lock.release()

    def make_room(self) -> None:
        """Wait until the log has room for what a rank may do next.

        Raises:
            JobError: its follower has read nothing for `FOLLOWER_TIMEOUT_S`.
        """
        if not self.layout.followed or self._unread() < self._room:
            return
        before, deadline = self._followed[0], time.monotonic() + FOLLOWER_TIMEOUT_S
        while self._unread() >= self._room:
            time.sleep(0.0005)
            if self._followed[0] != before:
                before, deadline = self._followed[0], time.monotonic() + FOLLOWER_TIMEOUT_S
            if time.monotonic() > deadline:
                raise JobError(f"the coordinator has read nothing of the log of rounds for {FOLLOWER_TIMEOUT_S:g} s, and the log is full")

    def _unread(self) -> int:
        # Of a state that is being overwritten too: a number that only grows is right, or soon will be.
        return self._states[self._commits[0] & 1].seq - self._followed[0]
