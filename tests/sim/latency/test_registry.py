"""Laws: their moments, that a draw depends on (seed, worker, clock) and on nothing else, their spellings, and what they refuse."""

from __future__ import annotations

import math
import statistics
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.errors import ConfigurationError
from offbeat.sim.latency.registry import (
    LAWS,
    Constant,
    Law,
    Lognormal,
    OneOf,
    Pareto,
    PerWorker,
    Plus,
    Rotating,
    ShiftedExponential,
    Sometimes,
    Trace,
    Uniform,
    Windows,
    derived,
    law,
    stretched,
)

UNIFORM = Uniform(low=1, high=2)
SAMPLES: tuple[Law, ...] = (
    Constant(seconds=0),
    UNIFORM,
    ShiftedExponential(shift=0.3, scale=0.7),
    Pareto(scale=0.5, shape=3),
    Lognormal(mean=1.235, sd=0.706, low=0.201, high=3.41),
    Lognormal(mean=0.5, sd=0.1),
    Sometimes(probability=0.0016, seconds=4),
    Rotating(low=0.05, high=0.4),
    Windows(law=UNIFORM, worker=2, begin=10, end=20, factor=5),
    Windows(law=UNIFORM, worker=2, begin=10, end=20, factor=5, every=30),
    PerWorker(law="sometimes(probability=0.1, seconds=4)", factors=(1, 1, 4, 1)),
    OneOf(law=UNIFORM, seconds=0.3),
    OneOf(law=UNIFORM, seconds=0.3, count=3),
    Plus(law=Windows(law="constant(seconds=1)", worker=0, begin=0, end=1, factor=2), extra="pareto(scale=0.1, shape=2.5)"),
    Trace(path='it\'s "a" file.csv', job="SE", scale=0.001, offset=3),
)
RUNNABLE = [one for one in SAMPLES if not isinstance(one, Trace)]
by_spelling = pytest.mark.parametrize("one", SAMPLES, ids=lambda one: one.spelling)


def numbers(one: Law, n: int = 20_000, worker: int = 0, workers: int = 4, seed: int = 0) -> list[float]:
    sampler = one.start(seed, workers)
    return [sampler.draw(worker, clock, 0.0) for clock in range(n)]


@by_spelling
def test_a_spelling_is_read_back(one: Law) -> None:
    assert LAWS[one.word()] is type(one)
    assert law(one.spelling) == one and law(one.spelling).spelling == one.spelling and law(one) is one


def test_the_samples_cover_every_law() -> None:
    assert {type(one) for one in SAMPLES} == set(LAWS.values())


# Moments: within five standard errors, from fixed seeds.


@pytest.mark.parametrize(
    ("spec", "mean", "sd"),
    [
        ("constant(seconds=0.25)", 0.25, 0.0),
        ("uniform(low=1, high=2)", 1.5, math.sqrt(1 / 12)),
        ("shifted_exponential(shift=0.3, scale=0.7)", 1.0, 0.7),
        ("shifted_exponential(shift=1, scale=0)", 1.0, 0.0),
        ("pareto(scale=0.5, shape=5)", 0.625, 0.5 * math.sqrt(5 / 3) / 4),
        ("sometimes(probability=0.25, seconds=4)", 1.0, 4 * math.sqrt(0.25 * 0.75)),
        ("plus(law='uniform(low=1, high=2)', extra='uniform(low=1, high=2)')", 3.0, math.sqrt(2 / 12)),
        ("lognormal(mean=0.5, sd=0.1)", 0.5, 0.1),
        ("lognormal(mean=1.235, sd=0.706, low=0.201, high=3.41)", 1.235, 0.706),
        ("lognormal(mean=0.475, sd=0.144, low=0.179, high=3.482)", 0.475, 0.144),
        ("lognormal(mean=187, sd=97, low=29, high=1776)", 187, 97),
        ("lognormal(mean=0.5, sd=0.45, high=1)", 0.5, 0.45),
        ("lognormal(mean=0.5, sd=0, high=1)", 0.5, 0.0),
    ],
)
def test_mean_and_standard_deviation(spec: str, mean: float, sd: float) -> None:
    n = 40_000
    drawn = numbers(law(spec), n)
    assert statistics.fmean(drawn) == pytest.approx(mean, abs=5 * sd / math.sqrt(n) + 1e-9)
    assert statistics.pstdev(drawn) == pytest.approx(sd, rel=0.06, abs=1e-9)


def test_the_pareto_tail() -> None:
    drawn = numbers(Pareto(scale=2, shape=1.5))
    assert min(drawn) >= 2.0
    for t in (3.0, 6.0, 20.0):
        expected = (2 / t) ** 1.5
        assert sum(x > t for x in drawn) / len(drawn) == pytest.approx(expected, abs=5 * math.sqrt(expected / len(drawn)))


def test_how_often_sometimes_is() -> None:
    drawn = numbers(Sometimes(probability=0.0016, seconds=4), n=100_000)
    assert set(drawn) == {0.0, 4.0}
    assert drawn.count(4.0) == pytest.approx(160, abs=5 * math.sqrt(160))
    assert set(numbers(Sometimes(probability=0, seconds=4), 200)) == {0.0}
    assert set(numbers(Sometimes(probability=1, seconds=4), 200)) == {4.0}


def test_the_log_normal_stays_in_its_range() -> None:
    drawn = numbers(Lognormal(mean=1.235, sd=0.706, low=0.201, high=3.41))
    assert min(drawn) >= 0.201 and max(drawn) == 3.41
    assert 0.001 < drawn.count(3.41) / len(drawn) < 0.1, "what would be longer takes this long"


@examples(30)
@given(st.floats(0.01, 0.99), st.floats(0.01, 0.85))
def test_the_log_normal_fit_has_the_moments_asked_for(place: float, spread: float) -> None:
    """Against the integral of the clipped variable over the normal density."""
    low, high = 0.5, 2.5
    mean = low + place * (high - low)
    sd = spread * math.sqrt((mean - low) * (high - mean))
    mu, sigma = Lognormal(mean=mean, sd=sd, low=low, high=high).parameters()
    z = np.linspace(-9.0, 9.0, 20_001)
    weights = np.exp(-z * z / 2.0) / np.exp(-z * z / 2.0).sum()
    values = np.minimum(low + np.exp(np.minimum(mu + sigma * z, 9.0)), high)
    assert weights @ values == pytest.approx(mean, rel=1e-6)
    assert math.sqrt(weights @ (values - mean) ** 2) == pytest.approx(sd, rel=1e-4)


def test_the_rotating_skew_gives_every_worker_another_time_each_iteration() -> None:
    sampler = Rotating(low=0.05, high=0.40).start(seed=0, workers=8)
    every = [0.05 * k for k in range(1, 9)]
    for clock in range(20):
        assert sorted(sampler.draw(worker, clock, 0.0) for worker in range(8)) == pytest.approx(every)
        assert sampler.draw(3, clock + 1, 0.0) == sampler.draw(4, clock, 0.0)
    assert Rotating(low=0.05, high=0.40).start(seed=0, workers=1).draw(0, 5, 0.0) == 0.05


# Where the numbers come from.


@pytest.mark.parametrize("one", RUNNABLE, ids=lambda one: one.spelling)
def test_a_draw_does_not_depend_on_the_order_of_draws(one: Law) -> None:
    places = [(worker, clock) for worker in range(4) for clock in (*range(5), *range(60, 70), 1_000_000)]
    straight, mixed = one.start(7, 4), one.start(7, 4)
    expected = {place: straight.draw(*place, now=11.0) for place in places}
    Random(1).shuffle(places)
    assert {place: mixed.draw(*place, now=11.0) for place in places + places} == expected
    assert all(0.0 <= seconds < math.inf for seconds in expected.values())


@given(st.integers(), st.integers(5, 50))
def test_a_worker_meets_the_same_times_in_a_larger_job(seed: int, workers: int) -> None:
    one = ShiftedExponential(shift=0.3, scale=0.7)
    assert numbers(one, 70, worker=4, workers=5, seed=seed) == numbers(one, 70, worker=4, workers=workers, seed=seed)


def test_seeds_workers_and_iterations_differ() -> None:
    drawn = [*numbers(UNIFORM, 5000), *numbers(UNIFORM, 5000, worker=1), *numbers(UNIFORM, 5000, seed=1), *numbers(UNIFORM, 5000, seed=-1)]
    assert len(set(drawn)) == len(drawn)


def test_workers_are_independent() -> None:
    one, other = numbers(UNIFORM), numbers(UNIFORM, worker=1)
    assert abs(statistics.correlation(one, other)) < 5 / math.sqrt(len(one))
    assert abs(statistics.correlation(one[1:], one[:-1])) < 5 / math.sqrt(len(one))


def test_a_law_around_another_draws_what_it_would_draw_alone() -> None:
    alone = numbers(UNIFORM, 200, worker=2)
    assert numbers(Windows(law=UNIFORM, worker=0, begin=0, end=9, factor=2), 200, worker=2) == alone
    assert numbers(PerWorker(law=UNIFORM, factors=(1, 1, 2, 1)), 200, worker=2) == [2 * x for x in alone]
    assert numbers(Plus(law=UNIFORM, extra=Constant(seconds=0)), 200, worker=2) == alone
    assert numbers(Plus(law=Constant(seconds=0), extra=UNIFORM), 200, worker=2) != alone, "the second law has a seed of its own"


def test_golden_numbers() -> None:
    """Should these change, every trace that somebody has kept changes with them."""
    assert [round(x, 9) for x in numbers(UNIFORM, 3, seed=0)] == [1.822240371, 1.522406792, 1.844663774]
    assert derived(0, "delay") == 315238945491994231619780500151139502391


# Workers, steps and times told apart.


def test_one_worker_is_delayed_each_iteration() -> None:
    sampler = OneOf(law="constant(seconds=1)", seconds=0.5).start(seed=3, workers=8)
    hit = [0] * 8
    for clock in range(4000):
        delayed = [worker for worker in range(8) if sampler.draw(worker, clock, 0.0) == 1.5]
        assert len(delayed) == 1
        hit[delayed[0]] += 1
    assert all(abs(times - 500) < 5 * math.sqrt(500) for times in hit)


def test_several_workers_are_delayed_each_iteration() -> None:
    sampler = OneOf(law="constant(seconds=1)", seconds=0.5, count=3).start(seed=3, workers=5)
    sets = [frozenset(worker for worker in range(5) if sampler.draw(worker, clock, 0.0) == 1.5) for clock in range(3000)]
    assert {len(delayed) for delayed in sets} == {3}
    assert len(set(sets)) == 10 and all(abs(sets.count(one) - 300) < 5 * math.sqrt(300) for one in set(sets))


def test_slow_windows_come_again() -> None:
    one = Windows(law="constant(seconds=1)", worker=1, begin=10, end=12, factor=4, every=20)
    sampler = one.start(seed=0, workers=2)
    times = {0.0: 1.0, 9.5: 2.5, 10.0: 2.5, 11.0: 1.75, 12.0: 1.0, 29.5: 2.5, 1010.0: 2.5, 1012.0: 1.0}
    assert {now: sampler.draw(1, 0, now) for now in times} == pytest.approx(times)
    assert all(sampler.draw(0, 0, now) == 1.0 for now in times)


@given(st.floats(0, 100), st.floats(0, 100), st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9), st.sampled_from([0.5, 2, math.inf]))))
def test_stretched_work_is_all_done(work_s: float, now: float, gaps: list[tuple[float, float, float]]) -> None:
    windows, t = [], 0.0
    for gap, length, factor in gaps:
        windows.append((t + gap, t + gap + length, factor))
        t += gap + length
    end = now + stretched(work_s, now, windows)
    inside = [(max(0.0, min(end, stop) - max(now, start)), factor) for start, stop, factor in windows]
    done = end - now - sum(seconds for seconds, _ in inside) + sum(seconds / factor for seconds, factor in inside)
    assert done == pytest.approx(work_s, abs=1e-6)


def test_stretched_work_away_from_windows_is_the_same_to_the_last_bit() -> None:
    assert stretched(0.1, 0.3, []) == 0.1
    assert stretched(0.1, 0.3, [(0.0, 0.3, 5.0), (7.0, 8.0, 5.0)]) == 0.1


# What is refused.


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("constant(seconds=-1)", r"constant\(seconds=-1\): seconds must be a finite number of at least 0"),
        ("constant(seconds=inf)", "must be a finite number"),
        ("constant(seconds=1e999)", "must be a finite number"),
        ("constant(seconds=fast)", "seconds='fast'"),
        ("constant(seconds=True)", "seconds=True"),
        ("constant", "constant needs seconds; its settings are seconds"),
        ("constant(second=1)", r"no setting 'second' \(did you mean 'seconds'\?\)"),
        ("constant(1)", "the argument at character 10 has no name"),
        ("constant(seconds=)", "cannot read it at character"),
        ("constant(seconds=1", "cannot read it at character"),
        (
            "constnat(seconds=1)",
            r"no latency model 'constnat' \(did you mean 'constant'\?\); the known ones are constant, lognormal, one_of,",
        ),
        ("uniform(low=2, high=1)", "high must be a finite number of at least 2"),
        ("uniform(low=-1, high=1)", "low must be"),
        ("shifted_exponential(shift=0.3, scale=-0.7)", "scale must be"),
        ("pareto(scale=0, shape=2)", "scale must be a finite number greater than 0"),
        ("pareto(scale=1, shape=0)", "shape must be"),
        ("sometimes(probability=1.6, seconds=4)", "a probability is at most 1"),
        ("sometimes(probability=-0.1, seconds=4)", "probability must be"),
        ("lognormal(mean=1, sd=0.2, low=1)", "mean must be a finite number greater than 1"),
        ("lognormal(mean=1, sd=0.2, high=1)", "high must be a number greater than 1"),
        ("lognormal(mean=1, sd=1, high=2)", "allow no standard deviation above 1, and"),
        ("rotating(low=0.4, high=0.05)", "high must be"),
        ("windows(law='constant(seconds=1)', worker=2, begin=20, end=20, factor=5)", "end must be a finite number greater than 20"),
        ("windows(law='constant(seconds=1)', worker=2, begin=10, end=20, factor=0)", "factor must be"),
        ("windows(law='constant(seconds=1)', worker=2, begin=10, end=20, factor=2, every=9)", "every must be a number of at least 10"),
        ("windows(law='constant(seconds=1)', worker=1.5, begin=10, end=20, factor=2)", "worker must be a whole number"),
        ("windows(law='constan(seconds=1)', worker=2, begin=10, end=20, factor=5)", "no latency model 'constan'"),
        ("windows(law=5, worker=2, begin=10, end=20, factor=5)", "5 is not a latency model"),
        ("per_worker(law='constant(seconds=1)', factors=2)", "write a number greater than 0 for each worker"),
        ("per_worker(law='constant(seconds=1)', factors=(1, 0))", "write a number greater than 0 for each worker"),
        ("per_worker(law='constant(seconds=1)', factors=(1, 'x'))", "write a number greater than 0 for each worker"),
        ("one_of(law='constant(seconds=1)', seconds=1, count=0)", "count must be a whole number, at least 1"),
        ("plus(law='constant(seconds=1)', extra='what')", "no latency model 'what'"),
        ("trace(path='')", "name a file"),
        ("trace(path=3)", "path must be text in quotes"),
        ("trace(path='a.csv', scale=0)", "scale must be"),
        ("trace(path='a.csv', offset=-1)", "offset must be a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_law_is_made(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        law(spec)


@pytest.mark.parametrize(
    ("spec", "workers", "message"),
    [
        (
            "windows(law='constant(seconds=1)', worker=4, begin=10, end=20, factor=5)",
            4,
            "there is no worker 4; the 4 workers are numbered from 0",
        ),
        ("per_worker(law='constant(seconds=1)', factors=(1, 2))", 3, "2 factors are too few for 3 workers"),
        ("one_of(law='constant(seconds=1)', seconds=1, count=5)", 4, "count=5 workers cannot be drawn from 4"),
        ("plus(law='constant(seconds=1)', extra=\"per_worker(law='constant(seconds=1)', factors=(1, 2))\")", 3, "too few for 3"),
        ("one_of(law=\"per_worker(law='constant(seconds=1)', factors=(1, 2))\", seconds=1)", 3, "too few for 3"),
    ],
)
def test_what_does_not_suit_the_job_is_refused_before_it_starts(spec: str, workers: int, message: str) -> None:
    one = law(spec)
    for refused in (one.check, lambda n: one.start(0, n)):
        with pytest.raises(ConfigurationError, match=message):
            refused(workers)


def test_what_is_no_law_at_all() -> None:
    with pytest.raises(ConfigurationError, match=r"None is not a latency model: pass one such as Constant\(seconds=1\)"):
        law(None)  # type: ignore[arg-type]
