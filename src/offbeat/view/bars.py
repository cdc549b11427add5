"""Work out the bars of the page: where all time went, a step of each worker, how many workers are how fast, how stale folds are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from offbeat.journal.costs import LINK, QUEUED, WAIT
from offbeat.journal.turns import ENDED_BY, NOBODY
from offbeat.journal.verdicts import percent
from offbeat.journal.verdicts import short as brief
from offbeat.report.chosen import chosen, extent
from offbeat.report.figures import Summary
from offbeat.report.remarks import culprits, marked
from offbeat.view.shares import KIND_OF, KINDS

if TYPE_CHECKING:
    from offbeat.view.job_view import JobView

Plain: TypeAlias = dict[str, Any]

WORDS: Final = {
    "data": "loading data",
    "forward": "forward",
    "backward": "backward",
    "computing": "computing",
    "own": "own code",
    "evaluation": "evaluation, saving",
    "gc": "garbage collection",
    "queued": "no core free",
    "exchange": "push, pull, messages",
    "wait": "waiting",
    "idle": "no samples left",
    "dead": "dead",
}
ROWS: Final = 12
"""Workers that have a row each, where a job has more than twice as many."""
LANES: Final = 32
"""A job with more workers has a heat map in place of a lane each."""
BARS, LABEL_BARS = 40, 4
"""Bars of the histogram, and how far from each other those with a label are."""
SMALL: Final = 0.004
NAMED: Final = 0.01
"""A worker's cost stands beside its bar from this share of the job's time on."""
ENDERS: Final = 5
"""Workers that are named as those for whom the others waited."""


def whole(view: JobView) -> Plain:
    """Return where all worker-seconds went: kinds of work, waiting by whom the others waited for."""
    totals = view.steps.shares.totals().sum(axis=0)
    whole = float(totals.sum()) or 1.0
    parts = [_part(kind, float(totals[place]), whole) for place, kind in enumerate(KINDS) if kind not in ("wait", "idle", "dead")]
    pushers: defaultdict[str, float] = defaultdict(float)
    others: defaultdict[str, float] = defaultdict(float)
    for (worker, kind), (_, seconds) in sorted(view.waits.groups.items(), key=lambda item: -item[1][1]):
        if kind == "pushed":
            pushers[f"for worker {worker}"] += seconds
        else:
            others[f"until {ENDED_BY[kind]}" if kind in ENDED_BY else "for no worker"] += seconds
    named = [*sorted(pushers.items(), key=lambda item: -item[1])[:ENDERS], *others.items()]
    parts += [_part("wait", seconds, whole, f"waiting {whom}") for whom, seconds in named]
    told = sum(seconds for _, seconds in named)
    rest = max(0.0, float(totals[KINDS.index("wait")]) - told)
    parts.append(_part("wait", rest, whole, "waiting for others" if told else "waiting"))
    parts += [_part(kind, float(totals[KINDS.index(kind)]), whole) for kind in ("idle", "dead")]
    return {"seconds": f"{whole:,.0f}" if whole >= 10 else f"{whole:.2g}", "parts": [part for part in parts if part["share"] > SMALL]}


def steps(view: JobView, summary: Summary) -> Plain:
    """Return the mean step of each worker by phases, and its wait, and for whom."""
    shown, pairs, whole_s = rows_of(summary), view.waits.pairs, view.seconds
    slow = marked(summary, (one["worker"] for one in shown[0]))
    rows: list[Plain] = []
    for one in shown[0]:
        number = one["worker"]
        seconds = by_kind(one["phases"], _counted(view, one))
        wait_s = one["wait_s"] / max(1, one["steps"])
        cost = one["cost_s"]
        _, other = max(((waited_s, other) for (waiter, other), waited_s in pairs.items() if waiter == number), default=(0.0, NOBODY))
        rows.append(
            {
                "worker": number,
                "culprit": number in slow,
                "own": sum(seconds.values()),
                "wait": wait_s,
                "seconds": seconds,
                "for": f"worker {other}" if other != NOBODY else "",
                "cost": f"{cost:,.1f} s, {percent(cost / whole_s)}" if whole_s > 0.0 and cost >= NAMED * whole_s else "",
            }
        )
    longest = max((row["own"] + row["wait"] for row in rows), default=0.0) or 1.0
    for row in rows:
        row["own_text"], row["wait_text"] = brief(row["own"]), brief(row["wait"])
        row["parts"] = [_part(kind, value, longest, text=brief(value)) for kind, value in row["seconds"].items() if value > 0.0]
        waits = f"waits for {row['for']}" if row["for"] else "waits"
        row["parts"].append(_part("wait", row["wait"], longest, waits, text=brief(row["wait"])))
    kinds = {part["kind"] for row in rows for part in row["parts"] if part["share"] > SMALL}
    others = [mean_of(one) for one in shown[1] if one["pushes"]]
    return {
        "rows": rows,
        "kinds": [kind for kind in WORDS if kind in kinds],
        "more": more_of(shown[1], f"a step {extent(others)}" if others else ""),
        "together": (summary["parts"] or {"mean": 0.0})["mean"] > 1.5,
    }


def histogram(summary: Summary) -> Plain | None:
    """Return how many workers have which mean step, of a job that has too many for a row each; the far ones are named."""
    means = {one["worker"]: mean_of(one) for one in summary["per_worker"] if one["pushes"]}
    if len(summary["per_worker"]) <= LANES or not means:
        return None
    least, most, median = min(means.values()), max(means.values()), median_low(means.values())
    width = (most - least) / BARS or 1.0
    bars: list[list[int]] = [[] for _ in range(BARS)]
    for number, mean in means.items():
        bars[min(BARS - 1, int((mean - least) / width))].append(number)
    tallest = max(map(len, bars))
    far = [number for number, mean in means.items() if mean > 1.25 * median]
    found: list[Plain] = []
    labelled = -BARS
    for place, workers in enumerate(bars):
        start = least + place * width
        outside = bool(workers) and len(far) <= 100 and all(number in far for number in workers)
        label = ""
        if outside and len(workers) <= 3 and place - labelled >= LABEL_BARS:
            label, labelled = f"worker {workers[0]}" if len(workers) == 1 else f"{len(workers)} workers", place
        height = max(2.0, 100 * len(workers) / tallest) if workers else 0.0
        title = f"{brief(start)} to {brief(start + width)}: {len(workers):,} workers"
        found.append({"height": f"{height:.1f}", "far": outside, "label": label, "title": title})
    slowest = sorted(means, key=lambda number: -means[number])[:3]
    text = f"Half of the workers need at most {brief(median)}; the slowest: " + ", ".join(
        f"worker {number} {brief(means[number])} ({means[number] / median:.1f}x)" if median else f"worker {number}" for number in slowest
    )
    return {"bars": found, "least": brief(least), "most": brief(most), "median": brief(median), "count": len(means), "text": text + "."}


def staleness(view: JobView, summary: Summary) -> Plain:
    """Return how many parts of folds had which staleness, in at most a dozen rows."""
    counts = view.staleness
    whole, most = sum(counts.values()), max(counts, default=0)
    width = max(1, -(-(most + 1) // 12))
    rows_by_start = {
        start: sum(value for at, value in counts.items() if start <= at < start + width) for start in range(0, most + 1, width)
    }
    tallest = max(rows_by_start.values()) or 1
    rows = [
        {
            "name": str(start) if width == 1 else f"{start} to {start + width - 1}",
            "count": f"{count:,}",
            "width": f"{100 * count / tallest:.2f}",
            "percent": percent(count / whole) if count else "",
        }
        for start, count in rows_by_start.items()
    ]
    return {"rows": rows if most else [], "mean": f"{summary['staleness_mean']:.1f}", "most": f"{summary['staleness_max']:,}"}


def rows_of(summary: Summary) -> tuple[list[Plain], list[Plain]]:
    """Return the workers that have a bar, and the others."""
    workers = summary["per_worker"]
    costs = {one["worker"]: one["cost_s"] for one in workers}
    return chosen(workers, culprits(summary), ROWS if len(workers) > 2 * ROWS else len(workers), costs)


def lanes(summary: Summary) -> list[int]:
    """Return the workers that have a lane at first."""
    workers = summary["per_worker"]
    return [one["worker"] for one in (workers if len(workers) <= LANES else rows_of(summary)[0])]


def _part(kind: str, seconds: float, whole: float, name: str = "", *, text: str = "") -> Plain:
    part = seconds / whole
    return {
        "kind": kind,
        "share": part,
        "width": f"{100 * part:.3f}",
        "name": name or WORDS[kind],
        "text": text or percent(part),
        "seconds": brief(seconds) if seconds < 1000 else f"{seconds:,.0f} s",
    }


def _counted(view: JobView, worker: Plain) -> float:
    """Return of how many steps a worker's phases are known: the first push of each process, with the script's beginning, is left out."""
    if view.costs is not None:
        known = view.costs.workers.get(worker["worker"])
        return max(1, known.steps if known else 0)
    pushes: int = max(1, worker["pushes"])
    steps: float = worker["steps"] * (pushes - worker["incarnations"]) / pushes
    return max(1.0, steps)


def by_kind(phases: Mapping[str, float], steps: float) -> dict[str, float]:
    """Return the mean seconds of a step by kind, without the wait."""
    found = dict.fromkeys(WORDS, 0.0)
    for cause, seconds in phases.items():
        if cause != WAIT:
            kind = "exchange" if cause == LINK else "queued" if cause == QUEUED else KIND_OF.get(cause, "own")
            found[kind] += seconds / steps
    return {kind: seconds for kind, seconds in found.items() if seconds > 0.0}


def mean_of(worker: Plain) -> float:
    """Return the mean busy seconds of a push."""
    return float(worker["busy_s"] / worker["pushes"]) if worker["pushes"] else 0.0


def more_of(hidden: Sequence[Plain], range_: str) -> str:
    """Return how many are not shown, and their range."""
    return f"and {len(hidden):,} more" + (f": {range_}" if range_ else "") if hidden else ""
