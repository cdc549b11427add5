"""Every rule's journal adds up: in random worlds with faults, and simulated. And if a line of the books is lost, that shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from tests.core.drawn import schedules
from tests.core.shard_world import ShardWorld, drawn
from tests.core.world import World
from tests.journal.records import Record, journal_of
from tests.support.rule_examples import spelled
from tests.tiers import examples

from offbeat.core.policy import ServerRule
from offbeat.journal.file import read
from offbeat.journal.summary import Tally
from offbeat.policies import rule
from offbeat.report.figures import short
from offbeat.report.lanes import SPANS, Chart
from offbeat.report.table import comparison, job_tables
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

SPELLINGS = sorted({rule(spelling).spelling for spelling in spelled()})


def worlds(spelling: str) -> st.SearchStrategy[list[Record]]:
    """The journals of random worlds under a rule."""
    policy = rule(spelling)
    if isinstance(policy, ServerRule) and policy.scope == "shard":
        least = max(2, getattr(policy, "c", 1))
        plans = st.integers(0, 2**62).map(lambda seed: replace(plan := drawn(seed), policy=policy, workers=max(least, plan.workers)))
        return plans.map(lambda plan: list(journal_of(policy, plan.workers, plan.shards, ShardWorld(plan).run().log)))
    least = int(policy.split_overlap is not None)
    return schedules(policy, least_epochs=least).map(lambda found: list(journal_of(policy, found.workers, 1, World(found).run().log)))


def adds_up(records: list[Record]) -> dict[str, Any]:
    """Check whatever holds in every journal; the summary."""
    tally = Tally.of(records)
    summary = tally.summary()
    workers = {worker["worker"]: worker for worker in summary["per_worker"]}
    assert tally.problems() == []
    assert sum(summary["fates"].values()) == summary["blocks"] == sum(entry["kind"] == "pushed" for entry in records)
    assert summary["abandoned"] == sum(entry["kind"] == "abandoned" for entry in records)
    assert summary["shards"] is not None or summary["pushes"] == summary["blocks"]
    assert summary["steps"] >= summary["pushes"]
    assert all(worker["wait_s"] >= 0.0 and worker["idle_s"] >= 0.0 for worker in workers.values())
    assert all(worker["wait_s"] + worker["compute_s"] + worker["idle_s"] <= 2 * summary["elapsed_s"] for worker in workers.values())
    assert all(worker["wait_s"] + worker["busy_s"] + worker["idle_s"] <= summary["elapsed_s"] + 1e-5 for worker in workers.values())
    rule_of = rule(str(summary["sync"])) if "(" in str(summary["sync"]) else None
    bound = getattr(rule_of, "upper", getattr(rule_of, "staleness", None))
    assert (summary["lead_max"] is None or summary["lead_max"] <= bound) if bound is not None else summary["lead_max"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    table = job_tables(summary, 200)[1]
    assert isinstance(table, Table) and table.row_count == len(workers)
    assert comparison({"this": summary, "that": summary}).row_count == 2
    for number, lane in Chart.of(records).lanes.items():
        for what, of_tally in (("computing", "busy_s"), ("waiting", "wait_s"), ("idle", "idle_s")):
            drawn_s = sum(span.stop_s - span.start_s for span in lane.spans if span.what == what)
            assert drawn_s == pytest.approx(workers[number][of_tally], abs=1e-4), f"worker {number}: {what}"
        assert all(span.start_s < span.stop_s and span.what in SPANS for span in lane.spans)
        assert all(a.stop_s <= b.start_s for a, b in zip(lane.spans, lane.spans[1:], strict=False))
    return summary


@pytest.mark.few(6)
@pytest.mark.parametrize("spelling", [spelling for spelling in SPELLINGS if rule(spelling).family != "gossip"], ids=short)
def test_any_journal_adds_up(spelling: str) -> None:
    """Gossip has worlds of its own (``tests/core/gossip/test_ledger.py``)."""

    @examples(15, ci=6)
    @given(worlds(spelling))
    def check(records: list[Record]) -> None:
        adds_up(records)

    check()


@pytest.mark.parametrize("spelling", ["elastic(R=3, mode=bulk)", "psp(c=1, b=0.4)", "backup(b=1)", "majority"])
def test_a_lost_line_of_the_books_shows(spelling: str) -> None:
    @examples(15)
    @given(worlds(spelling), st.floats(0.0, 1.0, exclude_max=True))
    def check(records: list[Record], where: float) -> None:
        books = [place for place, entry in enumerate(records) if entry["kind"] in ("pushed", "settle", "fold", "gather")]
        if books:
            lost = books[int(where * len(books))]
            late = records[lost]["kind"] == "gather" and "folded" not in _fates(records, records[lost])
            assert late or Tally.of(records[:lost] + records[lost + 1 :]).problems() != []

    check()


def _fates(records: list[Record], of: Record) -> set[str]:
    """The fates of what was gathered: the job's end drops it all the same, in whatever sum it was."""
    same = [entry for entry in records if entry["kind"] == "settle" and all(entry[k] == of[k] for k in ("worker", "incarnation", "clock"))]
    return {entry["fate"] for entry in same}


@pytest.mark.few(6)
@pytest.mark.parametrize("spelling", SPELLINGS, ids=short)
def test_a_simulated_journal_adds_up(spelling: str, tmp_path: Path) -> None:
    policy, path = rule(spelling), tmp_path / "run.jsonl"
    faults = "kill worker=2 at=5; restart worker=2 at=8; slow worker=1 at=3 for=5 factor=4"
    delay = "sometimes(probability=0.1, seconds=1)"
    cluster = Cluster(workers=4, servers=3, compute="uniform(low=0.5, high=1.5)", delay=delay, faults=faults)
    work = Work(epochs=2, samples=120, batch=4) if policy.split_overlap is None else Work(epochs=3, samples=60, batch=4)
    result = simulate(policy, cluster, work, journal=path)
    assert result.ok, result.reason
    summary = adds_up(list(read(path)))
    assert summary == {name: result.summary[name] for name in summary}
    assert summary["started"] == "simulated"
    assert [epoch["epoch"] for epoch in summary["epochs"]] == list(range(work.epochs or 0))
    assert [fault["what"] for fault in summary["faults"]] == ["slow", "kill"]
