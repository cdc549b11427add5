"""``offbeat view``: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.report.table import console
from offbeat.view.dashboard import address_of
from offbeat.view.of_journal import show


def view(
    journal: Annotated[Path, typer.Argument(help="The journal of a job that has ended or still runs, compressed or not.")],
    port: Annotated[str, typer.Option(help=r"\[HOST:]PORT of the page.  \[default: 7860, or a free one]", show_default=False)] = "",
) -> None:
    """Show the page of a job from its journal, until Ctrl-C."""
    host, number = address_of(port, "--port")
    show(journal, host, number, lambda text: console().print(text, markup=False, highlight=False, soft_wrap=True))
