"""``offbeat report --trace run.json``: the timeline as JSON trace events, for ui.perfetto.dev and chrome://tracing.

A row for each worker with its spans, marks and pushes, a row for each shard with its folds, one for barriers, and a flow from each push to
the fold that it went into. Rows and spans are those of `report.lanes`. Written record by record: what is over is not kept, and a journal
may have millions of records.

Source: Google, "Trace Event Format": https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import OpenPushes, Record
from offbeat.journal.file import of_optimizer
from offbeat.report.lanes import Chart, Moment
from offbeat.types import Seconds

WORKERS: Final = 1
SHARDS: Final = 2
BARRIERS: Final = 3
"""Identify the groups of rows, which the format calls processes."""
EACH: Final = 1_000_000
"""The rows of a group have this times the group's number and their own number: Perfetto names a thread by its number alone."""
GROUPS: Final = {WORKERS: "workers", SHARDS: "shards", BARRIERS: "job"}
MICROSECONDS: Final = 1e6
"""The format's times are in these, and the journal's are whole ones."""
SHORT: Final = 1
"""Microseconds of a push or a fold: a flow leads from a span to a span, and not between instants."""
COLOURS: Final = {"computing": "good", "waiting": "bad", "idle": "grey", "dead": "black"}
"""Names from the palette of chrome://tracing; Perfetto passes them over."""
PERFETTO: Final = ".pftrace"


class _Sent(NamedTuple):
    """What is kept of a push until its fold: the number of its flow, its worker, and where it is drawn."""

    flow: int
    worker: int
    ts: int


class _Timeline:
    """Draws records in a file."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._chart, self._pushes = file, Chart(), OpenPushes()
        self._rows: set[int] = set()
        self._arrived = 0
        self._folded: dict[int, int] = {}
        """By row: when its newest fold is over."""
        file.write('{"traceEvents":[\n')
        self._separator = ""

    def add(self, record: Record) -> None:
        self._chart.add(record)
        sent: list[_Sent] = []
        match record["kind"]:
            case "pushed":
                self._push(record)
            case "fold":
                sent = self._pushes.folded(record)
            case "settle":
                self._pushes.settled(record)
            case _:
                self._pushes.note(record)
        for moment in self._chart.moments:
            self._moment(moment, sent)
        self._chart.moments.clear()
        worker: Any = record.get("number" if record["kind"] == "process" else "worker")
        if worker in self._chart.lanes:
            self._drain(worker)

    def _push(self, record: Record) -> None:
        self._arrived += 1
        # At the end of what the worker has computed: spans of a row do not overlap, and its wait begins now.
        worker, ts = record["worker"], max(0, _time(record["t"]) - SHORT)
        push = self._pushes.pushed(record, _Sent(self._arrived, worker, ts))
        about = {key: record.get(key) for key in ("version", "samples", "steps", "compute_s", "loss", "shard")}
        self._event(self._worker(worker), "X", ts, name="push", dur=SHORT, args=_known(about | {"clock": push.clock}))

    def _drain(self, number: int) -> None:
        """Write what is over of a worker's row."""
        lane, row = self._chart.lanes[number], self._worker(number)
        for start_s, stop_s, what in lane.spans:
            ts = _time(start_s)
            self._event(row, "X", ts, name=what, cname=COLOURS[what], dur=_time(stop_s) - ts)
        for t, what, reason in lane.marks:
            self._event(row, "i", _time(t), name=what, s="t", args={"reason": reason})
        lane.spans.clear()
        lane.marks.clear()

    def _moment(self, moment: Moment, sent: Iterable[_Sent]) -> None:
        """Write a moment; ``sent``: the pushes that it folds."""
        ts, about = _time(moment.t), {"version": moment.version, "reason": moment.reason}
        if moment.what == "barrier":
            self._event(self._row(BARRIERS, 0, "barriers"), "i", ts, name="barrier", s="g", args=about)
            return
        row = self._row(SHARDS, moment.shard or 0, "all shards" if moment.shard is None else f"shard {moment.shard}")
        name = f"{moment.what} {moment.version}"
        if moment.what == "publish":
            self._event(row, "i", ts, name=name, s="t", args=about)
            return
        # A flow ends in the span that is open at its time: folds of one instant follow one another.
        ts = max(ts, self._folded.get(row, 0))
        self._folded[row] = ts + SHORT
        about |= {"contributions": moment.parts, "workers": " ".join(str(push.worker) for push in sent)}
        self._event(row, "X", ts, name=name, dur=SHORT, args=about)
        for push in sent:
            flow = {"name": "folded", "cat": "push", "id": push.flow}
            self._event(self._worker(push.worker), "s", push.ts, **flow)
            self._event(row, "f", ts, bp="e", **flow)

    def _worker(self, number: int) -> int:
        return self._row(WORKERS, number, f"worker {number}")

    def _row(self, group: int, number: int, name: str) -> int:
        """Return the number of a row, which is named the first time."""
        row = group * EACH + number
        if group not in self._rows:
            self._rows.add(group)
            self._event(row, "M", 0, name="process_name", args={"name": GROUPS[group]})
        if row not in self._rows:
            self._rows.add(row)
            self._event(row, "M", 0, name="thread_name", args={"name": name})
            self._event(row, "M", 0, name="thread_sort_index", args={"sort_index": number})
        return row

    def _event(self, row: int, phase: str, ts: int, **more: Any) -> None:
        event = {"ph": phase, "pid": row // EACH, "tid": row, "ts": ts, **more}
        self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"

    def close(self) -> None:
        """Write what is under way at the last record, and the end of the file."""
        self._chart.end()
        for number in self._chart.lanes:
            self._drain(number)
        self._file.write(f'\n],"otherData":{json.dumps({"sync": self._chart.sync})}}}\n')


def write(records: Iterable[Record], path: Path) -> None:
    """Write the trace of a job's first optimizer.

    Raises:
        ConfigurationError: the journal cannot be read, or the file cannot be written, or its name is that of another format.
    """
    if path.suffix == PERFETTO:
        raise ConfigurationError(
            f"--trace {path}: {PERFETTO} is Perfetto's binary format, and the trace is JSON, which ui.perfetto.dev reads too, flows "
            f"included: give {path.with_suffix('.json')}"
        )
    try:
        with path.open("w", encoding="utf-8") as file:
            timeline = _Timeline(file)
            for record in of_optimizer(records):
                timeline.add(record)
            timeline.close()
    except OSError as error:
        raise ConfigurationError(f"cannot write the trace {path}: {error.strerror}") from error


def _known(about: Record) -> Record:
    return {key: value for key, value in about.items() if value is not None}


def _time(seconds: Seconds) -> int:
    return round(seconds * MICROSECONDS)
