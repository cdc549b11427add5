"""Tables for people, made from summaries (`report.tally.Tally.summary`). It decides what is worth saying; it counts nothing itself.

`job_table` shows one job worker by worker and says who is slow and why; `comparison` puts several jobs side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import Any, Final, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Summary: TypeAlias = dict[str, Any]

SLOW: Final = 1.5
"""A worker is called slow when it computes for longer per push than this many times the median worker."""


def console() -> Console:
    """Where tables go: as wide as the terminal, and wide enough for all columns where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=120)


def job_table(summary: Summary) -> Table:
    """One job: a row for each worker, what it came to above, who is slow or died below."""
    table = Table(title=escape(_title(summary)), title_justify="left", caption=escape(remarks(summary)), caption_justify="left")
    table.add_column("worker", justify="right")
    table.add_column("state")
    for name in ("pushes", "samples", "compute/push", "waiting", "folded", "dropped", "rejected", "staleness"):
        table.add_column(name, justify="right")
    carried = summary["fates"]["carried"] > 0
    if carried:
        table.add_column("carried", justify="right")
    slow = slow_workers(summary)
    for worker in summary["per_worker"]:
        fates = worker["fates"]
        cells = [
            str(worker["worker"]),
            state_words(worker),
            f"{worker['pushes']:,}",
            f"{worker['samples']:,}",
            seconds(per_push(worker)),
            share(waiting_share([worker])),
            *(f"{fates[fate]:,}" for fate in ("folded", "dropped", "rejected")),
            f"{worker['staleness_mean']:.1f}, max {worker['staleness_max']}",
            *([f"{fates['carried']:,}"] if carried else []),
        ]
        style = "red" if worker["state"] == "dead" else "yellow" if worker["worker"] in slow else None
        table.add_row(*cells, style=style)
    return table


def comparison(summaries: Sequence[Summary]) -> Table:
    """Several jobs, a row for each: what it took, what came out, and what became of the contributions."""
    accuracies = [accuracy(summary) for summary in summaries]
    names = {found[0] for found in accuracies if found is not None}
    result = names.pop().replace("_", " ") if len(names) == 1 and None not in accuracies else "result" if names else "last loss"
    carried = any(summary["fates"]["carried"] for summary in summaries)
    table = Table()
    table.add_column("rule")
    fates = ["folded", "dropped", "rejected", *(["carried"] if carried else [])]
    for name in ("wall s", "versions", "samples/s", result, "waiting", *fates):
        table.add_column(name, justify="right")
    for summary, found in zip(summaries, accuracies, strict=True):
        table.add_row(
            escape(summary["sync"] or "?"),
            f"{summary['wall_s']:.1f}",
            f"{summary['version']:,}",
            f"{summary['samples_per_s']:,.0f}",
            _result(summary, found, named=result != "result"),
            share(waiting_share(summary["per_worker"])),
            *(f"{summary['fates'][fate]:,}" for fate in fates),
        )
    return table


def remarks(summary: Summary) -> str:
    """Who is slow and why, and who died, in a sentence each; empty if there is nothing to say."""
    said = [_slow_sentence(summary, number) for number in slow_workers(summary)]
    for worker in summary["per_worker"]:
        if worker["deaths"]:
            times = "" if worker["deaths"] == 1 else f" {worker['deaths']} times"
            after = f", the last reason is: {worker['reason']}" if worker["state"] == "dead" else " and came back"
            after = " and came back" if worker["state"] in ("alive", "finished") else after
            said.append(f"Worker {worker['worker']} died{times}{after}.")
    if summary["ok"] is False:
        said.append(f"The job failed: {summary['reason']}.")
    return "\n".join(said)


def slow_workers(summary: Summary) -> list[int]:
    """The workers that compute for longer per push than `SLOW` times the median. (Of two workers the faster is the median.)"""
    times = {worker["worker"]: worker["compute_s"] / worker["pushes"] for worker in summary["per_worker"] if worker["pushes"]}
    if len(times) < 2:
        return []
    bound = SLOW * median_low(times.values())
    return [number for number, time_s in times.items() if time_s > bound]


def _slow_sentence(summary: Summary, number: int) -> str:
    workers = {worker["worker"]: worker for worker in summary["per_worker"] if worker["pushes"]}
    time_s, median_s = per_push(workers[number]) or 0.0, median_low(per_push(worker) or 0.0 for worker in workers.values())
    ratio = f"{time_s / median_s:.1f} times the median" if median_s > 0 else "the median worker next to nothing"
    text = f"Worker {number} is slow: it computes {seconds(time_s)} per push, {ratio} ({seconds(median_s)})"
    others = waiting_share([worker for other, worker in workers.items() if other != number])
    if others is not None and others >= 0.05:
        text += f", while the others wait {share(others)} of their time"
    return f"{text}; {_cause(summary, workers, number)}."


def _cause(summary: Summary, workers: dict[int, Any], number: int) -> str:
    slowed = [
        fault["detail"] or "a fault of kind slow" for fault in summary["faults"] if fault["what"] == "slow" and fault["worker"] == number
    ]
    if slowed:
        return f"it was slowed on purpose ({slowed[-1]})"
    batches = {other: worker["samples"] / worker["fates"]["folded"] for other, worker in workers.items() if worker["fates"]["folded"]}
    if number in batches and batches[number] > SLOW * median_low(batches.values()) > 0:
        return f"its batches are larger ({batches[number]:.0f} samples, the median is {median_low(batches.values()):.0f})"
    return "the time goes into its own computing, before any wait for the rule or the others"


def accuracy(summary: Summary) -> tuple[str, float] | None:
    """The metric that tells how good the model is: a test accuracy before a validation accuracy before any other."""
    names = [name for name in summary["metrics"] if "acc" in name.lower()]
    if not names:
        return None
    best = min(names, key=lambda name: (0 if "test" in name.lower() else 1 if "val" in name.lower() else 2, name))
    return best, float(summary["metrics"][best])


def _result(summary: Summary, found: tuple[str, float] | None, *, named: bool) -> str:
    if found is not None:
        return f"{found[1]:.4f}" if named else escape(f"{found[0].replace('_', ' ')} {found[1]:.4f}")
    if summary["loss"] is None:
        return "-"
    return f"{float(summary['loss']):.4f}" if named else f"loss {float(summary['loss']):.4f}"


def per_push(worker: dict[str, Any]) -> float | None:
    """Seconds of computing per push; None before the first push."""
    return worker["compute_s"] / worker["pushes"] if worker["pushes"] else None


def waiting_share(workers: Sequence[dict[str, Any]]) -> float | None:
    """wait / (compute + wait), over all these workers; None where there is no time to share out."""
    wait_s = sum(worker["wait_s"] for worker in workers)
    busy_s = wait_s + sum(worker["compute_s"] for worker in workers)
    return wait_s / busy_s if busy_s > 0 else None


def state_words(worker: dict[str, Any]) -> str:
    """A worker's state in a few words, its returns included."""
    returns = worker["incarnations"] - 1
    return f"{worker['state']}, back {returns}x" if returns > 0 else str(worker["state"])


def seconds(value: float | None) -> str:
    """A duration with a unit that fits it."""
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s"


def share(value: float | None) -> str:
    """A part of a whole as a percentage."""
    return "-" if value is None else f"{100 * value:.0f}%"


def _title(summary: Summary) -> str:
    loss = "" if summary["loss"] is None else f", loss {float(summary['loss']):.4f}"
    return (
        f"{summary['sync'] or '?'}: version {summary['version']:,} in {summary['wall_s']:.1f} s, "
        f"{summary['samples_per_s']:,.0f} samples/s, {summary['pushes']:,} pushes{loss}"
    )
