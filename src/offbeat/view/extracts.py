"""Take from a job's figures what a page shows of them: named workers, verdicts, how long steps are. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from offbeat.journal.verdicts import percent, short
from offbeat.report.remarks import verdict_sentence
from offbeat.types import Seconds
from offbeat.view.happenings import cut

MARKS: Final = 4
"""Most workers that are named beside the map for what they cost, and as many for their deaths;"""
MARKED: Final = 0.01
"""those below this share are not."""


def marks(rows: Sequence[Mapping[str, Any]], slow: Sequence[Mapping[str, Any]], deaths: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the workers that are named beside the map, each with two short lines, and whether it is a culprit."""
    culprits = {number for verdict in slow if verdict["kind"] == "slow" for number in verdict["workers"]}
    named: dict[int, list[Any]] = {}
    for row in rows[:MARKS]:
        if row["worker"] in culprits or row["cost"] >= MARKED:
            step = f"{short(row['step'])} a step, {row['ratio']:.1f} times the others'" if row["ratio"] else "no step yet"
            named[row["worker"]] = [f"worker {row['worker']} costs {percent(row['cost'])}", step, row["worker"] in culprits]
    for verdict in deaths[-MARKS:]:
        number, away_s = verdict["workers"][0], verdict["details"].get("away_s", 0.0)
        words = f"dead for {short(away_s)} from {verdict['since_s']:,.0f} s, cost {percent(verdict['share'])}"
        named.setdefault(number, [f"worker {number} died", words, False])
    return [[number, *words] for number, words in named.items()]


def verdict_of(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verdict with its texts cut, and as a sentence."""
    keys = ("kind", "workers", "cause", "since_s", "cost_s", "share", "worth", "confidence")
    texts = {key: cut(verdict[key]) for key in ("what", "evidence", "remedy")}
    return {**{key: verdict[key] for key in keys}, **texts, "sentence": cut(verdict_sentence(dict(verdict)))}


def by_cost(worker: Mapping[str, Any]) -> tuple[float, int, int]:
    """Return a key by which the worker that costs most comes first."""
    return -worker.get("cost_s", 0.0), -worker["deaths"], worker["worker"]


def total(snapshot: Mapping[str, Any], key: str) -> float:
    """Return the sum of a figure over the workers."""
    return float(sum(worker[key] for worker in snapshot["per_worker"]))


def finite(value: Any) -> float | None:
    """Return a number of a summary, in which infinities are texts; None: it is none."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def histogram(usual: Mapping[int, Seconds | None], bars: int = 48) -> dict[str, Any] | None:
    """Return how many workers have steps of which length, and the slowest workers."""
    known = sorted((own, number) for number, own in usual.items() if own is not None)
    if len(known) < 2:
        return None
    least, most = known[0][0], known[-1][0]
    width = max(1e-9, (most - least) / bars)
    counts = [0] * bars
    for own, _ in known:
        counts[min(bars - 1, int((own - least) / width))] += 1
    middle = known[len(known) // 2][0]
    outside = [[number, own] for own, number in known[-3:] if own > 1.5 * middle]
    rest = known[: len(known) - len(outside)]
    return {"least": least, "width": width, "counts": counts, "slowest": outside, "rest": [len(rest), rest[0][0], rest[-1][0]]}
