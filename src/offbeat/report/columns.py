"""Fit the columns of a table of workers into a terminal: leave out what others imply, wrap between words, and never break a word."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Final, Literal, NamedTuple

from rich.table import Table

from offbeat.report.figures import seconds

GAP: Final = 2
"""Characters between two columns, where there is room."""


class Column(NamedTuple):
    """A column with a cell for each worker. A space in a cell is a place where it may be wrapped, unless it is one of `unbroken`."""

    name: str
    cells: list[str]
    implied: bool = False
    """True if other columns tell enough of it that it may be left out where there is no room."""
    justify: Literal["left", "right"] = "right"

    @property
    def least(self) -> int:
        """The width without which a word would be broken."""
        return max(len(word) for text in (self.name, *self.cells) for word in text.split(" "))

    @property
    def most(self) -> int:
        """The width with which no cell needs a second line."""
        return max(map(len, [*self.name.split(" "), *self.cells]))


class Fitted(NamedTuple):
    """Columns with their widths."""

    columns: list[Column]
    widths: list[int]
    gap: int
    left_out: list[str]

    @classmethod
    def of(cls, columns: Sequence[Column], width: int | None) -> Fitted:
        """Return as many of the columns as fit into ``width`` characters; None: there is room for all.

        A column that others imply is left out before a cell of another needs a second line.

        >>> columns = [Column("state", ["finished, back 1x"]), Column("pushes", ["12"], implied=True)]
        >>> Fitted.of(columns, 25).widths, Fitted.of(columns, 12).widths, Fitted.of(columns, 12).left_out
        ([17, 6], [12], ['pushes'])
        """
        kept, implied, gap = list(columns), [column for column in columns if column.implied], GAP

        def too_wide(*, wrapped: bool) -> bool:
            return width is not None and sum((column.least if wrapped else column.most) + gap for column in kept) - gap > width

        while implied and too_wide(wrapped=False):
            kept.remove(implied.pop())
        if too_wide(wrapped=True):
            gap = 1
        widths = [column.most for column in kept]
        while width is not None and sum(widths) + gap * (len(kept) - 1) > width:
            slack = [have - column.least for have, column in zip(widths, kept, strict=True)]
            if not any(slack):
                break
            widths[slack.index(max(slack))] -= 1
        return cls(kept, widths, gap, [column.name for column in columns if column not in kept])

    def table(self, *, header_style: str | None = None) -> Table:
        """Return a table without lines that has the columns, without their cells."""
        table = Table(box=None, pad_edge=False, padding=(0, self.gap, 0, 0), show_edge=False)
        for column, width in zip(self.columns, self.widths, strict=True):
            table.add_column(_wrapped(column.name, width), justify=column.justify, width=width, header_style=header_style)
        return table

    def row(self, number: int) -> list[str]:
        """Return the cells of one row."""
        return [_wrapped(column.cells[number], width) for column, width in zip(self.columns, self.widths, strict=True)]


def unbroken(time_s: float | None) -> str:
    """Return a duration whose unit stays with its number."""
    return seconds(time_s).replace(" ", "\u00a0")


def _wrapped(text: str, width: int) -> str:
    return fill(text, width, break_long_words=False, break_on_hyphens=False).replace("\u00a0", " ")
