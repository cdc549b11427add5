"""The table of arrival times: what is known, what is forgotten, and what is guessed of what has not been tried."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from tests.tiers import examples

from offbeat.policies.dbw_time import FORGOTTEN, SHORTEST, STEPS, ArrivalTimes


def test_of_a_row_that_has_been_tried_it_is_the_mean() -> None:
    times = ArrivalTimes(gamma=1.0, pooled=False)
    times.add(3, [1.0, 2.0, 3.0])
    times.add(3, [2.0, 3.0, 7.0])
    np.testing.assert_allclose(times.estimate(3, most=3, optimism=0.5), [1.5, 2.5, 5.0])


def test_of_what_has_not_been_tried_the_neighbours_bound_it() -> None:
    """After 2 it takes no less than after 3, and no more than after 1; and the third does not come before the second."""
    times = ArrivalTimes(gamma=1.0, pooled=False)
    times.add(3, [1.0, 2.0, 3.0])
    times.add(1, [5.0, 6.0])
    np.testing.assert_allclose(times.estimate(2, most=4, optimism=0.0), [5.0, 6.0, 6.0, 6.0])  # the third is bounded from below only
    np.testing.assert_allclose(times.estimate(2, most=4, optimism=1.0), [1.0, 2.0, 3.0, 3.0])
    np.testing.assert_allclose(times.estimate(2, most=4, optimism=0.25), [4.0, 5.0, 5.0, 5.0])
    np.testing.assert_allclose(times.estimate(1, most=3, optimism=1.0), [5.0, 6.0, 6.0])
    np.testing.assert_allclose(times.estimate(4, most=3, optimism=0.0), [1.0, 2.0, 3.0])


def test_of_what_nothing_bounds_it_is_the_mean_of_all() -> None:
    """After 4: bounded by (1, 1) from above for k = 1; the second could take any time, and the mean, 3, is as good a guess as any."""
    times = ArrivalTimes(gamma=1.0, pooled=False)
    times.add(1, [3.0])
    np.testing.assert_allclose(times.estimate(4, most=2, optimism=0.5), [3.0, 3.0])
    assert (ArrivalTimes(gamma=1.0, pooled=False).estimate(2, most=3, optimism=0.5) == SHORTEST).all()


def test_pooled_it_is_the_isotonic_regression_whatever_went_before() -> None:
    rng = np.random.default_rng(0)
    times, samples = ArrivalTimes(gamma=1.0, pooled=True), np.zeros((2, 6))
    for _ in range(20):
        k = int(rng.integers(1, 7))
        arrivals = np.sort(rng.exponential(size=k))
        times.add(int(rng.integers(1, 7)), arrivals.tolist())
        samples[:, :k] += arrivals, np.ones(k)
    expected = isotonic_regression(samples[0] / samples[1], weights=samples[1]).x
    for h in range(1, 7):
        np.testing.assert_allclose(times.estimate(h, most=6, optimism=0.5), expected)


def test_a_slowdown_shows_by_forgetting() -> None:
    """1 s for 300 rounds, then 3 s: after 34 rounds half of what is known is new; without forgetting it takes another 300."""
    forgetful, faithful = ArrivalTimes(gamma=0.98, pooled=False), ArrivalTimes(gamma=1.0, pooled=False)
    for times in (forgetful, faithful):
        for second in (1.0,) * 300 + (3.0,) * 34:
            times.add(2, [second])
    assert forgetful.estimate(2, most=1, optimism=0.5)[0] == pytest.approx(2.0, abs=0.02)
    assert faithful.estimate(2, most=1, optimism=0.5)[0] == pytest.approx(1.0 + 2.0 * 34 / 334)


def test_what_has_been_forgotten_bounds_nothing() -> None:
    times = ArrivalTimes(gamma=0.5, pooled=False)
    times.add(2, [1.0, 9.0])
    rounds = int(np.ceil(np.log(FORGOTTEN) / np.log(0.5)))
    for _ in range(rounds - 1):
        times.add(2, [1.0])
    np.testing.assert_allclose(times.estimate(2, most=2, optimism=0.5), [1.0, 9.0])
    times.add(2, [1.0])
    np.testing.assert_allclose(times.estimate(2, most=2, optimism=0.5), [1.0, 1.0])


def test_who_comes_too_late_may_be_added() -> None:
    times = ArrivalTimes(gamma=1.0, pooled=False)
    times.add(2, [1.0])
    times.add_late(2, 2, 4.0)
    np.testing.assert_allclose(times.estimate(2, most=3, optimism=0.5), [1.0, 4.0, 4.0])


def test_more_workers_than_before_find_room() -> None:
    times = ArrivalTimes(gamma=1.0, pooled=False)
    times.add(2, [1.0, 2.0])
    times.add(5, [0.5, 1.0, 1.5, 2.0, 2.5])
    np.testing.assert_allclose(times.estimate(2, most=2, optimism=0.5), [1.0, 2.0])
    assert len(times.estimate(7, most=9, optimism=0.5)) == 9


def test_with_many_workers_neighbouring_rows_are_pooled() -> None:
    size = 4 * STEPS
    times = ArrivalTimes(gamma=1.0, pooled=False)
    for h, time_s in ((1, 4.0), (4, 2.0), (5, 1.0)):
        times.add(h, [time_s])
    times.add(size, [0.5] * size)
    for h, expected in ((1, 3.0), (2, 3.0), (4, 3.0), (5, 1.0), (8, 1.0)):
        assert times.estimate(h, most=1, optimism=0.5)[0] == pytest.approx(expected)


rounds = st.lists(st.tuples(st.integers(1, 8), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8).map(sorted)), max_size=20)


@examples(150)
@given(rounds=rounds, h=st.integers(1, 9), most=st.integers(1, 12), optimism=st.floats(0.0, 1.0), pooled=st.booleans())
def test_estimates_are_positive_and_ascending(
    rounds: list[tuple[int, list[float]]], h: int, most: int, optimism: float, pooled: bool
) -> None:
    times = ArrivalTimes(gamma=0.9, pooled=pooled)
    for waited, arrivals in rounds:
        times.add(waited, arrivals)
    found = times.estimate(h, most=most, optimism=optimism)
    assert found.shape == (most,) and (found > 0.0).all() and np.isfinite(found).all() and (np.diff(found) >= 0.0).all()
    if rounds:
        assert found.max() <= 1e-6 + max(max(arrivals) for _, arrivals in rounds)
