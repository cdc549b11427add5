"""Keep the reports of a job's newest epochs for its summary, and the sums of the older ones, so that a long job does not grow it.

A summary travels to the supervisor several times per second: in brief, with the newest report alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from offbeat.journal.arrivals import Record

EPOCHS_KEPT: Final = 1_000
"""Most epochs whose reports a summary has."""
ENTRIES_KEPT: Final = 5_000
"""Most exceptions, splits and batch sizes in all these reports together; the newest report is kept whatever it lists."""
SUMS: Final = ("indices", "folded", "dropped", "rejected", "skipped", "unused", "returned", "kept", "brought")
LISTS: Final = ("exceptions", "splits", "batches")


class EpochReports:
    """Reports of ended epochs, the newest ones whole.

    >>> reports = EpochReports()
    >>> for epoch in range(1_002):
    ...     reports.add({"epoch": epoch, "indices": 8, "folded": 8})
    >>> summary = reports.summary()
    >>> summary["epochs"][0], summary["earlier_epochs"]["epochs"], summary["earlier_epochs"]["folded"]
    ({'epoch': 2, 'indices': 8, 'folded': 8}, 2, 16)
    """

    def __init__(self) -> None:
        self._newest: deque[Record] = deque()
        self._entries = 0
        self._all = dict.fromkeys(("epochs", *SUMS), 0)
        """The number of reports so far, and the sums of their counts."""
        self._earlier = dict(self._all)
        """The same of those that are not kept."""

    def add(self, report: Record) -> None:
        """Take the report of an epoch that has ended."""
        self._newest.append(report)
        self._entries += _entries(report)
        _add(self._all, report)
        while len(self._newest) > 1 and (len(self._newest) > EPOCHS_KEPT or self._entries > ENTRIES_KEPT):
            old = self._newest.popleft()
            self._entries -= _entries(old)
            _add(self._earlier, old)

    def summary(self, *, brief: bool = False) -> dict[str, Any]:
        """Return the fields of the summary: the newest reports, and the number of older ones with the sums of their counts, or None.

        Args:
            brief: only the newest report, for a message that is sent several times per second.
        """
        newest, earlier = list(self._newest), self._earlier
        if brief and newest:
            newest, earlier = newest[-1:], dict(self._all)
            _add(earlier, newest[-1], -1)
        return {"epochs": newest, "earlier_epochs": dict(earlier) if earlier["epochs"] else None}


def _add(sums: dict[str, int], report: Record, times: int = 1) -> None:
    sums["epochs"] += times
    for name in SUMS:
        sums[name] += times * report.get(name, 0)


def _entries(report: Record) -> int:
    return sum(len(report.get(name, ())) for name in LISTS)


def epoch_words(number: int, pool: int) -> str:
    """Return an epoch's number, and the loader's unless it is the script's first elastic one.

    >>> epoch_words(2, 0), epoch_words(0, 1)
    ('2', '0 of loader 1')
    """
    return f"{number:,}" + (f" of loader {pool}" if pool else "")
