"""Read a journal once, and keep what the page shows of it: the summary, every worker's time, the pushes, curves, and where it came from."""

from __future__ import annotations

from collections import Counter
from typing import Final

from offbeat.journal.arrivals import Record
from offbeat.journal.summary import Tally
from offbeat.report.page.levels import MOST_WORKERS
from offbeat.report.page.steps import Steps
from offbeat.report.series import Series
from offbeat.report.turns import Turns, Waits

METRICS_KEPT: Final = 24
"""Most metrics that have a curve; of others the page has the last value."""
STALENESS_KEPT: Final = 1_000
"""Greater values of staleness count as this one."""


class Gathered:
    """What is known of a job after its records have been added, in order."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.steps = Steps()
        self.waits = Waits()
        self.turns = Turns((self.steps, self.waits))
        self.records = 0
        self.job: Record = {}
        """The first record."""
        self.folds = _curve()
        """Staleness by time."""
        self.staleness: Counter[int] = Counter()
        """Parts of folds by their staleness."""
        self.loss = _curve()
        self.metrics: dict[str, Series] = {}
        self.phases = False
        """True if the workers have measured their phases."""
        self._parts: dict[tuple[int, int], int] = {}
        """The staleness of parts of folds whose fate has not come, by worker and clock."""

    def add(self, record: Record) -> None:
        """Take the next record."""
        self.records += 1
        if not -1 <= record.get("worker", 0) < MOST_WORKERS:
            raise ValueError(f"worker {record['worker']}")
        self.tally.add(record)
        if record.get("optimizer"):
            return
        kind = record["kind"]
        if kind == "settle":
            staleness = self._parts.pop((record["worker"], record["clock"]), None)
            self.steps.settle(record, staleness)
            return
        if kind == "fold":
            self._folded(record)
            return
        self.turns.add(record)
        if kind == "pushed":
            loss = record.get("loss")
            if loss is not None:
                self.loss.add(record["t"], float(loss))
            if not self.phases and record.get("phases"):
                self.phases = True
        elif kind == "metrics":
            self._logged(record)
        elif kind == "job" and not self.job:
            self.job = record

    def end(self) -> None:
        """Close what is under way at the last record."""
        self.turns.end()
        self.steps.end()

    def _folded(self, record: Record) -> None:
        t = record["t"]
        if t > self.turns.now:
            self.turns.now = t
        total = 0
        for part in record["parts"]:
            staleness = part["staleness"]
            total += staleness
            self.staleness[min(staleness, STALENESS_KEPT)] += 1
            self._parts[part["worker"], part["clock"]] = staleness
        if record["parts"]:
            self.folds.add(t, total / len(record["parts"]))
        if len(self._parts) > 100_000:  # fates that never came
            self._parts.clear()

    def _logged(self, record: Record) -> None:
        for name, value in record["values"].items():
            if name in self.metrics or len(self.metrics) < METRICS_KEPT:
                self.metrics.setdefault(name, _curve()).add(record["t"], float(value))


def _curve() -> Series:
    """Return a curve of the page; no screen has more columns than it has parts."""
    return Series(most=1024, width=1e-3)
