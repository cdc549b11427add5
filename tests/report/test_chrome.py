"""The trace, read back as JSON: rows, spans that nest, instants, and a flow from each folded push to its fold."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.journal.conftest import RunJob
from tests.journal.records import END, Record, abandoned, fold, interrupt, push, release, round_of_two, settle, two_shards
from tests.report.test_tables_csv import simulated
from typer.testing import CliRunner

from offbeat.cli import app
from offbeat.errors import ConfigurationError
from offbeat.journal.file import Records, read
from offbeat.policies import ElasticBSP
from offbeat.report.chrome import BARRIERS, EACH, SHARDS, WORKERS, write
from offbeat.report.lanes import Chart

Event = dict[str, Any]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def written(records: Iterable[Record], trace: Path) -> list[Event]:
    write(records, trace)
    events: list[Event] = json.loads(trace.read_text())["traceEvents"]
    return events


def of(events: list[Event], phase: str, group: int) -> list[Event]:
    return [event for event in events if event["ph"] == phase and event["pid"] == group]


def bound(events: list[Event]) -> dict[int, tuple[Event, Event]]:
    """The spans that each flow leads from and to: those that are open at its ends' times, the last begun where some are one in another."""
    under_way: defaultdict[int, list[Event]] = defaultdict(list)
    ends: defaultdict[int, dict[str, Event]] = defaultdict(dict)
    for event in sorted(events, key=lambda event: (event["ts"], event["ph"] != "X", -event.get("dur", 0))):
        row = under_way[event["tid"]]
        while row and row[-1]["ts"] + row[-1]["dur"] <= event["ts"]:
            row.pop()
        if event["ph"] == "X" and event["dur"]:
            assert not row or event["ts"] + event["dur"] <= row[-1]["ts"] + row[-1]["dur"], f"{event} overlaps with {row[-1]}"
            row.append(event)
        elif event["ph"] in ("s", "f"):
            assert event["ph"] not in ends[event["id"]]
            ends[event["id"]][event["ph"]] = row[-1]
    return {flow: (found["s"], found["f"]) for flow, found in ends.items()}


def test_times_are_microseconds_and_rows_have_names(trace: Path) -> None:
    events = written(round_of_two(), trace)
    first = [event for event in of(events, "X", WORKERS) if event["tid"] == WORKERS * EACH]
    assert [(event["name"], event["ts"], event["dur"]) for event in sorted(first, key=lambda event: event["ts"])] == [
        ("computing", 1_000_000, 500_000),
        ("push", 1_499_999, 1),
        ("waiting", 1_500_000, 750_000),
        ("computing", 2_250_000, 6_750_000),
    ]
    names = {(event["name"], event["args"].get("name")) for event in of(events, "M", WORKERS)}
    assert names == {("process_name", "workers"), ("thread_name", "worker 0"), ("thread_name", "worker 1"), ("thread_sort_index", None)}
    assert {event["args"].get("name") for event in of(events, "M", SHARDS)} == {"shards", "all shards", None}
    (folded,) = of(events, "X", SHARDS)
    about = {"version": 1, "reason": "all are here", "contributions": 2, "workers": "0 1"}
    assert (folded["name"], folded["ts"], folded["args"]) == ("fold 1", 2_000_000, about)


def test_each_shard_has_a_row_with_its_folds_and_what_it_publishes(trace: Path) -> None:
    events = written(two_shards(), trace)
    at = {
        shard: [event["name"] for event in events if event["tid"] == SHARDS * EACH + shard and event["ph"] in ("X", "i")]
        for shard in (0, 1)
    }
    assert at == {0: ["fold 1", "publish 1", "fold 2", "publish 2"], 1: ["fold 1", "publish 1"]}
    assert {event["args"].get("name") for event in of(events, "M", SHARDS)} == {"shards", "shard 0", "shard 1", None}


def test_interrupts_and_barriers_are_instants(run_job: RunJob, trace: Path) -> None:
    events = written([*round_of_two()[:-1], interrupt(2.75, 1), abandoned(3.0, 1, 1), release(3.5, 1, 1, 1), END], trace)
    assert [(event["name"], event["s"]) for event in of(events, "i", WORKERS)] == [("interrupted", "t"), ("abandoned", "t")]
    barriers = of(written(run_job(ElasticBSP(R=3), [0.1, 0.13, 0.3], epochs=1), trace), "i", BARRIERS)
    assert {(event["name"], event["s"]) for event in barriers} == {("barrier", "g")}
    assert "the barrier is open" in {event["args"]["reason"] for event in barriers}


@pytest.mark.parametrize("sync", ["bsp", "backup(b=1)", "psp(c=1)", "majority", "asp"])
def test_a_flow_leads_from_each_folded_push_to_its_fold(sync: str, tmp_path: Path, trace: Path) -> None:
    path, summary = simulated(tmp_path, sync)
    events = written(Records(path), trace)
    assert Counter(event["name"] for event in of(events, "X", WORKERS))["push"] == summary["blocks"]
    flows = bound(events)
    assert len(flows) == summary["fates"]["folded"]
    into: defaultdict[int, list[int]] = defaultdict(list)
    for sent, folded in flows.values():
        assert sent["name"] == "push" and folded["name"].startswith("fold ") and sent["ts"] < folded["ts"]
        assert folded["args"]["version"] > sent["args"]["version"]
        into[id(folded)].append(sent["tid"] - WORKERS * EACH)
    for folded in of(events, "X", SHARDS):
        assert sorted(into[id(folded)]) == sorted(map(int, folded["args"]["workers"].split()))


def test_folds_of_one_instant_have_their_own_flows(trace: Path) -> None:
    records = [*round_of_two()[:3], push(1.5, 0), push(1.5, 1), fold(1.5, 1, (0, 1, 1.0, 0)), settle(1.5, 0, 1)]
    flows = bound(written([*records, fold(1.5, 2, (1, 1, 1.0, 1)), settle(1.5, 1, 1, version=2), END], trace))
    assert [(sent["tid"] - WORKERS * EACH, folded["name"]) for sent, folded in flows.values()] == [(0, "fold 1"), (1, "fold 2")]


def test_rows_have_the_spans_of_the_chart(tmp_path: Path, trace: Path) -> None:
    path, _ = simulated(tmp_path, "backup(b=1)")
    events = written(Records(path), trace)
    names = Counter(event["name"] for event in of(events, "X", WORKERS))
    del names["push"]
    assert names == Counter(span.what for lane in Chart.of(read(path)).lanes.values() for span in lane.spans)
    assert {event["tid"] - WORKERS * EACH for event in of(events, "X", WORKERS)} == set(range(4))


def test_the_command_and_files_that_cannot_be_written(tmp_path: Path, trace: Path) -> None:
    path, summary = simulated(tmp_path, "psp(c=1)")
    assert CliRunner().invoke(app, ["report", str(path), "--trace", str(trace)]).exit_code == 0
    assert json.loads(trace.read_text())["otherData"] == {"sync": summary["sync"]}
    with pytest.raises(ConfigurationError, match="cannot write the trace"):
        write(two_shards(), tmp_path)
    refused = CliRunner().invoke(app, ["report", str(path), "--trace", str(tmp_path / "run.pftrace")])
    assert f"ui.perfetto.dev reads too, flows included: give {tmp_path / 'run.json'}" in str(refused.exception)
    assert not (tmp_path / "run.pftrace").exists()
