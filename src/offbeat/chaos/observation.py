"""Collect from a journal what the judgement needs beside its tally: folds in time, absences, epochs, versions, replicas. Pure.

Times are those of the journal, in seconds since the job began.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from offbeat.core.leases import adds_up
from offbeat.journal.records import Record
from offbeat.types import Seconds

REPLICA, REPLICA_VERSION = "replica", "replica_version"
"""What a script logs to have its replicas compared: a checksum of the parameters, and the version that they have."""


class Hit(NamedTuple):
    """A fault on a process of the job, in the journal's time."""

    at: Seconds
    until: Seconds
    """When the process went on; for a death ``at``."""
    worker: int | None
    """None: it hit something that workers may rightly wait for, such as a server without a standby."""
    part: float = 1.0
    """Part of this time during which it was stopped."""


class Observation:
    """What happened in one job; fed record by record."""

    def __init__(self) -> None:
        self.folds = array("d")
        """Times of the folds of the first optimizer."""
        self.workers = 0
        self.first_release: Seconds | None = None
        self.changes: dict[int, list[tuple[Seconds, bool]]] = {}
        """By worker: when it became present or away."""
        self.epochs, self.indices, self.unused, self.unused_last = 0, 0, 0, 0
        self.unaccounted: list[str] = []
        self.replicas = 0
        """How many times two replicas of one version were compared."""
        self.unequal: list[str] = []
        self.replicated = False
        """True if servers have standbys."""
        self.server_returns: dict[str, list[Seconds]] = {}
        """By server, such as ``server 0``: when its next process went on after a death."""
        self.end: Record = {}
        self._replicas: dict[tuple[int, float], float] = {}

    @classmethod
    def of(cls, records: Iterable[Record]) -> Observation:
        """Return what a whole journal says."""
        found = cls()
        for record in records:
            found.add(record)
        return found

    def add(self, record: Record) -> None:
        """Take the next record."""
        first = "optimizer" not in record
        match record["kind"]:
            case "job":
                self.workers = record["workers"]
            case "release" if first and self.first_release is None:
                self.first_release = record["t"]
            case "fold" if first:
                self.folds.append(record["t"])
            case "state_changed" if first:
                self.changes.setdefault(record["worker"], []).append((record["t"], record["state"] == "alive"))
            case "process" if record["role"] == "standby":
                self.replicated = True
            case "process" if record["role"] == "server" and record["what"] in ("restarted", "taken over"):
                self.server_returns.setdefault(f"server {record['number']}", []).append(record["t"])
            case "epoch_ended":
                self._account(record)
            case "metrics":
                self._compare(record)
            case "end":
                self.end = record

    def _account(self, record: Record) -> None:
        report = record["report"]
        self.epochs += 1
        self.indices += report["indices"]
        self.unused_last = report["unused"]
        self.unused += self.unused_last
        if not adds_up(report):
            self.unaccounted.append(f"epoch {record['epoch']}: {report}")

    def _compare(self, record: Record) -> None:
        values: dict[str, Any] = record["values"]
        if REPLICA not in values or REPLICA_VERSION not in values:
            return
        key = record.get("optimizer", 0), float(values[REPLICA_VERSION])
        checksum = float(values[REPLICA])
        before = self._replicas.setdefault(key, checksum)
        self.replicas += 1
        if before != checksum:
            self.unequal.append(f"worker {record['worker']} has another model of version {key[1]:g} than others, at {record['t']} s")

    # Absences.

    def away(self, worker: int, span: tuple[Seconds, Seconds] | None = None) -> list[tuple[Seconds, Seconds]]:
        """Return when a worker was not there, within ``span``; None: from the first release to the last fold."""
        start, stop = span or self.span
        found, since = [], start
        present = False
        for t, alive in self.changes.get(worker, []):
            if alive and not present:
                found.append((since, t))
            elif present and not alive:
                since = t
            present = alive
        if not present:
            found.append((since, stop))
        return [(max(a, start), min(b, stop)) for a, b in found if max(a, start) < min(b, stop)]

    def returns(self) -> list[Seconds]:
        """Return how long workers were away that had been there and came back."""
        start, stop = self.span
        return [end - begin for worker in range(self.workers) for begin, end in self.away(worker) if start < begin and end < stop]

    @property
    def span(self) -> tuple[Seconds, Seconds]:
        """Return the first release and the last fold."""
        start = self.first_release or 0.0
        return start, max(start, self.folds[-1]) if self.folds else start

    def outage(self, server: str, at: Seconds, until: Seconds | None = None) -> tuple[Seconds, Seconds]:
        """Return when a server, such as ``server 0``, was away that died at ``at``, or was stopped then and went on at ``until``."""
        back = next((t for t in self.server_returns.get(server, []) if t >= at), until)
        return at, at if back is None else max(at, back if until is None else min(back, until))

    def present_share(
        self, hits: Iterable[Hit], span: tuple[Seconds, Seconds] | None = None, outages: Sequence[tuple[Seconds, Seconds]] = ()
    ) -> float:
        """Return the part of all workers' time during which they could work: neither they nor a server was away.

        Args:
            hits: the faults; of those on workers, the times during which they were stopped count.
            span: the time that counts; None: from the first release to the last fold.
            outages: when a server was away. Every worker needs all servers.
        """
        start, stop = span or self.span
        total = self.workers * (stop - start)
        if total <= 0.0:
            return 1.0
        lost = 0.0
        known = list(hits)
        without = [(max(a, start), min(b, stop)) for a, b in outages if max(a, start) < min(b, stop)]
        for worker in range(self.workers):
            absences = [*self.away(worker, span), *without]
            stops = [hit for hit in known if hit.worker == worker and hit.until > hit.at]
            whole = [(max(hit.at, start), min(hit.until, stop)) for hit in stops if hit.part == 1.0 and hit.at < stop and hit.until > start]
            lost += length([*absences, *whole])
            lost += sum(hit.part * max(0.0, min(hit.until, stop) - max(hit.at, start)) for hit in stops if hit.part < 1.0)
        return max(0.0, 1.0 - lost / total)

    def nobody(self) -> list[tuple[Seconds, Seconds]]:
        """Return when no worker was there, after the first had been."""
        events = sorted((t, alive, worker) for worker, changes in self.changes.items() for t, alive in changes)
        there: set[int] = set()
        found, since = [], None
        for t, alive, worker in events:
            before = bool(there)
            there.add(worker) if alive else there.discard(worker)
            if before and not there:
                since = t
            elif since is not None and there:
                found.append((since, t))
                since = None
        return found if since is None else [*found, (since, float("inf"))]


def length(spans: Iterable[tuple[Seconds, Seconds]]) -> Seconds:
    """Return the length of a union of spans.

    >>> length([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


class Pauses(NamedTuple):
    """How long no version came to be, where a fault had something to do with it, and where none had."""

    after: list[Seconds]
    """From a fault on a worker, or from the last fold if that is later, to the next fold: the longest of each fault."""
    usual: Seconds
    """The longest time between two folds that no fault touches."""


def pauses(folds: Sequence[Seconds], hits: Iterable[Hit], timeout_s: Seconds, nobody: Sequence[tuple[Seconds, Seconds]] = ()) -> Pauses:
    """Return the pauses of a job.

    A fault on a worker has to do with what happens while it lasts and for one timeout after it began. Where several overlap, the time
    counts from the last. Left out are times in which workers rightly wait: for a server that is stopped, or because none of them is there.

    Args:
        folds: their times, in order.
        hits: the faults.
        timeout_s: the job's.
        nobody: when no worker was there.

    >>> pauses([0.0, 1.0, 4.0, 4.5], [Hit(1.5, 1.5, worker=0)], timeout_s=2.0)
    Pauses(after=[2.5], usual=1.0)
    """
    known = sorted(hits)
    begun = [hit.at for hit in known if hit.worker is not None]
    touched: set[int] = set()
    after: list[Seconds] = []
    for hit in known:
        if hit.worker is not None:
            first = max(0, bisect_right(folds, hit.at) - 1)
            last = min(len(folds) - 1, bisect_left(folds, max(hit.until, hit.at + timeout_s)))
            places = range(first, last)
            touched.update(places)
            found = [_pause(folds, place, begun) for place in places if not _excused(folds, place, known, nobody)]
            if found:
                after.append(max(found))
    usual = 0.0
    for place in range(len(folds) - 1):
        if place not in touched and folds[place + 1] - folds[place] > usual and not _excused(folds, place, known, nobody):
            usual = folds[place + 1] - folds[place]
    return Pauses(after, usual)


def _pause(folds: Sequence[Seconds], place: int, begun: Sequence[Seconds]) -> Seconds:
    before = bisect_left(begun, folds[place + 1]) - 1
    return folds[place + 1] - max(folds[place], begun[before] if before >= 0 else folds[place])


def _excused(folds: Sequence[Seconds], place: int, hits: Iterable[Hit], nobody: Iterable[tuple[Seconds, Seconds]]) -> bool:
    start, stop = folds[place], folds[place + 1]
    return any(hit.worker is None and hit.at <= stop and hit.until >= start for hit in hits) or any(
        a < stop and b > start for a, b in nobody
    )
