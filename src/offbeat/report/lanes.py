"""From a journal to a picture's raw material: for each worker the spans of what it did and the marks on it, and the job's own moments.

Pure: records in, spans out. How they look is the business of `report.timeline` and `report.chrome`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offbeat.journal.arrivals import JournalArrivals, Record

SPANS: Final = ("computing", "waiting", "idle", "dead")
CHANGES: Final = ("release", "pushed", "abandoned", "interrupt", "paused", "settle", "state_changed")
MARKS: Final = ("killed", "returned", "dropped", "rejected", "abandoned", "interrupted")
DEATHS: Final = ("kill", "vanish")
"""Faults made on purpose that end a process."""


class LaneSpan(NamedTuple):
    """Describe what a worker did from ``start_s`` to ``stop_s``; ``what`` is one of `SPANS`."""

    start_s: float
    stop_s: float
    what: str


class Mark(NamedTuple):
    """One of `MARKS`. ``killed`` stands for every death, intended or not."""

    t: float
    what: str
    reason: str = ""


class Moment(NamedTuple):
    """Something that concerns more than one worker: a ``fold``, a ``publish``, or a ``barrier``, at which all go on with one version."""

    t: float
    what: str
    version: int
    shard: int | None = None
    parts: int = 0
    reason: str = ""


@dataclass(slots=True)
class Lane:
    """Collect one worker's history."""

    spans: list[LaneSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    doing: str = "absent"
    since_s: float = 0.0
    incarnation: int = 0

    def turn(self, doing: str, t: float) -> None:
        """Close the span under way and begin another; ``absent`` is drawn as nothing."""
        if self.doing != "absent" and t > self.since_s:
            self.spans.append(LaneSpan(self.since_s, t, self.doing))
        self.doing, self.since_s = doing, t

    def die(self, t: float, reason: str = "") -> None:
        """Begin the span of a death. A kill often has two records, of the supervisor and of the coordinator: the first counts."""
        if self.doing not in ("dead", "absent"):
            self.turn("dead", t)
            self.marks.append(Mark(t, "killed", reason))


@dataclass(slots=True)
class Chart:
    """Collect one job's lanes by worker, and its moments."""

    sync: str = "?"
    lanes: dict[int, Lane] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    start_s: float = 0.0
    """When the first worker was admitted: how long processes take to start is no rule's doing."""
    end_s: float = 0.0
    blocks: bool = False
    """True if the rule has shard scope: workers continue by themselves, without a release."""
    _arrivals: JournalArrivals = field(default_factory=JournalArrivals)
    _doing: Counter[str] = field(default_factory=Counter)
    """Number of workers by activity."""
    _round: tuple[float, int] = (0.0, -1)
    """The time and version of the newest release."""
    _barrier: tuple[float, int] = (0.0, -1)
    """The same of the newest barrier."""
    _gone_on: int = 0
    """Number of workers that have begun to compute in this round, and of those among them that had waited for it."""
    _had_waited: int = 0

    @classmethod
    def of(cls, records: Iterable[Record]) -> Chart:
        """The chart of a whole journal, with the journal's own times."""
        chart = cls()
        admitted = False
        for record in records:
            if record["kind"] == "release" and not admitted:
                admitted, chart.start_s = True, record["t"]
            chart.add(record)
        for lane in chart.lanes.values():
            lane.turn("absent", chart.end_s)
        return chart

    def times(self, what: str) -> list[float]:
        """Return the times of the moments of one kind, in seconds."""
        return [moment.t for moment in self.moments if moment.what == what]

    def add(self, record: Record) -> None:
        """Take the next record."""
        kind, t = record["kind"], record["t"]
        self.end_s = max(self.end_s, t)
        self.blocks = self.blocks or record.get("shard") is not None  # a push may be rejected before the first fold
        if kind == "job":
            self.sync = record["sync"]
            for number in range(record["workers"]):
                self._lane(number)
        elif kind in ("fold", "publish"):
            self.moments.append(Moment(t, kind, record["version"], record.get("shard"), len(record.get("parts", ())), record["reason"]))
        elif kind == "process":
            if record["role"] == "worker" and record["what"] == "killed":
                self._change(record["number"], record)
        elif kind in CHANGES or (kind == "fault" and record["what"] in DEATHS):
            self._change(record["worker"], record)

    def _lane(self, number: int) -> Lane:
        return self.lanes.setdefault(number, Lane())

    def _change(self, number: int, record: Record) -> None:
        lane = self._lane(number)
        before = lane.doing
        self._one_worker(lane, record)
        self._doing[before] -= 1
        self._doing[lane.doing] += 1
        if record["kind"] == "release" and before != lane.doing == "computing":
            self._look_for_a_barrier(record, waited=before == "waiting")

    def _look_for_a_barrier(self, record: Record, *, waited: bool) -> None:
        """Note a barrier if all computing workers have begun at this instant, from one version, and at least two had waited for it."""
        this = record["t"], record["version"]
        if this != self._round:
            self._round, self._gone_on, self._had_waited = this, 0, 0
        self._gone_on += 1
        self._had_waited += waited
        if self._had_waited < 2 or self._doing["computing"] != self._gone_on or self._doing["waiting"]:
            return
        if this != self._barrier:  # a worker that comes back from a pause makes no second one
            self._barrier = this
            self.moments.append(Moment(record["t"], "barrier", record["version"], reason=record["reason"]))

    def _one_worker(self, lane: Lane, record: Record) -> None:
        kind, t = record["kind"], record["t"]
        if kind == "release":
            _release(lane, record, self.blocks)
        elif kind == "pushed":
            if self._arrivals.begins(record):
                _finish(lane, record, "shard" in record)
        elif kind == "abandoned":
            _finish(lane, record, self.blocks)
            lane.marks.append(Mark(t, "abandoned"))
        elif kind == "interrupt":
            lane.marks.append(Mark(t, "interrupted", record["reason"]))
        elif kind == "paused":
            lane.turn("idle", t)
        elif kind == "settle":
            if record["fate"] in MARKS:
                lane.marks.append(Mark(t, record["fate"], record["reason"]))
        elif kind in ("fault", "process"):
            lane.die(t, record.get("detail", ""))
        elif record["state"] == "dead":
            lane.die(t, record["reason"])
        elif record["state"] == "finished":
            lane.turn("absent", t)


def _finish(lane: Lane, record: Record, blocks: bool) -> None:
    """End a computation. If no release began it, it began as long ago as its push says."""
    if record["incarnation"] != lane.incarnation:
        return
    if blocks and lane.doing == "waiting":
        lane.turn("computing", max(lane.since_s, record["t"] - record["compute_s"]))
    if lane.doing in ("computing", "idle"):
        lane.turn("waiting", record["t"])


def _release(lane: Lane, record: Record, blocks: bool) -> None:
    fresh = record["incarnation"] > lane.incarnation
    if lane.doing == "dead" and not fresh:
        return  # sent to a process that was already gone
    if fresh and lane.incarnation > 0:
        lane.marks.append(Mark(record["t"], "returned"))
    lane.incarnation = record["incarnation"]
    # Parameters that were asked for in the middle of an iteration do not begin a new one.
    if lane.doing != "computing" and not (blocks and lane.doing == "waiting"):
        lane.turn("computing", record["t"])


def shares(spans: Sequence[LaneSpan], start_s: float, stop_s: float, columns: int) -> dict[str, list[float]]:
    """Return the share of each activity in each of ``columns`` equal stretches of time; the shares of a column add up to at most 1.

    >>> shares([LaneSpan(0.0, 1.5, "computing"), LaneSpan(1.5, 2.0, "waiting")], 0.0, 2.0, columns=2)["waiting"]
    [0.0, 0.5]
    """
    result = {what: [0.0] * columns for what in SPANS}
    width_s = (stop_s - start_s) / columns
    for span in spans:
        row = result[span.what]
        first, last = (min(columns - 1, max(0, int((t - start_s) / width_s))) for t in span[:2])
        for column in range(first, last + 1):
            left = start_s + column * width_s
            overlap_s = min(span.stop_s, left + width_s) - max(span.start_s, left)
            row[column] += max(0.0, overlap_s) / width_s
    return result
