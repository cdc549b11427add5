"""Bimonotone regression: one row of the weighted least-squares fit to a table that rises along its rows and falls down its columns.

It decides nothing about a job: DBW's tables of arrival times are what it is for, and `dbw_time` fills them. Cells without samples take no
part in the fit; it bounds them. One row is what a decision needs, and cheaper than the table: the fit is found by cutting the cells
at a threshold, and each of the two parts again, as long as a part has anything to say about that row.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigurationError

Table: TypeAlias = NDArray[np.float64]
Columns: TypeAlias = NDArray[np.intp]
Flags: TypeAlias = NDArray[np.bool_]

PRECISION: Final = 1e-14
"""Relative to the table's weighted deviation from its mean: what a cut must gain to be more than rounding."""


class Bounds(NamedTuple):
    """One row of the fit: between what each of its cells lies. Where there are samples the two are equal, and the fitted value."""

    lower: Table
    """(columns,) the greatest fitted value of the cells that must not be greater; -inf where no such cell has samples."""
    upper: Table
    """(columns,) the least fitted value of the cells that must not be less; inf where no such cell has samples."""


def fitted_row(mean: Table, weight: Table, row: int) -> Bounds:
    """Fit ``x = argmin sum(weight * (x - mean)**2)`` with ``x[h, k] <= x[h', k']`` for h >= h' and k <= k', and return one row.

    For any threshold c, the cells with ``x > c`` are the upper set U (with a cell, all that must not be less) that maximises
    ``sum over U of weight * (mean - c)``. In two dimensions U is what lies beyond a staircase, one step in each row, and dynamic
    programming finds the best in O(cells). What lies between two known staircases is cut at its own mean: either nothing is
    gained, then that is its fitted value; or there are two smaller parts. Exact but for rounding; all cuts of one depth are made at once.

    Source: Spouge, Wan and Wilbur 2003, "Least squares isotonic regression in two dimensions" (J. Optim. Theory Appl. 117).

    Args:
        mean: (rows, columns) of the samples in each cell; what it holds where there are none does not matter, if it is finite.
        weight: (rows, columns) how much these samples count; 0 where there are none.
        row: which row of the fit is wanted, from 0.

    Raises:
        ConfigurationError: tables of different shapes, or a row that is not in them.

    >>> fitted_row(np.array([[1.0, 4.0, 2.0]]), np.array([[1.0, 1.0, 1.0]]), 0).lower
    array([1., 3., 3.])
    >>> fitted_row(np.array([[1.0, 4.0], [0.0, 6.0]]), np.array([[1.0, 1.0], [0.0, 1.0]]), 1)
    Bounds(lower=array([-inf,   5.]), upper=array([1., 5.]))
    """
    if mean.ndim != 2 or mean.shape != weight.shape or not 0 <= row < len(mean):
        raise ConfigurationError(f"row {row} of means {mean.shape} with weights {weight.shape}: two tables of one shape, with that row")
    bounds = Bounds(np.full(mean.shape[1], -np.inf), np.full(mean.shape[1], np.inf))
    rows: Flags = np.logical_or.reduce(weight, axis=1)
    if not rows.any():
        return bounds
    centre = float((weight * mean).sum() / weight.sum())
    cells = _Cells(mean[rows] - centre, weight[rows], above=int(np.count_nonzero(rows[: row + 1])), below=int(np.count_nonzero(rows[:row])))
    low, high = cells.staircases(cells.everywhere), cells.staircases(cells.nowhere)
    while (wanted := (low.lower < high.lower) | (low.upper < high.upper)).any():
        low, high = low.of(wanted), high.of(wanted)
        level = (low.weighted - high.weighted) / (low.weight - high.weight)
        steps, gain = cells.best(level)
        between = cells.staircases(steps)
        cut = gain > low.weighted - level * low.weight + cells.rounding
        cut &= (high.weight < between.weight) & (between.weight < low.weight)
        for part in np.flatnonzero(~cut):
            bounds.lower[low.lower[part] : high.lower[part]] = level[part] + centre
            bounds.upper[low.upper[part] : high.upper[part]] = level[part] + centre
        low, between, high = low.of(cut), between.of(cut), high.of(cut)
        low, high = low.beside(between), between.beside(high)
    return bounds


class _Staircases(NamedTuple):
    """Upper sets, one per column of ``steps``, and sums over their cells."""

    steps: Columns
    """(rows, sets) from which column on the cells of a row are in the set."""
    weighted: Table
    """(sets,) the sum of weight * mean."""
    weight: Table
    lower: Columns
    """(sets,) from which column on the wanted row's lower bounds are in the set."""
    upper: Columns
    """(sets,) from which column on the wanted row's upper bounds are in the set."""

    def of(self, which: Flags) -> _Staircases:
        return _Staircases._make(part[..., which] for part in self)

    def beside(self, more: _Staircases) -> _Staircases:
        return _Staircases._make(np.concatenate(parts, axis=-1) for parts in zip(self, more, strict=True))


class _Cells:
    """A table whose rows all have samples.

    Args:
        mean: (rows, columns) in each cell, the mean of all being 0.
        weight: (rows, columns) of the samples in each cell.
        above: how many rows there are down to the wanted one, and that one itself, if it has samples.
        below: from which row on; equal to ``above`` where the wanted one has no samples.
    """

    def __init__(self, mean: Table, weight: Table, above: int, below: int) -> None:
        rows, columns = weight.shape
        self._above, self._below = above, below
        self._row = np.arange(rows)[:, None]
        weighted = weight * mean
        self.rounding = PRECISION * float(np.abs(weighted).sum())
        self._weighted, self._weight = _from(weighted), _from(weight)
        self.everywhere = np.zeros((rows, 1), dtype=np.intp)
        self.nowhere = np.full((rows, 1), columns)
        column, seen = np.arange(columns), weight > 0
        self._first = np.full((rows, columns + 1), columns)
        self._first[:, :columns] = np.minimum.accumulate(np.where(seen, column, columns)[:, ::-1], axis=1)[:, ::-1]
        """The first column with samples from this one on."""
        self._after = np.zeros((rows, columns + 1), dtype=np.intp)
        self._after[:, 1:] = np.maximum.accumulate(np.where(seen, column + 1, 0), axis=1)
        """The column after the last one with samples before this one."""

    def staircases(self, steps: Columns) -> _Staircases:
        # A lower bound is the greatest of some values: it is in the set if one of them is. An upper bound is, if all are.
        first, after, columns = self._first[self._row, steps], self._after[self._row, steps], self._weight.shape[1] - 1
        lower = first[self._below :].min(axis=0, initial=columns)
        upper = after[: self._above].max(axis=0, initial=0)
        return _Staircases(steps, self._weighted[self._row, steps].sum(axis=0), self._weight[self._row, steps].sum(axis=0), lower, upper)

    def best(self, level: Table) -> tuple[Columns, Table]:
        """The staircase that gains most, for each level, and how much: the sum of ``weight * (mean - level)`` over its cells."""
        (rows, places), sets = self._weight.shape, len(level)
        # gain[h, c, i]: for level i, of the best through rows 0 .. h whose step in row h is at c or before. Steps never go back.
        gain = np.empty((rows, places, sets))
        current = np.empty((places, sets))
        for h in range(rows):
            np.multiply(self._weight[h, :, None], level, out=current)
            np.subtract(self._weighted[h, :, None], current, out=current)
            if h:
                current += gain[h - 1]
            np.maximum.accumulate(current, axis=0, out=gain[h])
        steps, reached = np.empty((rows, sets), dtype=np.intp), gain[-1, -1]
        for h in range(rows - 1, -1, -1):
            steps[h] = (gain[h] < reached).sum(axis=0)
            if h:
                reached = gain[h - 1][steps[h], np.arange(sets)]
        return steps, gain[-1, -1]


def _from(cells: Table) -> Table:
    """(rows, columns + 1) the sum of each row from a column on."""
    sums = np.zeros((cells.shape[0], cells.shape[1] + 1))
    sums[:, :-1] = cells[:, ::-1].cumsum(axis=1)[:, ::-1]
    return sums
