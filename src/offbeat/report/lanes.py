"""From a journal to a picture's raw material: for each worker the spans of what it did and the marks on it, and the job's own moments.

Pure: records in, spans out. What a worker does when is `journal.turns`' to say; how it looks is the business of `report.timeline`
and `report.chrome`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offbeat.journal.arrivals import Record
from offbeat.journal.turns import Turn, Turns, Watcher
from offbeat.types import Seconds

SPANS: Final = ("computing", "waiting", "idle", "dead")
CHANGES: Final = frozenset({"release", "pushed", "abandoned", "paused", "state_changed", "process", "fault"})
"""Records after which a worker may do something else."""
MARKS: Final = ("killed", "returned", "dropped", "rejected", "abandoned", "interrupted")


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

    def add(self, start_s: float, stop_s: float, what: str) -> None:
        """Add a span, unless it took no time."""
        if stop_s > start_s:
            self.spans.append(LaneSpan(start_s, stop_s, what))


class Chart(Watcher):
    """Collect one job's lanes by worker, and its moments."""

    def __init__(self) -> None:
        self.sync = "?"
        self.lanes: defaultdict[int, Lane] = defaultdict(Lane)
        self.moments: list[Moment] = []
        self._turns = Turns((self,))
        self._doing: Counter[str] = Counter()
        """Number of workers by activity."""
        self._round: tuple[float, int] = (0.0, -1)
        """The time and version of the newest release."""
        self._barrier: tuple[float, int] = (0.0, -1)
        """The same of the newest barrier."""
        self._gone_on = 0
        """Number of workers that have begun to compute in this round, and of those among them that had waited for it."""
        self._had_waited = 0

    @classmethod
    def of(cls, records: Iterable[Record]) -> Chart:
        """The chart of a whole journal, with the journal's own times."""
        chart = cls()
        for record in records:
            chart.add(record)
        chart.end()
        return chart

    @property
    def start_s(self) -> Seconds:
        """When the first worker was admitted: how long processes take to start is no rule's doing."""
        return self._turns.began or 0.0

    @property
    def end_s(self) -> Seconds:
        return self._turns.now

    def times(self, what: str) -> list[float]:
        """Return the times of the moments of one kind, in seconds."""
        return [moment.t for moment in self.moments if moment.what == what]

    def add(self, record: Record) -> None:
        """Take the next record."""
        kind, t = record["kind"], record["t"]
        if kind in CHANGES:
            self._change(record["number" if kind == "process" else "worker"], record)
            return
        self._turns.add(record)
        if kind in ("fold", "publish"):
            self.moments.append(Moment(t, kind, record["version"], record.get("shard"), len(record.get("parts", ())), record["reason"]))
        elif kind == "settle":
            if record["fate"] in MARKS:
                self.lanes[record["worker"]].marks.append(Mark(t, record["fate"], record["reason"]))
        elif kind == "interrupt":
            self.lanes[record["worker"]].marks.append(Mark(t, "interrupted", record["reason"]))
        elif kind == "job":
            self.sync = record["sync"]
            for number in range(record["workers"]):
                self.lanes.setdefault(number, Lane())

    def end(self) -> None:
        """Close what is under way at the last record."""
        self._turns.end()

    def push(self, turn: Turn, record: Record, begun: Seconds) -> int:
        """Draw the computation of a push, or one that was abandoned."""
        self.lanes[record["worker"]].add(begun, record["t"], "computing")
        return 0

    def stretch(self, worker: int, turn: Turn, doing: str, stop: Seconds) -> None:
        """Draw a stretch of time without a push."""
        self.lanes[worker].add(turn.since, stop, doing)

    def waited(self, worker: int, turn: Turn, stop: Seconds) -> None:
        """Draw a wait."""
        self.lanes[worker].add(turn.since, stop, turn.doing)

    def _change(self, number: int, record: Record) -> None:
        kind, turn = record["kind"], self._turns.workers.get(number)
        doing, incarnation = ("absent", 0) if turn is None else (turn.doing, turn.incarnation)
        self._turns.add(record)
        turn = self._turns.workers.get(number)
        if turn is None:  # a process that is no worker's, or a fault of a worker that is drawn anew each time
            return
        if kind == "abandoned":
            self.lanes[number].marks.append(Mark(record["t"], kind))
        elif kind == "release" and turn.incarnation > incarnation > 0:
            self.lanes[number].marks.append(Mark(record["t"], "returned"))
        if turn.doing == doing:
            return
        self._doing[doing] -= 1
        self._doing[turn.doing] += 1
        if turn.doing == "dead":
            self.lanes[number].marks.append(Mark(record["t"], "killed", record["reason" if kind == "state_changed" else "detail"]))
        elif kind == "release" and turn.doing == "computing":
            self._look_for_a_barrier(record, waited=doing == "waiting")

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
