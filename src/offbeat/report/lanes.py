"""From a journal to a picture's raw material: for each worker the spans of what it did, and the moments worth a mark.

Pure: records in, spans out. How they look is `report.timeline`'s business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offbeat.report.audit import Record

SPANS: Final = ("computing", "waiting", "idle", "dead")
CHANGES: Final = ("release", "pushed", "paused", "settle", "state_changed")
MARKS: Final = ("killed", "returned", "dropped", "rejected")


class Span(NamedTuple):
    """What a worker did from ``start_s`` to ``stop_s``; one of `SPANS`."""

    start_s: float
    stop_s: float
    what: str


class Mark(NamedTuple):
    """One of `MARKS`. ``killed`` stands for every death, made on purpose or not."""

    t: float
    what: str


@dataclass(slots=True)
class Lane:
    """One worker's history."""

    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    doing: str = "absent"
    since_s: float = 0.0
    incarnation: int = 0

    def turn(self, doing: str, t: float) -> None:
        """Close the span under way and begin another; ``absent`` is drawn as nothing."""
        if self.doing != "absent" and t > self.since_s:
            self.spans.append(Span(self.since_s, t, self.doing))
        self.doing, self.since_s = doing, t

    def die(self, t: float) -> None:
        """A kill is often written down twice, by who did it and by who noticed: the first one counts."""
        if self.doing not in ("dead", "absent"):
            self.turn("dead", t)
            self.marks.append(Mark(t, "killed"))


@dataclass(slots=True)
class Chart:
    """One job's lanes by worker, and the times of its folds."""

    sync: str = "?"
    lanes: dict[int, Lane] = field(default_factory=dict)
    folds: list[float] = field(default_factory=list)
    end_s: float = 0.0

    @classmethod
    def of(cls, records: Iterable[Record]) -> Chart:
        """The chart of a whole journal.

        Its time begins when the first worker is admitted: how long processes take to start is no rule's doing.
        """
        chart = cls()
        records = list(records)
        start_s = next((record["t"] for record in records if record["kind"] == "release"), 0.0)
        for record in records:
            chart.add({**record, "t": max(0.0, record["t"] - start_s)})
        for lane in chart.lanes.values():
            lane.turn("absent", chart.end_s)
        return chart

    def add(self, record: Record) -> None:
        """Take the next record."""
        kind, t = record["kind"], record["t"]
        self.end_s = max(self.end_s, t)
        if kind == "job":
            self.sync = record["sync"]
            for number in range(record["workers"]):
                self._lane(number)
        elif kind == "fold":
            self.folds.append(t)
        elif kind == "process":
            if record["role"] == "worker" and record["what"] == "killed":
                self._lane(record["number"]).die(t)
        elif kind in CHANGES or (kind == "fault" and record["what"] == "kill"):
            _one_worker(self._lane(record["worker"]), kind, record)

    def _lane(self, number: int) -> Lane:
        return self.lanes.setdefault(number, Lane())


def _one_worker(lane: Lane, kind: str, record: Record) -> None:
    t = record["t"]
    if kind == "release":
        _release(lane, record)
    elif kind == "pushed":
        if lane.doing in ("computing", "idle") and record["incarnation"] == lane.incarnation:
            lane.turn("waiting", t)
    elif kind == "paused":
        lane.turn("idle", t)
    elif kind == "settle" and record["fate"] in MARKS:
        lane.marks.append(Mark(t, record["fate"]))
    elif kind == "fault":
        lane.die(t)
    elif kind == "state_changed":
        if record["state"] == "dead":
            lane.die(t)
        elif record["state"] == "finished":
            lane.turn("absent", t)


def _release(lane: Lane, record: Record) -> None:
    fresh = record["incarnation"] > lane.incarnation
    if lane.doing == "dead" and not fresh:
        return  # sent to a process that was already gone
    if fresh and lane.incarnation > 0:
        lane.marks.append(Mark(record["t"], "returned"))
    lane.incarnation = record["incarnation"]
    # Parameters that were asked for in the middle of an iteration do not begin a new one.
    if lane.doing != "computing":
        lane.turn("computing", record["t"])


def shares(spans: Sequence[Span], start_s: float, stop_s: float, columns: int) -> dict[str, list[float]]:
    """How much of each of ``columns`` equal stretches of time was spent on what; the shares of a column add up to at most 1.

    >>> shares([Span(0.0, 1.5, "computing"), Span(1.5, 2.0, "waiting")], 0.0, 2.0, columns=2)["waiting"]
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
