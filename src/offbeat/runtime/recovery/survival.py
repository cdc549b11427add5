"""Name what the parts of a server need so that another process goes on where this one dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from offbeat.transport.base import Buffer
from offbeat.transport.shm import MemoryBlock

T = TypeVar("T")


class Survival:
    """What this class does is for a server with which the job ends: no other process goes on.

    `Keeper` is for a next process on the same host, and `Replica` for a standby.
    """

    given_up: str | None = None
    """Why no other process can go on, where one was to; None: nothing stands in its way."""
    follows = False
    """True if a standby does what this process does: workers share no memory with the server then."""

    def give_up(self, reason: str, *, lack: bool = True) -> None:
        """Note that no other process can go on; ``lack``: for want of memory."""

    def ask(self, live: Callable[[], T], implied: Any = None) -> T:
        """Return what ``live`` returns, as plain data; a process that goes on gets what this one has got.

        Args:
            live: asks for something that messages do not determine. If it changes something, a second call in another process must change
                nothing more.
            implied: what need not be written.
        """
        return live()

    def change(self, live: Callable[[Callable[[Any], None]], T], implied: T, is_made: Callable[[], bool]) -> Any:
        """Make a change of which nobody can find out later what it came to; for the arguments see `Answers.change`."""
        return live(lambda answer: None)

    def allocate(self, nbytes: int, name: str) -> MemoryBlock:
        """Return new memory that every process of this host can map. Arguments and errors are those of `MemoryBlock.allocate`."""
        return MemoryBlock.allocate(nbytes, name)

    def once(self, name: str, make: Callable[[], T], attach: Callable[[MemoryBlock], T]) -> T:
        """Return what ``make`` makes in a block of its own (``block``); a next process gets what ``attach`` makes of the same block."""
        return make()

    def copy_of(self, memory: Buffer, name: str) -> Buffer:
        """Return a copy of memory as it is now. A process that goes on gets the same copy, however the memory has changed since."""
        return bytes(memory)

    def renew(self) -> None:
        """Note that a process that goes on may not do again what this one has done so far: a snapshot is due."""


NOBODY = Survival()
