"""How long PSP-SGD takes with late messages: the paper's four settings, timed with the rule itself on a model of its cluster.

The listing as printed (`listing.py`) is what the paper's table measures; beside it the rule as the library has it, and with interruption.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from experiments.claims import Claim, near
from experiments.psp_table1.cluster import Cluster, Outcome, Setting
from experiments.psp_table1.listing import Listing
from experiments.result import COLOURS, Row, label, new_figure, save
from offbeat.policies import PSP

PAPER = "PSP-SGD, table 1: running time with late messages, for thresholds c of pushes and b of pulls"
SEED: Final = 0

TABLE_1: Final = {(32, 1.0): 199.97, (28, 1.0): 164.97, (28, 0.9): 139.95, (20, 0.75): 136.54}
"""Running times by (c, b); the paper names no unit, and only minutes agree with its delays."""
RUNS: Final = 3
"""The paper's figures are means of three runs."""
QUICK_ITERATIONS: Final = 150


class Mode(NamedTuple):
    """One way to run the rule."""

    name: str
    rule: Callable[[int, float], PSP]
    """The rule for c and b."""
    colour: str


MODES: Final = (
    Mode("listing", lambda c, b: Listing(c=c, b=b), COLOURS[0]),
    Mode("default", lambda c, b: PSP(c=c, b=b), COLOURS[2]),
    Mode("interrupt", lambda c, b: PSP(c=c, b=b, interrupt=True), COLOURS[1]),
)


def title(c: int, b: float) -> str:
    """A setting as the paper's columns have it.

    >>> title(28, 0.9)
    'c=28 b=90%'
    """
    return f"c={c} b={b:.0%}"


def measure(mode: Mode, c: int, b: float, iterations: int, runs: int) -> Outcome:
    """The means over some runs, the time as if all iterations of the paper had been made."""
    setting = Setting(iterations=iterations)
    outcomes = [Cluster(mode.rule(c, b), setting, SEED + run).run() for run in range(runs)]
    mean = Outcome(*(fmean(values) for values in zip(*outcomes, strict=True)))
    return mean._replace(seconds=mean.seconds * Setting().iterations / iterations)


def rows_of(found: dict[tuple[str, int, float], Outcome], note: str) -> list[Row]:
    """Times beside the paper's, savings, then what the settings cost."""
    rows = []
    for mode in MODES:
        for (c, b), paper in TABLE_1.items():
            name = title(c, b) if mode.name == "listing" else f"{title(c, b)}, {mode.name}"
            minutes = found[mode.name, c, b].seconds / 60
            rows.append(Row(name, paper if mode.name == "listing" else None, round(minutes, 2), "min", note))
    whole = found["listing", 32, 1.0].seconds
    for (c, b), paper in list(TABLE_1.items())[1:]:
        saved = 1.0 - found["listing", c, b].seconds / whole
        rows.append(Row(f"saved, {title(c, b)}", round(100 - paper / 1.9997, 1), round(100 * saved, 1), "%"))
    for mode in (MODES[0], MODES[2]):
        for c, b in TABLE_1:
            outcome = found[mode.name, c, b]
            staleness = f"mean staleness of a block {outcome.staleness:.2f}"
            rows.append(Row(f"work wasted, {title(c, b)}, {mode.name}", None, round(100 * outcome.wasted, 1), "%", staleness))
    return rows


def draw(found: dict[tuple[str, int, float], Outcome], path: Path) -> None:
    """Bars: the paper's times and each mode's, by setting."""
    figure = new_figure(8.0, 4.5)
    axes = figure.subplots()
    width = 0.2
    axes.bar([i - 1.5 * width for i in range(len(TABLE_1))], list(TABLE_1.values()), width, color="#999999", label="paper")
    for place, mode in enumerate(MODES):
        heights = [found[mode.name, c, b].seconds / 60 for c, b in TABLE_1]
        axes.bar([i + (place - 0.5) * width for i in range(len(TABLE_1))], heights, width, color=mode.colour, label=f"here, {mode.name}")
    axes.set_xticks(range(len(TABLE_1)), [title(c, b) for c, b in TABLE_1])
    axes.set_ylim(100.0, 210.0)
    label(axes, title="32 workers, 32 servers, 0.16 % of the replies to pulls 4 s late", x="", y="running time, minutes (axis from 100)")
    save(figure, path)


CLAIMS: Final = (
    *(near(title(c, b), paper, 0.025, "paper; two constants calibrated, 1.9 % at most in a full run") for (c, b), paper in TABLE_1.items()),
    Claim(row="c=28 b=100%, interrupt", over="c=28 b=100%", at_most=0.95, why="breaking off cures a lag that jumping does not: 0.93"),
    Claim(
        row="c=28 b=100%, default",
        over="c=28 b=100%",
        at_least=0.99,
        at_most=1.01,
        why="jumping does not cure a lag of less than an iteration",
    ),
)


def run(quick: bool, out: Path) -> list[Row]:
    """Run the four settings in each mode, draw, and put the paper's times beside ours."""
    iterations, runs = (QUICK_ITERATIONS, 1) if quick else (Setting().iterations, RUNS)
    found = {(mode.name, c, b): measure(mode, c, b, iterations, runs) for mode in MODES for c, b in TABLE_1}
    draw(found, out / "psp_table1.png")
    return rows_of(found, f"{iterations} of {Setting().iterations} iterations, scaled up" if quick else f"mean of {runs} runs")
