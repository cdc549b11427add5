"""The smallest state that processes can share: cells that all have the same number, which a change raises by one, cell after cell.

A change that was seen half made, or was left half made and counts, shows: two cells differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offbeat.core.rank_log import EntryKind
from offbeat.runtime.shared_memory.layout import VECTOR_DTYPES, SharedLayout
from offbeat.runtime.shared_memory.log import EntryLog
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.transport.base import SharedMemory
from offbeat.transport.futex import EVERYBODY
from offbeat.transport.shm import MemoryBlock

CELLS = 512


@dataclass(frozen=True, kw_only=True)
class TallyLayout(SharedLayout):
    USE = "tallies"
    MAGIC = 0x74616C6C79
    FORMAT = 1

    @classmethod
    def of(cls, *, entries: int = 1 << 16, followed: bool = False) -> TallyLayout:
        dtype_index = VECTOR_DTYPES.index(torch.float64)
        return cls(ranks=4, numel=3, dtype_index=dtype_index, slots=2, log_entries=entries, seed=0, followed=followed)

    @property
    def state_words(self) -> int:
        return CELLS

    def small_parts(self) -> dict[str, int]:
        return {"small": 24}

    def vector_parts(self) -> dict[str, int]:
        return {"vectors": self.slots * self.vector_nbytes}


class Tally:
    """A copy of the state."""

    def __init__(self, memory: memoryview, log: EntryLog) -> None:
        self.cells = memory.cast("q")
        self._log = log

    def raised(self, rank: int, stop: int = CELLS) -> int:
        """Write an entry and raise so many cells; returns the number that they have then."""
        number = self.cells[0] + 1
        self._log.write(EntryKind.ARRIVE, rank, number)
        for cell in range(stop):
            self.cells[cell] = number
        return number


class Tallies(SharedState[Tally]):
    def __init__(self, block: SharedMemory, layout: TallyLayout | None = None) -> None:
        self.layout = TallyLayout.read(block.view)[0] if layout is None else layout
        super().__init__(self.layout.parts(block.view), self.layout, Tally, fresh=layout is not None)
        if layout is not None:
            layout.write(block.view, "none")

    def _update(self, new: Tally, newest: Tally) -> None:
        new.cells[:] = newest.cells

    def _complete(self, new: Tally, before: Tally) -> int:
        return EVERYBODY if new.cells[0] != before.cells[0] else 0


def create(layout: TallyLayout | None = None) -> tuple[MemoryBlock, Tallies]:
    layout = TallyLayout.of() if layout is None else layout
    block = MemoryBlock.allocate(layout.offsets()["end"], "tallies")
    return block, Tallies(block, layout)


def numbers(tallies: Tallies) -> set[int]:
    """The numbers in the cells of the newest copy: one, or a change was made by halves."""
    return tallies.look(lambda tally: set(tally.cells.tolist()))
