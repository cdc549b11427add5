"""The trace for Chrome's viewer: rows for workers and shards, spans that do not overlap, instants where something happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.journal.conftest import RunJob
from tests.journal.records import END, Record, abandoned, interrupt, release, round_of_two, two_shards

from offbeat.errors import ConfigurationError
from offbeat.journal.file import Journal, read
from offbeat.policies import ElasticBSP
from offbeat.report.chrome import BARRIERS, SHARDS, WORKERS, timeline, write
from offbeat.report.lanes import Chart


def events(records: list[Record], phase: str, row: int) -> list[dict[str, Any]]:
    found = timeline(Chart.of(records))
    return [event for event in found["traceEvents"] if event["ph"] == phase and event["pid"] == row]


def test_times_are_microseconds_and_rows_have_names() -> None:
    spans = events(round_of_two(), "X", WORKERS)
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in spans[:2]] == [(0, "computing", 1e6, 5e5), (0, "waiting", 15e5, 75e4)]
    assert [e["args"]["name"] for e in events(round_of_two(), "M", WORKERS)] == ["workers", "worker 0", "worker 1"]
    assert [e["args"]["name"] for e in events(round_of_two(), "M", SHARDS)] == ["shards", "all shards"]
    (fold,) = events(round_of_two(), "i", SHARDS)
    assert (fold["name"], fold["ts"], fold["args"]) == ("fold 1", 2e6, {"version": 1, "reason": "all are here", "parts": 2})


def test_each_shard_has_a_row_with_its_folds_and_what_it_publishes() -> None:
    instants = events(two_shards(), "i", SHARDS)
    at = {shard: [e["name"] for e in instants if e["tid"] == shard] for shard in (0, 1)}
    assert at == {0: ["fold 1", "publish 1", "fold 2", "publish 2"], 1: ["fold 1", "publish 1"]}
    assert {e["args"]["name"] for e in events(two_shards(), "M", SHARDS)} == {"shards", "shard 0", "shard 1"}


def test_interrupts_and_barriers_are_instants(run_job: RunJob) -> None:
    records = [*round_of_two()[:-1], interrupt(2.75, 1), abandoned(3.0, 1, 1), release(3.5, 1, 1, 1), END]
    assert [(e["name"], e["tid"], e["s"]) for e in events(records, "i", WORKERS)] == [("interrupted", 1, "t"), ("abandoned", 1, "t")]
    barriers = events(run_job(ElasticBSP(R=3), [0.1, 0.13, 0.3], epochs=1), "i", BARRIERS)
    assert barriers
    assert {(e["name"], e["s"]) for e in barriers} == {("barrier", "g")}
    assert "the barrier is open" in {e["args"]["reason"] for e in barriers}


def test_a_file_from_a_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run.jsonl", now=lambda: 0.0)
    for entry in two_shards():
        journal.write(entry)
    journal.close()
    write(read(tmp_path / "run.jsonl"), tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert found == timeline(Chart.of(two_shards()))
    assert found["otherData"] == {"sync": "psp(c=1, b=0.5)"}
    with pytest.raises(ConfigurationError, match="cannot write the trace"):
        write(two_shards(), tmp_path)
