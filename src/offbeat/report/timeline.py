"""The timeline as a picture: for each job a row of lanes, a lane per worker, on one common time axis. Needs matplotlib.

What is drawn comes from `report.lanes`; this file knows colours and shapes only. Colours are Okabe and Ito's, which people with any
kind of colour blindness can tell apart, and they differ in brightness too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from offbeat.errors import ConfigurationError
from offbeat.report.figures import Summary, share, short, training_words, waiting_share
from offbeat.report.lanes import SPANS, Chart, Lane, LaneSpan, shares
from offbeat.report.remarks import culprits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {"computing": "#56B4E9", "waiting": "#E69F00", "idle": "#DDDDDD", "dead": "#FFFFFF"}
LABELS: Final = {"computing": "computing", "waiting": "waiting for the rule", "idle": "idle, no samples", "dead": "dead or rejoining"}
BUSY: Final = ("computing", "waiting", "idle")
SHAPES: Final = {
    "killed": ("X", "#D55E00", 9.0),
    "returned": ("P", "#009E73", 9.0),
    "dropped": ("v", "#000000", 4.5),
    "rejected": ("D", "#CC79A7", 4.5),
    "abandoned": ("x", "#0072B2", 4.5),
}
"""Marks that are drawn: one that is interrupted shows by what it abandons."""
BARRIER: Final = "#0072B2"
HATCH: Final = "#999999"
INK: Final = "#333333"

WIDTH_INCHES: Final = 14.0
DPI: Final = 100
AXIS_PIXELS: Final = WIDTH_INCHES * DPI * 0.91
DENSE_PIXELS: Final = 4.0
"""A lane whose spans are narrower than this on average is drawn as shares of time, computing below and waiting above."""
EDGED_PIXELS: Final = 8.0
"""Spans at least this wide get white edges, which tell one iteration from the next."""
MANY, HEAT_LANES = 64, 30
"""With more lanes than this a job is drawn as a heat map, as high as so many lanes."""
HEAT_PIXELS: Final = 500
PALE, HOT = np.array([0xEE, 0xF2, 0xF5]) / 255, np.array([0xD5, 0x5E, 0x00]) / 255
NAMED: Final = 6
"""Workers of a heat map that have a label: those that the verdicts name, and the ends."""
BAR: Final = 0.74
"""The height of a lane's bar; lanes are 1 apart."""
PLACES: Final = AXIS_PIXELS * 8
"""Lines and marks of one kind are drawn at so many places at most: what a pixel has more of cannot be seen, and takes long."""


def draw(jobs: Sequence[tuple[Summary, Chart]], picture: Path) -> None:
    """Draw jobs one below the other, so that their waiting can be compared at a glance.

    Args:
        jobs: for each its summary, whose figures stand above the lanes, and what is drawn.
        picture: the file to write; its ending names the format, ``.png`` or ``.svg`` for instance. A PNG is 1400 pixels wide.

    Raises:
        ConfigurationError: matplotlib is not installed, or the picture cannot be written.
    """
    if not jobs:
        raise ConfigurationError("a timeline of 0 jobs: give at least one journal")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(f'drawing a timeline needs matplotlib ({error}); pip install "offbeat[plots]"') from error
    heights = [min(HEAT_LANES, max(1, len(chart.lanes))) + 1.0 for _, chart in jobs]
    inches = sum(0.30 * lanes + 0.45 for lanes in heights) + 1.0
    figure = Figure(figsize=(WIDTH_INCHES, inches), dpi=DPI, facecolor="white")
    rows = figure.subplots(len(jobs), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    start_s = min(chart.start_s for _, chart in jobs)
    stop_s = max(start_s + 1e-3, *(chart.end_s for _, chart in jobs))
    dense = [_job(axes, job, chart, (start_s, stop_s)) for axes, (job, chart) in zip(rows[:, 0], jobs, strict=True)]
    if any(dense):
        figure.text(0.985, 0.1 / inches, "lanes too dense for single spans show shares of time", ha="right", fontsize=9, color="#666666")
    rows[-1, 0].set_xlabel("seconds since the job began", color=INK)
    _legend(figure, [chart for _, chart in jobs])
    figure.subplots_adjust(left=0.075, right=0.985, top=1 - 0.75 / inches, bottom=0.5 / inches, hspace=0.42)
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot write the picture {picture}: {error}") from error


def _job(axes: Axes, job: Summary, chart: Chart, span: tuple[float, float]) -> bool:
    numbers = sorted(chart.lanes)
    start_s, stop_s = span
    if len(numbers) > MANY:
        _heat(axes, job, chart, span)
        return False
    dense = [_lane(axes, row, chart.lanes[number], stop_s - start_s) for row, number in enumerate(numbers)]
    strip = -0.85
    folds, barriers = chart.times("fold"), chart.times("barrier")
    crowded = len(folds) * DENSE_PIXELS > AXIS_PIXELS * (chart.end_s - chart.start_s) / (stop_s - start_s)
    axes.vlines(_apart(folds, stop_s - start_s), strip - 0.25, strip + 0.25, color=INK, linewidth=0.6, alpha=0.2 if crowded else 0.8)
    if _telling(chart):
        axes.vlines(barriers, -0.5, len(numbers) - 0.5, color=BARRIER, linewidth=0.8, linestyle="dotted", zorder=2)
    axes.set_yticks([strip, *range(len(numbers))], ["folds", *(f"worker {number}" for number in numbers)])
    axes.set_ylim(len(numbers) - 0.45, strip - 0.4)
    axes.set_xlim(start_s, stop_s)
    _dress(axes, job, _facts(chart, job), tick=0)
    axes.grid(axis="x", color="#EEEEEE", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#AAAAAA")
    return any(dense)


def _dress(axes: Axes, job: Summary, facts: str, *, tick: int) -> None:
    """Set the titles, and how ticks look; ``tick``: how long they are beside the lanes."""
    axes.tick_params(axis="y", length=tick, labelsize=9, labelcolor=INK)
    axes.tick_params(axis="x", labelsize=9, color="#AAAAAA", labelcolor=INK)
    axes.set_title(short(job["sync"]), loc="left", fontsize=11, fontweight="bold", color=INK, pad=4)
    axes.set_title(facts, loc="right", fontsize=9, color="#666666", pad=4)


def _heat(axes: Axes, job: Summary, chart: Chart, span: tuple[float, float]) -> None:
    """Draw a row for each worker: its longest step at each time against the median worker; of a row of pixels the slowest shows."""
    numbers = sorted(chart.lanes)
    spans = [np.array([one[:2] for one in chart.lanes[number].spans if one.what == "computing"]).reshape(-1, 2) for number in numbers]
    steps_s = (span[1] - span[0]) * len(numbers) / max(1, sum(map(len, spans)))
    columns = int(max(1, min(AXIS_PIXELS / 2, (span[1] - span[0]) / (1.5 * steps_s))))
    longest = np.zeros((len(numbers), columns))
    for row, times in enumerate(spans):
        column = ((times[:, 1] - span[0]) / (span[1] - span[0]) * columns).astype(int).clip(0, columns - 1)
        np.maximum.at(longest[row], column, times[:, 1] - times[:, 0])
    median = np.nanmedian(np.where(longest > 0.0, longest, np.nan), axis=0) if longest.any() else np.ones(columns)
    heat = ((longest / np.nan_to_num(median, nan=1.0) - 1.15) / 1.35).clip(0.0, 1.0)
    edges = np.arange(0, len(numbers), max(1, len(numbers) // HEAT_PIXELS))
    heat = np.maximum.reduceat(heat, edges, axis=0)
    image = np.where((np.maximum.reduceat(longest, edges, axis=0) > 0.0)[:, :, None], PALE + heat[:, :, None] * (HOT - PALE), 1.0)
    axes.imshow(image, extent=(*span, len(numbers) - 0.5, -0.5), aspect="auto", interpolation="nearest")
    slow = [number for number in culprits(job) if number in chart.lanes][:NAMED]
    gap = len(numbers) / HEAT_LANES
    ends = [number for number in (numbers[0], numbers[-1]) if all(abs(number - other) > gap for other in slow)]
    ticks = {numbers.index(number): f"worker {number}" for number in (*slow, *ends)}
    axes.set_yticks([*ticks], [*ticks.values()])
    legend = f"{len(numbers):,} workers: longest step, pale 1x the median worker's, dark 2.5x"
    _dress(axes, job, f"{legend}; {_facts(chart, job)}", tick=3)


def _lane(axes: Axes, row: int, lane: Lane, shown_s: float) -> bool:
    low = row - BAR / 2
    dead = [(span.start_s, span.stop_s - span.start_s) for span in lane.spans if span.what == "dead"]
    axes.broken_barh(dead, (low, BAR), **_face("dead"))
    busy = [span for span in lane.spans if span.what != "dead"]
    width = sum(span.stop_s - span.start_s for span in busy) / shown_s * AXIS_PIXELS / max(1, len(busy))
    if width < DENSE_PIXELS:
        _as_shares(axes, row, busy)
    else:
        edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6} if width >= EDGED_PIXELS else {}
        for what in BUSY:
            bars = [(span.start_s, span.stop_s - span.start_s) for span in busy if span.what == what]
            axes.broken_barh(bars, (low, BAR), **_face(what) | edge)
    _marks(axes, row, lane, shown_s)
    return width < DENSE_PIXELS and bool(busy)


def _as_shares(axes: Axes, row: int, busy: Sequence[LaneSpan]) -> None:
    if not busy:
        return
    start_s, stop_s = busy[0].start_s, busy[-1].stop_s
    # Ten spans or more to a column: with fewer, one more or less in a column would look like a change of pace.
    columns = max(1, min(len(busy) // 10, int(AXIS_PIXELS / 3)))
    parts = shares(busy, start_s, stop_s, columns)
    edges = [start_s + (stop_s - start_s) * column / columns for column in range(columns + 1)]
    top = [row + BAR / 2] * columns
    for what in BUSY:
        base, top = top, [y - BAR * part for y, part in zip(top, parts[what], strict=True)]
        axes.fill_between(edges, [*base, base[-1]], [*top, top[-1]], step="post", **_face(what))


def _marks(axes: Axes, row: int, lane: Lane, shown_s: float) -> None:
    for what, (marker, colour, size) in SHAPES.items():
        times = _apart([mark.t for mark in lane.marks if mark.what == what], shown_s)
        # Deaths and returns sit in the middle of the lane; the many small marks hang at its upper edge.
        height = row if size > 5 else row - BAR / 2
        rim: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 1.0 if size > 5 else 0.4} if marker != "x" else {}
        axes.plot(times, [height] * len(times), marker, color=colour, markersize=size, linestyle="none", clip_on=False, zorder=3, **rim)


def _apart(times: list[float], shown_s: float) -> list[float]:
    """Return one of the times at each of `PLACES`."""
    return times if len(times) < PLACES else list({int(t / shown_s * PLACES): t for t in times}.values())


def _face(what: str) -> dict[str, Any]:
    if what == "dead":
        return {"facecolor": COLOURS["dead"], "edgecolor": HATCH, "hatch": "/////", "linewidth": 0.6}
    return {"facecolor": COLOURS[what], "linewidth": 0}


def _telling(chart: Chart) -> bool:
    """Return True if barriers get lines: not where each fold is one, or where they are too many to tell apart."""
    barriers = len(chart.times("barrier"))
    return 0 < barriers < min(len(chart.times("fold")), AXIS_PIXELS / DENSE_PIXELS / 2)


def _facts(chart: Chart, job: Summary) -> str:
    """The figures of the table, from the same summary."""
    shards = {moment.shard for moment in chart.moments if moment.what == "fold" and moment.shard is not None}
    where = f" at {len(shards)} shards" if shards else ""
    waiting = waiting_share(job["per_worker"])
    return f"{len(chart.times('fold')):,} folds{where} in {training_words(job)}{'' if waiting is None else f', {share(waiting)} waiting'}"


def _legend(figure: Figure, charts: Sequence[Chart]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lanes = [lane for chart in charts if len(chart.lanes) <= MANY for lane in chart.lanes.values()]
    spans = {span.what for lane in lanes for span in lane.spans}
    marks = {mark.what for lane in lanes for mark in lane.marks}
    handles: list[Any] = [Patch(label=LABELS[what], **_face(what)) for what in SPANS if what in spans]
    for what, (marker, colour, size) in SHAPES.items():
        if what in marks:
            handles.append(Line2D([], [], marker=marker, color=colour, markersize=size, linestyle="none", label=what))
    if any(_telling(chart) for chart in charts):
        handles.append(Line2D([], [], color=BARRIER, linewidth=0.8, linestyle="dotted", label="barrier"))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.07, 1.0), ncols=len(handles) or 1, frameon=False, fontsize=10)
