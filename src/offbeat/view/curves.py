"""Turn what is known of a job into points of curves: what scripts log, by worker and for the whole job, and the job's own figures. Pure.

A point has a version (the job's global step) and a wall-clock time. **The job's curve** of a name has for each version the mean of all
values that workers have logged there; a value that comes after one of a newer version counts with the newer one, so the curve never goes
back. Nothing that grows with the length of a job is kept: one sum and one count for each name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from offbeat.journal.arrivals import JournalArrivals, Record
from offbeat.types import Seconds

LABELLED_MAX: Final = 256
"""Most workers of which each has curves of its own."""
LABELLED: Final = 32
"""The number of workers that have curves of their own in a larger job: the first ones."""
KINDS: Final = ("job", "metrics", "pushed", "state_changed")
"""The records that curves are made from."""
OWN: Final = "offbeat"
"""Begins the names of the job's own figures."""


class Point(NamedTuple):
    """A point of a curve."""

    name: str
    worker: int | None
    """None: the job's curve."""
    version: int
    at: Seconds
    """The time, in seconds since 1970."""
    value: float


@dataclass(slots=True)
class _Open:
    """The values of one name at the newest version."""

    version: int
    t: Seconds = 0.0
    total: float = 0.0
    count: int = 0
    """0: their mean is a point already."""


class Curves:
    """Makes points from records and from snapshots of the job's figures.

    >>> curves = Curves()
    >>> curves.begin({"started": "1970-01-01T00:01:40+00:00", "workers": 2})
    >>> for worker, value in ((0, 1.0), (1, 3.0)):
    ...     entry = {"kind": "metrics", "t": 5.0, "worker": worker, "version": 7, "values": {"loss": value}}
    ...     print(*curves.record(entry))
    Point(name='loss', worker=0, version=7, at=105.0, value=1.0)
    Point(name='loss', worker=1, version=7, at=105.0, value=3.0)
    >>> print(*curves.rest())
    Point(name='loss', worker=None, version=7, at=105.0, value=2.0)
    """

    def __init__(self) -> None:
        self._began: Seconds = 0.0
        self._labelled = LABELLED_MAX
        self._open: dict[str, _Open] = {}
        self._arrivals = JournalArrivals()
        self._before: Mapping[str, Any] | None = None

    def begin(self, job: Mapping[str, Any]) -> None:
        """Take what the first record of a journal, or a snapshot, says of the job."""
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a simulated job has no date
            self._began = datetime.fromisoformat(job["started"]).timestamp()
        workers = job.get("workers") or 0
        self._labelled = LABELLED if workers > LABELLED_MAX else LABELLED_MAX

    def record(self, entry: Record) -> Iterator[Point]:
        """Return the points that follow from a record."""
        if entry.get("optimizer"):  # its versions are not those of the first one
            return
        match entry["kind"]:
            case "job":
                self.begin(entry)
            case "metrics":
                for name, value in entry["values"].items():
                    yield from self._value(str(name), entry, value)
            case "pushed" if entry.get("loss") is not None and self._arrivals.begins(entry):
                yield from self._value("loss", entry, entry["loss"])
            case "state_changed" if entry["state"] == "alive":
                self._arrivals.joined(entry["worker"], entry["incarnation"])

    def status(self, snapshot: Mapping[str, Any]) -> Iterator[Point]:
        """Return the points of the job's own figures, for the time since the snapshot before, and means that are complete."""
        self.begin(snapshot)
        version, t = snapshot["version"], snapshot["elapsed_s"]
        for name, one in self._open.items():
            if one.version < version:
                yield from self._mean(name, one)
        before, self._before = self._before, snapshot
        if before is None or t <= before["elapsed_s"]:
            return
        for name, value in _figures(before, snapshot):
            yield Point(f"{OWN}/{name}", None, version, self._wall(t), value)
        known = {worker["worker"]: worker for worker in before["per_worker"]}
        for worker in snapshot["per_worker"]:
            number = worker["worker"]
            if number < self._labelled and number in known and (share := _waiting([known[number]], [worker])) is not None:
                yield Point(f"{OWN}/waiting_share", number, version, self._wall(t), share)

    def rest(self) -> Iterator[Point]:
        """Return the means that are left at the end."""
        for name, one in self._open.items():
            yield from self._mean(name, one)

    def _value(self, name: str, entry: Record, value: Any) -> Iterator[Point]:
        worker, version, t, number = entry["worker"], entry["version"], entry["t"], float(value)
        if worker < self._labelled:
            yield Point(name, worker, version, self._wall(t), number)
        one = self._open.setdefault(name, _Open(version))
        if version > one.version:
            yield from self._mean(name, one)
            one.version = version
        one.t, one.total, one.count = t, one.total + number, one.count + 1

    def _mean(self, name: str, one: _Open) -> Iterator[Point]:
        if one.count:
            yield Point(name, None, one.version, self._wall(one.t), one.total / one.count)
        one.total, one.count = 0.0, 0

    def _wall(self, t: Seconds) -> Seconds:
        return self._began + t


def _figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the job's figures between two snapshots: rates and shares of that time, and counts so far."""
    seconds = after["elapsed_s"] - before["elapsed_s"]
    yield "samples_per_s", (after["samples"] - before["samples"]) / seconds
    yield "versions_per_s", (after["version"] - before["version"]) / seconds
    yield "samples", after["samples"]
    yield "version", after["version"]
    yield "workers_alive", sum(worker["state"] == "alive" for worker in after["per_worker"])
    yield "deaths", sum(worker["deaths"] for worker in after["per_worker"])
    yield "staleness_mean", after["staleness_mean"]
    if (share := _waiting(before["per_worker"], after["per_worker"])) is not None:
        yield "waiting_share", share
    for fate, count in after["fates"].items():
        yield f"gradients/{fate}", count


def _waiting(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> float | None:
    """Return the share of the time between two snapshots that workers waited; None: nothing has ended in that time."""
    waited, busy = (sum(worker[key] for worker in after) - sum(worker[key] for worker in before) for key in ("wait_s", "busy_s"))
    return waited / (waited + busy) if waited + busy > 0 else None
