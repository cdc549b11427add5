"""Batches of different sizes: what ``--batch`` says, and sizes that follow the measured speeds without swinging."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.hand import Hand, only
from tests.tiers import examples

from offbeat.core.batch_sizes import DEAD_BAND, LEAST_SHARE, LONG_WINDOW, WINDOW, Auto, AutoSizes, BatchOrder, Deal, adjusted, size_and_auto
from offbeat.core.effects import Grant, Resized
from offbeat.core.events import Joined, LeaseWanted, Lost, Pushed
from offbeat.errors import ConfigurationError
from offbeat.policies import ASP

AUTO = Deal(granularity=1)
Time = tuple[float, float]
"""The seconds of a step, and of each sample in it."""


def test_what_the_command_line_says() -> None:
    assert BatchOrder.of("0=64, 2=16").sizes(32, 32, 3) == (64, 32, 16)
    assert BatchOrder.of("48").sizes(32, 32, 2) == (48, 48)
    assert BatchOrder.of("48,1=6").sizes(16, 32, 2) == (24, 3), "another sampler changes in the same proportion"
    assert BatchOrder.of("0=1").sizes(2, 32, 2) == (1, 2), "at least one sample"
    assert BatchOrder.of("auto").sizes(32, 32, 2) == (32, 32)
    assert BatchOrder.of("auto:64").sizes(224, 32, 2) == (448, 448)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no batch size"),
        ("x", "is no batch size"),
        ("0=", "is no batch size"),
        ("=4", "is no batch size"),
        ("0=1.5", "is no batch size"),
        ("\u0663=4", "is no batch size"),
        ("1=-3", "is no batch size"),
        ("0", "at least 1 sample, not 0"),
        ("9" * 20, "at most 2,147,483,648 samples"),
        ("0=4,0=5", "worker 0 twice"),
        ("4,8", "all workers twice, to 4 and 8"),
        ("2=3", "there is no worker 2, 2 workers are numbered 0 to 1"),
        ("auto:", "write 64 for all workers"),
        ("auto:0", "at least 1 sample"),
        ("auto:64:32", "the greatest size, 32, is less than the base size, 64"),
        ("auto,0=4", "write 64 for all workers"),
    ],
)
def test_what_it_cannot_say(text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        BatchOrder.of(text, workers=2)


def test_what_a_script_says() -> None:
    assert size_and_auto("f", 8) == (8, None)
    assert size_and_auto("f", "auto:8:12") == (8, Auto(8, 12))
    for wrong in ("auto", "8", 0, True, 1.5, None):
        with pytest.raises(ConfigurationError, match=r"^f\(batch_size="):
            size_and_auto("f", wrong)


# The speeds.

LIVING = st.dictionaries(st.integers(0, 9), st.floats(1.0, 1e4), min_size=1, max_size=8)


@examples(300)
@given(speeds=LIVING, shares=st.lists(st.floats(0.05, 20.0), min_size=8, max_size=8), most=st.sampled_from([0.0, 1.0, 1.5, 4.0]))
def test_shares_have_the_mean_one_and_keep_the_limits(speeds: Mapping[int, float], shares: Sequence[float], most: float) -> None:
    least = 1.0 / LEAST_SHARE
    new = adjusted(dict(zip(speeds, shares, strict=False)), speeds, least, most)
    assert new.keys() == speeds.keys()
    assert sum(new.values()) == pytest.approx(len(new))
    assert all(least * (1 - 1e-9) <= share <= (most or len(new)) * (1 + 1e-9) for share in new.values())


def rounds(
    sizes: AutoSizes, times: Mapping[int, Time], base: int, number: int, deal: Deal = AUTO, noise: float = 0.0
) -> list[dict[int, int]]:
    """Let these workers make so many steps each; return the sizes of each round."""
    draw, made = random.Random(1), []
    for _ in range(number):
        now = {worker: sizes.size(worker, base, deal, times) for worker in times}
        for worker, (fixed, each) in times.items():
            sizes.note(worker, now[worker], (fixed + each * now[worker]) * draw.lognormvariate(0.0, noise))
            sizes.adjust(times)
        made.append(now)
    return made


@examples(150)
@given(
    base=st.integers(1, 300),
    times=st.dictionaries(st.integers(0, 6), st.tuples(st.floats(0.0, 1.0), st.floats(1e-3, 1e-1)), min_size=1, max_size=5),
    granularity=st.sampled_from([1, 2, 4]),
    most=st.sampled_from([None, 1.0, 1.5]),
)
def test_the_global_batch_is_kept_and_sizes_come_to_rest(base: int, times: dict[int, Time], granularity: int, most: float | None) -> None:
    base *= granularity
    deal = Deal(granularity=granularity, most=0 if most is None else round(base * most))
    sizes = AutoSizes()
    made = rounds(sizes, times, base, 12 * LONG_WINDOW, deal)
    for now in made:
        assert sum(now.values()) == base * len(times), "the global batch is kept"
        assert all(size >= 1 and size % granularity == 0 for size in now.values())
        assert all(size <= max(base, deal.most) for size in now.values() if deal.most)
    slowest = [max(fixed + each * now[worker] for worker, (fixed, each) in times.items()) for now in made]
    assert slowest[-1] <= slowest[0] * (1 + DEAD_BAND) + 2 * granularity * max(each for _, each in times.values()), "a step is no longer"
    rest = made[-4 * LONG_WINDOW :]
    assert all(abs(now[w] - rest[0][w]) <= 2 * DEAD_BAND * rest[0][w] + granularity for now in rest for w in times), "and stays as it is"


def test_nothing_swings() -> None:
    """The way to the sizes of equal times goes in one direction, also where the times are noisy, or grow faster than the batch."""
    made = rounds(AutoSizes(), {0: (0.0, 0.001), 1: (0.02, 0.003)}, 64, 600)
    ratios = [now[0] / now[1] for now in made]
    assert all(later >= earlier * 0.999 for earlier, later in itertools.pairwise(ratios)), "towards the fast one only"
    assert made[-1][0] * 0.001 == pytest.approx(0.02 + made[-1][1] * 0.003, rel=0.06)
    noisy = rounds(AutoSizes(), {0: (0.0, 0.001), 1: (0.0, 0.003)}, 64, 2000, noise=0.1)
    assert all(88 <= now[0] <= 104 for now in noisy[200:]), "96 is what equal times need"
    quadratic, sizes = [], AutoSizes()
    for _ in range(600):
        now = {worker: sizes.size(worker, 64, AUTO, [0, 1]) for worker in (0, 1)}
        for worker, each in ((0, 1e-5), (1, 4e-5)):
            sizes.note(worker, now[worker], each * now[worker] ** 2)
        sizes.adjust([0, 1])
        quadratic.append(now[0])
    assert quadratic[-100:] == [quadratic[-1]] * 100 and abs(quadratic[-1] - 2 / 3 * 128) < 5


def test_a_worker_whose_time_does_not_depend_on_its_batch_keeps_the_least() -> None:
    made = rounds(AutoSizes(), {0: (0.0, 1e-4), 1: (1.0, 0.0)}, 64, 300)
    assert made[-1] == {0: 120, 1: 8}
    assert rounds(AutoSizes(), {0: (0.0, 1e-4), 1: (1.0, 0.0)}, 2, 300)[-1] == {0: 3, 1: 1}


def test_the_dead_and_the_new() -> None:
    sizes, times = AutoSizes(), {0: (0.0, 0.001), 1: (0.0, 0.001), 2: (0.0, 0.004)}
    settled = rounds(sizes, times, 60, 600)[-1]
    assert sum(settled.values()) == 180 and settled[2] < 25
    sizes.forget(1)
    two = {0: times[0], 2: times[2]}
    now = {worker: sizes.size(worker, 60, AUTO, two) for worker in two}
    assert sum(now.values()) == 120 and now[0] > 2 * now[2], "what was measured of the living stays"
    assert sizes.size(1, 60, AUTO, times) == 60, "one that comes back begins with the base size"
    assert sum(sizes.sizes(times, 60, AUTO).values()) == 180
    assert rounds(sizes, times, 60, 600)[-1] == pytest.approx(settled, abs=4)
    assert AutoSizes().sizes([4], 60, AUTO) == {4: 60}


def test_a_worker_that_becomes_slow_is_noticed_within_a_long_window() -> None:
    sizes = AutoSizes()
    rounds(sizes, {0: (0.0, 0.001), 1: (0.0, 0.001)}, 64, 1000)
    made = rounds(sizes, {0: (0.0, 0.001), 1: (0.0, 0.003)}, 64, 3 * LONG_WINDOW)
    assert made[-1][0] > 90 and made[LONG_WINDOW + 3 * WINDOW][0] > 85


def test_steps_of_unknown_length_do_not_count() -> None:
    sizes = AutoSizes()
    sizes.size(0, 8, AUTO, [0, 1])
    for _ in range(3 * WINDOW):
        sizes.note(0, 0, 1.0)
        sizes.note(1, 8, 0.0)
    assert not sizes.adjust([0, 1])


def test_a_job_deals_out_what_is_measured_and_says_so() -> None:
    job = Hand(ASP(), 2)
    incarnation = [1, 1]

    def step(worker: int, seconds: float) -> tuple[int, list[Resized]]:
        grant = only(Grant, job(LeaseWanted(worker, incarnation[worker], 0, 0, 10_000, 60, None, AUTO)))
        size = grant.stop - grant.start
        effects = job(Pushed(worker, incarnation[worker], 0, size, size * seconds, (grant.lease,)))
        return size, [effect for effect in effects if isinstance(effect, Resized)]

    told = []
    for _ in range(WINDOW):
        for worker, seconds in ((0, 0.001), (1, 0.003)):
            size, resized = step(worker, seconds)
            assert size == 60
            told += resized
    assert len(told) == 1 and sum(told[0].batches.values()) == 120
    assert (step(0, 0.001)[0], step(1, 0.003)[0]) == tuple(told[0].batches.values())
    job(Lost(0, "killed", 1))
    assert step(1, 0.003)[0] == 60, "the only one left: the base size times the number of the living"
    job(Joined(0))
    incarnation[0] = 2
    assert (step(0, 0.001)[0], step(1, 0.003)[0]) == (60, 60)
