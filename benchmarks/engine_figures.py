"""From the journal of a job under `benchmarks.engines` to figures: who paused for how long around a death, and who was back when.

Pure: records in, numbers out. All times are the journal's, in seconds since the job began, but for the death: whoever kills a process knows
the time of the machine's monotonic clock, which the script logs too (``monotonic_s``), so that `clock_offset` brings the two together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from offbeat.journal.records import Record
from offbeat.journal.summary import Tally

CLOCK = "monotonic_s"
"""What `tests/cluster/digits.py` logs."""


@dataclass(frozen=True, slots=True)
class Return:
    """What became of one worker whose process or node was lost."""

    worker: int
    noticed_s: float
    """From the death until the coordinator declares the worker dead."""
    started_s: float | None
    """From the death until the supervisor has had a new process started; None: it has not."""
    joined_s: float | None
    """From the death until the new process asks to take part."""
    folded_s: float | None
    """From the death until a push of the new process is folded."""


def clock_offset(records: Iterable[Record]) -> float:
    """Return what the machine's monotonic clock shows at the journal's time 0, up to the least delay of a metric.

    >>> clock_offset([{"kind": "metrics", "t": 2.0, "values": {"monotonic_s": 101.9}}, {"kind": "metrics", "t": 3.0, "values": {}}])
    99.9
    """
    return max(float(r["values"][CLOCK]) - float(r["t"]) for r in records if r["kind"] == "metrics" and CLOCK in r["values"])


def pushes(records: Iterable[Record]) -> dict[int, list[float]]:
    """Return the times of each worker's pushes. In rules of shard scope a push arrives once a shard, which makes no gap longer."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for record in records:
        if record["kind"] == "pushed":
            found[record["worker"]].append(float(record["t"]))
    return dict(found)


def largest_gap(times: Sequence[float], start: float, stop: float, *, whole: bool = True) -> float:
    """Return the longest time between two of these times that overlaps ``start`` to ``stop``.

    Args:
        times: in order.
        start: seconds.
        stop: seconds.
        whole: True: from one time to the next; False: only what lies after ``start``.

    >>> largest_gap([0.0, 1.0, 3.0, 3.5], 2.0, 9.0), largest_gap([0.0, 1.0, 3.0, 3.5], 2.0, 9.0, whole=False)
    (2.0, 1.0)
    """
    spans = [(before, after) for before, after in pairwise(times) if after > start and before < stop]
    return max((after - (before if whole else max(before, start)) for before, after in spans), default=0.0)


def steady_gap(records: Sequence[Record], start: float, stop: float) -> float:
    """Return the longest time between two pushes of a worker, both from ``start`` to ``stop``."""
    within = ([t for t in times if start <= t <= stop] for times in pushes(records).values())
    return max((after - before for times in within for before, after in pairwise(times)), default=0.0)


def all_folded_at(records: Iterable[Record], workers: int) -> float | None:
    """Return when the last of the workers had its first push folded; None: not yet."""
    seen: dict[int, float] = {}
    for record in records:
        if record["kind"] == "settle" and record["fate"] == "folded":
            seen.setdefault(record["worker"], float(record["t"]))
    return max(seen.values()) if len(seen) == workers else None


def victims(records: Iterable[Record], death: float) -> list[int]:
    """Return the workers whose process was killed, or was lost with its machine, after ``death``, as the supervisor has seen it."""
    found = {
        record["number"]
        for record in records
        if record["kind"] == "process"
        and record["role"] == "worker"
        and record["t"] > death
        and (record["what"] == "lost" or (record["what"] == "exited" and record["detail"] == "killed by SIGKILL"))
    }
    return sorted(found)


def return_of(records: Sequence[Record], worker: int, death: float) -> Return:
    """Return what became of a worker that died at ``death``."""

    def first(kind: str, after: float, field: str = "worker", **values: Any) -> Record | None:
        for record in records:
            found = record["kind"] == kind and record["t"] > after and record[field] == worker
            if found and all(record[name] == value for name, value in values.items()):
                return record
        return None

    def since(record: Record | None) -> float | None:
        return None if record is None else float(record["t"]) - death

    dead = first("state_changed", death, state="dead")
    assert dead is not None, f"worker {worker} was not declared dead after {death:.2f} s"
    started = first("process", death, "number", what="restarted", role="worker")
    joined = first("joined", float(dead["t"]))
    folded = None
    if joined is not None:
        alive = first("state_changed", float(dead["t"]), state="alive")
        if alive is not None:
            folded = first("settle", float(alive["t"]), fate="folded", incarnation=alive["incarnation"])
    return Return(worker, float(dead["t"]) - death, since(started), since(joined), since(folded))


def epochs(records: Iterable[Record]) -> dict[str, Any]:
    """Return how many epochs there were, those whose report does not account for every index, and those with exceptions."""
    reports = [record["report"] for record in records if record["kind"] == "epoch_ended"]
    unaccounted = [r for r in reports if r["folded"] + r["dropped"] + r["rejected"] + r["unused"] != r["indices"]]
    return {
        "epochs": len(reports),
        "unaccounted": len(unaccounted),
        "exceptions": sum(bool(report["exceptions"]) for report in reports),
        "not_folded": sum(report["indices"] - report["folded"] for report in reports),
        "returned": sum(report["returned"] for report in reports),
    }


def accuracy(records: Iterable[Record]) -> float | None:
    """Return the last test accuracy that the script logged."""
    found = [r["values"]["test_accuracy"] for r in records if r["kind"] == "metrics" and "test_accuracy" in r["values"]]
    return float(found[-1]) if found else None


def around(records: Sequence[Record], death: float, stop: float) -> dict[str, Any]:
    """Return the figures of a death: the others' gaps until ``stop``, and the returns.

    ``gap_s`` is the longest time between two pushes of another worker; ``after_s`` the same, but only what lies after the last of the lost
    workers was declared dead; ``fold_s`` the longest time between two folds.
    """
    lost = victims(records, death)
    assert lost, "no worker has died"
    returns = [return_of(records, worker, death) for worker in lost]
    detected = death + max(entry.noticed_s for entry in returns)
    by_worker = {worker: times for worker, times in pushes(records).items() if worker not in lost}
    folds = [float(record["t"]) for record in records if record["kind"] == "fold"]
    backs = [entry.folded_s for entry in returns]
    return {
        "lost": lost,
        "detected_s": max(entry.noticed_s for entry in returns),
        "gap_s": max(largest_gap(times, death, stop) for times in by_worker.values()),
        "after_s": max(largest_gap(times, detected, stop, whole=False) for times in by_worker.values()),
        "fold_s": largest_gap(folds, death, stop),
        "started_s": _latest([entry.started_s for entry in returns]),
        "joined_s": _latest([entry.joined_s for entry in returns]),
        "back_s": _latest(backs),
    }


def _latest(found: Sequence[float | None]) -> float | None:
    """Return the last of these times; None if one of them has not come."""
    times = [time for time in found if time is not None]
    return max(times) if len(times) == len(found) else None


def problems(records: Sequence[Record]) -> list[str]:
    """Return what offbeat's own audit finds, and whether the job has come to a good end."""
    end = [] if records[-1]["kind"] == "end" and records[-1]["ok"] else [f"the journal ends with {records[-1]}"]
    return [*Tally.of(records).problems(), *end]
