"""The bimonotone fit against brute force that knows nothing of its staircases, and against the conditions that only the best fit meets."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression, linprog
from scipy.sparse import coo_array
from tests.tiers import examples

from offbeat.errors import ConfigurationError
from offbeat.policies.bimonotone import Table, fitted_row


def fitted(mean: Table, weight: Table) -> Table:
    """The whole fit, row by row; nan where there are no samples. There the two bounds of a row must be the same."""
    rows = [fitted_row(mean, weight, h) for h in range(len(mean))]
    for row, seen in zip(rows, weight > 0, strict=True):
        np.testing.assert_allclose(row.lower[seen], row.upper[seen], atol=1e-9)
    return np.array([np.where(seen, row.lower, np.nan) for row, seen in zip(rows, weight > 0, strict=True)])


def pairs(weight: Table) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The cells with samples, and which of them (by place in that list) must not be greater than which."""
    cells = [(int(h), int(k)) for h, k in np.argwhere(weight > 0)]
    ordered = [
        (a, b) for (a, (h, k)), (b, (other_h, other_k)) in product(enumerate(cells), repeat=2) if a != b and h >= other_h and k <= other_k
    ]
    return cells, ordered


def noisy(rng: np.random.Generator, rows: int, columns: int, noise: float = 0.4) -> Table:
    """A table that rises along its rows and falls down its columns, and noise."""
    h, k = np.mgrid[1 : rows + 1, 1 : columns + 1]
    table: Table = 1.0 + 2.0 * k / columns - 0.7 * h / rows + noise * rng.normal(size=(rows, columns))
    return table


def by_minimax(mean: Table, weight: Table) -> Table:
    """Brute force: x_a is the greatest over upper sets U that hold a of the least over lower sets L that hold a of the mean of U and L."""
    cells, ordered = pairs(weight)
    y, w = np.array([mean[c] for c in cells]), np.array([weight[c] for c in cells])
    uppers = [s for s in product((False, True), repeat=len(cells)) if all(s[b] or not s[a] for a, b in ordered)]
    found = np.full(mean.shape, np.nan)
    for a, cell in enumerate(cells):
        lowers = [~np.array(s) for s in uppers if not s[a]]
        found[cell] = max(
            min(float(np.average(y[u & low], weights=w[u & low])) for low in lowers) for s in uppers if s[a] for u in [np.array(s)]
        )
    return found


values = st.integers(-4, 4).map(float)
weights = st.sampled_from((0.0, 0.001, 0.25, 1.0, 3.0))


@st.composite
def tables(draw: st.DrawFn, most: int) -> tuple[Table, Table]:
    """Small ones with many ties and holes."""
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    size = rows * columns
    mean = np.array(draw(st.lists(values, min_size=size, max_size=size))).reshape(rows, columns)
    weight = np.array(draw(st.lists(weights, min_size=size, max_size=size))).reshape(rows, columns)
    return mean, weight


@examples(150)
@given(tables(most=3))
def test_it_is_the_brute_force_minimax(table: tuple[Table, Table]) -> None:
    mean, weight = table
    np.testing.assert_allclose(fitted(mean, weight), by_minimax(mean, weight), atol=1e-9)


@examples(200)
@given(tables(most=6))
def test_cells_without_samples_lie_between_their_neighbours(table: tuple[Table, Table]) -> None:
    mean, weight = table
    x = fitted(mean, weight)
    for h in range(len(mean)):
        lower, upper = fitted_row(mean, weight, h)
        for k in range(mean.shape[1]):
            below, above = x[h:, : k + 1], x[: h + 1, k:]
            assert np.isclose(lower[k], below[~np.isnan(below)].max(initial=-np.inf), atol=1e-9)
            assert np.isclose(upper[k], above[~np.isnan(above)].min(initial=np.inf), atol=1e-9)
            assert lower[k] <= upper[k] + 1e-9


@pytest.mark.parametrize(
    ("seed", "rows", "columns", "filled"),
    [(0, 16, 16, 1.0), (1, 16, 16, 0.4), (2, 6, 40, 0.7), (3, 40, 6, 0.7), (4, 7, 9, 1.0), (5, 5, 7, 0.5)],
)
def test_karush_kuhn_tucker(seed: int, rows: int, columns: int, filled: float) -> None:
    """x is in order; the residual r = weight * (mean - x) is orthogonal to it, and no z in order has ``r @ z > 0``: a linear program.
    The best fit alone meets this, so that no other solver need be asked."""
    rng = np.random.default_rng(seed)
    mean = noisy(rng, rows, columns, noise=1.5)
    weight = rng.choice((0.01, 1.0, 2.5), (rows, columns)) * (rng.random((rows, columns)) < filled)
    cells, ordered = pairs(weight)
    x, y, w = (np.array([table[c] for c in cells]) for table in (fitted(mean, weight), mean, weight))
    a, b = np.array(ordered).T
    assert (x[a] <= x[b] + 1e-9).all()
    residual = w * (y - x)
    assert abs(residual @ x) < 1e-9 and abs(residual.sum()) < 1e-9
    each = np.arange(len(ordered))
    order = coo_array((np.repeat((1.0, -1.0), len(each)), (np.tile(each, 2), np.concatenate((a, b)))), shape=(len(each), len(cells)))
    program: Any = linprog(-residual, A_ub=order, b_ub=np.zeros(len(each)), bounds=(0.0, 1.0))
    assert program.status == 0 and -program.fun < 1e-7


def test_one_row_is_isotonic_regression_and_one_column_falls() -> None:
    rng = np.random.default_rng(3)
    y, w = rng.normal(size=50), rng.uniform(0.1, 1.0, 50)
    np.testing.assert_allclose(fitted(y[None], w[None])[0], isotonic_regression(y, weights=w).x, atol=1e-12)
    np.testing.assert_allclose(fitted(y[:, None], w[:, None])[:, 0], isotonic_regression(y, weights=w, increasing=False).x, atol=1e-12)


def test_a_table_without_samples_bounds_nothing() -> None:
    lower, upper = fitted_row(np.zeros((2, 3)), np.zeros((2, 3)), 1)
    assert (lower == -np.inf).all() and (upper == np.inf).all()


def test_light_cells_beside_heavy_ones_are_not_lost_in_rounding() -> None:
    weight = np.array([[1e6, 1e-3, 1e-3, 1e6]])
    lower, _ = fitted_row(np.array([[1.0, 5.0, 3.0, 9.0]]), weight, 0)
    np.testing.assert_allclose(lower, [1.0, 4.0, 4.0, 9.0], atol=1e-6)


@pytest.mark.parametrize(("mean", "weight", "row"), [((2, 3), (3, 2), 0), ((2, 3), (2, 3), 2), ((2, 3), (2, 3), -1), ((3,), (3,), 0)])
def test_tables_that_do_not_fit_are_refused(mean: tuple[int, ...], weight: tuple[int, ...], row: int) -> None:
    with pytest.raises(ConfigurationError, match=f"row {row} of means"):
        fitted_row(np.zeros(mean), np.zeros(weight), row)
