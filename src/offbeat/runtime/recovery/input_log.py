"""Write a server's messages to memory before the server handles them, so that its next process can handle them again.

The memory has two areas, one of them in use. An area has a snapshot, which may be empty, and the records since. A new snapshot is written
to the other area, and a store of eight bytes then puts that area in use. In the same way a store of eight bytes makes each record count.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

HEADER_NBYTES: Final = 1 << 12
AREA_NBYTES: Final = 256 << 20
"""Size of one area in bytes; pages that are not used are not allocated."""
LOG_NBYTES: Final = HEADER_NBYTES + 2 * AREA_NBYTES
GROWTH_NBYTES: Final = 1 << 20
RECORDS_MAX: Final = 1024
"""Number of records after which a snapshot is due: handling so many again takes about 0.1 s."""
RECORDS_NBYTES: Final = 32 << 20
"""Bytes of records after which a snapshot is due. With gradients in the records (`psp`), mostly this limit applies."""
_SIZE = struct.Struct("=Q")


class LogFull(Exception):
    """An area has no room for a snapshot or a record."""


class InputLog:
    """Hold one server's snapshot and log records.

    Args:
        view: `LOG_NBYTES` bytes: zeros, or what an earlier process has written.
        grow: called with the first byte and the number of bytes of each part of ``view``, before its first use.

    >>> memory = memoryview(bytearray(LOG_NBYTES))
    >>> log = InputLog(memory, lambda start, nbytes: None)
    >>> log.append(["tick", 0.5])
    >>> log.begin(b"the state so far")
    >>> log.append(["tick", 0.6])
    >>> again = InputLog(memory, lambda start, nbytes: None)
    >>> bytes(again.snapshot()), list(again.records())
    (b'the state so far', [['tick', 0.6]])
    """

    def __init__(self, view: memoryview, grow: Callable[[int, int], None]) -> None:
        self._view, self._grow = view, grow
        self._grown = [0, 0]
        self._words = view[:HEADER_NBYTES].cast("Q")  # the area in use, the filled bytes of each area, and `calls`
        self.calls = self._words[3:4]
        """The word of `answers.Answers`, which outlives this process."""
        self._pack = msgpack.Packer().pack
        self.count = 0
        """Records since the snapshot, without those that take almost no time to handle again."""
        self._postponed = 0
        """The count of records at which a snapshot is tried again, after one that did not fit; 0: the last one fitted."""
        self._area = self._words[0]
        self._filled = self._words[1 + self._area]
        if not self._filled:
            grow(0, HEADER_NBYTES)
            self._write(self._area, 0, _SIZE.pack(0))
            self._filled = self._words[1 + self._area] = _SIZE.size
        self._begun = _SIZE.size + self._snapshot_nbytes()
        self.count = sum(1 for _ in self.records())

    @property
    def due(self) -> bool:
        """True if a snapshot is due."""
        if self.count < self._postponed:
            return False
        return self.count >= RECORDS_MAX or self._filled - self._begun >= RECORDS_NBYTES

    def append(self, record: list[Any], *, counts: bool = True) -> None:
        """Write a record; ``counts``: False if handling it again takes almost no time. Raises `LogFull`."""
        packed = self._pack(record)
        filled = self._filled + _SIZE.size + len(packed)
        self._write(self._area, self._filled, _SIZE.pack(len(packed)) + packed)
        self._filled = self._words[1 + self._area] = filled
        self.count += counts

    def begin(self, snapshot: bytes) -> None:
        """Begin the log anew with a snapshot. Raises `LogFull`: the old log stays in use, and snapshots wait for `RECORDS_MAX` records."""
        other = 1 - self._area
        self._postponed = self.count + RECORDS_MAX
        self._write(other, 0, _SIZE.pack(len(snapshot)))
        self._write(other, _SIZE.size, snapshot)
        self._words[1 + other] = _SIZE.size + len(snapshot)
        self._words[0] = other
        self._area, self._filled, self._begun = other, _SIZE.size + len(snapshot), _SIZE.size + len(snapshot)
        self.count = self._postponed = 0

    def snapshot(self) -> memoryview:
        """Return the snapshot, empty if there is none."""
        at = self._at(self._area) + _SIZE.size
        return self._view[at : at + self._snapshot_nbytes()]

    def records(self) -> Iterator[list[Any]]:
        """Yield the records since the snapshot."""
        base = self._at(self._area)
        at, stop = base + self._begun, base + self._filled
        while at < stop:
            (size,) = _SIZE.unpack(self._view[at : at + _SIZE.size])
            at += _SIZE.size
            yield msgpack.unpackb(self._view[at : at + size], strict_map_key=False)
            at += size

    def _snapshot_nbytes(self) -> int:
        at = self._at(self._area)
        return int(_SIZE.unpack(self._view[at : at + _SIZE.size])[0])

    def _at(self, area: int) -> int:
        return HEADER_NBYTES + area * AREA_NBYTES

    def _write(self, area: int, start: int, data: bytes) -> None:
        stop = start + len(data)
        if stop > AREA_NBYTES:
            raise LogFull(f"{stop} bytes for a log of {AREA_NBYTES}")
        if stop > self._grown[area]:
            grown = min(AREA_NBYTES, -(-stop // GROWTH_NBYTES) * GROWTH_NBYTES)
            self._grow(self._at(area) + self._grown[area], grown - self._grown[area])
            self._grown[area] = grown
        at = self._at(area)
        self._view[at + start : at + stop] = data
