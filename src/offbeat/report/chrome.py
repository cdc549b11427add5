"""The timeline in the trace event format of Chrome, for ``chrome://tracing``, Perfetto and whatever else reads it. Standard library only.

A row per worker with its spans and marks, a row per shard with its folds and what it has published, and one for barriers. What they are
comes from `report.lanes`; this file knows the format only.

Source: Google, "Trace Event Format": https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeAlias

from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import Record
from offbeat.journal.file import of_optimizer
from offbeat.report.lanes import Chart, Lane, Moment

TraceEvent: TypeAlias = dict[str, Any]

WORKERS: Final = 1
SHARDS: Final = 2
BARRIERS: Final = 3
MICROSECONDS: Final = 1e6
"""The format's times are in these."""
COLOURS: Final = {"computing": "good", "waiting": "bad", "idle": "grey", "dead": "black"}
"""Names from the viewer's own palette; other viewers pass them over."""


def write(records: Iterable[Record], trace: Path) -> None:
    """Write the timeline of a job's first optimizer as JSON.

    Raises:
        ConfigurationError: the journal cannot be read, or the file cannot be written.
    """
    found = timeline(Chart.of(of_optimizer(records)))
    try:
        trace.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write the trace {trace}: {error.strerror}") from error


def timeline(chart: Chart) -> dict[str, Any]:
    """A chart as trace events. Times are those of the journal."""
    events = [_name("process_name", WORKERS, 0, "workers"), _name("process_name", SHARDS, 0, "shards")]
    for number, lane in sorted(chart.lanes.items()):
        events += _lane(number, lane)
    shards = {moment.shard for moment in chart.moments if moment.what != "barrier"}
    for shard in sorted(shards, key=lambda shard: shard or 0):
        events.append(_name("thread_name", SHARDS, shard or 0, "all shards" if shard is None else f"shard {shard}"))
    if chart.times("barrier"):
        events += [_name("process_name", BARRIERS, 0, "job"), _name("thread_name", BARRIERS, 0, "barriers")]
    events += [_moment(moment) for moment in chart.moments]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"sync": chart.sync}}


def _lane(number: int, lane: Lane) -> list[TraceEvent]:
    row = {"pid": WORKERS, "tid": number}
    spans = [
        {**row, "ph": "X", "name": what, "cname": COLOURS[what], "ts": _time(start_s), "dur": _time(stop_s - start_s)}
        for start_s, stop_s, what in lane.spans
    ]
    marks = [{**row, "ph": "i", "s": "t", "name": what, "ts": _time(t), "args": {"reason": reason}} for t, what, reason in lane.marks]
    return [_name("thread_name", WORKERS, number, f"worker {number}"), *spans, *marks]


def _moment(moment: Moment) -> TraceEvent:
    where = {"pid": SHARDS, "tid": moment.shard or 0, "s": "t"}
    name, args = f"{moment.what} {moment.version}", {"version": moment.version, "reason": moment.reason}
    if moment.what == "barrier":
        where, name = {"pid": BARRIERS, "tid": 0, "s": "g"}, "barrier"
    elif moment.what == "fold":
        args["parts"] = moment.parts
    return {**where, "ph": "i", "name": name, "ts": _time(moment.t), "args": args}


def _name(what: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _time(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 3)
