"""``offbeat rules [NAME]``: the list of synchronization rules, and all that a user must know of one."""

from __future__ import annotations

from typing import Annotated

import typer

from offbeat.options import rule_names
from offbeat.report import rules as described
from offbeat.report.table import console

WIDEST = 120
"""Longer lines are hard to read."""
PIPED = 80
"""Without a terminal of its own the text goes to a pager, as a rule, and this is the width of a terminal: its lines are broken here."""


def rules(
    name: Annotated[
        str, typer.Argument(help="A rule: its formula, settings and paper.", show_default=False, autocompletion=rule_names)
    ] = "",
) -> None:
    """List the synchronization rules, or describe one."""
    screen = console()
    width = min(screen.width, WIDEST) if screen.is_terminal else PIPED
    lines = described.details(name, width) if name else described.overview(width)
    screen.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
