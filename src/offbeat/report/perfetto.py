"""``offbeat report --trace run.pftrace``: the timeline as Perfetto's protobuf, for ui.perfetto.dev, with a flow from each push to its fold.

Rows and spans are those of `report.lanes`. Written record by record: what is over is not kept, and a journal may have millions of records.

Source: Google, "Perfetto: Synthetic TrackEvent": https://perfetto.dev/docs/reference/synthetic-track-event
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import OpenPushes, Record
from offbeat.journal.file import of_optimizer
from offbeat.report.lanes import Chart, Moment

WORKERS: Final = 1
FOLDS: Final = 2
"""Identify the groups of rows; the rows of a group have `_EACH` times its number and their own number."""
_EACH: Final = 1 << 32
LAST: Final = (1 << 31) - 1
"""The number of the last row of a group."""
SEQUENCE: Final = 1
PACKETS_MAX: Final = 2000
"""Most packets that wait to be written."""
NANOSECONDS: Final = 1e9
SUFFIX: Final = ".pftrace"


class Trace:
    """Writes packets.

    Args:
        protobuf: the module of the package perfetto that has the messages.
        file: the trace.
    """

    def __init__(self, protobuf: Any, file: IO[bytes]) -> None:
        self._protobuf, self._file = protobuf, file
        self._event = protobuf.TrackEvent
        self._trace = protobuf.Trace()
        self._rows: set[int] = set()
        self._begun = False

    def row(self, group: int, number: int, name: str) -> int:
        """Return the id of a row, which is described the first time."""
        if group not in self._rows:
            self._describe(group, "workers" if group == WORKERS else "folds", rank=group)
        uuid = group * _EACH + number
        if uuid not in self._rows:
            self._describe(uuid, name, parent=group, rank=number)
        return uuid

    def _describe(self, uuid: int, name: str, *, parent: int | None = None, rank: int = 0) -> None:
        self._rows.add(uuid)
        described = self._packet().track_descriptor
        described.uuid, described.name, described.sibling_order_rank = uuid, name, rank
        described.child_ordering = self._protobuf.TrackDescriptor.EXPLICIT
        if parent is not None:
            described.parent_uuid = parent

    def span(self, row: int, start_s: float, stop_s: float, name: str) -> None:
        """Write a span."""
        begin = self._at(row, start_s, self._event.TYPE_SLICE_BEGIN)
        begin.name = name
        self._at(row, stop_s, self._event.TYPE_SLICE_END)

    def instant(
        self, row: int, t: float, name: str, *, flows: Iterable[int] = (), ends: Iterable[int] = (), about: Mapping[str, Any]
    ) -> None:
        """Write a mark, the flows that begin in it, those that end in it, and what is to be known of it."""
        event = self._at(row, t, self._event.TYPE_INSTANT)
        event.name = name
        event.flow_ids.extend(flows)
        event.terminating_flow_ids.extend(ends)
        for key, value in about.items():
            if value is not None:
                note = event.debug_annotations.add()
                note.name = key
                if isinstance(value, int):
                    note.int_value = value
                elif isinstance(value, float):
                    note.double_value = value
                else:
                    note.string_value = str(value)

    def _at(self, row: int, t: float, kind: int) -> Any:
        packet = self._packet()
        packet.timestamp = round(t * NANOSECONDS)
        packet.track_event.type, packet.track_event.track_uuid = kind, row
        return packet.track_event

    def _packet(self) -> Any:
        if len(self._trace.packet) >= PACKETS_MAX:
            self.flush()
        packet = self._trace.packet.add()
        packet.trusted_packet_sequence_id = SEQUENCE
        if not self._begun:
            self._begun = True
            packet.sequence_flags = self._protobuf.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        return packet

    def flush(self) -> None:
        """Write what waits: traces in a row are one trace."""
        self._file.write(self._trace.SerializeToString())
        self._trace = self._protobuf.Trace()  # a cleared one keeps its memory, and would grow


class _Timeline:
    """Draws records on a trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._chart, self._pushes = trace, Chart(), OpenPushes()
        self._arrived = 0

    def add(self, record: Record) -> None:
        self._chart.add(record)
        ends: list[tuple[int, int]] = []
        match record["kind"]:
            case "pushed":
                self._arrived += 1  # the flow's id
                push = self._pushes.pushed(record, (self._arrived, record["worker"]))
                about = {key: record.get(key) for key in ("version", "samples", "steps", "compute_s", "loss", "shard")}
                about |= {"clock": push.clock}
                self._trace.instant(self._worker(record["worker"]), record["t"], "push", flows=[self._arrived], about=about)
            case "fold":
                ends = self._pushes.folded(record)
            case "settle":
                self._pushes.settled(record)
            case _:
                self._pushes.note(record)
        for moment in self._chart.moments:
            self._moment(moment, ends)
        self._chart.moments.clear()
        worker: Any = record.get("number" if record["kind"] == "process" else "worker")
        if worker in self._chart.lanes:
            self._drain(worker)

    def _drain(self, number: int) -> None:
        """Write what is over of a worker's row."""
        lane, row = self._chart.lanes[number], self._worker(number)
        for start_s, stop_s, what in lane.spans:
            self._trace.span(row, start_s, stop_s, what)
        for t, what, reason in lane.marks:
            self._trace.instant(row, t, what, about={"reason": reason})
        lane.spans.clear()
        lane.marks.clear()

    def _moment(self, moment: Moment, ends: list[tuple[int, int]]) -> None:
        """Write a moment; ``ends``: the flows that end in it, and the workers that they come from."""
        if moment.what == "barrier":
            self._trace.instant(self._trace.row(FOLDS, LAST, "barriers"), moment.t, "barrier", about={"reason": moment.reason})
            return
        shard = moment.shard
        row = self._trace.row(FOLDS, 0 if shard is None else shard, "all shards" if shard is None else f"shard {shard}")
        about: dict[str, Any] = {"version": moment.version, "reason": moment.reason}
        if moment.what == "fold":
            about |= {"contributions": moment.parts, "workers": " ".join(str(worker) for _, worker in ends)}
        self._trace.instant(row, moment.t, f"{moment.what} {moment.version}", ends=[flow for flow, _ in ends], about=about)

    def _worker(self, number: int) -> int:
        return self._trace.row(WORKERS, number, f"worker {number}")

    def close(self) -> None:
        self._chart.end()
        for number in self._chart.lanes:
            self._drain(number)
        self._trace.flush()


def write(records: Iterable[Record], path: Path) -> None:
    """Write the trace of a job's first optimizer.

    Raises:
        ConfigurationError: the package is not installed, the journal cannot be read, or the file cannot be written.
    """
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protobuf
    except ImportError as error:
        raise ConfigurationError(f"--trace {path}: the package perfetto is not installed: pip install 'offbeat[trace]'") from error
    try:
        with path.open("wb") as file:
            timeline = _Timeline(Trace(protobuf, file))
            for record in of_optimizer(records):
                timeline.add(record)
            timeline.close()
    except OSError as error:
        raise ConfigurationError(f"cannot write the trace {path}: {error.strerror}") from error
