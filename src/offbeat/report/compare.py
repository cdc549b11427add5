"""``offbeat compare a.jsonl b.jsonl``: two runs side by side, who differs in them, and in what they cannot be compared.

Two passes over each journal, record by record: the first counts, the second finds the losses at the times and samples that both runs have
reached. Nothing is estimated: a loss is the mean of those that were logged shortly before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from offbeat.journal.arrivals import FoldedSamples, JournalArrivals, Record
from offbeat.journal.file import of_optimizer
from offbeat.journal.summary import Tally
from offbeat.report.figures import Summary, accuracy, per_step, seconds, share, short, waiting_share

PARTS: Final = (0.25, 0.5, 0.75, 1.0)
"""Where losses are compared: parts of what both runs have reached."""
WINDOW: Final = 0.05
"""The part of it over which logged losses are averaged."""
UNLIKE: Final = 1.2
"""A worker differs if its time or its waiting has this ratio between the runs, or more;"""
WAITED: Final = 0.05
"""waiting only if it makes this share more."""
LISTED: Final = 8


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as far as its summary goes."""

    name: str
    records: Iterable[Record]
    """Can be iterated over again."""
    summary: Summary
    job: Record
    began_s: float
    """When the first worker was released: times of losses count from here."""

    @classmethod
    def of(cls, name: str, records: Iterable[Record]) -> Run:
        """Read a run. Raises `ConfigurationError` if the journal cannot be read."""
        tally = Tally.of(records)
        return cls(name, records, tally.summary(), tally.job, tally.turns.began or 0.0)


class Losses:
    """Means of the logged losses in the windows that end at the given marks, of time and of samples."""

    def __init__(self, marks: Sequence[float]) -> None:
        self._windows = [(mark * (1 - WINDOW), mark) for mark in marks]
        self._sums = [[0.0, 0] for _ in marks]

    def add(self, at: float, loss: float) -> None:
        """Take a loss that was logged at this time, or after so many samples."""
        for (start, stop), found in zip(self._windows, self._sums, strict=True):
            if start <= at <= stop:
                found[0] += loss
                found[1] += 1

    def means(self) -> list[float | None]:
        """Return the mean of each window; None: no loss was logged there."""
        return [total / count if count else None for total, count in self._sums]


def losses(run: Run, times: Sequence[float], samples: Sequence[float]) -> tuple[list[float | None], list[float | None]]:
    """Return a run's losses at these times since its training began, and after so many folded samples."""
    by_time, by_samples = Losses(times), Losses(samples)
    arrivals, folded, done = JournalArrivals(), FoldedSamples(), 0
    for record in of_optimizer(run.records):
        loss = None
        match record["kind"]:
            case "settle":
                done += folded.settled(record, record["samples"])
            case "pushed":
                folded.pushed(record)
                loss = record.get("loss") if arrivals.begins(record) else None
            case "state_changed" if record["state"] == "alive":
                for known in (arrivals, folded):
                    known.joined(record["worker"], record["incarnation"])
            case "metrics":
                loss = record["values"].get("loss")
        if loss is not None:
            by_time.add(record["t"] - run.began_s, float(loss))
            by_samples.add(done, float(loss))
    return by_time.means(), by_samples.means()


def obstacles(one: Run, other: Run) -> list[str]:
    """Return in what the runs are not alike, so that their figures do not show what the rules do."""
    found = []
    a, b = one.summary, other.summary
    for key, what in (("script", "scripts"), ("workers", "numbers of workers"), ("servers", "numbers of servers"), ("seed", "seeds")):
        if a[key] != b[key]:
            found.append(f"they have different {what}: {a[key]} and {b[key]}")
    kinds = ["simulated" if run.summary["started"] == "simulated" else "live" for run in (one, other)]
    if kinds[0] != kinds[1]:
        found.append(f"{one.name} was {kinds[0]}, and {other.name} {kinds[1]}")
    batches = [_per_push(run.summary) for run in (one, other)]
    if all(batches) and _ratio(batches[1], batches[0]) >= UNLIKE:
        found.append(f"their batches differ: {batches[0]:,.1f} and {batches[1]:,.1f} samples a step")
    for run in (one, other):
        if run.job.get("resumed") is not None:
            found.append(f"{run.name} goes on from version {run.job['resumed']:,} of another run")
        if run.summary["ok"] is None:
            found.append(f"{run.name} has no end: its figures are those of its first {run.summary['elapsed_s']:,.1f} s")
        elif not run.summary["ok"]:
            found.append(f"{run.name} has failed after {run.summary['elapsed_s']:,.1f} s: {run.summary['reason']}")
    return found


def table(one: Run, other: Run) -> Table:
    """Return the figures of both runs, and their ratios."""
    shown = Table()
    shown.add_column("")
    for run in (one, other):
        shown.add_column(escape(run.name), justify="right", overflow="fold")
    shown.add_column("ratio", justify="right")
    for name, cells, ratio in _rows(one, other):
        shown.add_row(name, *(escape(cell) for cell in cells), ratio)
    return shown


def _rows(one: Run, other: Run) -> Iterator[tuple[str, list[str], str]]:
    a, b = one.summary, other.summary

    def row(name: str, value: Callable[[Summary], float | None], words: Callable[[float | None], str]) -> tuple[str, list[str], str]:
        first, second = value(a), value(b)
        return name, [words(first), words(second)], f"{second / first:.2f}" if first and second is not None else ""

    yield "rule", [short(a["sync"]), short(b["sync"])], ""
    yield row("training", lambda s: s["wall_s"], seconds)
    yield row("versions", lambda s: s["version"], _count)
    yield row("samples", lambda s: s["samples"], _count)
    yield row("samples/s", lambda s: s["samples_per_s"], _count)
    yield row("computing a step", _computing, seconds)
    yield row("waiting", lambda s: waiting_share(s["per_worker"]), share)
    yield row("staleness, mean", lambda s: s["staleness_mean"], lambda value: "-" if value is None else f"{value:.2f}")
    for fate in ("carried", "dropped", "rejected"):
        if a["fates"][fate] or b["fates"][fate]:
            yield row(fate, partial(_fate, fate), _count)
    yield row("deaths", lambda s: sum(worker["deaths"] for worker in s["per_worker"]), _count)
    measured = accuracy(a), accuracy(b)
    if measured[0] is not None and measured[1] is not None and measured[0][0] == measured[1][0]:
        yield measured[0][0].replace("_", " "), [f"{found[1]:.4g}" for found in measured if found is not None], ""
    yield from _loss_rows(one, other)


def _loss_rows(one: Run, other: Run) -> Iterator[tuple[str, list[str], str]]:
    most_s, most = (min(run.summary[key] for run in (one, other)) for key in ("wall_s", "samples"))
    times, samples = ([part * reached for part in PARTS if reached] for reached in (most_s, most))
    names = [*(f"loss at {seconds(mark)}" for mark in times), *(f"loss at {mark:,.0f} samples" for mark in samples)]
    found = [by_time + by_samples for by_time, by_samples in (losses(run, times, samples) for run in (one, other))]
    for name, first, second in zip(names, *found, strict=True):
        if first is not None and second is not None:
            yield name, [f"{first:.4f}", f"{second:.4f}"], ""


def differing(one: Run, other: Run) -> list[str]:
    """Return a sentence for each worker that was not the same in both runs, those that differ most first."""
    found: list[tuple[float, str]] = []
    others = {worker["worker"]: worker for worker in other.summary["per_worker"]}
    for worker in one.summary["per_worker"]:
        twin = others.get(worker["worker"])
        if twin is None:
            continue
        words, much = [], 0.0
        first, second = per_step(worker), per_step(twin)
        if first and second and (ratio := _ratio(first, second)) >= UNLIKE:
            words.append(f"computed {seconds(first)} and {seconds(second)} a step")
            much = ratio
        waits = waiting_share([worker]), waiting_share([twin])
        if waits[0] is not None and waits[1] is not None and abs(waits[0] - waits[1]) >= WAITED:
            words.append(f"waited {share(waits[0])} and {share(waits[1])} of its time")
            much = max(much, 1 + abs(waits[0] - waits[1]))
        if worker["deaths"] != twin["deaths"]:
            words.append(f"died {worker['deaths']}x and {twin['deaths']}x")
            much += 10.0
        if words:
            found.append((-much, f"worker {worker['worker']} {', '.join(words)}"))
    sentences = [sentence for _, sentence in sorted(found)]
    more = len(sentences) - LISTED
    return [*sentences[:LISTED], f"and {more} more workers"] if more > 0 else sentences


def compared(one: Run, other: Run) -> list[Any]:
    """Return what `rich` prints of two runs."""
    shown: list[Any] = [table(one, other)]
    if differences := differing(one, other):
        shown += [escape(f"Who differs ({one.name} and {other.name}):"), *(escape(f"  {text}") for text in differences)]
    if unlike := obstacles(one, other):
        shown += ["Not comparable in everything:", *(escape(f"  {text}") for text in unlike)]
    return shown


def _fate(fate: str, summary: Summary) -> float:
    return float(summary["fates"][fate])


def _computing(summary: Summary) -> float | None:
    steps = sum(worker["steps"] for worker in summary["per_worker"])
    return sum(worker["compute_s"] for worker in summary["per_worker"]) / steps if steps else None


def _per_push(summary: Summary) -> float:
    steps = sum(worker["steps"] for worker in summary["per_worker"])
    return sum(worker["samples_per_step"] * worker["steps"] for worker in summary["per_worker"]) / steps if steps else 0.0


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _ratio(a: float, b: float) -> float:
    return max(a, b) / min(a, b)
