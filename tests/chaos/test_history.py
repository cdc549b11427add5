"""What a journal says about a run with faults: pauses, times without workers, replicas."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.journal.records import JOB, fold, state
from tests.tiers import examples

from offbeat.chaos.history import History
from offbeat.chaos.schedule import Fault


def history(*folds: float, changes: tuple[tuple[float, int, str], ...] = ()) -> History:
    """A job of two workers with folds at these times, and workers that come and go."""
    records = [*(fold(t, place) for place, t in enumerate(folds)), *(state(*change) for change in changes)]
    return History.of([JOB, *sorted(records, key=lambda record: record["t"])])


def hit(at: float, until: float | None = None, target: str = "worker") -> Fault:
    """A death, or a stop until then."""
    fault = Fault(0, 0.0, "kill" if until is None else "stop", target, 0.0, 1.0, 0.5, injected_at_s=0.0, journal_s=at, done=True)
    fault.until_s = None if until is None else until - at
    return fault


def test_a_pause_counts_from_the_fault_to_the_next_fold() -> None:
    assert history(0.0, 1.0, 2.0, 5.5, 6.0).pauses([hit(2.5, 5.0)], timeout_s=3.0) == ([3.0], 1.0)


def test_a_stop_that_holds_the_others_up_only_after_one_more_fold_is_found() -> None:
    after, _ = history(0.0, 1.0, 1.1, 4.0, 4.5).pauses([hit(1.05, 4.0)], timeout_s=3.0)
    assert after == [pytest.approx(2.9)]


def test_where_faults_overlap_the_last_counts() -> None:
    assert history(0.0, 1.0, 6.0).pauses([hit(1.5), hit(3.0)], timeout_s=4.0) == ([3.0, 3.0], 1.0)


def test_nobody_is_blamed_for_waiting_for_a_server_or_when_nobody_is_there() -> None:
    folds = (0.0, 1.0, 9.0, 9.5)
    assert history(*folds).pauses([hit(1.5), hit(2.0, 8.0, "server")], timeout_s=2.0) == ([], 1.0)
    gone = history(*folds, changes=((0.0, 0, "alive"), (2.0, 0, "dead"), (8.0, 0, "alive")))
    assert gone.nobody == [(2.0, 8.0)] and gone.pauses([hit(1.5)], timeout_s=2.0) == ([], 1.0)


def test_when_nobody_was_there() -> None:
    changes = ((1.0, 0, "alive"), (1.5, 1, "alive"), (2.0, 0, "dead"), (3.0, 1, "dead"), (4.0, 0, "alive"), (5.0, 0, "dead"))
    assert history(changes=changes).nobody == [(3.0, 4.0), (5.0, float("inf"))]


@examples(300)
@given(st.lists(st.floats(0.0, 100.0), unique=True), st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.0, 10.0))))
def test_pauses_are_within_the_gaps_between_folds(times: list[float], faults: list[tuple[float, float]]) -> None:
    folds = sorted(times)
    after, usual = history(*folds).pauses([hit(at, at + lasts) for at, lasts in faults], timeout_s=2.0)
    widest = max((b - a for a, b in pairwise(folds)), default=0.0)
    assert len(after) <= len(faults) and all(0.0 <= pause <= widest for pause in after) and usual <= widest


def test_replicas() -> None:
    def checksum(worker: int, version: float, value: float) -> dict[str, Any]:
        return {"kind": "metrics", "t": 1.0, "worker": worker, "version": 1, "values": {"replica": value, "replica_version": version}}

    good = History.of([checksum(0, 4.0, 17.0), checksum(1, 4.0, 17.0), checksum(1, 5.0, 18.0)])
    assert (good.compared, good.unequal) == (3, [])
    bad = History.of([checksum(0, 4.0, 17.0), checksum(1, 4.0, 16.0)])
    assert bad.unequal == ["worker 1 has another model of version 4 than others, at 1.0 s"]
    parts = [fold(0.5, 4, shard=0), fold(0.5, 4, shard=1), checksum(0, 4.0, 17.0), fold(0.5, 5, shard=1)]
    newer = History.of([*parts, checksum(1, 4.0, 16.0)])
    assert (newer.compared, newer.unequal) == (1, []), "worker 1 has version 5 of one part"
    assert History.of([*parts[:3], checksum(1, 4.0, 16.0)]).unequal
