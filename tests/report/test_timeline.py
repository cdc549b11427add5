"""Lanes: every moment of a worker is one kind of span. The picture: it is made, at the promised size."""

from __future__ import annotations

import itertools
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.journal.conftest import RunJob
from tests.journal.records import END, JOB, Record, abandoned, interrupt, paused, push, release, round_of_two, state, two_shards

from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.journal.summary import Tally
from offbeat.policies import ASP, BSP, SSP, Backup, ElasticBSP
from offbeat.report.figures import share, waiting_share
from offbeat.report.lanes import Chart, LaneSpan, shares
from offbeat.report.table import job_tables
from offbeat.report.timeline import draw


def chart_of(records: list[Record]) -> Chart:
    """Return the chart of a journal whose time begins with the first release."""
    start_s = next((record["t"] for record in records if record["kind"] == "release"), 0.0)
    chart = Chart.of([{**record, "t": max(0.0, record["t"] - start_s)} for record in records])
    assert chart.start_s == 0.0 and Chart.of(records).start_s == start_s
    return chart


def marks(chart: Chart, worker: int) -> list[str]:
    return [mark.what for mark in chart.lanes[worker].marks]


def test_a_death_is_one_mark_and_one_span(run_job: RunJob) -> None:
    records = run_job(BSP(), [0.1, 0.1, 0.1], kill={1: 0.5}, back_after_s=0.4)
    began = next(record["t"] for record in records if record["kind"] == "release")
    chart = chart_of(records)
    assert marks(chart, 1) == ["killed", "returned"]
    dead = [span for span in chart.lanes[1].spans if span.what == "dead"]
    assert len(dead) == 1
    assert dead[0].start_s == pytest.approx(0.5 - began)
    assert dead[0].stop_s >= 0.9 - began
    assert marks(chart, 0) == []


def test_dropped_pushes_are_marked(run_job: RunJob) -> None:
    records = run_job(Backup(b=1), [0.1, 0.1, 0.3])
    chart, summary = chart_of(records), Tally.of(records).summary()
    assert [marks(chart, number).count("dropped") for number in range(3)] == [w["fates"]["dropped"] for w in summary["per_worker"]]


def test_a_release_for_a_process_that_is_gone_does_not_wake_its_lane() -> None:
    release = {"kind": "release", "worker": 0, "incarnation": 1, "version": 0, "clock": 0, "reason": ""}
    kill = {"kind": "fault", "t": 2.0, "worker": 0, "what": "kill", "detail": ""}
    slow = {"kind": "fault", "t": 0.0, "worker": -1, "what": "slow", "detail": "one worker, drawn anew"}
    chart = chart_of([slow, release | {"t": 1.0}, kill, release | {"t": 2.5}, {"kind": "end", "t": 4.0, "ok": True, "reason": ""}])
    assert chart.lanes[0].spans == [LaneSpan(0.0, 1.0, "computing"), LaneSpan(1.0, 3.0, "dead")]
    assert list(chart.lanes) == [0]


def test_in_shard_scope_a_computation_began_as_long_ago_as_its_push_says() -> None:
    lane = chart_of(two_shards()).lanes[0]
    assert lane.spans[:4] == [
        LaneSpan(0.0, 1.0, "computing"),
        LaneSpan(1.0, 2.5, "waiting"),
        LaneSpan(2.5, 4.0, "computing"),
        LaneSpan(4.0, 8.0, "computing"),
    ]
    records = two_shards()
    records[-1:-1] = [release(6.5, 0, 1, 2), abandoned(7.5, 0, 2, compute_s=1.0)]
    chart = chart_of(records)
    assert chart.lanes[0].spans[3:] == [LaneSpan(4.0, 5.5, "waiting"), LaneSpan(5.5, 6.5, "computing"), LaneSpan(6.5, 8.0, "computing")]
    assert marks(chart, 0) == ["dropped", "abandoned"]
    assert [(moment.what, moment.shard, moment.version) for moment in chart.moments[-2:]] == [("fold", 1, 1), ("publish", 1, 1)]


def test_a_push_that_is_rejected_before_the_first_fold_shows_the_scope_too() -> None:
    rejected = push(2.0, 0, compute_s=1.0, shard=0, held=[0, 0]), release(2.0, 0, clock=1)
    next_one = push(4.0, 0, compute_s=1.0, shard=1, held=[0, 0]), push(4.0, 0, 1, compute_s=1.0, shard=0, held=[1, 0])
    records = [JOB | {"sync": "psp(c=1, b=0.5)", "servers": 2}, release(1.0, 0), *rejected, *next_one, END | {"t": 5.0}]
    assert chart_of(records).lanes[0].spans[1:3] == [LaneSpan(1.0, 2.0, "waiting"), LaneSpan(2.0, 3.0, "computing")]


def test_interrupts_and_what_they_make_worthless_are_marked() -> None:
    chart = chart_of([*round_of_two()[:-1], interrupt(2.75, 1), abandoned(3.0, 1, 1), release(3.5, 1, 1, 1), END])
    assert marks(chart, 1) == ["interrupted", "abandoned"]
    assert chart.lanes[1].spans[-3:] == [LaneSpan(1.5, 2.0, "computing"), LaneSpan(2.0, 2.5, "waiting"), LaneSpan(2.5, 8.0, "computing")]


def test_a_barrier_is_where_all_who_compute_go_on_at_once_from_one_version(run_job: RunJob) -> None:
    def barriers(policy: Policy) -> tuple[list[float], list[float]]:
        chart = chart_of(run_job(policy, [0.1, 0.13, 0.3], epochs=1))
        return chart.times("barrier"), chart.times("fold")

    at, folds = barriers(BSP())
    assert at == folds
    assert barriers(ASP())[0] == []
    assert barriers(Backup(b=1))[0] == []
    at, folds = barriers(ElasticBSP(R=3))
    assert 0 < len(at) < len(folds) / 3
    assert len(barriers(ElasticBSP(R=3, mode="bulk"))[0]) > 0


def test_a_wait_that_a_pause_ends_is_drawn_up_to_the_pause() -> None:
    records = [JOB, release(0.0, 0), push(1.0, 0), paused(2.5, 0), release(4.0, 0, 1, 1), state(5.0, 0, "finished"), END]
    spans = [LaneSpan(0.0, 1.0, "computing"), LaneSpan(1.0, 2.5, "waiting"), LaneSpan(2.5, 4.0, "idle"), LaneSpan(4.0, 5.0, "computing")]
    assert chart_of(records).lanes[0].spans == spans


def test_a_process_that_vanishes_is_dead_at_once_whenever_that_is_noticed() -> None:
    vanished = {"kind": "fault", "t": 2.75, "worker": 0, "what": "vanish", "detail": ""}
    chart = chart_of([*round_of_two()[:-1], vanished, state(8.0, 0, "dead"), END])
    assert chart.lanes[0].spans[-1] == LaneSpan(1.75, 8.0, "dead")
    assert marks(chart, 0) == ["killed"]


@given(st.lists(st.floats(0.001, 5.0), min_size=1, max_size=30), st.integers(1, 20))
def test_shares_keep_the_time(lengths: list[float], columns: int) -> None:
    edges = [0.0, *itertools.accumulate(lengths)]
    kinds = itertools.cycle(["computing", "waiting", "idle"])
    spans = [LaneSpan(a, b, kind) for (a, b), kind in zip(itertools.pairwise(edges), kinds, strict=False)]
    result = shares(spans, 0.0, edges[-1], columns)
    for what in ("computing", "waiting", "idle"):
        total = sum(span.stop_s - span.start_s for span in spans if span.what == what)
        assert sum(result[what]) * edges[-1] / columns == pytest.approx(total, rel=1e-6, abs=1e-9)
    assert all(sum(row[column] for row in result.values()) == pytest.approx(1.0) for column in range(columns))


def drawn(records: list[Record]) -> tuple[dict[str, Any], Chart]:
    return Tally.of(records).summary(), Chart.of(records)


def test_the_pictures_figures_are_the_tables(run_job: RunJob, tmp_path: Path) -> None:
    """One duration, one share of waiting, wherever they are printed; ``tests/journal/test_worlds.py`` compares what is drawn."""
    pytest.importorskip("matplotlib")
    summary, chart = drawn(run_job(SSP(staleness=1), [0.1, 0.1, 0.4]))
    draw([(summary, chart)], tmp_path / "one.svg")
    facts = f"{summary['version']} folds in {summary['wall_s']:.1f} s of training, {share(waiting_share(summary['per_worker']))} waiting"
    assert facts in (tmp_path / "one.svg").read_text() and "seconds since the job began" in (tmp_path / "one.svg").read_text()
    title = str(job_tables(summary, 120)[0])
    assert f"in {summary['wall_s']:.1f} s of training" in title and f"{share(waiting_share(summary['per_worker']))} waiting" in title


def test_a_picture_of_several_jobs(run_job: RunJob, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = run_job(ASP(), [0.1, 0.1], kill={0: 0.4})
    many = run_job(BSP(), [0.01, 0.03], size=8 * 800)
    picture = tmp_path / "timeline.png"
    draw([drawn(records), drawn(many)], picture)
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", head[16:20]) == (1400,)
    draw([drawn(two_shards()), drawn(run_job(ElasticBSP(R=3), [0.1, 0.13, 0.3]))], tmp_path / "more.svg")
    draw([drawn(records[:1])], tmp_path / "empty.svg")
    with pytest.raises(ConfigurationError, match="cannot write the picture"):
        draw([drawn(records)], tmp_path / "timeline.unknown")
    with pytest.raises(ConfigurationError, match="at least one"):
        draw([], picture)


def test_without_matplotlib_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r'pip install "offbeat\[plots\]"'):
        draw([drawn([])], tmp_path / "timeline.png")
