"""Set an advice out: as a table for a terminal, as rows for the page, and as plain data for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from offbeat.advise.advice import Advice, Row, slow
from offbeat.advise.words import assumptions, conclusion, warnings
from offbeat.journal.verdicts import named, percent
from offbeat.report.figures import short, waiting_share

PAGE_ROWS: Final = 3
"""Rows of other rules on the pages."""
COLUMNS: Final = ("samples/s", "against it", "staleness", "dropped", "least weight", "kind", "time to loss")


def table(advice: Advice) -> Table:
    """Return the table: the measured run, its rule simulated, what is repaired, other rules, other sizes."""
    rows = [measured(advice), _cells(advice.own, f"{advice.own.name}, simulated")]
    if advice.repaired is not None:
        rows.append(_cells(advice.repaired, f"{advice.own.name}, {named(slow(advice.recording))} repaired"))
    rows += [_cells(row, row.name) for row in (*advice.rows, *advice.sizes)]
    shown = [name for name in COLUMNS if {row[name] for row in rows} - {"0", "-"}]
    found = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    found.add_column("rule", overflow="fold")
    for name in shown:
        found.add_column(name, justify="right", no_wrap=True)
    advised = {row.name for row in advice.advised}
    for row in rows:
        found.add_row(escape(row["name"]), *(row[name] for name in shown), style="bold" if row["name"] in advised else None)
    return found


def measured(advice: Advice) -> dict[str, str]:
    """Return the cells of the measured run."""
    recording = advice.recording
    summary = recording.summary
    mean, most = summary["staleness_mean"], summary["staleness_max"]
    return {
        "name": f"{short(summary['sync'])}, measured",
        "samples/s": rate(recording.rate),
        "against it": "1.00x",
        "staleness": f"{mean:.1f}, max {most}" if most else "0",
        "dropped": _share(summary["fates"]["dropped"] / summary["blocks"] if summary["blocks"] else 0.0),
        "waiting": _share(waiting_share(summary["per_worker"]) or 0.0),
        "least weight": "-",
        "kind": "-",
        "time to loss": "-" if advice.reached is None else f"{advice.reached.seconds - recording.began:,.1f} s",
    }


def _cells(row: Row, name: str) -> dict[str, str]:
    found = row.found
    spread = f" ({row.least:.2f}-{row.most:.2f})" if row.most - row.least >= 0.01 else ""
    return {
        "name": name,
        "samples/s": rate(row.rate),
        "against it": f"{row.ratio:.2f}x{spread}",
        "staleness": f"{found.staleness:.1f}, max {found.staleness_max}" if found.staleness_max else "0",
        "dropped": _share(found.dropped),
        "waiting": _share(found.waiting),
        "least weight": f"{found.least:.2f} (worker {found.least_worker})" if found.least < 0.9 else "fair",
        "kind": row.kind,
        "time to loss": "-" if row.seconds is None else _range(row.seconds),
    }


def _range(seconds: tuple[float, float]) -> str:
    least, most = seconds
    return f"{least:,.1f} s" if most - least < 0.02 * most else f"{least:,.1f} to {most:,.1f} s"


def rate(value: float) -> str:
    """Return a rate with as many digits as are known.

    >>> rate(1234.5), rate(9.87)
    ('1,234', '9.9')
    """
    return f"{value:,.0f}" if value >= 10.0 else f"{value:.2g}"


def _share(value: float) -> str:
    return percent(value) if value >= 0.0005 else "0"


def page_rows(advice: Advice) -> list[dict[str, Any]]:
    """Return the first rows for the page of a job, the measured run first, with the sentences in its ``notes``."""
    first = {"name": short(advice.recording.summary["sync"]), "ratio": 1.0, "measured": True, "best": False}
    rows = [{**first, **_plain_cells(measured(advice))}]
    for row in advice.rows[:PAGE_ROWS]:
        best = bool(advice.advised) and row is advice.advised[0]
        rows.append({"name": row.name, "ratio": row.ratio, "measured": False, "best": best, **_plain_cells(_cells(row, row.name))})
    command = f"offbeat advise {advice.recording.path} has all {len(advice.rows)} rules and says what is assumed."
    rows[0]["notes"] = [*conclusion(advice, on_page=True), *warnings(advice), assumptions(advice)[0], command]
    return rows


def _plain_cells(cells: dict[str, str]) -> dict[str, str]:
    return {"rate": cells["samples/s"], **{name: cells[name] for name in ("waiting", "dropped", "staleness")}}


def plain(advice: Advice, said: Sequence[str]) -> dict[str, Any]:
    """Return an advice as JSON can carry it."""

    def of(row: Row | None) -> dict[str, Any] | None:
        if row is None:
            return None
        figures = {name: value for name, value in row.found._asdict().items() if name != "rate"}
        return {
            "name": row.name,
            "samples_per_s": row.rate,
            "ratio": row.ratio,
            "ratio_least": row.least,
            "ratio_most": row.most,
            "kind": row.kind,
            "seconds_to_loss": row.seconds,
            **figures,
        }

    recording = advice.recording
    return {
        "journal": recording.path,
        "sync": recording.job["sync"],
        "workers": recording.total,
        "measured": {"samples_per_s": recording.rate, "seconds": recording.seconds, "pushes": recording.summary["pushes"]},
        "simulated_by_measured": advice.off,
        "own": of(advice.own),
        "repaired": of(advice.repaired),
        "rules": [of(row) for row in advice.rows],
        "sizes": [of(row) for row in advice.sizes],
        "advised": [row.name for row in advice.advised],
        "failed": dict(advice.failed),
        "loss": None if advice.reached is None else advice.reached._asdict(),
        "said": list(said),
    }
