"""PSP's shard side: what folds when, what is dropped, and which settings are refused. Its worker side: tests/core/test_block_cache.py."""

from __future__ import annotations

from typing import Literal

import pytest
from tests.policies.views import StillView

from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Contribution, Decision
from offbeat.errors import ConfigurationError
from offbeat.policies import PSP

REFUSED = [
    ("psp(c=0)", "c must be a whole number, at least 1"),
    ("psp(c=2.5)", "c must be a whole number"),
    ("psp(c=2, b=1.5)", r"psp\(b=1.5\): b must be a fraction of the blocks, more than 0 and at most 1"),
    ("psp(c=2, b=0)", "more than 0 and at most 1"),
    ("psp(c=2, b=True)", "b must be a fraction"),
    ("psp(c=2, tau1=-1)", r"psp\(tau1=-1\): tau1 must be a time in seconds, at least 0"),
    ("psp(c=2, tau2=inf)", "tau2 must be a time in seconds"),
    ("psp(c=2, tau1=None)", "tau1 must be a time in seconds"),
    ("psp(c=2, tau_max=-0.5)", "tau_max must be a time in seconds"),
    ("psp(c=2, future=keep)", "future must be one of accept, hold, drop"),
    ("psp(c=2, scaling=square)", "scaling must be one of linear, none"),
    ("psp(c=2, interrupt=1)", "interrupt must be True or False"),
    ("psp(c=2, max_skew=-1)", "max_skew must be a whole number, at least 0"),
    ("psp(b=0.9)", r"psp needs c, for instance psp\(c=2\); its settings are c, b, "),
]

WORKERS = {0: 0, 1: 0, 2: 0, 3: 0}


def gradient(worker: int, t: int = 5, arrived: float = 1.0) -> Contribution:
    return Contribution(worker, 1, 1, t, 8, arrived, 1.0, None, ())


def shard(*pushed: Contribution, earlier: tuple[Contribution, ...] = (), now: float = 10.0) -> StillView:
    """A shard at version 5 with four active workers."""
    return StillView(WORKERS, pushed, version=5, now=now, gathered=earlier)


def folds(decision: Decision | None) -> list[tuple[int, int]]:
    """Who is folded, and with which iteration's gradient."""
    assert decision is not None
    return [(c.worker, c.version) for c in decision.fold]


def test_a_shard_folds_once_c_gradients_are_in() -> None:
    policy = PSP(c=2)
    assert policy.fold(shard(gradient(3))) is None
    decision = policy.fold(shard(gradient(3), gradient(1)))
    assert folds(decision) == [(3, 5), (1, 5)] and decision is not None
    assert decision.scale == 2.0 and decision.weights is None and decision.reason == "2 gradients are in, 2 awaited"
    assert policy.wake_at(shard(gradient(3))) is None


def test_the_mean_may_have_the_learning_rate_of_one_gradient() -> None:
    decision = PSP(c=2, scaling="none").fold(shard(gradient(3), gradient(1)))
    assert decision is not None and decision.scale == 1.0


def test_a_shard_waits_for_more_until_the_timeout_or_the_last_worker() -> None:
    policy = PSP(c=2, tau1=3.0)
    two = gradient(0, arrived=4.0), gradient(1, arrived=8.0)
    assert policy.fold(shard(*two, now=10.9)) is None and policy.wake_at(shard(*two)) == 11.0
    three = shard(*two, gradient(2, arrived=9.0), now=11.0)
    assert folds(policy.fold(three)) == [(0, 5), (1, 5), (2, 5)] and policy.wake_at(three) == 11.0, "since the second, not the third"
    everybody = shard(*two, gradient(2, arrived=9.0), gradient(3, arrived=9.5), now=9.5)
    decision = policy.fold(everybody)
    assert decision is not None and len(decision.fold) == 4 and decision.reason == "all 4 active workers have responded"


def test_a_gradient_of_an_earlier_iteration_is_dropped() -> None:
    late = gradient(0, t=4)
    decision = PSP(c=1).fold(shard(late))
    assert decision == Decision((), "of an earlier iteration than 5, this shard's", drop=(late,))


def test_fewer_than_c_workers_are_enough_when_no_more_are_left() -> None:
    view = StillView({0: 0, 1: 0}, (gradient(0), gradient(1)), version=5)
    assert folds(PSP(c=3).fold(view)) == [(0, 5), (1, 5)]
    dead = StillView({0: 0, 1: 0}, (gradient(3), gradient(0)), version=5)
    assert PSP(c=3).fold(dead) is None, "worker 1 is still to come; that a dead one has pushed does not replace it"
    assert folds(PSP(c=2).fold(dead)) == [(3, 5), (0, 5)]
    assert folds(PSP(c=2).fold(StillView({}, (gradient(0),), version=5))) == [(0, 5)], "nobody else will come"


def test_after_tau_max_fewer_than_c_are_enough() -> None:
    policy = PSP(c=3, tau_max=5.0)
    view = shard(gradient(0, arrived=2.0), now=6.9)
    assert policy.fold(view) is None and policy.wake_at(view) == 7.0
    assert folds(policy.fold(shard(gradient(0, arrived=2.0), now=7.0))) == [(0, 5)]
    both = PSP(c=1, tau1=9.0, tau_max=5.0)
    assert both.wake_at(view) == 7.0, "no later than tau_max, whatever tau1 says"


# Gradients of later iterations than the shard's.


def test_a_later_gradient_counts_now() -> None:
    assert folds(PSP(c=2).fold(shard(gradient(0, t=9), gradient(1)))) == [(0, 9), (1, 5)]


def test_a_worker_counts_once_with_its_newest_gradient() -> None:
    older = gradient(0)
    decision = PSP(c=2).fold(shard(gradient(0, t=6), earlier=(older,)))
    assert decision == Decision((), "its worker has sent a newer gradient", drop=(older,))


@pytest.mark.parametrize("future", ["hold", "drop"])
def test_a_later_gradient_does_not_count_yet(future: Literal["hold", "drop"]) -> None:
    policy = PSP(c=2, future=future)
    assert policy.fold(shard(gradient(0, t=6), gradient(1))) is None
    decision = policy.fold(shard(gradient(0, t=6), gradient(1), gradient(2)))
    assert folds(decision) == [(1, 5), (2, 5)] and decision is not None
    assert [c.worker for c in decision.drop] == ([0] if future == "drop" else [])
    assert decision.scale == 2.0


@pytest.mark.parametrize("future", ["hold", "drop"])
def test_a_worker_keeps_its_gradient_for_this_iteration_beside_a_later_one(future: Literal["hold", "drop"]) -> None:
    policy = PSP(c=2, future=future)
    assert folds(policy.fold(shard(gradient(1), gradient(0, t=6), earlier=(gradient(0),)))) in ([(0, 5), (1, 5)], [(1, 5), (0, 5)])
    again = gradient(0, arrived=1.0)
    decision = policy.fold(shard(gradient(0, arrived=2.0), earlier=(again,)))
    assert decision is not None and decision.drop == (again,), "two for the same iteration: the newer one counts"


def test_dropping_keeps_only_a_workers_last_gradient_for_later_iterations() -> None:
    between = gradient(0, t=6)
    decision = PSP(c=2, future="drop").fold(shard(gradient(0, t=7), earlier=(between,)))
    assert decision is not None and decision.drop == (between,)
    assert PSP(c=2, future="hold").fold(shard(gradient(0, t=7), earlier=(between,))) is None


@pytest.mark.parametrize("future", ["hold", "drop"])
def test_if_everybody_has_gone_beyond_this_iteration_the_earliest_later_one_counts(future: Literal["hold", "drop"]) -> None:
    """Else the shard would wait for ever for gradients that nobody will compute."""
    decision = PSP(c=2, future=future).fold(shard(*(gradient(worker, t=6 + worker % 2) for worker in range(4))))
    assert folds(decision) == [(0, 6), (2, 6)] and decision is not None
    assert [c.worker for c in decision.drop] == ([1, 3] if future == "drop" else [])


# Settings.


def test_more_gradients_than_workers_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigurationError, match=r"psp\(c=5\) with 4 workers .* c must be at most 4"):
        Coordinator(PSP(c=5), workers=4, shards=2)


def test_the_worker_side_gets_the_settings() -> None:
    blocks = PSP(c=2, b=0.5, tau2=3.0).blocks(4)
    for number in range(4):
        blocks.received(number, 0, now=0.0)
    blocks.advance()
    for number in range(2):
        blocks.received(number, 1, now=1.0)
    assert blocks.wake_at() == 4.0
    assert PSP(c=2, interrupt=True).obsolete_work == "push_and_interrupt" and PSP(c=2).obsolete_work == "push_and_wait"
