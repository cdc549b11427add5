"""Define what a server asks for so that another process can continue its work: blocks of memory, answers and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from offbeat.runtime.recovery.answers import Answers
from offbeat.transport.base import Buffer
from offbeat.transport.device_memory import DeviceBlock
from offbeat.transport.shm import MemoryBlock

T = TypeVar("T")


class Survival:
    """Serve a server whose death ends the job: nothing is kept.

    `Keeper` is for a next process on the same host, and `Replica` for a standby.
    """

    given_up: str | None = None
    """The reason for which no other process can continue, where one was meant to; None: one can, or none was meant to."""
    follows = False
    """True if a standby repeats this server's work: then workers share no memory with the server."""
    answers: Answers | None = None
    """What another process repeats of the results that messages do not determine; None: there is no other process."""

    def give_up(self, reason: str, *, lack: bool = True) -> None:
        """Note that no other process can continue; ``lack``: because of too little memory."""

    def ask(self, live: Callable[[], T], implied: Any = None) -> T:
        """Return the result of ``live``, as plain data. A process that continues gets the same result.

        Args:
            live: reads what messages do not determine. If it changes something, a second call in another process must change nothing more.
            implied: the most frequent result, which need not be written.
        """
        return live() if self.answers is None else self.answers.ask(live, implied)

    def change(self, live: Callable[[Callable[[Any], None]], T], implied: T, is_made: Callable[[], bool]) -> Any:
        """Make a change whose answer cannot be found out afterwards; for the arguments see `Answers.change`."""
        return live(lambda answer: None) if self.answers is None else self.answers.change(live, implied, is_made)

    def allocate(self, nbytes: int, name: str, gpu: str | None = None) -> MemoryBlock:
        """Return new memory that every process of this host can map; ``gpu``: the UUID of the one that it is on, with any bytes.

        Other arguments and errors are those of `MemoryBlock.allocate`.
        """
        return MemoryBlock.allocate(nbytes, name) if gpu is None else DeviceBlock.allocate_on(gpu, nbytes, name)

    def once(self, name: str, make: Callable[[], T], attach: Callable[[MemoryBlock], T]) -> T:
        """Return an object made by ``make``, which has its own memory (``block``); the next process gets ``attach`` of the same block."""
        return make()

    def copy_of(self, memory: Buffer, name: str) -> Buffer:
        """Return a copy of memory as it is now. A process that continues gets the same copy, even if the memory has changed since."""
        return bytes(memory)

    def carried(self, memory: memoryview) -> None:
        """Let these bytes be the same in a process that continues elsewhere."""

    def renew(self) -> None:
        """Make a snapshot due: a process that continues must not repeat what this one has done so far."""


NOBODY = Survival()
