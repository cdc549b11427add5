"""Tables for people, made from summaries (`journal.summary.Tally.summary`). It decides what is worth a column; it counts nothing itself.

`job_tables` shows one job worker by worker; `comparison` puts several jobs side by side, live ones or simulated ones. Columns that would
say the same of everybody are left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.report.chosen import chosen, extent
from offbeat.report.columns import Column, Fitted, unbroken
from offbeat.report.figures import (
    Summary,
    accuracy,
    batches_by_epoch,
    is_awaited,
    local,
    per_fold,
    per_step,
    rate_words,
    share,
    short,
    state_words,
    training_words,
    version_words,
    versions_per_s,
    waiting_share,
)
from offbeat.report.remarks import culprits, marked, remarks

EPOCHS_SHOWN: Final = 6
ROWS: Final = 12
"""Workers that have a row each, where a job has more than twice as many."""
NOTHING: Final = frozenset({"0", "0%", "-"})
"""A column of a comparison in which all cells are among these is left out."""
SIDE_BY_SIDE: Final = 4
"""Most jobs of a comparison that have a column each, where there is no room for a column for each figure."""


def console() -> Console:
    """Return the console for tables: as wide as the terminal, or wide enough for all columns without a terminal.

    A variable such as FORCE_COLOR does not make a file a terminal: a live view would fill it with its states. Neither is it a user's
    terminal if it has no size: ``mpirun``, for one, gives each process such a one, and writes what comes out to a file.
    """
    found = Console()
    if found.file.isatty() and not found.is_dumb_terminal and _has_size(found.file):
        return found
    return Console(width=120, force_terminal=False)


def _has_size(terminal: IO[str]) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(terminal.fileno()).columns > 0
    return False


def job_tables(summary: Summary, width: int) -> list[Table | str]:
    """Return all that is said of one job at its end: the totals, its table, remarks, and the last value of each metric.

    Args:
        summary: of the job.
        width: characters that a line has: of the columns that do not fit those are left out that others imply, and are named below.
    """
    few = len(summary["per_worker"]) <= 2 * ROWS
    shown, hidden = (summary["per_worker"], []) if few else chosen(summary["per_worker"], culprits(summary), ROWS, _costs(summary))
    fitted = Fitted.of(_columns(summary, shown), width)
    said = [rest_words(summary, hidden), remarks(summary)]
    if fitted.left_out:
        said.append(f"(A terminal wider than {width} characters shows also: {', '.join(fitted.left_out)}.)")
    logged = [f"{name}: {float(value):.6g}" for name, value in summary["metrics"].items()]
    return [
        escape(_title(summary)),
        _table(fitted, shown, marked(summary, (worker["worker"] for worker in shown))),
        *(escape(text) for text in (*said, *logged) if text),
    ]


def _table(fitted: Fitted, workers: Sequence[dict[str, Any]], slow: Sequence[int]) -> Table:
    table = fitted.table()
    for row, worker in enumerate(workers):
        style = "red" if worker["state"] == "dead" and not is_awaited(worker) else "yellow" if worker["worker"] in slow else None
        table.add_row(*fitted.row(row), style=style)
    return table


def rest_words(summary: Summary, workers: Sequence[dict[str, Any]]) -> str:
    """Return a line on the workers that have no row: how many, and between what their figures are."""
    if not workers:
        return ""
    ranges = [("pushes", [f"{count:,}" for count in _extremes(worker["pushes"] for worker in workers)])]
    if steps := [seconds for worker in workers if (seconds := per_step(worker)) is not None]:
        ranges.append(("compute", extent(steps).split(" to ")))
    if waits := [part for worker in workers if (part := waiting_share([worker])) is not None]:
        ranges.append(("waiting", [share(part) for part in _extremes(waits)]))
    if summary["staleness_max"]:
        ranges.append(("staleness", [f"{mean:.1f}" for mean in _extremes(worker["staleness_mean"] for worker in workers)]))
    told = ", ".join(f"{name} {' to '.join(dict.fromkeys(values))}" for name, values in ranges)
    return f"and {len(workers):,} more: {told}"


def _extremes(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return min(found), max(found)


def _costs(summary: Summary) -> dict[int, float]:
    """Return the share of the job's time that each worker of a verdict costs."""
    found: dict[int, float] = {}
    for verdict in summary["verdicts"]:
        if verdict["kind"] == "slow":
            for number, cost in verdict["details"].items():
                found[int(number)] = found.get(int(number), 0.0) + cost
    return found


def _columns(summary: Summary, workers: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns that do not say the same of everybody, with a cell for each of these workers."""
    steps = local(summary)
    known = summary["samples"] or not summary["fates"]["folded"]
    batches = batches_by_epoch(summary)
    planned = any(worker["batch"] is not None for worker in workers) or any(any(sizes) for sizes in batches.values())
    columns = [
        Column("worker", [str(worker["worker"]) for worker in workers]),
        Column("state", [state_words(worker) for worker in workers], justify="left"),
        Column("pushes", [f"{worker['pushes']:,}" for worker in workers], implied=True),
    ]
    if steps:
        columns.append(Column("steps", [f"{worker['steps']:,}" for worker in workers]))
    columns += [
        *([Column("samples", [f"{worker['samples']:,}" for worker in workers], implied=True)] if known else []),
        Column("compute /step" if steps else "compute /push", [unbroken(per_step(worker)) for worker in workers]),
        Column("waiting", [share(waiting_share([worker])) for worker in workers]),
    ]
    for fate in ("folded", *(fate for fate in ("dropped", "rejected", "carried") if summary["fates"][fate])):
        columns.append(Column(fate, [f"{worker['fates'][fate]:,}" for worker in workers]))
    if summary["abandoned"]:
        columns.append(Column("abandoned", [_abandoned(worker) for worker in workers]))
    name = "staleness (versions)" if summary["shards"] is None else "block staleness (versions)"
    if summary["staleness_max"]:
        columns.append(Column(name, [_mean_and_most(worker["staleness_mean"], worker["staleness_max"]) for worker in workers]))
    if summary["lead_max"] is not None:
        columns.append(Column("lead", [_mean_and_most(worker["lead_mean"], worker["lead_max"]) for worker in workers]))
    if planned:
        columns.append(Column("batch by epoch", [_batches(batches[worker["worker"]], worker) for worker in workers]))
    return columns


def _mean_and_most(mean: float | None, most: int | None) -> str:
    return f"{mean or 0.0:.1f}, max\u00a0{most}" if most else "0"


def comparison(summaries: Sequence[Summary] | Mapping[str, Summary], width: int | None = None) -> Table:
    """Several jobs, a row for each: what it took, what came out, and what became of the contributions.

    Args:
        summaries: in the order of the rows; a mapping's keys name them instead of their rules.
        width: characters that a line has: where a row for each job does not fit, a row stands for each figure. None: all fits.
    """
    names = list(summaries) if isinstance(summaries, Mapping) else [short(summary["sync"]) for summary in summaries]
    jobs = list(summaries.values() if isinstance(summaries, Mapping) else summaries)
    columns = _simulated(jobs) if any(job["started"] == "simulated" for job in jobs) else _live(jobs)
    for name, counts in (("carried", [job["fates"]["carried"] for job in jobs]), ("abandoned", [job["abandoned"] for job in jobs])):
        if any(counts):
            columns[name] = [f"{count:,}" for count in counts]
    if any(per_fold(job) for job in jobs):
        columns["per fold"] = [f"{job['parts']['mean']:.1f}" if job["parts"] else "-" for job in jobs]
    columns = {name: cells for name, cells in columns.items() if not set(cells) <= NOTHING}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    whole = max(map(len, names), default=4) + sum(max(map(len, [name, *cells])) + 2 for name, cells in columns.items())
    if width is not None and width < whole and len(jobs) <= SIDE_BY_SIDE:
        table.add_column("")
        for name in names:
            table.add_column(escape(name), justify="right", overflow="fold")
        for name, cells in columns.items():
            table.add_row(name, *cells)
        return table
    table.add_column("rule", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row, name in enumerate(names):
        table.add_row(escape(name), *(cells[row] for cells in columns.values()))
    return table


def _live(jobs: Sequence[Summary]) -> dict[str, list[str]]:
    accuracies = [accuracy(job) for job in jobs]
    names = {found[0] for found in accuracies if found is not None}
    result = names.pop().replace("_", " ") if len(names) == 1 and None not in accuracies else "result" if names else "last loss"
    return {
        "training": [f"{job['wall_s']:.1f} s" for job in jobs],
        "versions": [f"{job['version']:,}" for job in jobs],
        "samples/s": [f"{job['samples_per_s']:,.0f}" if job["samples"] else "-" for job in jobs],
        result: [_result(job, found, named=result != "result") for job, found in zip(jobs, accuracies, strict=True)],
        "waiting": [share(waiting_share(job["per_worker"])) for job in jobs],
        **_leads(jobs),
        **{fate: [f"{job['fates'][fate]:,}" for job in jobs] for fate in ("folded", "dropped", "rejected")},
    }


def _simulated(jobs: Sequence[Summary]) -> dict[str, list[str]]:
    """Rates instead of counts: simulated jobs are of any length, and how long they took says nothing."""
    results = [accuracy(job) for job in jobs]
    return {
        "training": [f"{job['wall_s']:,.1f} s" for job in jobs],
        "versions": [f"{job['version']:,}" for job in jobs],
        "versions/s": [f"{versions_per_s(job):,.3g}" for job in jobs],
        "samples/s": [f"{job['samples_per_s']:,.3g}" for job in jobs],
        **({"result": [_result(job, found, named=False) for job, found in zip(jobs, results, strict=True)]} if any(results) else {}),
        "staleness (versions)": [
            f"{job['staleness_mean']:.2f}, max {job['staleness_max']}" if job["staleness_max"] else "0" for job in jobs
        ],
        **_leads(jobs),
        "waiting": [share(waiting_share(job["per_worker"])) for job in jobs],
        "dropped": [share(job["fates"]["dropped"] / job["blocks"] if job["blocks"] else None) for job in jobs],
    }


def _leads(jobs: Sequence[Summary]) -> dict[str, list[str]]:
    """The greatest lead, where a rule bounds it."""
    leads = [job["lead_max"] for job in jobs]
    return {"lead": ["-" if lead is None else f"max {lead}" for lead in leads]} if any(lead is not None for lead in leads) else {}


def _abandoned(worker: dict[str, Any]) -> str:
    return f"{worker['abandoned']:,}, {unbroken(worker['abandoned_s'])}" if worker["abandoned"] else "0"


def _batches(by_epoch: Sequence[int | None], worker: dict[str, Any]) -> str:
    """The batch sizes of the last epochs, and that of the one under way."""
    sizes = [*by_epoch, *([worker["batch"]] if worker["state"] == "alive" else [])]
    shown = ["-" if size is None else str(size) for size in sizes[-EPOCHS_SHOWN:]]
    return " ".join([*(["..."] if len(sizes) > EPOCHS_SHOWN else []), *shown])


def _result(summary: Summary, found: tuple[str, float] | None, *, named: bool) -> str:
    if found is not None:
        return f"{found[1]:.4f}" if named else escape(f"{found[0].replace('_', ' ')} {found[1]:.4f}")
    if summary["loss"] is None:
        return "-"
    return f"{float(summary['loss']):.4f}" if named else f"loss {float(summary['loss']):.4f}"


def _title(summary: Summary) -> str:
    loss = "" if summary["loss"] is None else f", loss {float(summary['loss']):.4f}"
    steps = f" of {summary['steps']:,} steps" if local(summary) else ""
    waiting = waiting_share(summary["per_worker"])
    return (
        f"{short(summary['sync'])}: {version_words(summary)} in {training_words(summary)}, "
        f"{rate_words(summary, summary['samples_per_s'])}, {'' if waiting is None else f'{share(waiting)} waiting, '}"
        f"{summary['pushes']:,} pushes{steps}{loss}"
    )
