"""Batch sizes: they add up to the budget always, the slowest takes as short as can be, and equal workers come back to equal shares."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from statistics import fmean

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.core.batch_sizes import whole
from offbeat.policies.allocation import HISTORY, MEMORY, Budget, Model, Speed, StepTime
from offbeat.types import WorkerId

quick = examples(300)


# Whole numbers.


@quick
@given(
    ideal=st.lists(st.floats(0.0, 1e6), min_size=1, max_size=40),
    units=st.integers(1, 500),
    granularity=st.sampled_from((1, 2, 8, 32)),
    least=st.integers(1, 40),
    most=st.none() | st.integers(1, 400),
)
def test_whole_sizes_add_up_to_the_budget_always(ideal: list[float], units: int, granularity: int, least: int, most: int | None) -> None:
    budget, n = units * granularity, len(ideal)
    low = granularity * math.ceil(least / granularity)
    high = budget if most is None else granularity * (most // granularity)
    sizes = whole(ideal, budget, granularity=granularity, least=least, most=most)
    assert all(size % granularity == 0 and size > 0 for size in sizes)
    if n * low <= budget <= n * high:
        assert sum(sizes) == budget
        assert all(low <= size <= high for size in sizes)
    elif budget > n * high and high >= low:
        assert sizes == [high] * n, "no more than all may take"
    elif n <= units and high >= granularity * (units // n + 1):
        assert sum(sizes) == budget, "the least gives way, not the budget"


@pytest.mark.parametrize("rising", [False, True])
@quick
@given(
    times=st.lists(st.tuples(st.floats(0.01, 10.0), st.floats(0.0, 1.0)), min_size=1, max_size=4),
    units=st.integers(1, 14),
    granularity=st.sampled_from((1, 3)),
    least=st.integers(1, 6),
    most=st.none() | st.integers(1, 30),
)
def test_no_other_sizes_have_a_shorter_longest_time(
    times: list[tuple[float, float]], units: int, granularity: int, least: int, most: int | None, rising: bool
) -> None:
    """Compared with every way to divide the budget within the limits."""
    weights, fixed = [a for a, _ in times], [0.0 if rising else c for _, c in times]
    low, high = math.ceil(least / granularity), units if most is None else most // granularity
    ways = [way for way in product(range(low, high + 1), repeat=len(times)) if sum(way) == units]
    assume(ways)

    def longest(sizes: Sequence[int]) -> float:
        return max(x / a if rising else a / x + c for x, a, c in zip(sizes, weights, fixed, strict=True))

    sizes = whole(weights, units * granularity, fixed=fixed, rising=rising, granularity=granularity, least=least, most=most)
    assert sum(sizes) == units * granularity
    assert longest(sizes) <= min(longest([granularity * x for x in way]) for way in ways) * (1 + 1e-12)


@pytest.mark.parametrize("rising", [False, True])
@examples(100)
@given(
    times=st.lists(st.tuples(st.floats(0.01, 100.0), st.floats(0.0, 10.0)), min_size=1, max_size=20),
    budget=st.integers(20, 2000),
)
def test_the_next_unit_goes_to_the_slowest(times: list[tuple[float, float]], budget: int, rising: bool) -> None:
    """The same, for budgets of which not every division can be tried: unit after unit from one each."""
    weights, fixed = [a for a, _ in times], [0.0 if rising else c for _, c in times]

    def took(i: int, x: int) -> float:
        return (x / weights[i] if rising else weights[i] / x) + fixed[i]

    given = [1] * len(weights)
    for _ in range(budget - len(weights)):
        given[max(range(len(weights)), key=lambda i: -took(i, given[i] + 1) if rising else took(i, given[i]))] += 1
    sizes = whole(weights, budget, fixed=fixed, rising=rising)
    assert sum(sizes) == budget
    assert max(map(took, range(len(sizes)), sizes)) == pytest.approx(max(map(took, range(len(given)), given)), rel=1e-12)


@pytest.mark.parametrize("rising", [False, True])
@quick
@given(weight=st.floats(1e-6, 1e6), n=st.integers(1, 50), budget=st.integers(50, 5000), least=st.integers(1, 60))
def test_equal_workers_are_a_unit_apart_whatever_their_times_round_to(weight: float, n: int, budget: int, least: int, rising: bool) -> None:
    sizes = whole([weight] * n, budget, rising=rising, least=least)
    assert sum(sizes) == budget and sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1


# Equal times.


FINE = 10**9
"""Parts of a sample: so many times the budget makes whole sizes as good as real ones."""


def ideal(times: Sequence[StepTime], samples: Sequence[int], budget: int) -> list[float]:
    """Return the batch sizes with which all take equally long."""
    N, (a, c) = np.array(samples), (np.array(column) for column in zip(*times, strict=True))
    return [x / FINE for x in whole(list(N * a * FINE), budget * FINE, fixed=list(N * c))]


def test_the_papers_formula_and_its_slow_worker() -> None:
    """Half a second more on each step of 0.05 s: 21.3 and 234.7 of 256 at once, and back at once."""
    slow = ideal([StepTime(0.05, 0.0), StepTime(0.55, 0.0)], [37_500] * 2, 256)
    assert slow == pytest.approx([21.3, 234.7], abs=0.05)
    assert ideal([StepTime(0.05, 0.0)] * 2, [37_500] * 2, 256) == [128.0, 128.0]


# A run.


class Cluster:
    """Workers whose step of x samples takes ``fixed_s + sample_s * x``, and a budget that sees only that."""

    def __init__(self, model: Model, *times: StepTime, total: int = 256, **limits: object) -> None:
        self.times = dict(enumerate(times))
        self.living = list(self.times)
        self.budget = Budget(total, model, **limits)
        self.budget.deal(dict.fromkeys(self.living, 1), 0)
        self.epoch_number = 0

    def epoch(self, epochs: int = 1) -> dict[WorkerId, int]:
        for _ in range(epochs):
            for worker in self.living:
                x, time = self.budget.batches[worker], self.times[worker]
                steps = 37_500 // x
                self.budget.note(worker, steps * (time.fixed_s + time.sample_s * x), steps * x, steps)
            self.epoch_number += 1
            self.budget.deal(dict.fromkeys(self.living, 37_500), self.epoch_number)
            assert sum(self.budget.batches.values()) == self.budget.total
        return self.budget.batches


@pytest.mark.parametrize("model", ["inverse", "affine"])
@pytest.mark.parametrize("normal", [StepTime(0.05, 0.0), StepTime(0.05, 0.05 / 128), StepTime(0.01, 0.1 / 128)])
def test_equal_workers_come_back_to_equal_shares(model: Model, normal: StepTime) -> None:
    """The paper's disturbance: half a second more on each step of one worker, for ten epochs."""
    cluster = Cluster(model, normal, normal)
    assert cluster.epoch(2) == {0: 128, 1: 128}
    cluster.times[1] = StepTime(normal.fixed_s + 0.5, normal.sample_s)
    assert cluster.epoch()[1] > 190
    cluster.epoch(9)
    cluster.times[1] = normal
    batches = cluster.epoch(6 if model == "affine" else 60)
    assert abs(batches[0] - 128) <= 6, batches


def test_the_affine_model_finds_the_balance_at_the_second_batch_size() -> None:
    cluster = Cluster("affine", StepTime(0.05, 0.0004), StepTime(0.55, 0.0004))
    exact = ideal(list(cluster.times.values()), [37_500] * 2, 256)
    inverse = Cluster("inverse", *cluster.times.values()).epoch(2)
    assert abs(cluster.epoch(2)[0] - exact[0]) < 1 < abs(inverse[0] - exact[0])
    assert abs(cluster.epoch(5)[0] - exact[0]) < 1


def test_noise_in_the_times_costs_little() -> None:
    """10 % of it, in 40 epochs of four equal workers: epochs take 2 to 5 % longer than with even batches, which would be best."""
    rng = random.Random(1)
    cluster = Cluster("affine", *[StepTime(0.05, 0.05 / 128)] * 4, total=512)
    longest = []
    for _ in range(40):
        batches = dict(cluster.budget.batches)
        for worker in range(4):
            cluster.times[worker] = StepTime(*(part * rng.lognormvariate(0.0, 0.1) for part in (0.05, 0.05 / 128)))
        cluster.epoch()
        longest.append(max(0.05 / x + 0.05 / 128 for x in batches.values()))
    assert fmean(longest) < 1.08 * 2 * 0.05 / 128


def test_a_worker_limited_by_its_samples_still_has_a_batch() -> None:
    cluster = Cluster("affine", StepTime(1e-6, 0.001), StepTime(1e-6, 0.004), least=16)
    batches = cluster.epoch(6)
    assert batches[0] >= 16 and batches[1] > batches[0]


@pytest.mark.parametrize("model", ["none", "inverse", "affine"])
def test_the_dead_have_nothing_and_who_returns_has_what_it_had(model: Model) -> None:
    cluster = Cluster(model, StepTime(0.05, 0.0), StepTime(0.15, 0.0))
    before = dict(cluster.epoch(3))
    assert before == ({0: 128, 1: 128} if model == "none" else {0: 64, 1: 192})
    cluster.living = [0]
    assert cluster.epoch(3) == {0: 256}
    cluster.living = [0, 1]
    cluster.budget.deal(dict.fromkeys((0, 1), 37_500), cluster.epoch_number)
    assert cluster.budget.batches == before


def test_what_is_remembered_too_long_is_not_believed() -> None:
    cluster = Cluster("inverse", StepTime(0.05, 0.0), StepTime(0.05, 0.0), StepTime(0.25, 0.0), total=210)
    assert cluster.epoch(2) == {0: 30, 1: 30, 2: 150}
    cluster.living = [0, 1]
    cluster.epoch(MEMORY + 1)
    cluster.living = [0, 1, 2]
    cluster.budget.deal(dict.fromkeys((0, 1, 2), 37_500), cluster.epoch_number)
    assert cluster.budget.batches == {0: 70, 1: 70, 2: 70}, "as the median worker"


def test_who_returns_can_begin_with_the_least_and_rises_slowly() -> None:
    """Figure 5: nothing is remembered, and the rule is the paper's."""
    cluster = Cluster("inverse", StepTime(0.01, 0.1 / 128), StepTime(0.01, 0.1 / 128), least=16, humble=True)
    cluster.epoch(2)
    cluster.living = [1]
    assert cluster.epoch(2) == {1: 256}
    cluster.living = [0, 1]
    cluster.budget.deal(dict.fromkeys((0, 1), 37_500), cluster.epoch_number)
    rise = [cluster.budget.batches[0]] + [cluster.epoch()[0] for _ in range(20)]
    assert rise[0] == 16 and 20 < rise[1] < 40 and 100 < rise[20] <= 128
    assert rise == sorted(rise)


def test_little_changes_are_left_alone() -> None:
    cluster = Cluster("inverse", StepTime(0.100, 0.0), StepTime(0.104, 0.0), hysteresis=0.05)
    assert cluster.epoch() == {0: 128, 1: 128}
    cluster.times[1] = StepTime(0.2, 0.0)
    assert cluster.epoch() == {0: 86, 1: 170}


def test_splits_of_different_sizes_have_batches_in_proportion() -> None:
    budget = Budget(90, "inverse")
    budget.deal({0: 1, 1: 1}, 0)
    for worker in (0, 1):
        budget.note(worker, 10.0, 4500, 100)
    budget.deal({0: 1000, 1: 2000}, 1)
    assert budget.batches == {0: 30, 1: 60}


# What is known of one worker.


def test_a_worker_that_has_changed_is_measured_anew() -> None:
    speed = Speed()
    speed.observe(100.0, 0.20, 0)
    speed.observe(200.0, 0.30, 1)
    speed.observe(205.0, 0.31, 2)
    assert len(speed.seen) == 3, "nearly the same batch size, nearly the same time"
    speed.observe(200.0, 0.80, 3)
    assert speed.seen == [(200.0, 0.80)] and speed.time("affine") == StepTime(0.80, 0.0)
    for number in range(20):
        speed.observe(200.0, 0.80, number)
    assert len(speed.seen) == HISTORY


def test_measurements_that_make_no_line_make_the_nearest_that_makes_sense() -> None:
    falling, steep = Speed(), Speed()
    for batch, fell, rose in ((100.0, 0.9, 0.1), (200.0, 0.5, 0.9)):
        falling.observe(batch, fell, 0)
        steep.observe(batch, rose, 0)
    assert 0.5 < falling.time("affine").fixed_s < 0.9 and falling.time("affine").sample_s == 0.0
    time = steep.time("affine")
    assert 0.0 < time.fixed_s < 0.1 * (time.fixed_s + 150 * time.sample_s)


def test_what_says_nothing_is_not_noted() -> None:
    budget = Budget(64, "inverse")
    for compute_s, samples, steps in ((0.0, 8, 1), (1.0, 0, 1), (1.0, 8, 0)):
        budget.note(0, compute_s, samples, steps)
    budget.deal({0: 10, 1: 10}, 1)
    assert budget.batches == {0: 32, 1: 32} and not budget.speeds
