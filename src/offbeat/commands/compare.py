"""``offbeat compare``: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offbeat.journal.file import Records
from offbeat.report.compare import Run, compared
from offbeat.report.table import console


def compare(
    first: Annotated[Path, typer.Argument(help="The journal of a run.", show_default=False)],
    second: Annotated[Path, typer.Argument(help="The journal of another run.", show_default=False)],
) -> None:
    """Show two runs side by side: their figures, their losses at equal times and samples, who differs, and what is not comparable."""
    screen = console()
    names = [str(path) for path in (first, second)] if first.name == second.name else [first.name, second.name]
    runs = [Run.of(name, Records(path)) for name, path in zip(names, (first, second), strict=True)]
    screen.print(*compared(*runs), sep="\n", highlight=False)
