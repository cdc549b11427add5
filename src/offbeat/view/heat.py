"""Keep how slow each worker of a large job was, over the job's time, in bounded memory: a map for a picture. Pure.

A column is a stretch of time, a cell the longest own step of a worker in it. What is shown is a step against the column's median, so a
stripe is a slow worker, and what all workers have in common is not seen. Rows stand by host, then by number.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from statistics import median_low
from typing import Final

from offbeat.types import Seconds

COLUMNS: Final = 240
"""The most columns; a column becomes twice as long whenever there would be more."""
ROWS: Final = 340
"""The most rows that are sent: with more workers several share one, which shows the slowest of them."""
NONE, DEAD, FIRST, LAST = 0, 1, 2, 255
LEAST, MOST = 0.5, 8.0
"""The ratios that `FIRST` and `LAST` stand for; between them the scale is logarithmic."""
SLOW: Final = 1.5
"""From this ratio on, the slowest worker of a row is shown before one that is dead."""
_DEAD: Final = -1.0


def level(ratio: float) -> int:
    """Return the byte that stands for a ratio.

    >>> level(0.1), level(1.0), level(2.0), level(99.0)
    (2, 65, 128, 255)
    """
    share = math.log(min(MOST, max(LEAST, ratio)) / LEAST) / math.log(MOST / LEAST)
    return FIRST + round(share * (LAST - FIRST))


class Heat:
    """The steps of all workers.

    >>> heat = Heat(3)
    >>> for worker, own in ((0, 0.1), (1, 0.1), (2, 0.2)):
    ...     heat.step(worker, 0.5, 0.9, own)
    >>> {at: list(column) for at, column in heat.take().items()}
    {0: [65, 65, 128]}
    """

    def __init__(self, workers: int) -> None:
        self.width: Seconds = 1.0
        """How long a column is."""
        self._workers = workers
        self._columns: dict[int, array[float]] = {}
        self._dirty: set[int] = set()
        self._dead: dict[int, Seconds] = {}
        self._order = list(range(workers))

    @property
    def rows(self) -> list[list[int]]:
        """The workers of each row."""
        each = -(-self._workers // ROWS)
        return [self._order[at : at + each] for at in range(0, self._workers, each)]

    def by_host(self, hosts: Mapping[int, str]) -> None:
        """Order the rows by host."""
        order = sorted(range(self._workers), key=lambda number: (hosts.get(number, ""), number))
        if order != self._order:
            self._order = order
            self._dirty.update(self._columns)

    def step(self, worker: int, start: Seconds, stop: Seconds, own: Seconds) -> None:
        """Take a step that has lasted from one time to another, ``own`` seconds of which were the worker's own."""
        if worker < self._workers:
            self._put(worker, start, stop, own)

    def died(self, worker: int, t: Seconds) -> None:
        """Note that a worker is dead."""
        if worker < self._workers:
            self._dead.setdefault(worker, t)

    def alive(self, worker: int, t: Seconds) -> None:
        """Note that a dead worker is back, or that nobody expects it any more."""
        if (since := self._dead.pop(worker, None)) is not None:
            self._put(worker, since, t, _DEAD)

    def now(self, t: Seconds) -> None:
        """Go on to a time."""
        for worker, since in self._dead.items():
            self._put(worker, since, t, _DEAD)
            self._dead[worker] = max(since, t)

    def take(self, *, whole: bool = False) -> dict[int, bytes]:
        """Return the columns that have changed since the last call, or all of them, a byte a row."""
        wanted = self._columns.keys() if whole else self._dirty & self._columns.keys()
        rows = self.rows
        found = {at: self._levels(self._columns[at], rows) for at in sorted(wanted)}
        self._dirty.clear()
        return found

    def _levels(self, column: array[float], rows: list[list[int]]) -> bytes:
        known = [own for own in column if own > 0.0]
        usual = median_low(known) if known else 1.0
        levels = bytearray()
        for workers in rows:
            owns = [column[number] for number in workers]
            ratio = max(owns) / usual
            levels.append(DEAD if _DEAD in owns and ratio < SLOW else level(ratio) if ratio > 0.0 else NONE)
        return bytes(levels)

    def _put(self, worker: int, start: Seconds, stop: Seconds, own: float) -> None:
        while int(stop / self.width) >= COLUMNS:
            self._halve()
        for at in range(max(0, int(start / self.width)), int(stop / self.width) + 1):
            if at not in self._columns:
                self._columns[at] = array("f", bytes(4 * self._workers))
            column = self._columns[at]
            if column[worker] != _DEAD and (own > column[worker] or own == _DEAD):
                column[worker] = own
                self._dirty.add(at)

    def _halve(self) -> None:
        self.width *= 2.0
        columns, self._columns = self._columns, {}
        for at, column in sorted(columns.items()):
            first = self._columns.setdefault(at // 2, column)
            if first is not column:
                for worker, own in enumerate(column):
                    if first[worker] != _DEAD and (own > first[worker] or own == _DEAD):
                        first[worker] = own
        self._dirty = set(self._columns)
