"""Show what came of a run with faults: one table, and the same as plain data."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from rich.markup import escape
from rich.table import Table

from offbeat.chaos.injector import Injected
from offbeat.chaos.judgement import Verdict
from offbeat.types import Seconds

WORDS = {True: "yes", False: "NO", None: "-"}
MORE = 1.05
"""From this ratio on the goodput is called more than in proportion to the workers' time."""
STYLES = {True: None, False: "red", None: "dim"}


def table(verdict: Verdict, injected: list[Injected], *, seed: int, baseline_rate: float | None) -> Table:
    """Return the table: a row for each kind of fault, for each check, and for the goodput."""
    done = [entry for entry in injected if entry.done]
    shown = Table(title=escape(f"{len(done)} faults, seed {seed}: {verdict.outcome}"), title_justify="left")
    shown.add_column("what")
    shown.add_column("figures", overflow="fold")
    shown.add_column("held")
    kinds = Counter((entry.fault.kind, entry.fault.target) for entry in done)
    for (kind, target), count in sorted(kinds.items()):
        shown.add_row(f"{kind} {target}", f"{count} of {len(done)}, {_hit(done, kind, target)}", "")
    skipped = len(injected) - len(done)
    if skipped:
        shown.add_row("not done", f"{skipped}: {'; '.join(sorted({entry.note for entry in injected if not entry.done}))}", "")
    shown.add_section()
    for check in verdict.checks:
        shown.add_row(check.name, escape(check.figures), WORDS[check.held], style=STYLES[check.held])
    shown.add_section()
    if returns := verdict.figures["returns_s"]:
        figures = f"{len(returns)}, after {statistics.median(returns):.2f} s (median) and {max(returns):.2f} s (longest)"
        shown.add_row("workers that came back", figures, "")
    shown.add_row("goodput", escape(_goodput(verdict, baseline_rate)), "")
    return shown


def _hit(done: list[Injected], kind: str, target: str) -> str:
    names = Counter(entry.victim for entry in done if (entry.fault.kind, entry.fault.target) == (kind, target))
    return ", ".join(name if count == 1 else f"{name} ({count} times)" for name, count in sorted(names.items()))


def _goodput(verdict: Verdict, baseline_rate: float | None) -> str:
    there = f"workers could work {verdict.present:.1%} of the time"
    if verdict.goodput is None or baseline_rate is None:
        return f"{verdict.figures['samples_per_s']:,.0f} samples/s; {there}; no undisturbed job to compare with"
    found = f"{verdict.goodput:.2f} times the undisturbed job's {baseline_rate:,.0f} samples/s; {there}"
    # Not a share of what could be: nobody knows how fast the workers that are left would be, who often have more of the cores.
    faster = ", so that those left were faster than in proportion: they had more of the machine, or it had less other work"
    return found + (faster if verdict.goodput > verdict.present * MORE else "")


def as_data(verdict: Verdict, injected: list[Injected], *, start: Seconds, offset_s: Seconds, **more: Any) -> dict[str, Any]:
    """Return all of it for ``--json``. Times of faults are seconds after the first push of every worker, ``journal_s`` is the journal's."""
    return {
        **more,
        "ok": verdict.ok,
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "goodput": verdict.goodput,
        "present": verdict.present,
        "figures": verdict.figures,
        "checks": [check._asdict() for check in verdict.checks],
        "faults": [
            {
                **entry.fault._asdict(),
                "injected_at_s": entry.at - start,
                "journal_s": entry.at - offset_s,
                "until_s": None if entry.until is None else entry.until - start,
                "victim": entry.victim,
                "worker": entry.worker,
                "done": entry.done,
                "proved": entry.proved,
                "note": entry.note,
            }
            for entry in injected
        ],
    }
