"""Compare a job that was hit by faults with an undisturbed one, from both journals, and put the figures of many jobs in one table.

Both are measured from the first push of the last worker, for as long as faults fall, so that neither start counts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from rich.table import Table

from benchmarks.fault_plan import SHARES, grouped
from offbeat.chaos.schedule import Fault
from offbeat.core.leases import unaccounted
from offbeat.journal.file import read
from offbeat.journal.records import Record
from offbeat.journal.summary import Tally

Span: TypeAlias = tuple[float, float]
SOON_S = 1.0
"""A wait for a returned worker, or for a server, shows within this time after its death."""
HEADINGS = ("rule", "jobs", "faults", "survived", "away %", "goodput %", "of what could be %", "indices", "lost", "hangs", "checks broken")


class Window(NamedTuple):
    """What happened in a job from the first push of its last worker on, for so many seconds."""

    seconds: float
    samples: int
    """Folded."""
    present: float
    """Part of the workers' time during which they were there and could work: neither they nor a server was dead or stopped."""

    @property
    def rate(self) -> float:
        """Return folded samples per second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


def window(journal: Path, seconds: float, faults: Sequence[dict[str, Any]] = (), *, ends: bool = False) -> Window:
    """Return the figures of a job.

    Args:
        journal: its own.
        seconds: the length of the window.
        faults: those of ``offbeat chaos --json`` that have happened.
        ends: True if a fault has ended the job, or its journal: then the window ends with the last fold.
    """
    records = list(read(journal))
    start, folds = _start(records), _folds(records)
    if start == float("inf") or not folds:
        return Window(0.0, 0, 1.0)
    stop = max(start, folds[-1]) if ends else start + seconds
    tally, samples = Tally(), []
    at = 0
    for limit in (start, stop):
        while at < len(records) and records[at]["t"] <= limit:
            tally.add(records[at])
            at += 1
        samples.append(tally.summary(brief=True)["samples"])
    return Window(stop - start, samples[1] - samples[0], present(records, [Fault(**fault) for fault in faults], (start, stop)))


def present(records: Sequence[Record], faults: Iterable[Fault], span: Span) -> float:
    """Return the part of all workers' time in a span during which they could work: no server and not they were dead, stopped or cut off."""
    workers = records[0]["workers"]
    away = {worker: _away(records, worker, span[1]) for worker in range(workers)}
    returns = [(record["t"], f"server {record['number']}") for record in records if record["kind"] == "process" and _returned(record)]
    for fault in faults:
        worker = workers - 1 if fault.kind == "cut" else fault.worker  # on the host without the supervisor
        if fault.target == "server" and fault.kind in ("kill", "stop"):  # every worker needs all servers
            back = [t for t, name in returns if t >= fault.journal_s and name == fault.victim] + [fault.over_s] * (fault.kind == "stop")
            for spans in away.values():
                spans.append((fault.journal_s, min(back, default=fault.journal_s)))
        elif fault.target in ("worker", "link") and worker is not None:
            part = fault.duty if fault.kind == "slow" else 1.0
            away[worker].append((fault.journal_s, fault.journal_s + part * (fault.over_s - fault.journal_s)))
    total, lost = workers * (span[1] - span[0]), sum(_length(spans, span) for spans in away.values())
    return max(0.0, 1.0 - lost / total) if total > 0.0 else 1.0


def _away(records: Iterable[Record], worker: int, end: float) -> list[Span]:
    """Return when a worker was not there."""
    found, since, there = [], 0.0, False
    changes = [record for record in records if record["kind"] == "state_changed" and record["worker"] == worker and _first(record)]
    for t, alive in [*((record["t"], record["state"] == "alive") for record in changes), (end, True)]:
        if alive and not there:
            found.append((since, t))
        elif there and not alive:
            since = t
        there = alive
    return found


def _first(record: Record) -> bool:
    """Return True if a record is not of a further optimizer."""
    return "optimizer" not in record


def _returned(record: Record) -> bool:
    return record["role"] == "server" and record["what"] in ("restarted", "taken over")


def _folds(records: Iterable[Record]) -> list[float]:
    return [record["t"] for record in records if record["kind"] == "fold" and _first(record)]


def _length(spans: Iterable[Span], within: Span) -> float:
    """Return the length of a union of spans, as far as they are within one."""
    total, reached = 0.0, within[0]
    for start, stop in sorted(spans):
        total += max(0.0, min(stop, within[1]) - max(start, reached))
        reached = max(reached, stop)
    return total


def gaps(journal: Path, faults: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the longest time without a fold in the `SOON_S` after each fault, before the next one, by ``kind:target``."""
    folds = _folds(read(journal))
    times = sorted(fault["journal_s"] for fault in faults)
    found: dict[str, list[float]] = {}
    for fault in faults:
        at = fault["journal_s"]
        until = min([at + SOON_S, *times[bisect_right(times, at) :][:1]])
        ends = folds[bisect_right(folds, at) : bisect_right(folds, until) + 1]
        if ends:
            pauses = [after - before for before, after in pairwise([at, *ends])]
            found.setdefault(f"{fault['kind']}:{fault['target']}", []).append(round(max(pauses), 3))
    return found


def _start(records: Iterable[dict[str, Any]]) -> float:
    """Return the time of the first push of the last worker; infinite if one has not pushed."""
    workers, first = 0, dict[int, float]()
    for record in records:
        if record["kind"] == "job":
            workers = record["workers"]
        elif record["kind"] == "pushed":
            first.setdefault(record["worker"], record["t"])
    return max(first.values()) if len(first) >= max(1, workers) else float("inf")


def lost_indices(journal: Path) -> int:
    """Return how many indices no report of an epoch accounts for."""
    reports = [record["report"] for record in read(journal) if record["kind"] == "epoch_ended"]
    return sum(abs(unaccounted(report)) for report in reports)


def infinite(journal: Path) -> int:
    """Return how many gradients were rejected since they were not finite: then the model has diverged, and the goodput says nothing."""
    return sum(record["kind"] == "settle" and "not finite" in record["reason"] for record in read(journal))


@dataclass
class Row:
    """What became of the jobs under one rule."""

    name: str
    jobs: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    indices: int = 0
    lost: int = 0
    hangs: int = 0
    broken: int = 0
    seconds: float = 0.0
    samples: float = 0.0
    expected: float = 0.0
    """Samples that the undisturbed jobs would have folded in these seconds."""
    present_s: float = 0.0

    def add(self, job: dict[str, Any]) -> None:
        """Add a job, as `benchmarks.faults` keeps it."""
        done = Counter(job["done"])
        self.jobs += 1
        self.faults += done
        self.survived += done.total() - (job["outcome"] != "finished" and not done["disk:journal"])
        self.indices += job["indices"]
        self.lost += job["lost"]
        self.hangs += job["outcome"] == "hang"
        self.broken += len(job["broken"])
        if job["rate"] > 0:
            self.seconds += job["seconds"]
            self.samples += job["samples"]
            self.expected += job["rate"] * job["seconds"]
            self.present_s += job["present"] * job["seconds"]

    @property
    def present(self) -> float:
        """Return the part of the time during which the capacity was there."""
        return self.present_s / self.seconds if self.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Return folded samples over those of the undisturbed jobs in the same time."""
        return self.samples / self.expected if self.expected else 0.0

    def cells(self) -> list[str]:
        """Return the row of the table."""
        ratio = f"{100 * self.goodput / self.present:.0f}" if self.present else "-"
        shares = [f"{100 * (1 - self.present):.1f}", f"{100 * self.goodput:.0f}", ratio] if self.seconds else ["-", "-", "-"]
        counts = [f"{self.indices:,}", str(self.lost), str(self.hangs), str(self.broken)]
        return [self.name, str(self.jobs), str(self.faults.total()), str(self.survived), *shares, *counts]


def table(jobs: Iterable[dict[str, Any]]) -> Table:
    """Return one table of all jobs, a row for each rule, and one for all."""
    rows: dict[str, Row] = {}
    for job in jobs:
        for name in (f"{job['sync']}, two hosts" if job["hosts"] == 2 else job["sync"], "all"):
            rows.setdefault(name, Row(name)).add(job)
    shown = Table(title_justify="left")
    for heading in HEADINGS:
        shown.add_column(heading)
    for name in sorted(rows, key=lambda name: (name == "all", name)):
        shown.add_row(*rows[name].cells())
    return shown


def waits(jobs: Iterable[dict[str, Any]]) -> Table:
    """Return a table of `gaps`, median and longest of each kind of fault and rule."""
    found: dict[str, dict[str, list[float]]] = {}
    for job in jobs:
        for kind, seconds in job.get("gaps", {}).items():
            for name in (job["sync"], "all"):
                found.setdefault(name, {}).setdefault(kind, []).extend(seconds)
    kinds = ("kill:worker", "kill:server", "stop:worker", "stop:server", "cut:link")
    shown = Table(title="seconds without a fold within a second of a fault, median (longest)", title_justify="left")
    for heading in ("rule", *kinds):
        shown.add_column(heading)
    for name in sorted(found, key=lambda name: (name == "all", name)):
        cells = [found[name].get(kind, []) for kind in kinds]
        shown.add_row(name, *(f"{median(cell):.2f} ({max(cell):.2f})" if cell else "-" for cell in cells))
    return shown


def shares(done: Counter[str], wanted: Mapping[str, float] = SHARES) -> str:
    """Return the shares of all groups of faults beside those that were asked for, in words."""
    groups = grouped(done)
    total = max(1, groups.total())
    parts = [f"{group} {100 * groups[group] / total:.1f} % (of {100 * share:.0f} %)" for group, share in wanted.items()]
    return f"{groups.total():,} faults: {', '.join(parts)}"
