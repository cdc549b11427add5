"""What an experiment hands back, and what becomes of it: rows beside the paper's, a table on the screen, ``result.json``, a picture.

A row is one number that the paper reports (or one that should have been there), with what came out here. Nothing in this file knows
any experiment, and nothing here reads the time of day: two runs with one seed differ in their seconds only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsFloat

from rich.console import Console
from rich.markup import escape
from rich.table import Table

import offbeat
from offbeat.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442", "#000000")
"""Okabe and Ito's colours, which people with any kind of colour blindness can tell apart: one line each, in this order."""


class Row(NamedTuple):
    """One line of a reproduction: what the paper says and what was measured here."""

    name: str
    """What is measured, unique within the experiment, for instance ``zipline n=100 R=15``."""
    paper: float | str | None
    """The paper's figure, or words such as ``below 5``; None where the paper has none."""
    measured: float | str
    """What came out here; words where there is no number, for instance ``not reached``."""
    unit: str
    """Of both columns; empty for counts and ratios."""
    note: str = ""
    """What a reader must know to compare the two: a smaller model, fewer seeds, what was left out in a quick run."""


def number(value: float | str | None) -> str:
    """A figure for people: four digits that count, thousands apart, no exponent between 0.001 and a thousand million.

    >>> number(2380000.0), number(0.98765), number(17), number(None), number(2.5e-7)
    ('2,380,000', '0.9877', '17', '-', '2.5e-07')
    """
    if value is None or isinstance(value, str):
        return "-" if value is None else value
    if not math.isfinite(value) or (value != 0 and not 1e-3 <= abs(value) < 1e9):
        return f"{value:.4g}"
    if isinstance(value, int) or float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}".rstrip("0").rstrip(".")


def spread(values: Sequence[float]) -> str:
    """The range over seeds, for a row's note; empty for one seed.

    >>> spread([0.051, 0.065, 0.06]), spread([1.0])
    ('0.051 to 0.065 over 3 seeds', '')
    """
    return f"{number(min(values))} to {number(max(values))} over {len(values)} seeds" if len(values) > 1 else ""


def table(title: str, rows: Sequence[Row]) -> Table:
    """The rows as a table; the column of notes only where there are notes."""
    made = Table(title=escape(title), title_justify="left")
    made.add_column("name", no_wrap=True)
    for name in ("paper", "measured"):
        made.add_column(name, justify="right")
    made.add_column("unit")
    notes = any(row.note for row in rows)
    if notes:
        made.add_column("note")
    for row in rows:
        cells = [row.name, number(row.paper), number(row.measured), row.unit, *([row.note] if notes else [])]
        made.add_row(*(escape(cell) for cell in cells))
    return made


def report(
    experiment: str, paper: str, rows: Sequence[Row], out: Path, *, quick: bool, wall_s: float, seed: int, screen: Console | None = None
) -> Path:
    """Print the table of an experiment and write ``result.json`` into the folder ``out``; that file's path.

    Args:
        experiment: its name, the package's under ``experiments/``.
        paper: which table or figure of which paper.
        rows: what came out, at least one row, names unique.
        quick: whether this was a ``--quick`` run.
        wall_s: how long the whole experiment took, in seconds.
        seed: what all its randomness came from.
        screen: where to print; the terminal unless told otherwise.

    Raises:
        ConfigurationError: no rows, or two of one name.
    """
    names = [row.name for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not rows or twice:
        found = f"two rows named {twice[0]!r}" if twice else "no rows"
        raise ConfigurationError(f"{experiment}: {found}; run() must return at least one Row, each with a name of its own")
    found_screen = screen if screen is not None else Console()
    if screen is None and not found_screen.is_terminal:
        found_screen = Console(width=140)
    found_screen.print(table(f"{experiment}{' (quick)' if quick else ''}: {paper}", rows))
    content = {
        "experiment": experiment,
        "mode": "quick" if quick else "full",
        "paper": paper,
        "rows": [{key: _plain(value) for key, value in row._asdict().items()} for row in rows],
        "seed": seed,
        "version": offbeat.__version__,
        "wall_s": round(wall_s, 3),
    }
    path = out / "result.json"
    path.write_text(json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """As JSON has it: NumPy's and torch's numbers become Python's, and inf and nan, which JSON has not, become words."""
    if value is None or isinstance(value, str | int):
        return value
    assert isinstance(value, SupportsFloat), f"a row holds {value!r}; its figures are numbers or words"
    found = float(value)
    return found if math.isfinite(found) else str(found)


def new_figure(width_inches: float = 7.0, height_inches: float = 4.5) -> Figure:
    """An empty picture, drawn without a display; ``figure.subplots()`` gives its axes, ``save(figure, out / "NAME.png")`` writes it.

    Raises:
        ConfigurationError: matplotlib, an optional extra, is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f'the experiments draw with matplotlib ({error}); pip install "offbeat[plots]"') from error
    return Figure(figsize=(width_inches, height_inches), dpi=110, facecolor="white", layout="constrained")


def label(axes: Axes, *, title: str = "", x: str, y: str, legend: bool = True) -> None:
    """Give axes their words and a light grid; ``x`` and ``y`` say the unit."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
    if legend:
        axes.legend(fontsize=8, frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Write the picture as PNG. Its bytes depend on what is drawn only: no date, no version."""
    figure.savefig(path, format="png", metadata={"Software": None})
