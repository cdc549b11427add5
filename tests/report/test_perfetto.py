"""Perfetto's trace, read back as protobuf: rows, spans that close, and a flow from each push to the fold that it went into."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.journal.records import round_of_two
from tests.report.test_tables_csv import simulated
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ConfigurationError
from offbeat.journal.file import Records, read
from offbeat.report import perfetto
from offbeat.report.lanes import Chart

protobuf = pytest.importorskip(
    "perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="perfetto is not installed: pip install 'offbeat[trace]'"
)


def packets(path: Path) -> list[Any]:
    trace = protobuf.Trace()
    trace.ParseFromString(path.read_bytes())
    return list(trace.packet)


def rows(found: list[Any]) -> dict[int, str]:
    return {packet.track_descriptor.uuid: packet.track_descriptor.name for packet in found if packet.HasField("track_descriptor")}


def events(found: list[Any], kind: int) -> list[Any]:
    return [packet for packet in found if packet.HasField("track_event") and packet.track_event.type == kind]


@pytest.mark.parametrize("sync", ["bsp", "backup(b=1)", "psp(c=1)", "majority", "asp"])
def test_a_flow_leads_from_each_folded_push_to_its_fold(sync: str, tmp_path: Path) -> None:
    path, summary = simulated(tmp_path, sync)
    perfetto.write(Records(path), tmp_path / "run.pftrace")
    found = packets(tmp_path / "run.pftrace")
    instants = events(found, protobuf.TrackEvent.TYPE_INSTANT)
    pushed = {flow: packet.timestamp for packet in instants for flow in packet.track_event.flow_ids}
    ended = {flow: packet for packet in instants for flow in packet.track_event.terminating_flow_ids}
    assert len(pushed) == summary["blocks"] and len(ended) == summary["fates"]["folded"]
    assert ended.keys() <= pushed.keys()
    assert all(packet.track_event.name.startswith("fold ") and packet.timestamp >= pushed[flow] for flow, packet in ended.items())


def test_rows_have_spans_that_close_in_order(tmp_path: Path) -> None:
    path, _ = simulated(tmp_path, "backup(b=1)")
    perfetto.write(Records(path), tmp_path / "run.pftrace")
    found = packets(tmp_path / "run.pftrace")
    names, event = rows(found), protobuf.TrackEvent
    described: set[int] = set()
    for packet in found:
        if packet.HasField("track_descriptor"):
            described.add(packet.track_descriptor.uuid)
        else:
            assert packet.track_event.track_uuid in described
    open_in: Counter[int] = Counter()
    slices = [packet for packet in found if packet.track_event.type in (event.TYPE_SLICE_BEGIN, event.TYPE_SLICE_END)]
    for packet in sorted(slices, key=lambda packet: packet.timestamp):  # of one time in the file's order, as Perfetto does
        row = packet.track_event.track_uuid
        open_in[row] += 1 if packet.track_event.type == event.TYPE_SLICE_BEGIN else -1
        assert open_in[row] in (0, 1), names[row]
    assert set(open_in.values()) == {0}
    assert {name for name in names.values() if name.startswith("worker ")} == {f"worker {number}" for number in range(4)}
    begins = Counter(packet.track_event.name for packet in events(found, event.TYPE_SLICE_BEGIN))
    chart = Chart.of(read(path))
    assert begins == Counter(span.what for lane in chart.lanes.values() for span in lane.spans)


def test_the_command_and_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    path, _ = simulated(tmp_path, "bsp")
    done = CliRunner().invoke(app, ["report", str(path), "--trace", str(tmp_path / "out.pftrace")])
    assert done.exit_code == 0 and packets(tmp_path / "out.pftrace")
    with pytest.raises(ConfigurationError, match="cannot write the trace"):
        perfetto.write(round_of_two(), tmp_path / "nosuch" / "out.pftrace")


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "perfetto.protos.perfetto.trace", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'offbeat\[trace\]'"):
        perfetto.write(round_of_two(), tmp_path / "out.pftrace")
    assert not (tmp_path / "out.pftrace").exists()
