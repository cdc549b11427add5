"""Say what a journal tells of a run with faults, beside its tally and its audit: pauses of the folds, and replicas. Pure.

Times are those of the journal, in seconds since the job began.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from offbeat.chaos.schedule import Fault
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally
from offbeat.types import Seconds

REPLICA, REPLICA_VERSION = "replica", "replica_version"
"""What a script logs to have its replicas compared: a checksum of the parameters, and the version that they have."""
Span: TypeAlias = tuple[Seconds, Seconds]


class History:
    """What happened in one job; fed record by record."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.folds = array("d")
        """Times of the folds of the first optimizer."""
        self.replicated = False
        """True if servers have standbys."""
        self.replicas: dict[tuple[int, float], float] = {}
        """The first checksum of each version, by optimizer and version."""
        self._shards: dict[int, int] = {}
        """The version of each shard of the first optimizer; of all shards together under rules of job scope."""
        self.compared = 0
        self.unequal: list[str] = []
        self.nobody: list[Span] = []
        """When no worker was there, after the first had been."""
        self._there: set[int] = set()

    @classmethod
    def of(cls, records: Iterable[Record]) -> History:
        """Return what a whole journal says."""
        found = cls()
        for record in records:
            found.add(record)
        return found

    def add(self, record: Record) -> None:
        """Take the next record."""
        self.tally.add(record)
        first = "optimizer" not in record
        match record["kind"]:
            case "fold" if first:
                self.folds.append(record["t"])
                self._shards[record.get("shard", 0)] = record["version"]
            case "state_changed" if first:
                self._changed(record["t"], record["worker"], record["state"] == "alive")
            case "process" if record["role"] == "standby":
                self.replicated = True
            case "metrics" if {REPLICA, REPLICA_VERSION} <= record["values"].keys():
                self._compare(record, record.get("optimizer", 0), float(record["values"][REPLICA_VERSION]))

    def _changed(self, t: Seconds, worker: int, alive: bool) -> None:
        before = bool(self._there)
        self._there.add(worker) if alive else self._there.discard(worker)
        if before and not self._there:
            self.nobody.append((t, float("inf")))
        elif self._there and not before and self.nobody:
            self.nobody[-1] = self.nobody[-1][0], t

    def _compare(self, record: Record, optimizer: int, version: float) -> None:
        if len(self._shards) > 1 and (optimizer or {*self._shards.values()} != {version}):
            return  # the version of a model is the least of its parts, and models of one version may differ in the others
        checksum = float(record["values"][REPLICA])
        self.compared += 1
        if self.replicas.setdefault((optimizer, version), checksum) != checksum:
            self.unequal.append(f"worker {record['worker']} has another model of version {version:g} than others, at {record['t']} s")

    def pauses(self, faults: Iterable[Fault], timeout_s: Seconds) -> tuple[list[Seconds], Seconds]:
        """Return how long the folds paused after each fault on a worker, at most, and the longest time between two that no fault touches.

        A fault on a worker has to do with what happens while it lasts and for one timeout after it began. The pause is the time from it, or
        from the last fold if that is later, to the next fold; where several faults overlap, the time counts from the last. Left out are
        times in which workers rightly wait: for a server that is stopped, or because none of them is there. With standbys they wait for no
        server: when one or its standby is dead or frozen, the other must go on within the timeout. What hangs together with another
        process that has died dies within that time.

        Args:
            faults: those that have happened.
            timeout_s: the job's.
        """
        alike = ("worker", "link", "server", "standby") if self.replicated else ("worker", "link")
        spans = sorted((one.journal_s, max(one.over_s, one.journal_s + timeout_s)) for one in faults if one.target in alike)
        others = [one for one in faults if one.target not in alike]
        rightly = [(one.journal_s, one.over_s + timeout_s * (one.kind in ("kill", "term"))) for one in others]
        left_out = {place for start, stop in [*rightly, *self.nobody] for place in _gaps(self.folds, start, stop)}
        touched, after = set(left_out), []
        begun = [at for at, _ in spans]
        for span in spans:
            places = _gaps(self.folds, *span)
            touched.update(places)
            if found := [self._pause(place, begun) for place in places if place not in left_out]:
                after.append(max(found))
        lengths = (self.folds[place + 1] - self.folds[place] for place in range(len(self.folds) - 1) if place not in touched)
        return after, max(lengths, default=0.0)

    def _pause(self, place: int, begun: Sequence[Seconds]) -> Seconds:
        """Return the time to a fold from the one before, or from the last fault between them."""
        before = bisect_left(begun, self.folds[place + 1]) - 1
        return self.folds[place + 1] - max(self.folds[place], begun[before] if before >= 0 else 0.0)


def _gaps(folds: Sequence[Seconds], start: Seconds, stop: Seconds) -> range:
    """Return the places of the folds, each the beginning of a time between two, that this time touches."""
    return range(max(0, bisect_right(folds, start) - 1), min(len(folds) - 1, bisect_left(folds, stop)))
