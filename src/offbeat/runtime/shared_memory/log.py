"""Keep the log of what the ranks of a host decided: a ring of entries in shared memory, written under the lock of `SharedState`."""

from __future__ import annotations

from struct import Struct
from time import monotonic_ns

from offbeat.core.rank_log import Entry, EntryKind
from offbeat.types import Version, WorkerId

_RECORD = Struct("8q")
"""An entry in the ring: the fields of `Entry`; ``buffer`` is -1 for None."""
ENTRY_NBYTES = _RECORD.size


class EntryLog:
    """Access the ring from one process.

    Args:
        memory: of the ring.
        entries: its number of entries.
    """

    def __init__(self, memory: memoryview, entries: int) -> None:
        self._memory = memory
        self._entries = entries
        self.end = 0
        """The number of entries so far, in the change that this process is making. `SharedState` sets and saves it."""

    def write(
        self, kind: int, rank: WorkerId, version: Version, buffer: int | None = None, number: Version = 0, closed: bool = False
    ) -> None:
        """Append an entry with the present time; the arguments are the fields of `Entry`. It is valid once the change is complete."""
        seq = self.end
        at = seq % self._entries * ENTRY_NBYTES
        _RECORD.pack_into(self._memory, at, seq, kind, rank, version, -1 if buffer is None else buffer, number, closed, monotonic_ns())
        self.end = seq + 1

    def entries(self, start: int, end: int) -> list[Entry]:
        """Return the entries from number ``start`` up to, but not including, number ``end``."""
        found = []
        for seq in range(start, end):
            at, kind, rank, version, buffer, number, closed, at_ns = _RECORD.unpack_from(self._memory, seq % self._entries * ENTRY_NBYTES)
            assert at == seq, f"entry {seq} of the log is overwritten by {at}"
            found.append(Entry(seq, EntryKind(kind), rank, version, None if buffer < 0 else buffer, number, bool(closed), at_ns))
        return found
