"""Dynamic backup workers, through the coordinator: what is chosen, when, and what the reasons say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tests.core.hand import Hand, names, only
from tests.core.promises import FreshOnly
from tests.policies.race import Race, norms, shifted, steady
from tests.tiers import ALL

from offbeat.core.effects import Effect, Fold, Release, Settle
from offbeat.core.events import Folded, Pushed
from offbeat.core.policy import Policy
from offbeat.policies import BDBW, BSP, DBW
from offbeat.policies.dbw_gain import GainEstimator
from offbeat.types import Fate

PROMISES = {BDBW: FreshOnly, DBW: FreshOnly}


class Job(Hand):
    """A job by hand in which time stands still unless told otherwise."""

    def at(self, now: float, worker: int, version: int) -> list[Effect]:
        self.now = now - 1.0  # the next event is one second later
        return self.push(worker, version)

    def measured(self, version: int, norm: float = 1.0, variance: float = 0.0) -> list[Effect]:
        self.now -= 1.0
        fold = next(effect for effect in self.said if isinstance(effect, Fold))
        return self(norms(norm, variance)(fold)._replace(version=version))


def test_golden_history() -> None:
    """Three workers, gradients that agree, so that one is worth as much as three: after one round of all the fastest is enough."""
    job = Job(DBW(warm_up=1), 3)
    start = job.now
    assert job.at(start + 1, 0, 0) == [] and job.at(start + 2, 1, 0) == []
    effects = job.at(start + 4, 2, 0)
    fold = only(Fold, effects)
    assert (fold.version, len(fold.parts), fold.reason, fold.scale) == (1, 3, "k=3 of 3: warm-up", 1.0)
    assert sorted(e.worker for e in effects if isinstance(e, Release)) == [0, 1, 2], "they compute while the shards measure"
    start = job.now
    assert job.at(start + 1, 0, 1) == [], "a gradient has come before anybody knows how many to wait for"
    fold = only(Fold, job.measured(1))
    assert (fold.version, [p.worker for p in fold.parts], fold.reason) == (2, [0], "k=1 of 3: best gain per second")
    effects = job.at(start + 2, 1, 1)
    assert names(effects) == ["Settle 1", "Release 1"]
    settle = only(Settle, effects)
    assert (settle.fate, settle.reason) == (Fate.DROPPED, "computed from an older version than 2")


def test_each_norm_has_the_weight_of_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms are in the order of the sum, which is not that of arrival."""
    seen: list[Sequence[float]] = []

    def add(self: GainEstimator, event: Folded, weights: Sequence[float], scale: float) -> bool:
        seen.append(weights)
        return True

    monkeypatch.setattr(GainEstimator, "add", add)
    job = Job(DBW(warm_up=1), 2)
    job(Pushed(1, 1, 0, 8, 1.0, ()))
    fold = only(Fold, job(Pushed(0, 1, 0, 24, 1.0, ())))
    job.measured(1)
    assert [part.worker for part in fold.parts] == [0, 1]
    assert seen == [tuple(part.weight for part in fold.parts)] == [(0.75, 0.25)]


def test_time_decides_between_gains() -> None:
    """gain(k) = 3 - 2/k: 1, 2, 7/3. Arrivals at 1, 1.8, 4 s: rates 1, 1.11, 0.58."""
    job = Job(DBW(warm_up=1), 3)
    start = job.now
    for after, worker in ((1.0, 0), (1.8, 1), (4.0, 2)):
        effects = job.at(start + after, worker, 0)
    only(Fold, effects)
    start = job.now
    job.measured(1, norm=3.0, variance=2.0)
    assert job.at(start + 1, 2, 1) == []
    assert len(only(Fold, job.at(start + 2, 0, 1)).parts) == 2


def test_with_k_forced_to_all_it_decides_as_bsp_does() -> None:
    dynamic, barrier = (Race(policy, 5, shifted(0.7, seed=4), norms(1.0, 3.0)).run(40) for policy in (DBW(k_min=5), BSP()))
    assert [fold.parts for fold in dynamic.folds] == [fold.parts for fold in barrier.folds]
    assert dynamic.folded_at == barrier.folded_at and {fold.scale for fold in dynamic.folds} == {1.0}


@pytest.mark.parametrize("policy", [DBW(), BDBW()], ids=["dbw", "b_dbw"])
def test_workers_that_are_all_as_fast_are_all_waited_for(policy: Policy) -> None:
    race = Race(policy, 16, shifted(0.0, seed=0), norms(4.0, 1.0)).run(30)
    assert set(race.chosen) == {16}


def test_where_no_k_promises_a_gain_all_are_waited_for() -> None:
    """N = 1, V = 100: even sixteen gradients are mostly noise. The norm of the mean is what such noise leaves."""
    race = Race(DBW(), 16, shifted(1.0, seed=0), lambda fold: Folded(fold.version, (100.0,) * len(fold.parts), 1.0, 0.1)).run(20)
    assert set(race.chosen) == {16} and race.folds[-1].reason == "k=16 of 16: no k promises a gain"


def test_blind_it_maximises_gradients_per_second() -> None:
    """With interruption E[T_k] = 0.3 + 0.7 (H_16 - H_{16-k}), for which k / E[T_k] is greatest at 9, and as good as that from 8 to 10."""
    chosen = [
        k
        for seed in range(3 if ALL else 1)
        for k in Race(BDBW(obsolete="push_and_interrupt"), 16, shifted(0.7, seed)).run(400).chosen[100:]
    ]
    assert 8.0 <= np.mean(chosen) <= 10.0 and np.mean([8 <= k <= 10 for k in chosen]) > 0.8


def test_little_noise_needs_few_gradients_and_much_noise_many() -> None:
    means = [np.mean(Race(DBW(), 16, shifted(0.7, seed=1), norms(1.0, v)).run(150).chosen[50:]) for v in (0.01, 1.0, 10.0)]
    assert means[0] < 2.5 < means[1] < 10.0 < means[2]


def test_a_slowdown_is_noticed() -> None:
    """Half of the workers become ten times slower: soon nobody waits for them."""
    slow = set[int]()
    race = Race(BDBW(), 4, lambda worker, iteration: 10.0 if worker in slow else 1.0 + 0.01 * worker)
    race.run(60)
    assert race.chosen[-1] == 4
    slow |= {2, 3}
    race.run(130)
    assert race.chosen[-1] == 2 and race.folded_at[-1] - race.folded_at[-11] < 12.0


# What may be missing or late.


def test_k_is_chosen_when_the_norms_are_known_however_late_that_is() -> None:
    """Two seconds after the fold, when many gradients are in already; they are measured by when they came, not by when they were used."""
    race = Race(DBW(warm_up=1), 4, steady(1.0, 1.0, 1.0, 3.0), norms(1.0, 0.5), measured_after=2.0).run(20)
    assert race.chosen[0] == 4 and set(race.chosen[1:]) == {3}
    gaps = np.diff(race.folded_at[1:])
    assert gaps == pytest.approx(np.full(len(gaps), 2.0)), "three gradients have been there for a second"


def test_without_norms_it_is_the_blind_form_and_says_so() -> None:
    quiet = lambda fold: Folded(fold.version, (), 0.0, 0.1)  # noqa: E731
    dynamic, blind = Race(DBW(), 8, shifted(0.7, 0), quiet).run(60), Race(BDBW(), 8, shifted(0.7, 0)).run(60)
    assert dynamic.chosen == blind.chosen
    assert dynamic.folds[-1].reason.endswith(": most gradients per second, for want of norms")
    assert blind.folds[-1].reason.endswith(": most gradients per second")


def test_norms_that_are_not_finite_are_passed_over() -> None:
    good, broken = norms(1.0, 0.0), Folded(2, (float("inf"), 1.0), 1.0, 0.1)
    race = Race(DBW(warm_up=1), 3, steady(1.0, 1.0, 2.0), lambda f: broken if f.version == 2 else good(f)).run(4)
    assert [fold.reason for fold in race.folds[1:]] == [
        "k=2 of 3: best gain per second",
        "k=2 of 3: most gradients per second, for want of norms",
        "k=2 of 3: best gain per second",
    ]


def test_the_blind_form_needs_no_word_of_the_shards() -> None:
    assert BDBW().measures == "nothing" and len(Race(BDBW(), 3, steady(1.0, 1.0, 5.0)).run(20).folds) == 20


def test_an_old_measurement_is_not_mistaken_for_the_last() -> None:
    job = Job(DBW(warm_up=1), 2)
    job.push(0, 0)
    job.push(1, 0)
    job.push(0, 1)
    assert job.measured(0) == []
    assert only(Fold, job.measured(1)).version == 2


# The losses.


def losses(*values: float | None) -> Callable[[int], float | None]:
    return lambda version: values[version] if version < len(values) else None


@pytest.mark.parametrize(
    ("said", "beta", "expected"),
    [
        ((1.0, 1.0, 1.02), 1.01, [3, 1, 1, 2]),
        ((1.0, 1.0, 1.005), 1.01, [3, 1, 1, 1]),
        ((1.0, 1.0, 1.02), 1.05, [3, 1, 1, 1]),
        ((1.0, 1.0, 1.02), None, [3, 1, 1, 1]),
        ((1.0, 1.0, None), 1.01, [3, 1, 1, 1]),
        ((1.0, None, 9.0), 1.01, [3, 1, 1, 1]),
        ((1.0, 2.0, 4.0), 1.01, [3, 1, 2, 3]),
        ((-1.0, -1.0, -1.0), 1.01, [3, 1, 1, 1]),
        ((-1.0, -1.0, -0.9), 1.01, [3, 1, 1, 2]),
        ((1.0, 1.0, float("nan")), 1.01, [3, 1, 1, 1]),
    ],
)
def test_a_loss_that_rises_raises_k(said: tuple[float | None, ...], beta: float | None, expected: list[int]) -> None:
    race = Race(DBW(warm_up=1, beta=beta), 3, steady(1.0, 1.5, 2.5), norms(1.0, 0.0), loss=losses(*said)).run(4)
    assert race.chosen == expected
    raised = ["loss rose, k raised" in fold.reason for fold in race.folds]
    assert raised == [False, *(later > 1 for later in expected[1:])]
    assert DBW(beta=beta).uses_loss is (beta is not None)
