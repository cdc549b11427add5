"""ZipLine against brute force and a heap: the two objectives, and what every barrier must have."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from experiments.zipline_table2.references import by_heap
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigurationError
from offbeat.policies.zipline import ZipLine, zipline

Rows = list[list[float]]


def combinations(rows: Rows) -> list[tuple[float, ...]]:
    return list(product(*rows))


def brute_range(rows: Rows) -> tuple[float, float]:
    """The least range over all combinations, and the earliest barrier that has it."""
    return min((max(z) - min(z), max(z)) for z in combinations(rows))


def brute_sum(rows: Rows) -> tuple[float, float]:
    return min((sum(max(z) - end for end in z), max(z)) for z in combinations(rows))


def random_rows(rng: random.Random) -> Rows:
    """Few workers, few points, small whole numbers: ties within and between workers are common. Lengths differ in every second one."""
    workers, longest = rng.randint(1, 4), rng.randint(1, 5)
    lengths = [rng.randint(1, longest) if rng.random() < 0.5 else longest for _ in range(workers)]
    return [sorted(float(rng.randint(0, 12)) for _ in range(length)) for length in lengths]


def waits(rows: Rows, found: ZipLine) -> list[float]:
    return [found.barrier - row[i] for row, i in zip(rows, found.choice, strict=True)]


def test_the_range_equals_brute_force_on_a_thousand_instances_with_ties() -> None:
    rng = random.Random(4)
    ties = 0
    for _ in range(1000):
        rows = random_rows(rng)
        found = zipline(rows)
        assert (found.range, found.barrier) == brute_range(rows), rows
        assert max(waits(rows, found)) == found.range and min(waits(rows, found)) == 0.0, rows
        every = [end for row in rows for end in row]
        ties += len(set(every)) < len(every)
    assert ties > 500, f"only {ties} of 1,000 instances had ties: the generator tests less than it says"


def test_the_sum_of_waits_equals_brute_force_on_a_thousand_instances_with_ties() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        rows = random_rows(rng)
        found = zipline(rows, objective="sum")
        assert (sum(waits(rows, found)), found.barrier) == brute_sum(rows), rows
        assert found.range == max(waits(rows, found))


def test_the_length_penalty_equals_brute_force_on_a_thousand_instances() -> None:
    rng = random.Random(6)
    for _ in range(1000):
        rows = [[end + 0.5 for end in row] for row in random_rows(rng)]
        found = zipline(rows, length_penalty=True)
        least = min(((max(z) - min(z)) / max(z), max(z)) for z in combinations(rows))
        assert found.range / found.barrier == least[0], rows
        assert found.barrier == least[1], rows


increasing = st.lists(st.integers(0, 40), min_size=1, max_size=12).map(lambda row: [float(end) for end in sorted(row)])
instances = st.lists(increasing, min_size=1, max_size=9)


@given(instances)
def test_each_point_is_the_last_before_the_barrier_whatever_the_lengths(rows: Rows) -> None:
    found = zipline(rows)
    for row, i in zip(rows, found.choice, strict=True):
        assert row[i] <= found.barrier and (i + 1 == len(row) or row[i + 1] > found.barrier)


@pytest.mark.parametrize(("workers", "points"), [(7, 9), (8, 8), (13, 5), (30, 40), (100, 15)])
def test_an_array_gives_what_its_rows_give(workers: int, points: int) -> None:
    """And what a heap finds; intervals as in the paper's generator."""
    rng = np.random.default_rng(workers)
    ends = rng.uniform(0, workers, (workers, 1)) + np.arange(points) * rng.uniform(1000, 1500, (workers, 1))
    found = zipline(ends)
    assert found == zipline(ends.tolist())
    assert (found.range, found.barrier) == by_heap(ends)[:2]
    assert zipline(ends.astype(np.float32)) == zipline(ends.astype(np.float32).tolist())


def test_the_length_penalty_prefers_the_later_of_two_equal_ranges() -> None:
    rows = [[1.0, 11.0], [2.0, 12.0]]
    assert zipline(rows).barrier == 2.0
    assert zipline(rows, length_penalty=True).barrier == 12.0
    assert zipline([[end + 1e9 for end in row] for row in rows], length_penalty=True).range == 1.0


def test_a_barrier_that_has_passed_is_taken_only_where_nobody_waits() -> None:
    assert zipline([[-1.0, 4.0], [0.0, 6.0]], length_penalty=True).barrier == 6.0
    assert zipline([[0.0, 4.0], [0.0, 5.0]], length_penalty=True).barrier == 0.0


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([], "no workers"),
        ([[1.0], []], "worker 1 of 2 has none"),
        ([[1.0, 2.0], [3.0, 2.0]], r"worker 1 \(3, 2\) must be finite and in ascending order"),
        ([[1.0, float("nan")]], "worker 0"),
        ([[float("nan")]], "worker 0"),
        ([[0.0], [1.0, float("inf")]], "worker 1"),
        ([[float(i) for i in range(100)], [2.0, 1.0]], r"worker 1 \(2, 1\)"),
        ([[float(i) for i in range(100)], [2.0, float("nan")]], "worker 1"),
        ([[5.0, 4.0, *(float(i) for i in range(10, 100))], [2.0]], r"worker 0 \(5, 4, 10, 11, 12, \.\.\.\)"),
    ],
)
def test_what_is_no_prediction_is_refused(rows: Rows, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        zipline(rows)
    with pytest.raises(ConfigurationError, match="objective must be range or sum"):
        zipline([[1.0]], objective="mean")
