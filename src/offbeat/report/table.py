"""Tables for people, made from summaries (`journal.summary.Tally.summary`). It decides what is worth a column; it counts nothing itself.

`job_table` shows one job worker by worker; `comparison` puts several jobs side by side, live ones or simulated ones. Columns that would
say the same of everybody are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offbeat.report.figures import (
    Summary,
    accuracy,
    batches_by_epoch,
    local,
    per_fold,
    per_step,
    rate_words,
    seconds,
    share,
    short,
    state_words,
    version_words,
    versions_per_s,
    waiting_share,
)
from offbeat.report.remarks import remarks, slow_workers

EPOCHS_SHOWN: Final = 6


def console() -> Console:
    """Return the console for tables: as wide as the terminal, or wide enough for all columns without a terminal."""
    found = Console()
    return found if found.is_terminal else Console(width=120)


def job_table(summary: Summary) -> Table:
    """Return the table of one job: the totals, a row for each worker, and remarks."""
    table = Table(title=escape(_title(summary)), title_justify="left", caption=escape(remarks(summary)), caption_justify="left")
    steps, blocks = local(summary), summary["shards"] is not None
    fates = ["folded", "dropped", *(fate for fate in ("rejected", "carried") if summary["fates"][fate])]
    abandoned = summary["abandoned"] > 0
    batches = batches_by_epoch(summary)
    planned = any(worker["batch"] is not None for worker in summary["per_worker"]) or any(any(sizes) for sizes in batches.values())
    names = ["pushes", *(["steps"] if steps else []), "samples", "compute/step" if steps else "compute/push", "waiting"]
    names += [*fates, *(["abandoned"] if abandoned else [])]
    names += ["block staleness" if blocks else "staleness", *(["batch by epoch"] if planned else [])]
    table.add_column("worker", justify="right")
    table.add_column("state")
    for name in names:
        table.add_column(name, justify="right")
    slow = slow_workers(summary)
    known = summary["samples"] or not summary["fates"]["folded"]
    for worker in summary["per_worker"]:
        cells = [
            str(worker["worker"]),
            state_words(worker),
            f"{worker['pushes']:,}",
            *([f"{worker['steps']:,}"] if steps else []),
            f"{worker['samples']:,}" if known else "-",
            seconds(per_step(worker)),
            share(waiting_share([worker])),
            *(f"{worker['fates'][fate]:,}" for fate in fates),
            *([_abandoned(worker)] if abandoned else []),
            f"{worker['staleness_mean']:.1f}, max {worker['staleness_max']}" if worker["staleness_max"] else "0",
            *([_batches(batches[worker["worker"]], worker)] if planned else []),
        ]
        table.add_row(*cells, style="red" if worker["state"] == "dead" else "yellow" if worker["worker"] in slow else None)
    return table


def comparison(summaries: Sequence[Summary] | Mapping[str, Summary]) -> Table:
    """Several jobs, a row for each: what it took, what came out, and what became of the contributions.

    Args:
        summaries: in the order of the rows; a mapping's keys name them instead of their rules.
    """
    names = list(summaries) if isinstance(summaries, Mapping) else [short(summary["sync"]) for summary in summaries]
    jobs = list(summaries.values() if isinstance(summaries, Mapping) else summaries)
    columns = _simulated(jobs) if jobs and all(job["started"] == "simulated" for job in jobs) else _live(jobs)
    for name, counts in (("carried", [job["fates"]["carried"] for job in jobs]), ("abandoned", [job["abandoned"] for job in jobs])):
        if any(counts):
            columns[name] = [f"{count:,}" for count in counts]
    if any(per_fold(job) for job in jobs):
        columns["per fold"] = [f"{job['parts']['mean']:.1f}" if job["parts"] else "-" for job in jobs]
    table = Table()
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
        "wall s": [f"{job['wall_s']:.1f}" for job in jobs],
        "versions": [f"{job['version']:,}" for job in jobs],
        "samples/s": [f"{job['samples_per_s']:,.0f}" if job["samples"] else "-" for job in jobs],
        result: [_result(job, found, named=result != "result") for job, found in zip(jobs, accuracies, strict=True)],
        "waiting": [share(waiting_share(job["per_worker"])) for job in jobs],
        **{fate: [f"{job['fates'][fate]:,}" for job in jobs] for fate in ("folded", "dropped", "rejected")},
    }


def _simulated(jobs: Sequence[Summary]) -> dict[str, list[str]]:
    """Rates instead of counts: simulated jobs are of any length, and how long they took says nothing."""
    results = [accuracy(job) for job in jobs]
    return {
        "seconds": [f"{job['wall_s']:,.1f}" for job in jobs],
        "versions": [f"{job['version']:,}" for job in jobs],
        "versions/s": [f"{versions_per_s(job):,.3g}" for job in jobs],
        "samples/s": [f"{job['samples_per_s']:,.3g}" for job in jobs],
        **({"result": [_result(job, found, named=False) for job, found in zip(jobs, results, strict=True)]} if any(results) else {}),
        "staleness": [f"{job['staleness_mean']:.2f}, max {job['staleness_max']}" if job["staleness_max"] else "0" for job in jobs],
        "waiting": [share(waiting_share(job["per_worker"])) for job in jobs],
        "dropped": [share(job["fates"]["dropped"] / job["blocks"] if job["blocks"] else None) for job in jobs],
    }


def _abandoned(worker: dict[str, Any]) -> str:
    return f"{worker['abandoned']:,}, {seconds(worker['abandoned_s'])}" if worker["abandoned"] else "0"


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
    simulated = " simulated" if summary["started"] == "simulated" else ""
    steps = f" of {summary['steps']:,} steps" if local(summary) else ""
    return (
        f"{short(summary['sync'])}: {version_words(summary)} in {summary['wall_s']:.1f}{simulated} s, "
        f"{rate_words(summary, summary['samples_per_s'])}, {summary['pushes']:,} pushes{steps}{loss}"
    )
