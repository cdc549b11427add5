"""Count what a job has done so far, record by record. This file uses the standard library only, and prints nothing.

The same object serves the live display (`summary` costs O(workers), whenever it is wanted), the summary file and the report of an old
journal, a simulated one as well. Inconsistent records are found by the audit (`Tally.problems`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from offbeat.journal.arrivals import FoldedSamples, Record
from offbeat.journal.audit import Audit
from offbeat.journal.costs import COST_HANDLERS, Costs
from offbeat.journal.elsewhere import Elsewhere
from offbeat.journal.epoch_reports import EpochReports
from offbeat.journal.turns import TURN_HANDLERS, Turn, Turns, Watcher
from offbeat.journal.verdicts import verdicts
from offbeat.journal.worker_summary import FATES, Spread, WorkerTally, plain
from offbeat.types import Seconds

LEAD_BOUNDED: Final = frozenset({"ssp", "dssp"})
"""The rules that bound how many iterations a worker may be ahead of the slowest."""
FAULTS_LISTED: Final = 1_000
"""Faults listed in a summary, the first ones; all are in the journal."""
EXCEPTIONS_LISTED: Final = 100
"""Most exceptions of scripts in a summary; the journal has all."""
RULES_LISTED: Final = 1_000
"""Changes of the rule listed in a summary, the first ones; the journal has all."""


@dataclass(slots=True)
class _Shard:
    """Count the records of one shard under a rule of shard scope."""

    version: int = 0
    staleness: Spread = field(default_factory=Spread)


class SlowestClock:
    """Finds the least clock of the workers that take part without a search among all of them.

    Args:
        turns: of all workers, by number.
    """

    def __init__(self, turns: Mapping[int, Turn]) -> None:
        self._turns = turns
        self.aside: set[int] = set()
        """Workers that wait with another optimizer of the job, for which this rule does not wait."""
        self._heap: list[tuple[int, int]] = []
        """Clocks with their workers. Each worker that takes part has an entry that is not above its clock; others are corrected here."""
        self._noted: dict[int, int] = {}

    def note(self, number: int) -> None:
        """Note a worker that may have begun to take part, or has another clock than before."""
        clock = self._turns[number].clock
        if number not in self._noted or clock < self._noted[number]:
            self._noted[number] = clock
            heapq.heappush(self._heap, (clock, number))

    def clock(self) -> int:
        """Return the least clock; at least one worker takes part."""
        while True:
            clock, number = self._heap[0]
            turn = self._turns[number]
            takes_part = turn.doing in ("computing", "waiting") and number not in self.aside
            if takes_part and turn.clock == clock:
                return clock
            heapq.heappop(self._heap)
            if self._noted.get(number) == clock:
                del self._noted[number]
            if takes_part:
                self.note(number)


class Tally(Watcher):
    """Counts the records of one journal.

    Args:
        audited: look for inconsistencies as well, see `problems`; False: the records are only counted.

    >>> tally = Tally()
    >>> tally.add({"kind": "job", "t": 0, "format": 1, "sync": "asp", "workers": 1, "servers": 1, "seed": 0})
    >>> tally.add({"kind": "release", "t": 0.5, "worker": 0, "incarnation": 1, "version": 0, "clock": 0, "reason": ""})
    >>> tally.add({"kind": "pushed", "t": 1.5, "worker": 0, "incarnation": 1, "version": 0, "samples": 8, "compute_s": 0.9})
    >>> tally.summary()["pushes"], tally.summary()["per_worker"][0]["compute_s"]
    (1, 0.9)
    >>> tally.add({"kind": "end", "t": 2.0, "ok": True, "reason": "no fate follows"})
    >>> tally.problems()
    ['worker 0, incarnation 1: its push at 1.5 s has no fate']
    """

    def __init__(self, *, audited: bool = True) -> None:
        self._audit = Audit() if audited else None
        self.costs = Costs()
        """What each worker costs the job, and why."""
        self.turns = Turns((self,))
        """What each worker does."""
        self.job: Record = {}
        """The first record."""
        self._end: Record = {}
        self._last_fold: float | None = None
        self._version = 0
        self._blocks = 0
        self._workers: defaultdict[int, WorkerTally] = defaultdict(WorkerTally)
        self._shards: dict[int, _Shard] = {}
        self._samples = FoldedSamples()
        self._parts = Spread()
        self._scale = Spread()
        self._slowest: SlowestClock | None = None
        """None: the rule does not bound how far a worker may be ahead."""
        self._planned = False
        """True if the rule, or the measured speeds, have ever set the size of batches."""
        self._metrics: dict[str, tuple[tuple[int, int], Any]] = {}
        self._epochs = EpochReports()
        self._faults: list[Record] = []
        self._warnings: list[Record] = []
        self._exceptions: list[Record] = []
        self._rule_changes: list[Record] = []
        self._others: dict[int, Tally] = {}
        """The tallies of the optimizers after the first, where a job has several."""
        self._elsewhere = Elsewhere()
        self.journal_failure: str | None = None
        """The reason for which the journal of these records is incomplete, set by the owner of the journal."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> Tally:
        """Return the tally of a whole journal, for instance of ``journal.read(path)``."""
        tally = cls()
        for record in records:
            tally.add(record)
        return tally

    def add(self, record: Record) -> None:
        """Count the next record. Kinds that are not known are passed over, as the format demands."""
        kind, t, costs, turns = record["kind"], record["t"], self.costs, self.turns
        if t > turns.now:
            turns.now = t
        if number := record.get("optimizer", 0):
            if number not in self._others:
                self._others[number] = Tally(audited=self._audit is not None)
                self._others[number].add(self.job)
            self._others[number].add({key: value for key, value in record.items() if key != "optimizer"})
            if kind == "pushed":
                self._elsewhere.pushed(record)
            if kind == "warning":  # the summary of the first optimizer has the warnings of all
                self._on_warning({**record, "detail": f"optimizer {number}: {record.get('detail')}"})
            return
        if self._audit is not None:
            self._audit.add(record)
        if kind == "pushed" and self._others:
            record = self._elsewhere.whole(record)
        if t > costs.now:
            costs.now = t
        if (count := COST_HANDLERS.get(kind)) is not None:
            count(costs, record)
        if (follow := TURN_HANDLERS.get(kind)) is not None:
            follow(turns, record)
        if (handler := _HANDLERS.get(kind)) is not None:
            handler(self, record)

    def push(self, turn: Turn, record: Record, begun: Seconds) -> int:
        """Count a push, or an abandoned computation."""
        worker = self._workers[record["worker"]]
        worker.busy_s += record["t"] - begun
        if record["kind"] == "abandoned":
            worker.gave_up(record)
        else:
            worker.pushed(record)
        return 0

    def stretch(self, worker: int, turn: Turn, doing: str, stop: Seconds) -> None:
        """Count time without a push."""
        if doing == "computing":
            self._workers[worker].busy_s += stop - turn.since
        elif doing == "idle":
            self._workers[worker].idle_s += stop - turn.since
        elif doing == "waiting":
            self._workers[worker].wait_s += stop - turn.since

    def waited(self, worker: int, turn: Turn, stop: Seconds) -> None:
        """Count a wait."""
        self._workers[worker].wait_s += stop - turn.since

    def problems(self) -> list[str]:
        """Return the inconsistencies: a push without a fate or with two, a fold of a contribution that was never pushed, and the like."""
        others = [f"optimizer {number}: {text}" for number, tally in self._others.items() for text in tally.problems()]
        return ([] if self._audit is None else self._audit.problems()) + others

    def summary(self, *, brief: bool = False) -> dict[str, Any]:
        """Return all counts so far as plain data that JSON can carry; described in ``docs/summary.md``.

        ``brief``: with the report of the newest epoch only; all earlier ones are in the sums.
        ``wall_s`` runs from the first release to the last fold, and ``samples_per_s = samples / wall_s`` counts folded samples only.
        """
        workers, turns = [self._workers[number] for number in sorted(self._workers)], self.turns
        by_worker = self.costs.by_worker()
        per_worker = [
            {
                **worker.report(number, turns.workers.get(number) or Turn(), blocks=turns.blocks),
                **self.costs.times_of(number, None if brief else 6),
                "cost_s": round(sum(by_worker.get(number, {}).values()), 6),
            }
            for number, worker in zip(sorted(self._workers), workers, strict=True)
        ]
        # Of a script that closes one optimizer and makes the next, the newest training has logged last.
        trainings = [self, *(self._others[number] for number in sorted(self._others))]
        samples = sum(worker.samples for worker in workers)
        parts = sum(worker.staleness.count for worker in workers)
        wall_s = 0.0
        if turns.began is not None and self._last_fold is not None:
            wall_s = max(0.0, self._last_fold - turns.began)
        return {
            **{key: self.job.get(key) for key in ("sync", "workers", "servers", "seed", "started", "script")},
            "elapsed_s": turns.now,
            "wall_s": round(wall_s, 6),
            "version": self._version,
            "samples": samples,
            "samples_per_s": samples / wall_s if wall_s > 0 else 0.0,
            **{key: sum(worker[key] for worker in per_worker) for key in ("pushes", "steps", "abandoned", "interrupts")},
            "blocks": self._blocks,
            "fates": {fate: sum(worker["fates"][fate] for worker in per_worker) for fate in FATES},
            "staleness_mean": sum(worker.staleness.total for worker in workers) / parts if parts else 0.0,
            "staleness_max": max((worker["staleness_max"] for worker in per_worker), default=0),
            "lead_max": max((worker["lead_max"] for worker in per_worker if worker["lead_max"] is not None), default=None),
            "parts": self._parts.report(),
            "scale": self._scale.report() if (self._scale.least, self._scale.most) != (1.0, 1.0) else None,
            "shards": self._per_shard(),
            "per_worker": per_worker,
            "metrics": {name: value for one in trainings for name, (_, value) in one._metrics.items()},
            **self._epochs.summary(brief=brief),
            "faults": list(self._faults),
            "warnings": list(self._warnings),
            "exceptions": list(self._exceptions),
            "rule_changes": list(self._rule_changes),
            "verdicts": [verdict.plain() for verdict in verdicts(self.costs)],
            "loss": next((loss for one in reversed(trainings) if (loss := one._loss()) is not None), None),
            "optimizers": self._per_optimizer(),
            "journal_failure": self.journal_failure,
            "ok": self._end.get("ok"),
            "reason": self._end.get("reason"),
        }

    def _loss(self) -> float | str | None:
        """Return the mean over workers of the newest loss of each; None: none has logged any."""
        losses = [float(worker.loss) for _, worker in sorted(self._workers.items()) if worker.loss is not None]
        return plain(sum(losses) / len(losses)) if losses else None

    def _per_shard(self) -> list[dict[str, Any]] | None:
        if not self._shards:
            return None
        return [
            {
                "shard": number,
                "version": shard.version,
                "staleness_mean": shard.staleness.mean,
                "staleness_max": int(shard.staleness.most) if shard.staleness.count else 0,
            }
            for number, shard in sorted(self._shards.items())
        ]

    def _per_optimizer(self) -> list[dict[str, Any]] | None:
        if not self._others:
            return None
        fields = ("sync", "version", "pushes", "fates", "staleness_mean", "staleness_max")
        found = ((number, tally.summary()) for number, tally in sorted(self._others.items()))
        return [{"optimizer": number, **{key: summary[key] for key in fields}} for number, summary in found]

    def _on_optimizer(self, record: Record) -> None:
        self._on_job({**self.job, "sync": record["sync"]})

    def _on_job(self, record: Record) -> None:
        self.job = dict(record)
        self._slowest = SlowestClock(self.turns.workers) if str(record.get("sync")).partition("(")[0] in LEAD_BOUNDED else None
        for number in range(record["workers"]):
            self._workers.setdefault(number, WorkerTally())

    def _on_pushed(self, record: Record) -> None:
        self._blocks += 1
        if "shard" in record:
            self._shards = self._shards or {shard: _Shard() for shard in range(len(record["held"]))}
            self._samples.pushed(record)
        if self._slowest is not None:
            self._slowest.note(record["worker"])

    def _on_settle(self, record: Record) -> None:
        worker = self._workers[record["worker"]]
        worker.fates[record["fate"]] += 1
        worker.samples += self._samples.settled(record, record["samples"])

    def _on_fold(self, record: Record) -> None:
        shard, parts = self._shards.get(record.get("shard", -1)), record["parts"]
        if shard is None:
            self._version = record["version"]
        else:
            shard.version = record["version"]
            self._version = min(one.version for one in self._shards.values())
        self._last_fold = record["t"]
        self._parts.add(len(parts))
        self._scale.add(float(record.get("scale", 1.0)))
        for part in parts:
            self._workers[part["worker"]].staleness.add(part["staleness"])
            if shard is not None:
                shard.staleness.add(part["staleness"])

    def _on_release(self, record: Record) -> None:
        worker, turn = self._workers[record["worker"]], self.turns.workers[record["worker"]]
        worker.released(record)
        if self._last_fold is None:  # a job that has resumed begins with another version than 0
            self._version = record["version"]
        if self._slowest is not None and turn.doing == "computing":
            self._slowest.note(record["worker"])
            worker.lead.add(turn.clock - self._slowest.clock())
        self._planned = self._planned or worker.batch is not None

    def _on_resized(self, record: Record) -> None:
        self._planned = True
        for number, size in record["batches"].items():
            worker = self._workers[int(number)]
            worker.batch = worker.measured = size

    def _on_set_aside(self, record: Record) -> None:
        if self._slowest is not None:
            self._slowest.aside.add(record["worker"])

    def _on_taken_back(self, record: Record) -> None:
        if self._slowest is not None:
            self._slowest.aside.discard(record["worker"])
            self._slowest.note(record["worker"])

    def _on_interrupt(self, record: Record) -> None:
        self._workers[record["worker"]].interrupts += 1

    def _on_state_changed(self, record: Record) -> None:
        worker, incarnation = record["worker"], record["incarnation"]
        self._workers[worker].changed(record)
        if record["state"] == "alive":
            self._samples.joined(worker, incarnation)

    def _on_epoch_ended(self, record: Record) -> None:
        epoch = {"pool": record["pool"], "epoch": record["epoch"], "t": record["t"], **record["report"]}
        if self._planned:
            alive = {number: worker.batch for number, worker in sorted(self._workers.items()) if worker.state == "alive"}
            epoch["batches"] = {str(number): batch for number, batch in alive.items() if batch is not None}
        self._epochs.add(epoch)

    def _on_metrics(self, record: Record) -> None:
        # The newest version counts; of several workers that measured it, the one with the lowest number.
        key = (record["version"], -record["worker"])
        for name, value in record["values"].items():
            if name not in self._metrics or key >= self._metrics[name][0]:
                self._metrics[name] = (key, plain(value) if isinstance(value, float) else value)

    def _on_fault(self, record: Record) -> None:
        if len(self._faults) < FAULTS_LISTED:
            self._faults.append({key: record.get(key) for key in ("t", "worker", "what", "detail")})

    def _on_warning(self, record: Record) -> None:
        """Note the first warning of each kind: optimizers of one script that take the same batches find the same."""
        if all(warning["about"] != record.get("about") for warning in self._warnings):
            self._warnings.append({key: record.get(key) for key in ("t", "about", "workers", "step", "detail")})

    def _on_exception(self, record: Record) -> None:
        if len(self._exceptions) < EXCEPTIONS_LISTED:
            self._exceptions.append({key: record.get(key) for key in ("t", "worker", "reason", "place")})

    def _on_rule_changed(self, record: Record) -> None:
        if len(self._rule_changes) < RULES_LISTED:
            self._rule_changes.append({key: record[key] for key in ("t", "version", "rule", "reason")})

    def _on_end(self, record: Record) -> None:
        self._end = record
        for tally in self._others.values():
            tally.add(record)
        self.turns.end()


_HANDLERS: Final[Mapping[str, Callable[[Tally, Record], None]]] = {
    "job": Tally._on_job,
    "optimizer": Tally._on_optimizer,
    "pushed": Tally._on_pushed,
    "settle": Tally._on_settle,
    "undone": lambda tally, record: tally._workers[record["worker"]].undone(record),
    "fold": Tally._on_fold,
    "release": Tally._on_release,
    "interrupt": Tally._on_interrupt,
    "set_aside": Tally._on_set_aside,
    "taken_back": Tally._on_taken_back,
    "epoch_ended": Tally._on_epoch_ended,
    "resized": Tally._on_resized,
    "rule_changed": Tally._on_rule_changed,
    "state_changed": Tally._on_state_changed,
    "metrics": Tally._on_metrics,
    "fault": Tally._on_fault,
    "warning": Tally._on_warning,
    "exception": Tally._on_exception,
    "end": Tally._on_end,
}
