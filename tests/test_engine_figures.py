"""The figures of `benchmarks.engines` from a journal: gaps of the others, the return of the lost, and what the epochs account for."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.engine_figures import around, clock_offset, epochs, problems, return_of, steady_gap, victims
from benchmarks.engines import misses

DEATH = 10.0


def pushed(worker: int, *times: float) -> list[dict[str, Any]]:
    return [{"kind": "pushed", "t": t, "worker": worker} for t in times]


def process(t: float, what: str, detail: str = "") -> dict[str, Any]:
    return {"kind": "process", "t": t, "role": "worker", "number": 1, "what": what, "detail": detail}


def state(t: float, state: str, incarnation: int) -> dict[str, Any]:
    return {"kind": "state_changed", "t": t, "worker": 1, "state": state, "incarnation": incarnation}


def settle(t: float, incarnation: int, fate: str = "folded") -> dict[str, Any]:
    return {"kind": "settle", "t": t, "worker": 1, "incarnation": incarnation, "fate": fate}


RECORDS = sorted(
    [
        *pushed(0, 8.0, 9.0, 9.5, 11.5, 12.0, 15.0),
        *pushed(1, 9.0, 9.75, 13.5),
        state(10.5, "dead", 1),
        process(10.5, "exited", "killed by SIGKILL"),
        process(10.75, "restarted", "1 of 3"),
        settle(10.75, 1),
        {"kind": "joined", "t": 13.0, "worker": 1},
        state(13.0, "alive", 2),
        settle(13.25, 2, "dropped"),
        settle(13.5, 2),
        {"kind": "fold", "t": 10.25},
        {"kind": "fold", "t": 12.0},
        {"kind": "fold", "t": 13.5},
    ],
    key=lambda record: float(record["t"]),
)


def test_a_death_and_a_return() -> None:
    assert victims(RECORDS, DEATH) == [1]
    found = around(RECORDS, DEATH, 13.5)
    assert (found["lost"], found["detected_s"]) == ([1], 0.5)
    assert (found["gap_s"], found["after_s"]) == (3.0, 3.0), "the others' gaps that begin before the end count whole"
    found = around(RECORDS, DEATH, 12.0)
    assert (found["gap_s"], found["after_s"]) == (2.0, 1.0), "what lies before the detection counts in one of the two"
    assert found["fold_s"] == 1.75
    assert (found["started_s"], found["joined_s"], found["back_s"]) == (0.75, 3.0, 3.5)
    assert steady_gap(RECORDS, 8.5, DEATH) == 0.75


def test_a_worker_that_is_not_back() -> None:
    before = [record for record in RECORDS if record["t"] < 13.0]
    assert return_of(before, 1, DEATH).folded_s is None
    assert around(before, DEATH, 12.0)["back_s"] is None


def test_the_end_of_a_script_is_no_loss() -> None:
    assert victims([process(20.0, "exited", "finished")], DEATH) == []


def test_clocks_are_compared_by_the_metric_that_came_soonest() -> None:
    records = [{"kind": "metrics", "t": t, "values": {"monotonic_s": clock}} for t, clock in ((1.0, 100.5), (2.0, 101.9), (3.0, 102.7))]
    assert clock_offset(records) == pytest.approx(99.9)


def test_epochs_and_goals() -> None:
    report = {"indices": 8, "folded": 6, "dropped": 1, "rejected": 0, "unused": 1, "returned": 2, "exceptions": [{"start": 0}]}
    broken = {**report, "unused": 0, "exceptions": []}
    found = epochs({"kind": "epoch_ended", "report": each} for each in (report, broken))
    assert found == {"epochs": 2, "unaccounted": 1, "exceptions": 1, "not_folded": 4, "returned": 4}
    good = {"fault": "worker", "accuracy": 0.97, "unaccounted": 0, "exceptions": 0, "problems": [], "statuses": {"a": "0"}}
    assert misses({**good, "gap_s": 0.3, "back_s": 5.0}) == []
    assert misses({**good, "gap_s": 0.31, "back_s": None, "accuracy": 0.95, "statuses": {"a": "1"}}) == [
        "accuracy 0.95",
        "statuses {'a': '1'}",
        "others' gap 0.31 s",
        "not back",
    ]
    assert misses({**good, "fault": "node", "after_s": 0.6}) == ["others' gap after the detection 0.60 s"]


def test_a_journal_without_a_good_end() -> None:
    job = {
        "kind": "job",
        "t": 0.0,
        "format": 1,
        "offbeat": "0",
        "sync": "bsp",
        "workers": 2,
        "servers": 1,
        "seed": 0,
        "started": "",
        "script": "",
    }
    assert problems([job, {"kind": "end", "t": 1.0, "ok": True, "reason": "done"}]) == []
    assert "ends with" in problems([job, {"kind": "end", "t": 1.0, "ok": False, "reason": "no"}])[0]
