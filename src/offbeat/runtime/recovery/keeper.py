"""Share named blocks of memory with the supervisor, so that a server's next process gets them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from offbeat.errors import ConfigurationError, JobError
from offbeat.runtime.recovery.answers import Answers
from offbeat.runtime.recovery.survival import Survival
from offbeat.transport.base import Buffer, Connection, SharedMemory
from offbeat.transport.shm import MemoryBlock, address_of

LOG = "log"
"""The name of the block that holds the input log."""
APART_NBYTES: Final = 1 << 20
"""Most bytes of a copy that stands in the log: for more, a separate block costs less than a copy in the log and one in each snapshot."""
APART_MAX_NBYTES: Final = 64 << 20
"""Bytes in separate blocks after which a snapshot is due: it releases the blocks that are no longer used."""

T = TypeVar("T")


class Keeper(Survival):
    """Keep the blocks of one server for its next process.

    Args:
        supervisor: the connection over which the supervisor gets each new block.
        kept: the blocks that an earlier process of this server has left, by name.
    """

    def __init__(self, supervisor: Connection, kept: dict[str, MemoryBlock]) -> None:
        self._supervisor = supervisor
        self._blocks = kept
        self.made: Counter[str] = Counter()
        """By name: how many blocks were asked for under it, so that the next process uses the same names."""
        self.answers: Answers = Answers(lambda record: None)
        """`Recorder` replaces this object by one with a log."""
        self.snapshot_due = False
        """True if a snapshot is due now, whatever the log's size: the records so far cannot be handled again later."""
        self.elsewhere = False
        """True if workers may be on other machines: data that they send beside messages, such as gradients, is not logged."""
        self._apart = 0
        """Bytes put into separate blocks since these last made a snapshot due."""

    def renew(self) -> None:
        self.snapshot_due = True

    def allocate(self, nbytes: int, name: str, gpu: str | None = None) -> MemoryBlock:
        allocate = super().allocate
        return self.named(self.name_for(name), lambda name: allocate(nbytes, name, gpu))

    def sparse(self, nbytes: int, name: str) -> MemoryBlock:
        """Return the block of this name, made if necessary; a new block's pages are allocated when they are used."""
        return self.named(name, lambda name: MemoryBlock.allocate(nbytes, name, sparse=True))

    def once(self, name: str, make: Callable[[], T], attach: Callable[[MemoryBlock], T]) -> T:
        name = self.name_for(name)
        if name in self._blocks:
            return attach(self._blocks[name])
        made = make()
        self.keep(name, made.block)  # type: ignore[attr-defined]
        return made

    def name_for(self, name: str) -> str:
        """Return this name, with a number from the second time on."""
        self.made[name] += 1
        return f"{name} {self.made[name]}" if self.made[name] > 1 else name

    def named(self, name: str, make: Callable[[str], MemoryBlock]) -> MemoryBlock:
        """Return the block of this name, which ``make`` makes if there is none."""
        if name not in self._blocks:
            self.keep(name, make(name))
        return self._usable(name)

    def _usable(self, name: str) -> MemoryBlock:
        block = self._blocks[name]
        if block.unusable is not None:
            raise JobError(f"what an earlier process of this server has left as {name!r} cannot be used: {block.unusable}")
        return block

    def give_up(self, reason: str, *, lack: bool = True) -> None:
        """Note the reason, and report it to the supervisor; only the first one counts."""
        if self.given_up is None:
            self.given_up = reason
            self._supervisor.send({"kind": "mortal", "reason": reason, "lack": lack})

    def keep(self, name: str, block: MemoryBlock) -> None:
        """Add a block, and have the supervisor hold it too, from before the log names it."""
        self._blocks[name] = block
        self._supervisor.send({"kind": "keep", "name": name}, memory=(block,))
        self._supervisor.hand_over()

    def keep_apart(self, data: Buffer, name: str) -> memoryview:
        """Return a copy of these bytes in a separate block. Raises `ConfigurationError` if there is not enough memory."""
        block = MemoryBlock.allocate(len(data), name)
        block.view[:] = data
        self.keep(name, block)
        self._apart += len(data)
        if self._apart >= APART_MAX_NBYTES:
            self._apart, self.snapshot_due = 0, True
        return block.view

    def copy_of(self, memory: Buffer, name: str) -> Buffer:
        if len(memory) <= APART_NBYTES:
            return self.ask(lambda: bytes(memory))
        name = self.name_for(name)
        if name in self._blocks:
            return self._blocks[name].view.toreadonly()
        if self.given_up is None:
            try:
                return self.keep_apart(memory, name).toreadonly()
            except ConfigurationError as error:
                self.give_up(str(error))
        return bytes(memory)

    def __getitem__(self, name: str) -> MemoryBlock:
        return self._blocks[name]

    def drop_all_but(self, names: Collection[str]) -> None:
        """Release all blocks but these, here and at the supervisor."""
        for name in [name for name in self._blocks if name not in names]:
            del self._blocks[name]
            self._supervisor.send({"kind": "drop", "name": name})

    def place_of(self, memory: SharedMemory | memoryview) -> Sequence[Any] | None:
        """Return the place of memory, for a snapshot's table: the name of its block, and for a view also its first byte, the byte after it,
        and whether it is writable. None: it is in none of these blocks."""
        for name, block in self._blocks.items():
            if block is memory:
                return (name,)
            if isinstance(memory, memoryview) and len(memory) and block.nbytes and memory.obj is block.view.obj:
                start = address_of(memory) - address_of(block.view)
                return name, start, start + memory.nbytes, not memory.readonly
        return None

    def at(self, name: str, *part: Any) -> MemoryBlock | memoryview:
        """Return the memory at a place from `place_of`."""
        if not part:
            return self._blocks[name]
        start, stop, writable = part
        view = self._usable(name).view
        if not 0 <= start <= stop <= len(view):
            raise ValueError(f"bytes {start} to {stop} of a block of {len(view)}")
        return view[start:stop] if writable else view[start:stop].toreadonly()
