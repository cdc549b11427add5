"""What an experiment claims, as data beside it, and whether the rows of a run bear it out: ``python -m experiments NAME --check``.

A claim bounds one row, or the ratio of two rows, and says why the bound is where it is: the paper's figure with a tolerance, what follows
from the construction, what several seeds gave. Bounds of measured times hold on a loaded machine with two cores, and so are ratios and
orders; what is simulated without real gradients is the same on every machine, and its bounds may be tight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final, Literal, NamedTuple, SupportsFloat

from rich.markup import escape
from rich.table import Table

from experiments.result import Row, number
from offbeat.errors import ConfigurationError

MECHANISM: Final = "mechanism"
"""The variant of an experiment that shows how its rule works, on simulated times and small gradients, in seconds. The experiment has its
rows too. A rule that does something else breaks one of its claims: ``tests/experiments/test_mutations.py`` shows this for each rule."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A bound for one row of an experiment's table.

    >>> Claim(row="solo over full", at_least=1.1, why="paper: 1.5").bound
    'at least 1.1'
    """

    row: str
    """The row's name."""
    why: str
    """Where the bound comes from: the paper's figure and the tolerance's reason."""
    over: str = ""
    """Another row's name: what is bounded is the ratio of the two."""
    at_least: float = -inf
    at_most: float = inf
    """Both bounds are within what is allowed."""
    says: str | None = None
    """For a row in words: exactly these."""
    mode: Literal["quick", "full", "both"] = "both"
    """In which mode of the experiment the claim is made."""
    variant: str = ""
    """Of which variant of the experiment; empty: of the experiment itself."""

    def __post_init__(self) -> None:
        bounded = self.at_least > -inf or self.at_most < inf
        if bounded == (self.says is not None) or not self.at_least <= self.at_most:
            raise ConfigurationError(
                f"Claim(row={self.row!r}, at_least={self.at_least!r}, at_most={self.at_most!r}, says={self.says!r}) "
                "needs either words or bounds of which the lower is not above the upper"
            )

    @property
    def name(self) -> str:
        """The row's name, and the other's if two are compared."""
        return f"{self.row} / {self.over}" if self.over else self.row

    @property
    def bound(self) -> str:
        """What is allowed, in words."""
        if self.says is not None:
            return repr(self.says)
        if self.at_least == -inf:
            return f"at most {number(self.at_most)}"
        if self.at_most == inf:
            return f"at least {number(self.at_least)}"
        if self.at_least == self.at_most:
            return f"exactly {number(self.at_least)}"
        return f"{number(self.at_least)} to {number(self.at_most)}"


def near(row: str, value: float, tolerance: float, why: str, *, mode: Literal["quick", "full", "both"] = "both") -> Claim:
    """Claim that a row is a positive value, the paper's for instance, up to a tolerance relative to it.

    >>> near("ratio", 2.0, 0.1, "the paper's").bound
    '1.8 to 2.2'
    """
    return Claim(row=row, at_least=value * (1 - tolerance), at_most=value * (1 + tolerance), why=why, mode=mode)


def mechanism(*claims: Claim) -> tuple[Claim, ...]:
    """Make claims of an experiment twice: for the experiment itself, and for its variant ``mechanism``, which has their rows only."""
    return tuple(replace(claim, variant=variant) for claim in claims for variant in ("", MECHANISM))


class Verdict(NamedTuple):
    """A claim beside what was measured."""

    claim: Claim
    measured: float | str
    """The row, or the ratio of two rows; words where a row is words or missing."""
    holds: bool

    def __str__(self) -> str:
        return f"{self.claim.name} is {number(self.measured)}, claimed is {self.claim.bound} ({self.claim.why})"


def judge(claims: Sequence[Claim], rows: Sequence[Row]) -> list[Verdict]:
    """Compare claims with the rows of a run.

    A row that is missing, or in words where a number is claimed, does not bear out its claim.
    """
    found = {row.name: row.measured for row in rows}
    return [_verdict(claim, found) for claim in claims]


def _verdict(claim: Claim, found: dict[str, float | str]) -> Verdict:
    missing = [name for name in (claim.row, claim.over) if name and name not in found]
    if missing:
        return Verdict(claim, f"unknown: there is no row {missing[0]!r}", False)
    measured = found[claim.row]
    if claim.says is not None:
        return Verdict(claim, measured, measured == claim.says)
    if claim.over and not isinstance(measured, str):
        other = found[claim.over]
        measured = other if isinstance(other, str) else _ratio(measured, other)
    return Verdict(claim, measured, isinstance(measured, SupportsFloat) and claim.at_least <= float(measured) <= claim.at_most)


def _ratio(a: float, b: float) -> float:
    return float(a) / float(b) if b else inf


def table(verdicts: Sequence[Verdict]) -> Table:
    """The verdicts for people: what holds, what was measured, what is claimed and why."""
    made = Table(title="claims", title_justify="left")
    for heading in ("", "claim", "measured", "bound", "why"):
        made.add_column(heading, justify="right" if heading == "measured" else "left")
    for verdict in verdicts:
        claim = verdict.claim
        cells = ("holds" if verdict.holds else "BROKEN", claim.name, number(verdict.measured), claim.bound, claim.why)
        made.add_row(*(escape(cell) for cell in cells), style=None if verdict.holds else "bold red")
    return made
