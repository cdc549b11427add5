"""What a journal says about a run with faults: pauses, absences, versions, epochs, replicas."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.chaos.observation import Hit, Observation, length, pauses

SPANS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (float(min(pair)), float(max(pair)))))


def fold(t: float, version: int, **more: Any) -> dict[str, Any]:
    return {"kind": "fold", "t": t, "version": version, "parts": [], **more}


def change(t: float, worker: int, state: str) -> dict[str, Any]:
    return {"kind": "state_changed", "t": t, "worker": worker, "incarnation": 1, "state": state}


def seen(*records: dict[str, Any], workers: int = 2) -> Observation:
    return Observation.of([{"kind": "job", "t": 0.0, "workers": workers, "servers": 1}, *records])


@examples(200)
@given(SPANS)
def test_the_length_of_a_union(spans: list[tuple[float, float]]) -> None:
    assert length(spans) == sum(any(a <= second < b for a, b in spans) for second in range(50))


def test_a_pause_counts_from_the_fault_to_the_next_fold() -> None:
    folds = [0.0, 1.0, 2.0, 5.5, 6.0]
    assert pauses(folds, [Hit(2.5, 5.0, worker=1)], timeout_s=3.0) == ([3.0], 1.0)


def test_a_stop_that_holds_the_others_up_only_after_one_more_fold_is_found() -> None:
    folds = [0.0, 1.0, 1.1, 4.0, 4.5]
    assert pauses(folds, [Hit(1.05, 4.0, worker=1)], timeout_s=3.0).after == [pytest.approx(2.9)]


def test_where_faults_overlap_the_last_counts() -> None:
    folds = [0.0, 1.0, 6.0]
    assert pauses(folds, [Hit(1.5, 1.5, worker=0), Hit(3.0, 3.0, worker=1)], timeout_s=4.0).after == [3.0, 3.0]


def test_nobody_is_blamed_for_waiting_for_a_server_or_when_nobody_is_there() -> None:
    folds = [0.0, 1.0, 9.0, 9.5]
    hit = Hit(1.5, 1.5, worker=0)
    assert pauses(folds, [hit, Hit(2.0, 8.0, worker=None)], timeout_s=2.0) == ([], 1.0)
    assert pauses(folds, [hit], timeout_s=2.0, nobody=[(2.0, 8.0)]) == ([], 1.0)


@examples(300)
@given(st.lists(st.floats(0.0, 100.0), unique=True), st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 10.0), st.integers(0, 3))))
def test_pauses_are_within_the_gaps_between_folds(times: list[float], faults: list[tuple[float, float, int]]) -> None:
    folds = sorted(times)
    found = pauses(folds, [Hit(at, at + lasts, worker) for at, lasts, worker in faults], timeout_s=2.0)
    widest = max((b - a for a, b in pairwise(folds)), default=0.0)
    assert len(found.after) <= len(faults) and all(0.0 <= pause <= widest for pause in found.after) and found.usual <= widest


def test_absences_from_the_first_release_to_the_last_fold() -> None:
    observation = seen(
        change(0.5, 0, "alive"),
        change(1.0, 1, "alive"),
        {"kind": "release", "t": 1.0, "worker": 0},
        fold(2.0, 1),
        change(3.0, 1, "dead"),
        change(6.0, 1, "alive"),
        fold(11.0, 2),
    )
    assert observation.away(0) == [] and observation.away(1) == [(3.0, 6.0)]
    assert observation.returns() == [3.0]
    assert observation.present_share([]) == pytest.approx(1.0 - 3.0 / 20.0)
    stop, slow = Hit(5.0, 7.0, worker=1), Hit(8.0, 10.0, worker=0, part=0.5)
    assert observation.present_share([stop, slow]) == pytest.approx(1.0 - (4.0 + 1.0) / 20.0)
    assert observation.present_share([], outages=[(0.0, 2.0), (5.0, 7.0)]) == pytest.approx(1.0 - (3.0 + 2.0 + 3.0) / 20.0)
    assert observation.nobody() == []


def test_a_server_is_away_until_its_next_process_goes_on() -> None:
    def back(t: float, server: int, what: str) -> dict[str, Any]:
        return {"kind": "process", "t": t, "role": "server", "number": server, "what": what, "detail": ""}

    observation = seen(
        back(0.0, 0, "started"), fold(1.0, 1), back(2.5, 1, "restarted"), back(3.0, 0, "restarted"), back(6.0, 0, "taken over")
    )
    assert observation.outage("server 0", 2.0) == (2.0, 3.0)
    assert observation.outage("server 0", 4.0) == (4.0, 6.0)
    assert observation.outage("server 0", 4.0, until=5.0) == (4.0, 5.0), "it was stopped, and went on"
    assert observation.outage("server 1", 4.0) == (4.0, 4.0), "it never came back: the journal says nothing of it"


def test_when_nobody_was_there() -> None:
    observation = seen(change(1.0, 0, "alive"), change(2.0, 0, "dead"), change(4.0, 0, "alive"), change(5.0, 0, "dead"))
    assert observation.nobody() == [(2.0, 4.0), (5.0, float("inf"))]


def test_epochs_and_replicas() -> None:
    def epoch(folded: int) -> dict[str, Any]:
        report = {"indices": 64, "folded": folded, "dropped": 0, "rejected": 0, "unused": 2}
        return {"kind": "epoch_ended", "t": 1.0, "epoch": 3, "report": report}

    def checksum(worker: int, version: float, value: float) -> dict[str, Any]:
        return {"kind": "metrics", "t": 1.0, "worker": worker, "version": 1, "values": {"replica": value, "replica_version": version}}

    good = seen(epoch(62), checksum(0, 4.0, 17.0), checksum(1, 4.0, 17.0), checksum(1, 5.0, 18.0))
    assert (good.epochs, good.indices, good.unused, good.unaccounted, good.replicas, good.unequal) == (1, 64, 2, [], 3, [])
    bad = seen(epoch(61), checksum(0, 4.0, 17.0), checksum(1, 4.0, 16.0))
    assert len(bad.unaccounted) == 1
    assert bad.unequal == ["worker 1 has another model of version 4 than others, at 1.0 s"]
