"""The tally: what a job has done so far, counted record by record. Standard library only, nothing is printed here.

The same object serves the live display (`summary` costs O(workers), whenever it is wanted), the summary file and the report of an old
journal. It counts; whether the books are right is the audit's business (`Tally.problems`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.report.audit import Audit, Record

FATES: Final = ("folded", "carried", "dropped", "rejected")


def _plain(value: float) -> float | str:
    """As in the journal: JSON has no NaN and no infinity, and ``float()`` reads both spellings."""
    return value if math.isfinite(value) else str(value)


def _no_fates() -> dict[str, int]:
    return dict.fromkeys(FATES, 0)


@dataclass(slots=True)
class _Worker:
    state: str = "expected"
    reason: str = ""
    doing: str = "absent"
    since_s: float = 0.0
    incarnation: int = 0
    deaths: int = 0
    clock: int = 0
    pushes: int = 0
    samples: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    idle_s: float = 0.0
    fates: dict[str, int] = field(default_factory=_no_fates)
    parts: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    loss: float | str | None = None

    def turn(self, doing: str, t: float) -> None:
        """Stop what it was doing, and account for the time if that was waiting."""
        if self.doing == "waiting" and doing == "computing":
            self.wait_s += t - self.since_s
        elif self.doing == "idle":
            self.idle_s += t - self.since_s
        self.doing, self.since_s = doing, t

    def report(self, number: int) -> dict[str, Any]:
        return {
            "worker": number,
            "state": self.state,
            "reason": self.reason,
            "doing": self.doing,
            "incarnations": self.incarnation,
            "deaths": self.deaths,
            "pushes": self.pushes,
            "samples": self.samples,
            "clock": self.clock,
            "compute_s": round(self.compute_s, 6),
            "wait_s": round(self.wait_s, 6),
            "idle_s": round(self.idle_s, 6),
            "fates": dict(self.fates),
            "staleness_mean": self.staleness_sum / self.parts if self.parts else 0.0,
            "staleness_max": self.staleness_max,
            "loss": self.loss,
        }


class Tally:
    """Counts the records of one journal.

    >>> tally = Tally()
    >>> tally.add({"kind": "job", "t": 0, "format": 1, "sync": "asp", "workers": 1, "servers": 1, "seed": 0})
    >>> tally.add({"kind": "release", "t": 0.5, "worker": 0, "incarnation": 1, "version": 0, "clock": 0, "reason": ""})
    >>> tally.add({"kind": "pushed", "t": 1.5, "worker": 0, "incarnation": 1, "version": 0, "samples": 8, "compute_s": 0.9})
    >>> tally.summary()["pushes"], tally.summary()["per_worker"][0]["compute_s"]
    (1, 0.9)
    """

    def __init__(self) -> None:
        self._audit = Audit()
        self._job: Record = {}
        self._end: Record = {}
        self._t = 0.0
        self._first_release: float | None = None
        self._last_fold: float | None = None
        self._version = 0
        self._workers: dict[int, _Worker] = {}
        self._metrics: dict[str, tuple[tuple[int, int], Any]] = {}
        self._epochs: list[Record] = []
        self._faults: list[Record] = []
        self._handlers: dict[str, Callable[[Record], None]] = {
            "job": self._on_job,
            "pushed": self._on_pushed,
            "settle": self._on_settle,
            "fold": self._on_fold,
            "release": self._on_release,
            "paused": self._on_paused,
            "epoch_ended": self._on_epoch_ended,
            "state_changed": self._on_state,
            "metrics": self._on_metrics,
            "fault": self._on_fault,
            "end": self._on_end,
        }

    @classmethod
    def of(cls, records: Iterable[Record]) -> Tally:
        """The tally of a whole journal, for instance of ``journal.read(path)``."""
        tally = cls()
        for record in records:
            tally.add(record)
        return tally

    def add(self, record: Record) -> None:
        """Count the next record. Kinds that are not known are passed over, as the format demands."""
        self._t = max(self._t, record["t"])
        self._audit.add(record)
        handler = self._handlers.get(record["kind"])
        if handler is not None:
            handler(record)

    def problems(self) -> list[str]:
        """What in the books does not add up: a push without a fate or with two, a fold of what was never pushed, and the like."""
        return self._audit.problems()

    def summary(self) -> dict[str, Any]:
        """Everything counted so far, as plain data that JSON can carry; described in ``docs/journal.md``.

        ``wall_s`` runs from the first release to the last fold, and ``samples_per_s = samples / wall_s`` counts folded samples only.
        """
        per_worker = [self._workers[number].report(number) for number in sorted(self._workers)]
        losses = [float(worker["loss"]) for worker in per_worker if worker["loss"] is not None]
        samples = sum(worker["samples"] for worker in per_worker)
        wall_s = 0.0
        if self._first_release is not None and self._last_fold is not None:
            wall_s = max(0.0, self._last_fold - self._first_release)
        return {
            **{key: self._job.get(key) for key in ("sync", "workers", "servers", "seed", "started", "script")},
            "elapsed_s": self._t,
            "wall_s": round(wall_s, 6),
            "version": self._version,
            "samples": samples,
            "samples_per_s": samples / wall_s if wall_s > 0 else 0.0,
            "pushes": sum(worker["pushes"] for worker in per_worker),
            "fates": {fate: sum(worker["fates"][fate] for worker in per_worker) for fate in FATES},
            "per_worker": per_worker,
            "metrics": {name: value for name, (_, value) in self._metrics.items()},
            "epochs": list(self._epochs),
            "faults": list(self._faults),
            "loss": _plain(sum(losses) / len(losses)) if losses else None,
            "ok": self._end.get("ok"),
            "reason": self._end.get("reason"),
        }

    def _worker(self, number: int) -> _Worker:
        worker = self._workers.get(number)
        if worker is None:
            worker = self._workers[number] = _Worker()
        return worker

    def _on_job(self, record: Record) -> None:
        self._job = record
        for number in range(record["workers"]):
            self._worker(number)

    def _on_pushed(self, record: Record) -> None:
        worker = self._worker(record["worker"])
        worker.pushes += 1
        worker.compute_s += record["compute_s"]
        if record.get("loss") is not None:
            worker.loss = _plain(float(record["loss"]))
        if record["incarnation"] == worker.incarnation and worker.doing in ("computing", "idle"):
            worker.clock += 1
            worker.turn("waiting", record["t"])

    def _on_settle(self, record: Record) -> None:
        worker = self._worker(record["worker"])
        worker.fates[record["fate"]] += 1
        if record["fate"] == "folded":
            worker.samples += record["samples"]

    def _on_fold(self, record: Record) -> None:
        self._version = record["version"]
        self._last_fold = record["t"]
        for part in record["parts"]:
            worker, staleness = self._worker(part["worker"]), part["staleness"]
            worker.parts += 1
            worker.staleness_sum += staleness
            worker.staleness_max = max(worker.staleness_max, staleness)

    def _on_release(self, record: Record) -> None:
        if self._first_release is None:
            self._first_release = record["t"]
        worker = self._worker(record["worker"])
        worker.incarnation = max(worker.incarnation, record["incarnation"])
        worker.clock = record["clock"]
        worker.turn("computing", record["t"])

    def _on_paused(self, record: Record) -> None:
        self._worker(record["worker"]).turn("idle", record["t"])

    def _on_epoch_ended(self, record: Record) -> None:
        self._epochs.append({"pool": record["pool"], "epoch": record["epoch"], "t": record["t"], **record["report"]})

    def _on_state(self, record: Record) -> None:
        worker, state = self._worker(record["worker"]), record["state"]
        if state == "dead" and worker.state != "dead":
            worker.deaths += 1
        worker.state, worker.reason = state, record["reason"]
        worker.incarnation = max(worker.incarnation, record["incarnation"])
        worker.turn("joining" if state == "alive" else "absent", record["t"])

    def _on_metrics(self, record: Record) -> None:
        # The newest version counts; of several workers that measured it, the one with the lowest number.
        key = (record["version"], -record["worker"])
        for name, value in record["values"].items():
            if name not in self._metrics or key >= self._metrics[name][0]:
                self._metrics[name] = (key, _plain(value) if isinstance(value, float) else value)

    def _on_fault(self, record: Record) -> None:
        self._faults.append({key: record.get(key) for key in ("t", "worker", "what", "detail")})

    def _on_end(self, record: Record) -> None:
        self._end = record
        for worker in self._workers.values():
            worker.turn("absent", record["t"])
