"""Keep the reports of a job's newest epochs for its summary, and the sums of the older ones, so that a long job does not grow it.

A summary travels to the supervisor several times per second; its size is bounded as the memory is.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from offbeat.journal.arrivals import Record

EPOCHS_KEPT: Final = 1_000
"""Most epochs whose reports a summary has."""
ENTRIES_KEPT: Final = 5_000
"""Most exceptions, splits and batch sizes in all these reports together; the newest report is kept whatever it lists."""
SUMS: Final = ("indices", "folded", "dropped", "rejected", "unused", "returned")
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
        self._earlier = 0
        self._sums = dict.fromkeys(SUMS, 0)

    def add(self, report: Record) -> None:
        """Take the report of an epoch that has ended."""
        self._newest.append(report)
        self._entries += _entries(report)
        while len(self._newest) > 1 and (len(self._newest) > EPOCHS_KEPT or self._entries > ENTRIES_KEPT):
            old = self._newest.popleft()
            self._entries -= _entries(old)
            self._earlier += 1
            for name in SUMS:
                self._sums[name] += old.get(name, 0)

    def summary(self) -> dict[str, Any]:
        """Return the fields of the summary: the newest reports, and the number of older ones with the sums of their counts, or None."""
        return {"epochs": list(self._newest), "earlier_epochs": {"epochs": self._earlier, **self._sums} if self._earlier else None}


def _entries(report: Record) -> int:
    return sum(len(report.get(name, ())) for name in LISTS)
