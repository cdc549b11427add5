"""Simulate other rules on the times of a journal, in bounded time, for a comparison with the job that was measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ConfigurationError
from offbeat.journal.verdicts import percent
from offbeat.policies import rule
from offbeat.report.figures import Summary, short, waiting_share
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.latency.traces import Trace
from offbeat.sim.run import check_rule, simulate
from offbeat.types import Seconds

RULES: Final = ("bsp", "backup(b=1)", "dbw", "ssp(staleness=3)", "asp")
BUDGET_S: Final[Seconds] = 10.0
FIRST: Final = 400
"""Pushes of the simulation that measures how fast the simulator is."""
MOST: Final = 20_000
"""More pushes do not make the ratios better."""


def other_rules(path: Path, measured: Summary, say: Callable[[str], None], *, budget_s: Seconds = BUDGET_S) -> list[dict[str, Any]]:
    """Return the measured job and the same steps under other rules, for `report.page.render`.

    The ratios compare simulations with a simulation of the job's own rule, so that what the simulator leaves out (deaths, links, the
    folds' time) is left out of both.

    Args:
        path: the journal, whose times are replayed.
        measured: its summary.
        say: is told what could not be simulated.
        budget_s: about how long all simulations together may take.
    """
    own, workers = measured["sync"], len(measured["per_worker"])
    notes: list[str] = []
    rows = [_row(f"{short(own)}", measured, 1.0) | {"measured": True, "best": False, "notes": notes}]
    try:
        cluster = Cluster(workers=workers, compute=Trace(path=str(path)))
        cluster.check()
        batch = max(1, round(sum(one["samples"] for one in measured["per_worker"]) / max(1, measured["pushes"])))
        began = time.perf_counter()
        base = _simulated(own, cluster, batch, max(FIRST, 3 * workers))
        took_s = time.perf_counter() - began
    except ConfigurationError as error:
        say(f"--replay: {error}")
        notes.append(f"Not simulated: {error}.")
        return rows
    pushes = int(min(MOST, measured["pushes"], max(FIRST, FIRST * budget_s / (len(RULES) + 1) / max(took_s, 1e-3))))
    pushes = max(pushes, 3 * workers)
    if took_s < budget_s / 4:
        base = _simulated(own, cluster, batch, pushes)
    for spelling in RULES:
        if spelling == own:
            continue
        if time.perf_counter() - began > budget_s:
            notes.append(f"Not simulated in {budget_s:.0f} s: {spelling}.")
            continue
        try:
            found = _simulated(spelling, cluster, batch, pushes)
        except ConfigurationError as error:
            notes.append(f"{spelling}: {error}.")
            continue
        ratio = found["samples_per_s"] / base["samples_per_s"] if base["samples_per_s"] > 0.0 else None
        row = _row(spelling, found, ratio) | {"measured": False, "best": False}
        row["rate"] = "-" if ratio is None else _rate(ratio * measured["samples_per_s"])
        rows.append(row)
    if base["samples_per_s"] > 0.0 and measured["samples_per_s"] > 0.0:
        off = base["samples_per_s"] / measured["samples_per_s"]
        said = f"Simulated on the computing times of this run, about {pushes:,} pushes of each rule, without deaths, links and folds."
        said += (
            f" For the rule that ran the simulator gives {off:.2f} times the measured rate; ratios are between simulations, without this."
        )
        notes.insert(0, said)
    notes.append("Speed is not accuracy: a stale or missing gradient is worth less.")
    better = [row for row in rows[1:] if row["ratio"] and row["ratio"] >= 1.05]
    if better:  # the gentlest first: the rule with the least staleness and the fewest dropped gradients that is worth it
        min(better, key=lambda row: (row["stale"], row["lost"], -row["ratio"]))["best"] = True
    return rows


def _simulated(spelling: str, cluster: Cluster, batch: int, pushes: int) -> Summary:
    """Return the summary of a simulation of about so many pushes: a short one tells how many a version has."""
    policy = rule(spelling)
    check_rule(policy, cluster, Work(versions=3, batch=batch))
    trial = simulate(policy, cluster, Work(versions=3, batch=batch)).summary
    versions = int(pushes * max(1, trial["version"]) / max(1, trial["pushes"]))
    return dict(simulate(policy, cluster, Work(versions=max(3, versions), batch=batch)).summary)


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10.0 else f"{rate:.2g}"


def _row(name: str, summary: Summary, ratio: float | None) -> dict[str, Any]:
    lost = summary["fates"]["dropped"] / summary["blocks"] if summary["blocks"] else 0.0
    mean, most = summary["staleness_mean"], summary["staleness_max"]
    return {
        "name": name,
        "rate": _rate(summary["samples_per_s"]),
        "ratio": ratio,
        "waiting": percent(waiting) if (waiting := waiting_share(summary["per_worker"])) else "0",
        "dropped": percent(lost) if lost else "0",
        "staleness": f"mean {mean:.1f}, max {most}" if most else "0",
        "stale": mean,
        "lost": lost,
    }
