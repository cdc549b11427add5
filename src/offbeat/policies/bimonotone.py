"""Bimonotone regression: one row of the weighted least-squares fit to a table that rises along its rows and falls down its columns.

`dbw_time` fits DBW's tables of arrival times with it. Cells without samples take no part in the fit, which bounds their values. A decision
needs one row, which is cheaper than the whole table: the cells are cut at a threshold into two parts, and each part is cut again as long
as it affects the row.
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
"""The least gain of a cut that counts as more than rounding, relative to the table's weighted deviation from its mean."""


class Bounds(NamedTuple):
    """Bounds of the cells of one row of the fit. In a cell with samples both are the fitted value."""

    lower: Table
    """(columns,) the greatest fitted value of all cells that must not exceed this one; -inf if no such cell has samples."""
    upper: Table
    """(columns,) the least fitted value of all cells that must not be below this one; inf if no such cell has samples."""


def fitted_row(mean: Table, weight: Table, row: int) -> Bounds:
    """Fit ``x = argmin sum(weight * (x - mean)**2)`` with ``x[h, k] <= x[h', k']`` for h >= h' and k <= k', and return one row.

    For any threshold c, the cells with ``x > c`` are the upper set U that maximises ``sum over U of weight * (mean - c)``. (An upper set
    contains with a cell all cells that must not be less.) In two dimensions U is beyond a staircase with one step in each row, and dynamic
    programming finds the best U in O(cells). The cells between two known staircases are cut at their own mean: if nothing is gained, this
    is their fitted value; otherwise there are two smaller parts. Exact but for rounding; all cuts of one depth are made at once.

    Source: Spouge, Wan and Wilbur 2003, "Least squares isotonic regression in two dimensions" (J. Optim. Theory Appl. 117).

    Args:
        mean: (rows, columns) the mean of the samples in each cell; any finite value in a cell without samples.
        weight: (rows, columns) the weight of these samples; 0 in a cell without samples.
        row: the row of the fit to return, from 0.

    Raises:
        ConfigurationError: the tables have different shapes, or do not have that row.

    >>> fitted_row(np.array([[1.0, 4.0, 2.0]]), np.array([[1.0, 1.0, 1.0]]), 0).lower
    array([1., 3., 3.])
    >>> fitted_row(np.array([[1.0, 4.0], [0.0, 6.0]]), np.array([[1.0, 1.0], [0.0, 1.0]]), 1)
    Bounds(lower=array([-inf,   5.]), upper=array([1., 5.]))
    """
    if mean.ndim != 2 or mean.shape != weight.shape or not 0 <= row < len(mean):
        raise ConfigurationError(f"row {row} of means {mean.shape} with weights {weight.shape}: pass two tables of one shape with that row")
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
    """(rows, sets) the column from which on the cells of a row are in the set."""
    weighted: Table
    """(sets,) the sum of weight * mean."""
    weight: Table
    """(sets,) the sum of the weights."""
    lower: Columns
    """(sets,) the column from which on the requested row's lower bounds are in the set."""
    upper: Columns
    """(sets,) the column from which on the requested row's upper bounds are in the set."""

    def of(self, which: Flags) -> _Staircases:
        return _Staircases._make(part[..., which] for part in self)

    def beside(self, more: _Staircases) -> _Staircases:
        return _Staircases._make(np.concatenate(parts, axis=-1) for parts in zip(self, more, strict=True))


class _Cells:
    """A table whose rows all have samples.

    Args:
        mean: (rows, columns) the mean of the samples in each cell, shifted so that the mean of all samples is 0.
        weight: (rows, columns) the weight of the samples in each cell.
        above: the number of rows from the first one to the requested row, which counts if it has samples.
        below: the number of rows before the requested row; equal to ``above`` if the requested row has no samples.
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
        """(rows, columns + 1) the first column with samples at or after this one."""
        self._after = np.zeros((rows, columns + 1), dtype=np.intp)
        self._after[:, 1:] = np.maximum.accumulate(np.where(seen, column + 1, 0), axis=1)
        """(rows, columns + 1) the column after the last one with samples before this one; 0 if there is none."""

    def staircases(self, steps: Columns) -> _Staircases:
        # A lower bound is a maximum of values: it is in the set if one of them is. An upper bound, a minimum, is if all of them are.
        first, after, columns = self._first[self._row, steps], self._after[self._row, steps], self._weight.shape[1] - 1
        lower = first[self._below :].min(axis=0, initial=columns)
        upper = after[: self._above].max(axis=0, initial=0)
        return _Staircases(steps, self._weighted[self._row, steps].sum(axis=0), self._weight[self._row, steps].sum(axis=0), lower, upper)

    def best(self, level: Table) -> tuple[Columns, Table]:
        """Return for each level the staircase that gains most, and its gain: the sum of ``weight * (mean - level)`` over its cells."""
        (rows, places), sets = self._weight.shape, len(level)
        # gain[h, c, i]: for level i, the gain of the best staircase in rows 0 .. h whose step in row h is at most c. Steps never decrease.
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
    """Return the sums of each row from each column on, (rows, columns + 1)."""
    sums = np.zeros((cells.shape[0], cells.shape[1] + 1))
    sums[:, :-1] = cells[:, ::-1].cumsum(axis=1)[:, ::-1]
    return sums
