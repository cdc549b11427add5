"""What happens among ranks that decide for themselves, as they write it down; and the two ways in which one of them cannot take part."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from offbeat.errors import OffbeatError
from offbeat.types import Seconds, Version, WorkerId


class Fenced(OffbeatError):
    """Raised when this rank does not take part, or another process does in its place: it has been declared dead, or has left."""


class TooOld(OffbeatError):
    """Raised when a rank cannot enter with its version, since results that it needs are gone."""


class EntryKind(IntEnum):
    """Name the kinds of entries of the log."""

    ENTER = 0
    LEAVE = 1
    PAUSE = 2
    RESUME = 3
    ARRIVE = 4
    FOLD_DONE = 5
    CATCH_UP = 6
    READ = 7
    LOST = 8
    """Across hosts: a gradient of this rank has gone with its host before it was in any result."""


class Entry(NamedTuple):
    """One event, in the order in which all of them happened: what `Rounds` was told, by method, and what it said."""

    seq: int
    """From 0, without gaps."""
    kind: EntryKind
    rank: WorkerId
    """-1 for `EntryKind.FOLD_DONE`."""
    version: Version
    """ENTER, ARRIVE: the version it came with; CATCH_UP: the one it has now; LOST: the round that it was for; else the rank's version at
    the time, or the newest one."""
    buffer: int | None
    """ARRIVE, LOST: where its gradient is, or was; None: it has none."""
    number: Version
    """Number of the open round before the event."""
    closed: bool
    """True if the event closed a round."""
    at_ns: int
    """By the host's monotonic clock."""


class RankLog:
    """Keep the log where one process decides for the ranks of several hosts.

    Args:
        now: the job's clock, by which entries are dated.
    """

    def __init__(self, now: Callable[[], Seconds]) -> None:
        self._now = now
        self._kept: deque[Entry] = deque()
        self.count = 0
        """How many entries the log has had."""

    def write(
        self, kind: EntryKind, rank: WorkerId, version: Version, buffer: int | None = None, number: Version = 0, closed: bool = False
    ) -> None:
        """Append an entry; for the arguments see `Entry`."""
        self._kept.append(Entry(self.count, kind, rank, version, buffer, number, closed, round(self._now() * 1e9)))
        self.count += 1

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on, and forget earlier entries."""
        while self._kept and self._kept[0].seq < start:
            self._kept.popleft()
        return list(self._kept)
