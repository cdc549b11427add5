"""Decoupled DiLoCo: a quorum, a window that ends in time, weights by tokens, and workers that go on whatever happens to the others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isclose
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policies.views import StillView, contribution
from tests.tiers import examples

from offbeat.core.policy import Contribution, ServerRule
from offbeat.errors import ConfigurationError
from offbeat.journal.file import read
from offbeat.policies import Decoupled
from offbeat.policies.decoupled import by_tokens
from offbeat.report.compare import Run, losses
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.recording import recorded
from offbeat.sim.run import simulate

REFUSED = [
    ("decoupled(quorum=0)", "quorum must be a whole number, at least 1"),
    ("decoupled(quorum=1, grace=2)", "grace must be a number, at least 0 and at most 1"),
]


def at(worker: int, arrived: float, samples: int = 8, steps: int = 2) -> Contribution:
    return contribution(worker)._replace(arrived=arrived, samples=samples, steps=steps)


def measured(policy: ServerRule, turns: dict[int, float]) -> None:
    """Let the rule see two pushes of each of these workers, so far apart; the later ones arrive at 0."""
    everybody = dict.fromkeys(range(9), 1)
    for arrivals in ([at(worker, -turn) for worker, turn in turns.items()], [at(worker, 0.0) for worker in turns]):
        assert policy.fold(StillView(everybody, tuple(arrivals), now=-1e9)) is None


def test_before_anything_is_measured_the_quorum_is_enough() -> None:
    policy = Decoupled(quorum=2).start()
    view = StillView(dict.fromkeys(range(4), 1), (at(0, 9.0),), now=10.0)
    assert policy.fold(view) is None and policy.wake_at(view) is None
    decision = policy.fold(replace(view, pushed=(at(0, 9.0), at(1, 10.0))))
    assert decision is not None and [c.worker for c in decision.fold] == [0, 1]


def test_the_window_is_a_share_of_a_turn_and_ends_when_all_are_in() -> None:
    policy = Decoupled(quorum=1, grace=0.5).start()
    measured(policy, {0: 10.0, 1: 12.0, 2: 8.0})
    view = StillView(dict.fromkeys(range(3), 1), (at(0, 10.0),), now=14.9)
    assert policy.fold(view) is None and policy.wake_at(view) == 15.0
    late = replace(view, pushed=(at(0, 10.0), at(1, 14.0)), now=15.0)
    decision = policy.fold(late)
    assert decision is not None and len(decision.fold) == 2
    everybody = replace(late, pushed=(*late.pushed, at(2, 14.5)), now=14.5)
    assert policy.fold(everybody) is not None and policy.wake_at(everybody) is None


def test_the_window_ends_before_a_worker_in_it_pushes_again() -> None:
    policy = Decoupled(quorum=2, grace=1.0).start()
    measured(policy, {0: 3.0, 1: 30.0, 2: 30.0})
    view = StillView(dict.fromkeys(range(4), 1), (at(0, 2.0), at(1, 4.0)), now=4.0)
    assert policy.wake_at(view) == 5.0, "worker 0 pushes this fragment again three seconds after the last time"


def test_fewer_than_the_quorum_are_enough_where_no_more_are_left() -> None:
    policy = Decoupled(quorum=3).start()
    assert policy.fold(StillView({0: 1, 1: 1}, (at(0, 9.0), at(1, 9.5)))) is not None


def test_a_push_that_was_followed_by_another_is_carried() -> None:
    decision = Decoupled(quorum=2).start().fold(StillView({0: 1, 1: 1}, (at(0, 9.0),), gathered=(at(0, 5.0),)))
    assert decision is not None and not decision.fold and [c.arrived for c in decision.carry] == [5.0]


@examples(100)
@given(st.lists(st.tuples(st.integers(0, 64), st.integers(1, 9)), min_size=1, max_size=6))
def test_weights_are_tokens_times_tokens_per_step(work: list[tuple[int, int]]) -> None:
    weights = by_tokens(tuple(at(worker, 0.0, samples, steps) for worker, (samples, steps) in enumerate(work)))
    assert isclose(sum(weights), 1.0)
    if all(samples for samples, _ in work):
        scores = [samples * samples / steps for samples, steps in work]
        assert all(isclose(a * weights[0], b * scores[0]) for a, b in zip(scores, weights, strict=True))
    else:
        assert len(set(weights)) == 1


def test_nobody_waits_whoever_dies(tmp_path: Path) -> None:
    """Steps take 1 s: each worker that lives pushes every 4 s, while others die, come back, or take ten times as long."""
    faults = "kill worker=1 at=10; kill worker=2 at=20; restart worker=2 at=31; slow worker=3 at=0 for=200 factor=10"
    cluster = Cluster(workers=4, servers=2, compute="constant(seconds=1)", delay="constant(seconds=0.5)", faults=faults)
    journal = tmp_path / "run.jsonl"
    result = simulate("decoupled(steps=8, quorum=3, delay=2)", cluster, Work(time_s=100.0), journal=journal)
    pushes = [record["t"] for record in read(journal) if record["kind"] == "pushed" and record["worker"] == 0]
    assert {later - earlier for earlier, later in pairwise(pushes)} == {4.0} and len(pushes) == 24
    assert result.summary["ok"]


def test_the_samples_of_a_carried_push_share_the_fate_of_the_next_and_everybody_counts_them_once(tmp_path: Path) -> None:
    """Worker 2 takes ten times as long, and the quorum is everybody: the others push a fragment again and again before it is folded."""
    cluster = Cluster(workers=3, servers=2, compute="constant(seconds=1)", faults="slow worker=2 at=0 for=9999 factor=10")
    journal = tmp_path / "run.jsonl"
    summary = simulate("decoupled(steps=4, quorum=3)", cluster, Work(samples=2000, epochs=2, batch=8), journal=journal).summary
    assert summary["fates"]["carried"] > 20 and summary["fates"]["dropped"] == summary["fates"]["rejected"] == 0
    assert summary["fates"]["carried"] + summary["fates"]["folded"] == summary["blocks"]
    for report in summary["epochs"]:
        assert report["folded"] == report["indices"] == 2000 and not report["exceptions"]
    assert summary["samples"] == 4000 and 3600 < recorded(journal).folded[-1][2] < 4000, "all but those of the last fold"
    run = Run.of("run", [*read(journal), {"kind": "metrics", "t": 9999.0, "version": 0, "worker": 0, "values": {"loss": 0.5}}])
    assert losses(run, [], [3999.0, 4000.0]) == ([], [None, 0.5])


def test_more_than_there_are_workers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="quorum must be at most 2"):
        simulate("decoupled(quorum=3)", Cluster(workers=2), Work(versions=1))
