"""Lay out what the page's scripts draw: a description as JSON, and the numbers, packed. ``data.js`` reads both."""

from __future__ import annotations

import json
from typing import Any, Final

import numpy as np

from offbeat.report.figures import Summary
from offbeat.report.page.bars import WORDS, costs_of
from offbeat.report.page.gather import Gathered
from offbeat.report.page.levels import KIND_OF, KINDS, ORDER, OWN
from offbeat.report.page.pack import Packed
from offbeat.report.page.steps import FATES
from offbeat.report.remarks import culprits
from offbeat.report.turns import ENDED_BY

PLAIN: Final[dict[str, bool]] = {}
GROWS: Final = {"grows": True}
SIGNED: Final = {"signed": True}


@np.errstate(all="ignore")  # numbers of a journal may be out of any range
def packed(gathered: Gathered, summary: Summary, name: str, lanes: list[int]) -> tuple[str, str]:
    """Return the description, as JSON in which nothing can end a script element, and the packed columns.

    Args:
        gathered: the job.
        summary: its summary.
        name: of the journal's file.
        lanes: the workers that have a lane at first.
    """
    steps, levels = gathered.steps, gathered.steps.levels
    columns, packs = steps.columns(), Packed()
    end = max(gathered.turns.now, 1e-6)
    tick = max(1e-6, end / 4e7)

    def ticks(values: Any) -> Any:
        return np.rint(np.nan_to_num(values) / tick)

    number, version, arrived = columns["number"], columns["version"], columns["arrived"]
    for column, values, how in (
        ("number", number, GROWS),
        ("worker", columns["worker"], PLAIN),
        ("version", version, GROWS | SIGNED),
        ("clock", columns["clock"] - version, SIGNED),
        ("into", columns["into"] - version, SIGNED),
        ("staleness", columns["staleness"], SIGNED),
        ("samples", columns["samples"], PLAIN),
        ("fate", columns["fate"], PLAIN),
        ("reason", columns["reason"], PLAIN),
        ("opener", np.where(columns["opener"] > 0, number - columns["opener"], 0), PLAIN),
        ("ended_by", columns["ended_by"], PLAIN),
        ("other", columns["other"] + 1, PLAIN),
        ("arrived", ticks(arrived), GROWS | SIGNED),
        ("busy", ticks(arrived - columns["begun"]), PLAIN),
        ("waited", ticks(columns["waited"]), PLAIN),
        ("settled", np.where(np.isnan(columns["settled"]), 0, ticks(columns["settled"] - arrived) + 1), PLAIN),
    ):
        packs.add(column, values, **how)
    if gathered.steps.losses:
        packs.add_floats("loss", columns["loss"])
    some = columns["phases"].any(axis=0)
    for place in np.flatnonzero(some).tolist():
        packs.add(f"phase {OWN[place]}", ticks(columns["phases"][:, place]))

    levels.totals()  # takes what has not been added yet
    shares = np.clip(np.rint(levels.seconds / levels.width * 255), 0, 255)
    for place, kind in enumerate(KINDS):
        if shares[:, :, place].any():
            packs.add(f"level {kind}", shares[:, :, place])
    packs.add("longest", ticks(levels.longest))
    packs.add("stretch worker", np.array([one[0] for one in steps.stretches], dtype=np.int64))
    packs.add("stretch start", ticks(np.array([one[2] for one in steps.stretches])))
    packs.add("stretch length", ticks(np.array([one[3] - one[2] for one in steps.stretches])))

    costs, workers = costs_of(gathered), gathered.tally.costs.workers
    count = len(levels.longest)
    head = {
        "name": name,
        "began": gathered.turns.began or 0.0,
        "end": end,
        "tick": tick,
        "workers": count,
        "hosts": [workers[n].host if n in workers else "" for n in range(count)] if any(w.host for w in workers.values()) else [],
        "lanes": [number for number in lanes if number < count],
        "slow": culprits(summary),
        "costs": [round(costs.get(n, 0.0), 4) for n in range(count)],
        "seconds": gathered.tally.costs.seconds,
        "kinds": KINDS,
        "words": WORDS,
        "order": ORDER,
        "kind_of": KIND_OF,
        "fates": FATES,
        "reasons": steps.reasons.texts(),
        "enders": [ENDED_BY.get(kind, "") for kind in steps.kinds.texts()],
        "stretches": [one[1] for one in steps.stretches],
        "width": levels.width,
        "parts": levels.longest.shape[1],
        "pushes": steps.count,
        "window": steps.window,
        "stride": steps.stride,
        "deaths": [[n, round(death.t, 6), death.back] for n, worker in workers.items() for death in worker.deaths][:2000],
        "curves": _curves(gathered),
        "columns": packs.columns,
    }
    return json.dumps(head, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"), packs.text()


def _curves(gathered: Gathered) -> list[dict[str, Any]]:
    """Return curves by time: the loss of pushes first, then what scripts have logged, then staleness."""
    named = [("loss of each push", gathered.loss), *gathered.metrics.items(), ("staleness of folds (versions)", gathered.folds)]
    found = []
    for name, curve in named:
        points = curve.points()
        if len(points) > 1 and not (curve is gathered.folds and not any(point[3] for point in points)):
            found.append({"name": name, "points": [[float(f"{value:.6g}") for value in point] for point in points]})
    return found
