"""Deadlines learned from arrivals: a fold that nobody needs to guess a timeout for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.policies.views import StillView, contribution

from offbeat.core.policy import Contribution
from offbeat.policies import Backup
from offbeat.policies.deadline import LEAST, WINDOW, Deadline
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.types import WorkerId

STEADY = "lognormal(mean=1, sd=0.05)"


def gradient(worker: int, version: int, arrived: float) -> Contribution:
    return contribution(WorkerId(worker), version, version + 1)._replace(arrived=arrived)


def taught(spans: list[float], turn: float = 10.0) -> Deadline:
    """A deadline that has seen two workers' gradients of each version, so far apart."""
    deadline = Deadline()
    for version, span in enumerate(spans):
        begun = turn * version
        first = gradient(0, version, begun)
        last = gradient(1, version, begun + span)
        for pending in ((first,), (first, last)):
            deadline.look(StillView({0: version, 1: version}, pending, version=version, now=begun + span))
    deadline.look(StillView({0: 0, 1: 0}, (), version=len(spans), now=turn * len(spans)))
    return deadline


@given(st.lists(st.floats(0.0, 9.0), min_size=LEAST + 1, max_size=3 * WINDOW))
def test_most_versions_are_whole_by_the_deadline(spans: list[float]) -> None:
    deadline = taught(spans)
    recent = spans[-WINDOW:]
    assert deadline.seconds is not None and deadline.seconds >= 2.5, "a quarter of a version's time is waited in any case"
    assert sum(span <= deadline.seconds for span in recent) >= 0.9 * len(recent)
    assert deadline.seconds <= max(2.5, 1.5 * max(recent)) + 1e-9


def test_nothing_is_left_out_before_anything_is_known() -> None:
    assert taught([1.0] * (LEAST - 1)).seconds is None
    first = gradient(0, 5, 1.0)
    assert Backup(b=0, wait="auto").start().fold(StillView({0: 0, 1: 0}, (first,), version=5, now=1e9)) is None


def test_a_wait_in_seconds_ends_with_what_is_there() -> None:
    policy = Backup(b=0, wait=2.0, lr_rule="proportional")
    first: tuple[Contribution, ...] = (gradient(2, 5, 1.0),)
    view = StillView({0: 0, 1: 0, 2: 0, 3: 0}, first, version=5, now=2.9)
    assert policy.fold(view) is None and policy.wake_at(view) == 3.0
    decision = policy.fold(StillView({0: 0, 1: 0, 2: 0, 3: 0}, first, version=5, now=3.0))
    assert decision is not None and decision.fold == first and decision.scale == 0.25
    assert decision.reason == "1 fresh gradients of 4 workers are in, and the wait of 2 s for 4 is over"
    assert policy.wake_at(StillView({0: 0}, (), version=5, now=3.0)) is None


@pytest.mark.parametrize(("sync", "servers"), [("backup(b=0, wait=auto)", 1), ("psp(c=4, tau_max=auto)", 2)])
def test_nobody_waits_long_for_a_worker_that_hangs(sync: str, servers: int) -> None:
    hangs = "freeze worker=2 at=50 for=60"
    cluster = Cluster(workers=4, servers=servers, compute=STEADY, faults=hangs, timeout_s=1000.0)
    learned, barrier = (simulate(one, cluster, Work(versions=200)) for one in (sync, "bsp"))
    assert barrier.seconds > 255.0
    assert learned.seconds < barrier.seconds - 50.0, "all but one deadline of the minute"
    assert learned.summary["parts"]["least"] == 3 and learned.summary["fates"]["dropped"] <= servers * 8


def test_a_worker_that_stays_slow_is_waited_for_again() -> None:
    cluster = Cluster(workers=4, compute=STEADY, faults="slow worker=2 at=100 for=100000 factor=3")
    summary = simulate("backup(b=0, wait=auto)", cluster, Work(versions=600)).summary
    samples = [one["samples"] for one in summary["per_worker"]]
    assert 0.8 * samples[0] < samples[2] < samples[0] and summary["fates"]["dropped"] > 0


def test_little_is_left_out_where_nothing_is_slow() -> None:
    summary = simulate("backup(b=0, wait=auto)", Cluster(workers=8, compute="lognormal(mean=1, sd=0.3)"), Work(versions=500)).summary
    assert summary["fates"]["dropped"] < 0.02 * summary["pushes"]
