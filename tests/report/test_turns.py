"""What each worker does at each moment, and for whom the workers of a job wait."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.journal.test_verdicts import STEP, barrier, with_more

from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally
from offbeat.journal.turns import NOBODY
from offbeat.report.waits import Waits, WaitStory
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.view.job_view import total
from offbeat.view.of_journal import Reading
from offbeat.view.shares import KINDS


def told(records: Iterable[Record]) -> tuple[Waits, list[str]]:
    """Return the waits of a journal, and what is told of them."""
    story = WaitStory()
    for record in records:
        story.add(record)
    return story.waits, list(story.lines())


RANDOM = "per_worker(law='shifted_exponential(shift=0.3, scale=0.5)', factors=(1, 1, 3))"
FAULTS = "kill worker=1 at=3.2; restart worker=1 at=6; freeze worker=2 at=9 for=14"
RULES = [
    "bsp",
    "asp",
    "ssp(staleness=1)",
    "backup(b=1)",
    "psp(c=2)",
    "elastic",
    "majority",
    "full",
    "dpsgd",
    "decoupled(steps=5, quorum=2)",
    "ensemble(per_epoch=5, overlap=0.0)",
]


@pytest.mark.parametrize("rule", RULES)
def test_every_moment_of_every_worker_is_accounted_for_once(rule: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    simulate(rule, Cluster(workers=3, compute=RANDOM, faults=FAULTS), Work(samples=200, batch=4, epochs=2), journal=path)
    reading = Reading("")
    for record in read(path):
        reading.add(record)
    reading.end()
    view = reading.view
    totals, columns = view.steps.shares.totals(), view.steps.columns()
    summary = Tally.of(read(path)).summary()
    assert columns["number"].tolist() == list(range(1, view.steps.count + 1))
    for worker in summary["per_worker"]:
        mine = columns["worker"] == worker["worker"]
        begun, arrived, waited = (columns[name][mine] for name in ("begun", "arrived", "waited"))
        assert (begun <= arrived + 1e-9).all() and (begun[1:] - waited[1:] >= arrived[:-1] - 1e-6).all(), (
            "a worker does one thing at a time"
        )
        present = summary["elapsed_s"] - (view.turns.began or 0.0)
        assert totals[worker["worker"]].sum() <= present + 1e-3
        wait, idle, dead = (float(totals[worker["worker"], KINDS.index(kind)]) for kind in ("wait", "idle", "dead"))
        on_page = float(totals[worker["worker"]].sum()) - wait - idle - dead, wait, idle
        assert on_page == pytest.approx((worker["busy_s"], worker["wait_s"], worker["idle_s"]), abs=1e-3), "page and report agree"
    waits, _ = told(read(path))
    seconds = waits.busy_s, sum(seconds for _, seconds in waits.groups.values())
    assert seconds == pytest.approx([total(summary, name) for name in ("busy_s", "wait_s")], abs=1e-4), "and so does --why wait"
    fates = {"folded": 1, "carried": 2, "dropped": 3, "rejected": 4}
    if not summary["shards"]:
        assert {name: int((columns["fate"] == number).sum()) for name, number in fates.items()} == summary["fates"]


def test_waits_are_the_tables_and_end_with_the_slow_worker(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    simulate("bsp", Cluster(workers=3, compute="per_worker(law='constant(seconds=1)', factors=(1, 1, 4))"), Work(versions=6), journal=path)
    waits, lines = told(read(path))
    summary = Tally.of(read(path)).summary()
    ended = {key: group for key, group in waits.groups.items() if key[1] == "pushed"}
    assert ended == {(2, "pushed"): [12, 36.0]}
    assert sum(worker["wait_s"] for worker in summary["per_worker"]) == pytest.approx(36.0)
    assert waits.pairs[0, 2] == waits.pairs[1, 2] == 18.0
    assert lines[1] == "12 of 12 waits ended with worker 2: its computing (36.0 s)"


def test_the_cause_of_waits_is_a_phase() -> None:
    steps = [[STEP, STEP, with_more(data=0.3)]] * 8
    records, number = [], 0
    for record in barrier(steps):
        if record["kind"] == "release":
            record = {**record, "incarnation": 1, "clock": 0, "cause": number}
        elif record["kind"] == "pushed":
            number += 1
            record = {**record, "incarnation": 1, "version": 0, "id": number}
        records.append(record)
    _, lines = told(records)
    assert lines[0].startswith("16 waits of 4.8 s together")
    assert lines[1] == "14 of 16 waits ended with worker 2: its DataLoader (4.2 s)"


def test_no_waits_and_waits_that_nobody_ended() -> None:
    assert told([{"kind": "job", "t": 0.0, "workers": 1}])[1] == [
        "no worker waited for another: under this rule, or in this run, each went on at once"
    ]
    release = {"kind": "release", "t": 1.0, "worker": 0, "incarnation": 1, "clock": 0}
    pushed = {"kind": "pushed", "t": 2.0, "worker": 0, "incarnation": 1, "id": 1, "compute_s": 1.0}
    waits, _ = told([release, pushed, {"kind": "end", "t": 5.0}])
    assert waits.groups == {(NOBODY, "over"): [1, 3.0]}
