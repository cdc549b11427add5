"""What the tally counts, and what the audit finds wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.policies import ASP, BSP, DSSP, SSP, Backup
from offbeat.protocol.policy import Policy
from offbeat.report.audit import LISTED
from offbeat.report.tally import Tally

Record: TypeAlias = dict[str, Any]
RunJob: TypeAlias = Callable[..., list[Record]]

JOB = {"kind": "job", "t": 0, "format": 1, "sync": "bsp", "workers": 2, "servers": 1, "seed": 0}
END = {"kind": "end", "t": 9.0, "ok": True, "reason": "done"}


def release(t: float, worker: int, version: int = 0, clock: int = 0, incarnation: int = 1) -> Record:
    fields = {"worker": worker, "incarnation": incarnation, "version": version, "clock": clock}
    return {"kind": "release", "t": t, **fields, "reason": "go on"}


def push(t: float, worker: int, version: int = 0, compute_s: float = 0.5, loss: float | str | None = None, incarnation: int = 1) -> Record:
    fields = {"worker": worker, "incarnation": incarnation, "version": version, "samples": 8, "compute_s": compute_s}
    return {"kind": "pushed", "t": t, **fields, "leases": [], "nonfinite": None, "loss": loss}


def fold(t: float, version: int, *parts: tuple[int, int, float, int]) -> Record:
    named = [{"worker": w, "incarnation": 1, "clock": c, "weight": weight, "staleness": s} for w, c, weight, s in parts]
    return {"kind": "fold", "t": t, "version": version, "parts": named, "reason": "all are here"}


def settle(t: float, worker: int, clock: int, fate: str = "folded", version: int = 1, samples: int = 8) -> Record:
    fields = {"worker": worker, "incarnation": 1, "clock": clock, "fate": fate, "version": version, "samples": samples}
    return {"kind": "settle", "t": t, **fields, "reason": "all are here"}


def metrics(worker: int, version: int, accuracy: float) -> Record:
    return {"kind": "metrics", "t": 1.0, "worker": worker, "version": version, "values": {"accuracy": accuracy}}


def round_of_two() -> list[Record]:
    return [
        JOB,
        release(1.0, 0),
        release(1.0, 1),
        push(1.5, 0, loss=2.0),
        push(2.0, 1, compute_s=1.0, loss=1.0),
        fold(2.0, 1, (0, 1, 0.5, 0), (1, 1, 0.5, 0)),
        settle(2.0, 0, 1),
        settle(2.0, 1, 1),
        release(2.25, 0, 1, 1),
        release(2.5, 1, 1, 1),
        END,
    ]


def test_one_round_by_hand() -> None:
    tally = Tally.of(round_of_two())
    summary = tally.summary()
    assert tally.problems() == []
    assert (summary["sync"], summary["workers"], summary["version"], summary["ok"], summary["reason"]) == ("bsp", 2, 1, True, "done")
    assert (summary["wall_s"], summary["samples"], summary["samples_per_s"], summary["loss"]) == (1.0, 16, 16.0, 1.5)
    assert summary["fates"] == {"folded": 2, "carried": 0, "dropped": 0, "rejected": 0}
    first, second = summary["per_worker"]
    assert (first["compute_s"], first["wait_s"], first["clock"], first["pushes"]) == (0.5, 0.75, 1, 1)
    assert (second["compute_s"], second["wait_s"], second["samples"]) == (1.0, 0.5, 8)


@pytest.mark.parametrize("policy", [BSP(), ASP(), SSP(staleness=1), DSSP(), Backup(b=1)], ids=lambda policy: str(policy.spelling))
@pytest.mark.parametrize("kill", [{}, {1: 0.5}, {0: 0.7, 2: 0.9}])
def test_the_books_of_real_rules_add_up(run_job: RunJob, policy: Policy, kill: dict[int, float]) -> None:
    records = run_job(policy, [0.1, 0.1, 0.1, 0.25], kill=kill)
    tally = Tally.of(records)
    summary = tally.summary()
    assert tally.problems() == []
    assert sum(summary["fates"].values()) == summary["pushes"] == sum(entry["kind"] == "pushed" for entry in records)
    assert summary["version"] == sum(entry["kind"] == "fold" for entry in records)
    assert [worker["deaths"] for worker in summary["per_worker"]] == [int(number in kill) for number in range(4)]
    assert [worker["incarnations"] for worker in summary["per_worker"]] == [1 + int(number in kill) for number in range(4)]
    assert [worker["state"] for worker in summary["per_worker"]] == ["finished"] * 4
    assert [epoch["indices"] for epoch in summary["epochs"]] == [160] * len(summary["epochs"])
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 1000),
    compute_s=st.lists(st.floats(0.01, 0.3), min_size=2, max_size=5),
    death=st.none() | st.floats(0.2, 1.5),
    back_after_s=st.floats(0.01, 2.0),
)
def test_any_journal_adds_up_and_any_lost_record_shows(
    run_job: RunJob, seed: int, compute_s: list[float], death: float | None, back_after_s: float
) -> None:
    kill = {} if death is None else {0: death}
    records = run_job(SSP(staleness=2), compute_s, size=96, epochs=1, seed=seed, kill=kill, back_after_s=back_after_s, leaving_early=0.05)
    assert Tally.of(records).problems() == []
    books = [index for index, entry in enumerate(records) if entry["kind"] in ("pushed", "settle", "fold")]
    # The last fold's absence shows too, as its parts' fates name a version without them.
    for lost in {books[seed % len(books)], books[-1]}:
        assert Tally.of(records[:lost] + records[lost + 1 :]).problems() != []


@pytest.mark.parametrize(
    ("place", "entries", "told"),
    [
        (10, [push(2.9, 1, 1)], "worker 1, incarnation 1: its push at 2.9 s has no fate"),
        (8, [settle(2.0, 1, 1)], "clock 1 has a second fate, folded, at 2.0 s"),
        (8, [settle(2.0, 1, 2, "dropped")], "clock 2 is dropped at 2.0 s but was never pushed"),
        (8, [fold(2.0, 2, (1, 7, 1.0, 0))], "clock 7 is part of version 2 but has no fate 'folded'"),
        (8, [fold(2.0, 2, (1, 1, 0.5, 0))], "the weights of its 1 parts add up to 0.5"),
        (8, [fold(2.0, 3)], "version 3 follows version 1"),
        (10, [push(2.9, 0, 1), settle(2.9, 0, 2, "folded", 2)], "clock 2 is folded into version 2, which lacks it"),
        (10, [push(2.9, 0, 1), fold(2.9, 2, (0, 2, 1.0, 4)), settle(2.9, 0, 2, version=2)], "with staleness 4, it should be 0"),
        (10, [push(2.9, 0, 1), fold(2.9, 2, (0, 2, 1.0, 0)), settle(2.9, 0, 2, version=3)], "its fate names version 3"),
        (10, [push(2.9, 0, 1), settle(2.9, 0, 2, "dropped", samples=9)], "pushed with 8 samples and settled with 9"),
        (10, [release(0.5, 0)], "time runs backwards"),
        (11, [release(9.5, 0)], "release at 9.5 s comes after the end"),
    ],
)
def test_each_kind_of_mistake_is_found(place: int, entries: list[Record], told: str) -> None:
    records = round_of_two()
    problems = Tally.of([*records[:place], *entries, *records[place:]]).problems()
    assert any(told in problem for problem in problems), problems


def test_the_order_of_fold_and_fates_does_not_matter() -> None:
    records = round_of_two()
    records[5:8] = [records[6], records[5], records[7]]
    assert Tally.of(records).problems() == []


def test_what_is_open_is_no_problem_before_the_end() -> None:
    assert Tally.of(round_of_two()[:5]).problems() == []


def test_many_problems_are_counted_rather_than_listed() -> None:
    wrong = [settle(3.0, 0, clock, "dropped") for clock in range(2, 2 + LISTED + 7)]
    assert Tally.of([JOB, *wrong]).problems()[-1] == "and 7 more"


def test_a_fenced_push_is_rejected_with_a_clock_of_its_own() -> None:
    records = round_of_two()
    fenced = [entry for t in (2.6, 2.7) for entry in (push(t, 1), settle(t, 1, 0, "rejected"))]
    tally = Tally.of([*records[:-1], *fenced, END])
    assert tally.problems() == []
    assert tally.summary()["per_worker"][1]["fates"]["rejected"] == 2


def test_metrics_come_from_the_newest_version_and_its_lowest_worker() -> None:
    tally = Tally.of([JOB])
    for worker, version, value in ((1, 5, 0.1), (0, 5, 0.2), (1, 5, 0.3), (0, 4, 0.4)):
        tally.add(metrics(worker, version, value))
    assert tally.summary()["metrics"] == {"accuracy": 0.2}
    tally.add(metrics(1, 6, 0.5))
    assert tally.summary()["metrics"] == {"accuracy": 0.5}
    tally.add(metrics(1, 7, math.nan))
    assert tally.summary()["metrics"] == {"accuracy": "nan"}


def test_a_loss_that_is_not_a_number_stays_one_that_json_can_carry() -> None:
    tally = Tally.of([JOB, release(1.0, 0), push(2.0, 0, loss="nan")])
    assert tally.summary()["loss"] == "nan"
    json.dumps(tally.summary(), allow_nan=False)


def test_waiting_for_the_end_of_an_epoch_is_idleness_and_a_death_ends_a_wait() -> None:
    paused = {"kind": "paused", "t": 2.5, "worker": 0, "incarnation": 1, "pool": 0, "epoch": 0, "reason": "waits for the end of epoch 0"}
    dead = {"kind": "state_changed", "t": 4.0, "worker": 1, "incarnation": 1, "state": "dead", "reason": "silent"}
    ended = {"kind": "epoch_ended", "t": 4.0, "pool": 0, "epoch": 0, "report": {"indices": 16}, "workers": [0]}
    tally = Tally.of([*round_of_two()[:-1], paused, push(3.0, 1, 1), dead, ended, release(4.0, 0, 1, 1), release(6.0, 1, 1, 1, 2)])
    first, second = tally.summary()["per_worker"]
    assert (first["idle_s"], second["wait_s"], second["deaths"], second["incarnations"]) == (1.5, 0.5, 1, 2)
    assert tally.summary()["epochs"] == [{"pool": 0, "epoch": 0, "t": 4.0, "indices": 16}]


def test_faults_are_kept_and_unknown_kinds_are_passed_over() -> None:
    tally = Tally.of([JOB, {"kind": "fault", "t": 1.0, "worker": 1, "what": "slow", "detail": "3x"}, {"kind": "from_the_future", "t": 2.0}])
    assert tally.summary()["faults"] == [{"t": 1.0, "worker": 1, "what": "slow", "detail": "3x"}]
    assert tally.summary()["elapsed_s"] == 2.0
