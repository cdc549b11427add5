"""Partial allreduce: every gradient in one round, nobody waits for ever, bounds hold, and whoever is told the same decides the same."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import tiers
from tests.core.rounds import Chance, Play
from tests.tiers import examples

from offbeat.core.allreduce.policy import CLOSED, ON_TIME, RoundRule, RoundView
from offbeat.core.allreduce.rounds import Arrival, Round, RoundPart, Rounds
from offbeat.policies import rule
from offbeat.types import WorkerId


def of(spelling: str) -> RoundRule:
    found = rule(spelling)
    assert isinstance(found, RoundRule)
    return found


def entered(spelling: str, ranks: int, seed: int = 0, slots: int | None = None) -> Rounds:
    rounds = Rounds(of(spelling), ranks, seed, slots=slots)
    for rank in range(ranks):
        rounds.enter(rank, 0)
    return rounds


def folded(rounds: Rounds, *ranks: int) -> None:
    """The round is folded, and these read its result."""
    rounds.fold_done()
    for rank in ranks:
        assert rounds.version(rank) == rounds.done
        rounds.read(rank)


# By hand.


def test_what_comes_late_is_carried_into_the_next_round() -> None:
    rounds = entered("solo", 2)
    assert rounds.arrive(0, 0).closed
    folded(rounds, 0)
    assert rounds.arrive(1, 0) == Arrival(1, late=True, closed=False, through=1)
    assert rounds.version(1) == 1 and not rounds.read(1)
    assert rounds.free_buffer(1) == 1, "the first holds what is carried"
    assert rounds.arrive(0, 0).closed
    assert rounds.closed() == Round(1, (RoundPart(0, 0), RoundPart(1, 0)), 2)


def test_a_rank_may_have_two_gradients_in_one_round() -> None:
    rounds = entered("quorum(q=2)", 3)
    rounds.arrive(0, 0)
    assert rounds.arrive(1, 0).closed
    folded(rounds, 0, 1)
    assert rounds.arrive(2, 0).late
    assert rounds.version(2) == 1 and not rounds.read(2)
    rounds.arrive(2, 1)
    assert rounds.free_buffer(2) is None and rounds.arrive(1, 0).closed
    closed = rounds.closed()
    assert closed is not None and closed.parts == (RoundPart(1, 0), RoundPart(2, 0), RoundPart(2, 1)) and closed.divisor == 3


def test_who_misses_a_round_by_a_little_has_not_arrived_in_the_next() -> None:
    rounds = entered("quorum(q=2)", 3)
    rounds.arrive(0, 0)
    rounds.arrive(1, 0)
    folded(rounds, 0, 1)
    assert rounds.arrive(2, 0).late, "nobody waits for round 1 yet"
    rounds.read(2)
    assert not rounds.arrive(0, 0).closed
    assert rounds.arrive(2, 1).closed


def test_the_limiter_lets_go_when_the_slow_rank_is_dead_or_idle() -> None:
    for end in (Rounds.leave, Rounds.pause):
        rounds = entered("solo(staleness=1)", 2)
        assert rounds.arrive(0, 0).closed
        folded(rounds, 0)
        assert not rounds.arrive(0, 0).closed
        assert end(rounds, 1) and rounds.closed() is not None


def test_a_round_waits_for_room_for_its_result() -> None:
    rounds = entered("solo(staleness=None)", 2, slots=2)
    for _ in range(2):
        assert rounds.arrive(0, 0).closed
        folded(rounds, 0)
    assert not rounds.arrive(0, 0).closed and rounds.free_from() == 0
    assert not rounds.arrive(1, 0).closed
    assert rounds.version(1) == 2
    assert rounds.read(1), "now there is room"


def test_the_dead_are_not_counted_and_what_they_have_handed_in_is_used() -> None:
    rounds = entered("full", 3)
    rounds.arrive(0, 0)
    rounds.arrive(1, 0)
    assert not rounds.leave(0)
    assert rounds.leave(2)
    assert rounds.closed() == Round(0, (RoundPart(0, 0), RoundPart(1, 0)), 1)


def test_if_the_initiator_dies_another_is_drawn_and_the_others_stay() -> None:
    for seed in range(20):
        rounds = entered("all_of(m=2)", 5, seed)
        before = rounds._view.drawn(2)
        rounds.leave(before[0])
        after = rounds._view.drawn(2)
        assert after[0] == before[1] and after[1] not in before


def test_who_comes_back_finds_its_buffers_empty() -> None:
    rounds = entered("full", 2)
    rounds.arrive(0, 0)
    rounds.leave(0)
    assert rounds.enter(0, 0) == (RoundPart(0, 0),)
    assert rounds.free_buffer(0) == 0 and not rounds.waits(0)


def test_nobody_folds_what_the_last_rank_has_left() -> None:
    rounds = entered("solo", 2)
    rounds.arrive(0, 0)
    folded(rounds, 0)
    rounds.arrive(1, 0)
    assert not rounds.leave(1) and not rounds.leave(0)
    rounds.enter(0, 1)
    assert rounds.arrive(0, 0).closed, "it is there still"
    closed = rounds.closed()
    assert closed is not None and len(closed.parts) == 2


def test_who_comes_in_the_middle_of_a_fold_waits_for_that_and_has_a_buffer_then() -> None:
    rounds = entered("solo", 2)
    assert rounds.arrive(0, 0).closed
    assert rounds.arrive(1, 0) == Arrival(1, late=True, closed=False, through=1)
    assert rounds.version(1) == 0
    with pytest.raises(AssertionError, match="rank 1 catches up while it waits until 1 rounds are done"):
        rounds.catch_up(1)
    rounds.fold_done()
    assert rounds.version(1) == 1 and rounds.free_buffer(1) == 1


def test_who_is_idle_catches_up() -> None:
    rounds = entered("solo", 2)
    rounds.pause(1)
    for _ in range(2):
        assert rounds.arrive(0, 0).closed
        folded(rounds, 0)
    assert rounds.version(1) == 0 and rounds.catch_up(1) == range(2) and rounds.catch_up(1) == range(2, 2)
    assert rounds.free_from() == 0, "it has not read them"
    rounds.read(1)
    assert rounds.free_from() == 2


def test_who_dies_while_it_waits_is_awaited_no_more() -> None:
    rounds = entered("full", 2)
    rounds.arrive(0, 0)
    assert rounds.awaited
    rounds.leave(0)
    assert not rounds.awaited


def test_the_state_is_all_in_the_table() -> None:
    rounds = entered("majority", 4, seed=3)
    other = Rounds(of("majority"), 4, 3, table=rounds.table.copy())
    for rank in (2, 0, 3, 1):
        if not rounds.closed():
            assert rounds.arrive(rank, 0) == other.arrive(rank, 0)
    assert np.array_equal(rounds.table, other.table)


# Random schedules.

spellings: dict[str, Callable[[int], st.SearchStrategy[str]]] = {
    "solo": lambda n: st.just("solo"),
    "majority": lambda n: st.just("majority"),
    "first_of": lambda n: st.integers(1, n).map("first_of(m={})".format),
    "all_of": lambda n: st.integers(1, n).map("all_of(m={})".format),
    "quorum": lambda n: st.integers(1, n).map("quorum(q={})".format),
    "full": lambda n: st.just("full"),
}
often, rarely = Chance(0.05, 0.05, 0.1), Chance(0.005, 0.01, 0.0)


def limited(spelling: str, staleness: int | None) -> RoundRule:
    """With a bound, where there is one."""
    more = f"staleness={staleness}"
    return of(f"{spelling[:-1]}, {more})" if spelling.endswith(")") else f"{spelling}({more})")


@st.composite
def plays(draw: st.DrawFn, name: str) -> Play:
    ranks = draw(st.integers(1, 6))
    spelling = draw(spellings[name](ranks))
    staleness = draw(st.sampled_from((None, 1, 2, 4)))
    chance = draw(st.sampled_from((Chance(), rarely, often)))
    return Play(limited(spelling, staleness), ranks, draw(st.integers(0, 2**16)), chance, draw(st.sampled_from((None, 1, 2, 5))))


@pytest.mark.parametrize("name", spellings)
def test_any_schedule(name: str) -> None:
    @examples(150)
    @given(plays(name))
    def check(play: Play) -> None:
        for _ in range(25 * len(play.ranks)):
            play.step()
        play.end()

    check()


def test_the_schedules_are_worth_something() -> None:
    """In them gradients are late, two of one rank in a round, refused; ranks die, come back, and are idle; rounds wait."""
    play = Play(of("majority"), 5, seed=1, chance=Chance(0.1, 0.02, 0.1))
    twice = 0
    for _ in range(2000):
        before = play.frozen
        play.step()
        if play.frozen is not None and play.frozen is not before:
            counts = [part.rank for part in play.frozen.parts]
            twice += len(counts) > len(set(counts))
    assert play.late > 50 and twice > 10 and sum(play.dropped.values()) > 0 and play.rounds.done > 100


# How many arrive before a round closes (SPEC 6.3; Li et al. 2020, section 4.2, for majority).


def expected(name: str, m: int, ranks: int) -> tuple[float, float]:
    """Mean and variance. The initiator's place in the order of arrival is the least, or the greatest, of m drawn without replacement."""
    spread = m * (ranks + 1) * (ranks - m) / ((m + 1) ** 2 * (m + 2))
    formulas = {
        "solo": (1.0, 0.0),
        "majority": ((ranks + 1) / 2, (ranks**2 - 1) / 12),
        "first_of": ((ranks + 1) / (m + 1), spread),
        "all_of": (m * (ranks + 1) / (m + 1), spread),
        "quorum": (m, 0.0),
        "full": (ranks, 0.0),
    }
    return formulas[name]


def arrivals(spelling: str, ranks: int, number: int, seed: int) -> list[int]:
    """How many arrive before each of so many rounds closes, all computing from the same version, in an order drawn anew each time."""
    rounds, counts, draw = entered(spelling, ranks, seed), [], random.Random(seed)
    for _ in range(number):
        order = draw.sample(range(ranks), ranks)
        for place, rank in enumerate(order):
            buffer = rounds.free_buffer(rank)
            assert buffer is not None
            arrival = rounds.arrive(rank, buffer)
            if arrival.closed:
                counts.append(place + 1)
                folded(rounds, *order[: place + 1])
            elif arrival.late:
                rounds.read(rank)
    return counts


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["solo", "majority", "first_of", "all_of", "quorum", "full"])
def test_as_many_arrive_as_the_formula_says(name: str) -> None:
    """For any number of ranks, powers of two or not, within three standard errors."""
    setting = {"first_of": "m", "all_of": "m", "quorum": "q"}.get(name)
    for ranks in range(2, 34, 1 if tiers.NIGHT else 3 if tiers.ALL else 5):
        for m in sorted({1, 2, (ranks + 1) // 2, ranks}) if setting else [1]:
            spelling = f"{name}({setting}={m})" if setting else name
            mean, variance = expected(name, m, ranks)
            counts = arrivals(spelling, ranks, 100, seed=4)
            error = math.sqrt(variance / len(counts))
            assert abs(statistics.mean(counts) - mean) <= 3 * error + 1e-9, f"{spelling}, {ranks} ranks"


@pytest.mark.parametrize(("gone", "count"), [((), 1), ((2, 5), 1), ((2,), 3)])
def test_ranks_are_drawn_evenly_among_those_that_are_there(gone: tuple[int, ...], count: int) -> None:
    draws = 3500
    drawn = np.array([draw(7, number, count, seed=1, gone=gone) for number in range(draws)])
    expected = draws * count / (7 - len(gone))
    counts = np.bincount(drawn.ravel(), minlength=7)
    assert not counts[list(gone)].any() and (np.abs(np.delete(counts, gone) - expected) < 4 * math.sqrt(expected)).all(), counts
    assert all(len(set(ranks)) == count for ranks in drawn.tolist())


def test_seeds_and_rounds_draw_independently() -> None:
    first = np.array([[draw(7, number, 2, seed) for number in range(3500)] for seed in (0, 1)])
    pairs = {
        "another seed's": (first[0, :, 0], first[1, :, 0]),
        "another seed's second": (first[0, :, 1], first[1, :, 0]),
        "the next round's": (first[0, 1:, 0], first[0, :-1, 0]),
        "the next round's second": (first[0, 1:, 0], first[0, :-1, 1]),
    }
    for name, (one, other) in pairs.items():
        assert abs(np.mean(one == other) - 1 / 7) < 0.025, name


def draw(ranks: int, number: int, count: int, seed: int, gone: tuple[int, ...] = ()) -> list[int]:
    rounds = entered("majority", ranks, seed=seed)
    for rank in gone:
        rounds.leave(rank)
    rounds.table[0, 0] = number
    return list(rounds._view.drawn(count))


def test_waiting_is_for_those_on_time() -> None:
    rounds = entered("full", 2)
    rounds.arrive(0, 0)
    assert rounds.waits(0) and not rounds.waits(1) and rounds.table[1, 3] == ON_TIME


@pytest.mark.parametrize("ranks", [2, 5, 16, 17, 40])
def test_a_seed_draws_the_same_ranks_from_a_table_with_more_room(ranks: int) -> None:
    """The simulator's table has rows for ranks that may come; a live job's has one for each worker."""

    def initiators(rows: int) -> list[list[WorkerId]]:
        rounds, found = Rounds(of("all_of(m=2)"), rows, seed=7), []
        for rank in range(ranks):
            rounds.enter(rank, 0)
        for number in range(50):
            rounds.table[0, CLOSED] = number
            found.append(list(RoundView(rounds.table, 7).drawn(2)))
        return found

    room = 16
    while room < ranks:
        room *= 2
    assert initiators(ranks) == initiators(room)
    assert ranks == 2 or len({tuple(drawn) for drawn in initiators(ranks)}) > 5


# Numbers of samples.


def weights_of(rounds: Rounds) -> dict[RoundPart, float]:
    closed = rounds.closed()
    assert closed is not None
    return dict(zip(closed.parts, closed.weights, strict=True)) if closed.weights else dict.fromkeys(closed.parts, 1 / closed.divisor)


def test_with_equal_or_unknown_numbers_the_sum_is_divided_by_the_ranks() -> None:
    for samples in ((8, 8, 8), (24, 0, 8)):
        rounds = entered("full", 3)
        for rank, number in enumerate(samples):
            rounds.arrive(rank, 0, samples=number)
        closed = rounds.closed()
        assert closed is not None and closed.weights == () and closed.divisor == 3


def test_a_rank_without_a_gradient_in_the_round_counts_with_its_last_ones() -> None:
    rounds = entered("solo(staleness=None)", 3)
    assert rounds.arrive(0, 0, samples=24).closed
    assert list(weights_of(rounds).values()) == [1 / 3], "nothing is known of the others: they count like this one"
    folded(rounds, 0)
    assert rounds.arrive(1, 0, samples=8).late and rounds.arrive(2, 0, samples=8).late
    rounds.read(1), rounds.read(2)
    for samples in (24, 1, 24):
        assert rounds.arrive(0, 0, samples=samples).closed
        weights = weights_of(rounds)
        assert weights[RoundPart(0, 0)] == samples / (samples + 16)
        assert all(weights[RoundPart(rank, 0)] == 8 / (samples + 16) for rank in (1, 2) if RoundPart(rank, 0) in weights)
        folded(rounds, 0)
    assert rounds.arrive(1, 1, samples=8).late
    assert rounds.arrive(1, 0, samples=1).late is False
    assert weights_of(rounds) == {RoundPart(1, 0): 1 / 40, RoundPart(1, 1): 8 / 40}, (
        "24 was its last but one: the 1 before is a small batch"
    )


def test_what_a_dead_rank_has_left_counts_and_the_rank_does_not() -> None:
    rounds = entered("full", 3)
    rounds.arrive(0, 0, samples=24)
    rounds.arrive(1, 0, samples=8)
    rounds.leave(0)
    assert rounds.arrive(2, 0, samples=8).closed
    assert list(weights_of(rounds).values()) == [24 / 16, 8 / 16, 8 / 16], "divided by the living, as with equal numbers"


@examples(300)
@given(st.data())
def test_a_sample_has_one_weight_in_all_rounds(data: st.DataObject) -> None:
    """Each rank with a number of its own: whatever the rule, and whoever is late, the weight is its number by that of all."""
    ranks = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=ranks, max_size=ranks))
    rounds = entered(data.draw(st.sampled_from(["full", "solo(staleness=None)", "majority", "quorum(q=1)"])), ranks)
    heard: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        ready = [rank for rank in range(ranks) if not rounds.waits(rank) and rounds.free_buffer(rank) is not None]
        rank = data.draw(st.sampled_from(ready))
        heard.add(rank)
        if not rounds.arrive(rank, rounds.free_buffer(rank), samples=sizes[rank]).closed:
            if not rounds.waits(rank):
                rounds.read(rank)
            continue
        total = ranks * sum(sizes[rank] for rank in heard) / len(heard)
        for part, weight in weights_of(rounds).items():
            assert weight == pytest.approx(sizes[part.rank] / total)
        rounds.fold_done()
        for rank in range(ranks):
            rounds.read(rank)
