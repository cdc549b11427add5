"""Work out the tables of the page: the workers, the deaths, and the account of samples."""

from __future__ import annotations

from statistics import median_low
from typing import TYPE_CHECKING, Final

from offbeat.core.leases import adds_up
from offbeat.journal.costs import Costs
from offbeat.journal.epoch_reports import epoch_words
from offbeat.journal.verdicts import percent
from offbeat.journal.verdicts import short as brief
from offbeat.report.figures import Summary, is_awaited, state_words, waiting_share
from offbeat.report.remarks import marked
from offbeat.view.bars import WORDS, Plain, by_kind, mean_of, more_of

if TYPE_CHECKING:
    from offbeat.view.job_view import JobView

ROWS: Final = 50
"""Most rows of the table of workers."""
DOING: Final = {"computing": "working", "idle": "without samples", "absent": "away"}
"""What a worker does, where its word in a summary is another one."""


def workers(view: JobView, summary: Summary) -> Plain:
    """Return the table of workers, those that cost most first."""
    ordered = sorted(summary["per_worker"], key=lambda one: (-one["cost_s"], -one["deaths"], one["worker"]))
    shown, hidden = ordered[:ROWS], ordered[ROWS:]
    slow = marked(summary, (one["worker"] for one in shown))
    usual = median_low([mean_of(one) for one in summary["per_worker"] if one["pushes"]] or [0.0])
    used = [fate for fate in ("folded", "carried", "dropped", "rejected") if summary["fates"][fate] or fate == "folded"]
    stale, hosts = summary["staleness_max"] > 0, len(set(view.hosts.values())) > 1
    steps = any(one["steps"] != one["pushes"] for one in summary["per_worker"])
    parts = view.phases and any(len(_own(one)) > 1 for one in shown)
    names = ["worker", *(["host"] if hosts else []), "state" if view.over else "now", "pushes", *(["steps"] if steps else []), "samples"]
    names += ["busy a push", "against median", *(["most of it"] if parts else []), "waiting", *used]
    names += [*(["staleness (versions)"] if stale else []), "costs the job"]
    rows = []
    for one in shown:
        number, cost, mean = one["worker"], one["cost_s"], mean_of(one)
        own = _own(one)
        most = max(own, key=lambda kind: own[kind], default="")
        cells = [
            *([view.hosts.get(number, "")] if hosts else []),
            state_words(one) if view.over or one["state"] == "dead" else DOING.get(one["doing"], one["doing"]),
            f"{one['pushes']:,}",
            *([f"{one['steps']:,}"] if steps else []),
            f"{one['samples']:,}",
            brief(mean) if one["pushes"] else "-",
            f"{mean / usual:.1f}x" if usual > 0.0 and one["pushes"] else "-",
            *([f"{WORDS[most]} {share_of(own[most] / sum(own.values()))}" if most else "-"] if parts else []),
            share_of(waiting_share([one])),
            *(f"{one['fates'][fate]:,}" for fate in used),
            *([f"{one['staleness_mean']:.1f}, max {one['staleness_max']}"] if stale else []),
            f"{cost:,.1f} s, {percent(cost / view.seconds)}" if cost >= 0.05 and view.seconds > 0.0 else "0 s",
        ]
        rows.append({"worker": number, "culprit": number in slow, "cells": cells})
    most_s = max((one["cost_s"] for one in hidden), default=0.0)
    return {"names": names, "rows": rows, "more": more_of(hidden, f"they cost at most {most_s:,.1f} s each")}


def _own(worker: Plain) -> dict[str, float]:
    """Return a worker's own seconds by kind."""
    return by_kind(worker["phases"], 1.0)


def deaths(costs: Costs, summary: Summary) -> Plain:
    """Return the table of deaths, of many the costliest."""
    rows: list[Plain] = []
    for number, worker in costs.workers.items():
        for death in worker.deaths:
            cost_s = death.cost_s(costs.now)
            rows.append(
                {
                    "worker": number,
                    "t": death.t,
                    "at": f"{death.t:,.1f} s",
                    "away": brief(death.away_s(costs.now)) + ("" if death.back is not None else ", not back"),
                    "reason": death.reason,
                    "samples": f"{death.samples:,}",
                    "stalled": brief(death.stalled_s) if death.stalled_s >= 1e-3 else "0 s",
                    "cost_s": cost_s,
                    "cost": brief(cost_s),
                }
            )
    rows.sort(key=lambda row: -row["cost_s"])
    count = sum(one["deaths"] for one in summary["per_worker"])
    absent = sum(is_awaited(one) for one in summary["per_worker"])
    shown = sorted(rows[:20], key=lambda row: row["t"])
    return {"rows": shown, "count": count, "more": max(0, count - len(shown)), "absent": absent}


def samples(summary: Summary) -> Plain:
    """Return the account of samples: each epoch's, and that it adds up."""
    names = ["indices", "folded", "dropped", "rejected", "skipped", "unused", "kept", "brought", "returned"]
    epochs = summary["epochs"]
    earlier = summary["earlier_epochs"]
    sums = {name: sum(epoch.get(name, 0) for epoch in epochs) + (earlier or {}).get(name, 0) for name in names}
    used = [name for name in names if sums[name] or name in ("indices", "folded")]
    shown = epochs[-8:]
    hidden = len(epochs) - len(shown) + (earlier or {"epochs": 0})["epochs"]
    wrong = [epoch_words(epoch["epoch"], epoch["pool"]) for epoch in epochs if not adds_up(epoch)]
    lost = [text for epoch in epochs for text in epoch.get("exceptions", ())]
    return {
        "names": used,
        "rows": [
            {
                "epoch": epoch_words(epoch["epoch"], epoch["pool"]),
                "t": f"{epoch['t']:,.1f} s",
                "cells": [f"{epoch.get(n, 0):,}" for n in used],
            }
            for epoch in shown
        ],
        "hidden": hidden,
        "sums": [f"{sums[name]:,}" for name in used],
        "epochs": len(epochs) + (earlier or {"epochs": 0})["epochs"],
        "wrong": wrong[:5],
        "exceptions": [f"{one['start']:,} to {one['stop']:,}: {one['why']}" for one in lost[:5]],
        "more": max(0, len(lost) - 5),
        "folded": f"{summary['samples']:,}",
    }


def share_of(part: float | None) -> str:
    """Return a share in per cent; "-" where there is none."""
    return "-" if part is None else percent(part) if part else "0 %"
