"""Keep the newest lines of a journal for the processes that follow the job: a bounded ring, from which batches are taken.

A reader that is slow, or none at all, costs memory of `RING_NBYTES` and the oldest lines, never time. Lines are counted from 0; each batch
says which number its first line has, so a receiver sees what is missing, and what a server's next process sends a second time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from offbeat.types import Seconds

ALL: Final = "*"
"""Stands for every kind of record."""
RING_NBYTES: Final = 4 << 20
"""Most bytes of lines that wait to be sent. A single line may be longer."""
BATCH_NBYTES: Final = 1 << 18
"""Bytes of lines after which a batch is full."""
BATCH_S: Final[Seconds] = 0.2
"""Seconds after which a batch is sent though it is not full."""


class Batch(NamedTuple):
    """Lines of a journal that follow one another."""

    first: int
    """The number of the first line."""
    lines: list[bytes]
    """Without their newlines."""

    @property
    def payload(self) -> bytes:
        """The lines, each with a newline."""
        return b"\n".join(self.lines) + b"\n"


class Followed:
    """The newest lines of the wanted kinds that have not been sent.

    Args:
        kinds: of records; `ALL` among them stands for every kind.

    >>> followed = Followed(["fold"])
    >>> for number in range(3):
    ...     followed.add(f'{{"kind":"fold","version":{number}}}')
    >>> followed.wants({"kind": "publish"})
    False
    >>> batch = followed.due(10.0)
    >>> batch.first, len(batch.lines), followed.due(99.0)
    (0, 3, None)
    """

    def __init__(self, kinds: Collection[str]) -> None:
        self._kinds = None if ALL in kinds else frozenset(kinds)
        self._lines: deque[bytes] = deque()
        self._nbytes = 0
        self._first = 0
        """The number of the oldest line in the ring."""
        self._sent_at: Seconds = 0.0
        self._outstanding = False
        """True while a batch has been sent and its receiver has not answered."""

    def wants(self, record: Mapping[str, Any]) -> bool:
        """Return whether a record is wanted: of such a kind, and no ``settle`` of a fold, whose own record has the fates of its parts."""
        if self._kinds is None:
            return True
        return record["kind"] in self._kinds and (record["kind"] != "settle" or record["fate"] != "folded")

    def add(self, line: str) -> None:
        """Take the line of a record that is wanted; the oldest lines make room."""
        self._lines.append(data := line.encode("utf-8", "backslashreplace"))
        self._nbytes += len(data)
        while self._nbytes > RING_NBYTES and len(self._lines) > 1:
            self._nbytes -= len(self._lines.popleft())
            self._first += 1

    def due(self, now: Seconds) -> Batch | None:
        """Return the batch to send now; None: none is due, or the one before has not been answered."""
        if self._outstanding or not self._lines or (self._nbytes < BATCH_NBYTES and now - self._sent_at < BATCH_S):
            return None
        self._sent_at, self._outstanding = now, True
        return self._take()

    def answered(self) -> None:
        """Note that the receiver has the batch sent last."""
        self._outstanding = False

    def rest(self) -> list[Batch]:
        """Return all that is left, at the end of the job, whether the receiver has answered or not."""
        batches = []
        while self._lines:
            batches.append(self._take())
        return batches

    def _take(self) -> Batch:
        batch = Batch(self._first, [])
        nbytes = 0
        while self._lines and nbytes < BATCH_NBYTES:
            batch.lines.append(self._lines.popleft())
            nbytes += len(batch.lines[-1])
        self._nbytes -= nbytes
        self._first += len(batch.lines)
        return batch

    def place(self) -> dict[str, Any]:
        """Return what another process needs to go on from here, as plain data."""
        return {"first": self._first, "lines": list(self._lines)}

    def go_on(self, place: Mapping[str, Any]) -> None:
        """Begin where another process was when `place` was called."""
        self._first, self._lines = place["first"], deque(place["lines"])
        self._nbytes = sum(map(len, self._lines))
