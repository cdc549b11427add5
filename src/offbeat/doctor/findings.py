"""Define what a check has found: a state, what was seen, and what to do; and show findings as lines of plain ASCII."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

State: TypeAlias = Literal["good", "note", "problem"]
"""Note: training works, but slower or less safely than it could, or under a condition. Problem: a job would stop, or not start."""

STYLES: Final[dict[State, str]] = {"good": "green", "note": "yellow", "problem": "red"}
NARROWEST: Final = 48
"""Characters of a line; a narrower terminal breaks lines itself."""
NAME_WIDTH: Final = 15
"""A longer name has a line of its own."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one check has found."""

    name: str
    """What was looked at, in a word or two."""
    state: State
    seen: str
    remedy: str = ""
    """What to do; "": nothing."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The measured values, for programs. Names end in their units."""


def good(name: str, seen: str, /, **figures: Any) -> Finding:
    """Return a finding about which nothing needs to be done."""
    return Finding(name=name, state="good", seen=seen, figures=figures)


def note(name: str, seen: str, remedy: str = "", /, **figures: Any) -> Finding:
    """Return a finding that ends no job."""
    return Finding(name=name, state="note", seen=seen, remedy=remedy, figures=figures)


def problem(name: str, seen: str, remedy: str, /, **figures: Any) -> Finding:
    """Return a finding that would stop a job, or keep it from starting."""
    return Finding(name=name, state="problem", seen=seen, remedy=remedy, figures=figures)


def lines(findings: Sequence[Finding], width: int) -> list[tuple[State, str]]:
    """Return the lines that show findings, each with the state of its finding.

    Args:
        findings: in the order of the lines.
        width: characters that a line has.

    >>> for _, line in lines([note("open files", "256", "ulimit -n 4096")], 80):
    ...     print(line)
    note     open files     256
                            -> ulimit -n 4096
    """
    shown: list[tuple[State, str]] = []
    room = max(width, NARROWEST)
    left = " " * (9 + NAME_WIDTH)
    for one in findings:
        head = f"{one.state:7}  {one.name:{NAME_WIDTH}}"
        if len(one.name) >= NAME_WIDTH:
            shown += [(one.state, line) for line in _wrapped(one.name, f"{one.state:7}  ", " " * 9, room)]
            head = left
        shown += [(one.state, line) for line in _wrapped(one.seen, head, left, room)]
        if one.remedy:
            shown += [(one.state, line) for line in _wrapped(one.remedy, f"{left}-> ", f"{left}   ", room)]
    return shown


def _wrapped(text: str, head: str, left: str, width: int) -> list[str]:
    plain = text.encode("ascii", "backslashreplace").decode()
    return textwrap.wrap(plain, width, initial_indent=head, subsequent_indent=left, break_on_hyphens=False) or [head.rstrip()]


def tally(findings: Sequence[Finding]) -> str:
    """Return how many findings are in which state.

    >>> tally([good("cores", "4"), note("open files", "256")])
    'no problem, 1 note, 1 good'
    """
    problems, notes, fine = (sum(one.state == state for one in findings) for state in ("problem", "note", "good"))
    some = f"{problems} problem{'s' * (problems > 1)}" if problems else "no problem"
    return f"{some}, {notes} note{'s' * (notes != 1)}, {fine} good"
