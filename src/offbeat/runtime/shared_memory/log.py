"""The log of what the ranks of a host decided: a ring of entries in shared memory, written under the lock of `SharedState`."""

from __future__ import annotations

from struct import Struct
from time import monotonic_ns

from offbeat.core.rank_log import Entry, EntryKind
from offbeat.types import Version, WorkerId

_RECORD = Struct("8q")
"""An entry as it lies in the ring: the fields of `Entry`, ``buffer`` -1 for None."""
ENTRY_NBYTES = _RECORD.size


class EntryLog:
    """The ring, as one process sees it.

    Args:
        memory: of the ring.
        entries: how many it has room for.
    """

    def __init__(self, memory: memoryview, entries: int) -> None:
        self._memory = memory
        self._entries = entries
        self.end = 0
        """How many entries there are so far, in the change that this process is making. `SharedState` sets and saves it."""

    def write(
        self, kind: int, rank: WorkerId, version: Version, buffer: int | None = None, number: Version = 0, closed: bool = False
    ) -> None:
        """Append an entry, stamped with the time; the arguments are the fields of `Entry`. It counts once the change is complete."""
        seq = self.end
        at = seq % self._entries * ENTRY_NBYTES
        _RECORD.pack_into(self._memory, at, seq, kind, rank, version, -1 if buffer is None else buffer, number, closed, monotonic_ns())
        self.end = seq + 1

    def entries(self, start: int, end: int) -> list[Entry]:
        """Return the entries from number ``start`` up to, and without, number ``end``."""
        found = []
        for seq in range(start, end):
            at, kind, rank, version, buffer, number, closed, at_ns = _RECORD.unpack_from(self._memory, seq % self._entries * ENTRY_NBYTES)
            assert at == seq, f"entry {seq} of the log is overwritten by {at}"
            found.append(Entry(seq, EntryKind(kind), rank, version, None if buffer < 0 else buffer, number, bool(closed), at_ns))
        return found
