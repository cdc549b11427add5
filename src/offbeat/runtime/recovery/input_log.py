"""Write the messages of a server to memory before the server handles them, so that its next process can handle them again.

The memory has two areas, of which one is in use. An area is a snapshot, which may be empty, and the records since. A new snapshot goes to
the other area, and one store of eight bytes makes that the one in use; so does each record count from one such store on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

HEADER_NBYTES: Final = 1 << 12
AREA_NBYTES: Final = 256 << 20
"""Of one area; pages that are not used are not allocated."""
LOG_NBYTES: Final = HEADER_NBYTES + 2 * AREA_NBYTES
GROWTH_NBYTES: Final = 1 << 20
RECORDS_MAX: Final = 1024
"""Records after which a new snapshot is due: to be told them again takes about a tenth of a second."""
RECORDS_NBYTES: Final = 32 << 20
"""Bytes of records after which one is due: with gradients in the records (`psp`) mostly these."""
_SIZE = struct.Struct("=Q")


class LogFull(Exception):
    """There is no room for a snapshot or a record."""


class InputLog:
    """The log of one server.

    Args:
        view: `LOG_NBYTES` bytes: zeros, or what an earlier process has left.
        grow: called with the place and the size of a part of ``view`` before it is used for the first time.

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
        self._words = view[:HEADER_NBYTES].cast("Q")  # the number of the area in use, how far each area is filled, and `calls`
        self.calls = self._words[3:4]
        """A number that outlives this process, for `answers.Answers`."""
        self._pack = msgpack.Packer().pack
        self.count = 0
        """Records since the snapshot, without those that take next to no time to be told again."""
        self._postponed = 0
        """How many records there were when a snapshot did not fit: the next one is tried after as many again."""
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
        """Return True if a snapshot is due."""
        if self.count < self._postponed:
            return False
        return self.count >= RECORDS_MAX or self._filled - self._begun >= RECORDS_NBYTES

    def append(self, record: list[Any], *, counts: bool = True) -> None:
        """Write a record. ``counts``: False if it takes next to no time to be told again. Raises `LogFull`."""
        packed = self._pack(record)
        filled = self._filled + _SIZE.size + len(packed)
        self._write(self._area, self._filled, _SIZE.pack(len(packed)) + packed)
        self._filled = self._words[1 + self._area] = filled
        self.count += counts

    def begin(self, snapshot: bytes) -> None:
        """Begin anew with a snapshot, and no records. Raises `LogFull`; the log goes on as it was then, and a snapshot is due later."""
        other = 1 - self._area
        self._postponed = self.count + RECORDS_MAX
        self._write(other, 0, _SIZE.pack(len(snapshot)))
        self._write(other, _SIZE.size, snapshot)
        self._words[1 + other] = _SIZE.size + len(snapshot)
        self._words[0] = other
        self._area, self._filled, self._begun = other, _SIZE.size + len(snapshot), _SIZE.size + len(snapshot)
        self.count = self._postponed = 0

    def snapshot(self) -> memoryview:
        """Return the snapshot; empty: there is none."""
        at = self._at(self._area) + _SIZE.size
        return self._view[at : at + self._snapshot_nbytes()]

    def records(self) -> Iterator[list[Any]]:
        """Return the records since the snapshot."""
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
