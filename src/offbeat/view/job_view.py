"""Keep what the page of one job shows, in bounded memory, and make the messages of the event stream and of the page's file from it. Pure.

A message is JSON. The first one that a browser gets is whole; each later one has what has changed since the one before it. The sections
of figures and words come as the template sets them out (``page.py``); pushes and shares of time as packed columns (``columns.py``).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from offbeat.journal.arrivals import Record, host_in
from offbeat.journal.costs import Costs
from offbeat.journal.elsewhere import Elsewhere
from offbeat.journal.turns import ENDED_BY, Turns
from offbeat.journal.worker_summary import NOT_COME
from offbeat.report.figures import Summary, judged_s, waiting_share
from offbeat.report.remarks import culprits
from offbeat.report.waits import Waits
from offbeat.types import Seconds
from offbeat.view.accounts import share_of
from offbeat.view.bars import LANES, WORDS, lanes
from offbeat.view.columns import Packed
from offbeat.view.content import Source, context, figure, finite
from offbeat.view.happenings import TOLD, cut, happening
from offbeat.view.levels import Levels
from offbeat.view.shares import KIND_OF, KINDS, MOST_WORKERS, ORDER
from offbeat.view.steps import CHANGES_KEPT, FATES, Column, Steps

FOLLOWED: Final = (
    *("job", "pushed", "release", "fold", "settle", "state_changed", "process", "fault", "warning", "exception", "checkpoint"),
    *("rule_changed", "stood_still", "epoch_ended", "end", "abandoned", "paused"),
    *(kind for kind in ENDED_BY if kind not in ("pushed", "abandoned")),
)
"""The records that the page of a running job is made from, beside the job's figures."""
WINDOW_S: Final[Seconds] = 15.0
"""The newest stretch of time, which the page of a running job shows at first."""
EVENTS: Final = 200
DEATHS: Final = 2_000
METRICS: Final = 32
"""Most names of which the page keeps curves, the first ones; others have only their newest value, in the job's figures."""
NAME_MAX: Final = 80
STALENESS_KEPT: Final = 1_000
"""Greater values of staleness count as this one."""
PARTS_KEPT: Final = 100_000
"""Most parts of folds that wait for their fate."""
SAMPLES: Final = 5
"""Rates are those since so many figures ago: at one a second, of five seconds."""
OWN: Final = {"samples_per_s": "samples/s", "version": "version", "waiting": "waiting", "loss": "loss", "alive": "workers alive"}
"""The page's five numbers, and their names."""
STALENESS: Final = "staleness"
LOSSES: Final = ("loss", "train/loss", "train_loss", "training_loss")

UNREADABLE: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a record leads to that is not as it should be."""


class _Before(NamedTuple):
    """The figures of some seconds ago, from which rates are counted."""

    wall_s: Seconds
    samples: int
    waited_s: Seconds
    busy_s: Seconds
    version: int
    t: Seconds


class JobView:
    """What the page of one job shows.

    Args:
        source: what it is about, if not the script's name: a journal's.
        live: True if the job runs while this is looked at, so that its clock goes on between two records.
        costs: counts what workers cost the job, from the records of a whole journal, in which pushes have their fates. None: the records
            are of the kinds of `FOLLOWED`, and some may be missing.
    """

    def __init__(self, source: str = "", *, live: bool = True, costs: Costs | None = None) -> None:
        self.source, self.live, self.costs = source, live, costs
        self.summary: Summary = {}
        """The newest figures."""
        self.job: Record = {}
        """The first record."""
        self.steps, self.waits = Steps(), Waits()
        self.turns = Turns((self.steps, self.waits))
        self.staleness: Counter[int] = Counter()
        """Parts of folds by their staleness."""
        self.hosts: dict[int, str] = {}
        self.records = 0
        self.phases = False
        """True if the workers have measured their phases."""
        self.events: deque[tuple[Seconds, str]] = deque(maxlen=EVENTS)
        self.levels: dict[str, Levels] = {}
        """The curves by name."""
        self.metrics: dict[str, str] = {}
        """The curves' names of what the script logs, by its names."""
        self.notes: dict[str, str] = {}
        """Sentences about what is shown, by their reason: what is missing, for instance."""
        self.advice: list[dict[str, Any]] = []
        self.advisable: Literal["yes", "asked"] | None = None
        """Whether a reader can ask for an advice, or has asked."""
        self.t: Seconds = 0.0
        """The newest time."""
        self.over = False
        """True once the end of the job is known."""
        self.dirty = True
        """True if something has changed since the last message."""
        self._before: deque[_Before] = deque(maxlen=SAMPLES)
        self._parts: dict[tuple[int, int], int] = {}
        """The staleness of parts of folds whose fate has not come, by worker and clock."""
        self._awaited: dict[int, Seconds] = {}
        self._elsewhere = Elsewhere()
        self._died: set[int] = set()
        """Workers whose death was told, until they are alive again."""
        self._missed = self._unreadable = 0
        self._logs = False
        """True if what scripts log comes in records, and not in figures alone."""
        self._losses = False
        """True if pushes say their loss."""
        self._fresh = True
        """True if figures or words have changed since the last message."""
        self._samples: deque[list[float | None]] = deque(maxlen=61)
        self._sent: dict[str, str] = {}
        """The sections as they were sent last."""
        self._sent_stretches = 0
        self._shown: list[int] = []
        """The workers that have a lane at first."""

    def record(self, record: Record) -> None:
        """Take the next record of the journal. One that is not as it should be is counted and passed over."""
        try:
            self.add(record)
        except UNREADABLE:
            self.unreadable()

    def status(self, snapshot: Mapping[str, Any]) -> None:
        """Take the job's figures, as `Tally.summary` gives them."""
        self.t = max(self.t, snapshot["elapsed_s"])
        before, t = self.summary, float(snapshot["elapsed_s"])
        if not before or t > before["elapsed_s"]:
            values = {name: value for name, value in self._values(snapshot, t).items() if value is not None and math.isfinite(value)}
            for name, value in values.items():
                if name != "loss" or not self._losses:
                    self._put(name, t, value)
                self.levels[name].sample(t, value)
            self._samples.append([t, *map(values.get, OWN)])
        self.summary = dict(snapshot)
        self.over = self.over or snapshot.get("ok") is not None
        self._fresh = self.dirty = True

    def unreadable(self) -> None:
        """Note that a record is not as it should be."""
        self._unreadable += 1
        self._fresh = True

    def missed(self, records: int) -> None:
        """Note that so many records are missing here."""
        self._missed += records
        self._fresh = self.dirty = True

    def note(self, about: str, text: str | None) -> None:
        """Show a sentence about what is shown, or no longer."""
        if self.notes.get(about) != text:
            self.notes = {key: value for key, value in {**self.notes, about: text}.items() if value is not None}
            self._fresh = self.dirty = True

    def advise(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show what other rules would have made of the job: rows as `advise.table.page_rows` gives them, the job itself first."""
        self.advice, self.advisable = list(rows), self.advisable and "yes"
        self._fresh = self.dirty = True

    def ask(self) -> None:
        """Show that an advice is being worked out."""
        self.advisable = "asked"
        self._fresh = self.dirty = True

    def lacks(self) -> list[str]:
        """Return sentences about records that are not in what is shown."""
        lacks = {
            "records are missing here: they came faster than this page reads. The job has lost nothing.": self._missed,
            "records were not as this version of offbeat expects them, and are left out.": self._unreadable,
        }
        return [f"{count:,} {what}" for what, count in lacks.items() if count]

    # Records.

    def add(self, record: Record) -> None:
        """Take the next record of the journal. Raises what a record leads to that offbeat has not written."""
        self.records += 1
        self.dirty = True
        if not math.isfinite(record["t"]):
            raise ValueError(record["t"])
        worker = record.get("worker", 0)
        if not -1 <= worker < MOST_WORKERS:
            raise ValueError(f"worker {worker}")
        t, kind = record["t"], record["kind"]
        self.t = max(self.t, t)
        if record.get("optimizer"):
            if kind == "pushed":
                self._elsewhere.pushed(record)
            return
        if kind == "settle":
            if self.costs is None and record["fate"] in ("folded", "carried"):
                return  # the record of its fold has said so, maybe before
            self.steps.settle(record, self._parts.pop((worker, record["clock"]), None))
            return
        if kind == "fold":
            self._folded(record, t)
            return
        if kind == "pushed":
            record = self._elsewhere.whole(record)
        self.turns.add(record)
        if kind == "pushed":
            if (loss := record.get("loss")) is not None:
                self._losses = True
                self._put("loss", t, float(loss))
            self.phases = self.phases or bool(record.get("phases"))
        elif kind == "metrics":
            self._logs = True
            for name, value in record["values"].items():
                if (curve := self._curve(name)) is not None:
                    self._put(curve, t, float(value))
        elif kind in TOLD:
            self._tell(record, t, kind)

    def _tell(self, record: Record, t: Seconds, kind: str) -> None:
        """Take a record that may be worth a sentence."""
        if kind == "job" and not self.job:
            self.job, self._fresh = record, True
        elif kind == "process" and record["role"] == "worker" and (host := host_in(record["detail"])):
            self.hosts[record["number"]] = cut(host, NAME_MAX)
        elif kind == "end":
            self.over = self._fresh = True
        elif kind == "state_changed":
            worker, state = record["worker"], record["state"]
            again = state == "dead" and worker in self._died  # a late message of the dead one is no life
            if state == "dead":
                self._died.add(worker)
                if record["reason"] in NOT_COME:
                    self._awaited[worker] = t
            elif state != "recovered":
                self._died.discard(worker)
                self._awaited.pop(worker, None)
            if again:
                return
        if (said := happening(record)) is not None:
            self.events.append((t, said))

    def _folded(self, record: Record, t: Seconds) -> None:
        self.turns.now = max(self.turns.now, t)
        total = 0
        for part in record["parts"]:
            worker, clock, staleness = part["worker"], part["clock"], part["staleness"]
            total += staleness
            self.staleness[min(staleness, STALENESS_KEPT)] += 1
            if self.costs is not None:
                self._parts[worker, clock] = staleness
            elif worker in self.turns.workers:  # no record of its own says what becomes of a push
                fate = {"fate": "folded", "worker": worker, "clock": clock, "incarnation": self.turns.workers[worker].incarnation}
                self.steps.settle({**record, **fate}, staleness)
        if record["parts"]:
            self._put(STALENESS, t, total / len(record["parts"]))
        if len(self._parts) > PARTS_KEPT:  # fates that never came
            self._parts.clear()

    def end(self) -> None:
        """Close what is under way at the last record: nothing more will come."""
        self.turns.end()
        self.steps.end()
        self._awaited.clear()
        self._fresh = self.dirty = True

    # Figures.

    def _put(self, name: str, t: Seconds, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            self.levels.setdefault(name, Levels()).add(t, value)

    def _curve(self, name: str) -> str | None:
        """Return the curve's name of something that a script logs; None: it has none."""
        if name in self.metrics or len(self.metrics) < METRICS:
            return self.metrics.setdefault(name, f"metric {len(self.metrics)}")
        return None

    def _values(self, after: Mapping[str, Any], t: Seconds) -> dict[str, float | None]:
        rate = waiting = None
        if self._before:
            before = self._before[0]
            seconds = after["wall_s"] - before.wall_s  # up to a fold: samples come with folds
            rate = (after["samples"] - before.samples) / seconds if seconds > 0.0 else 0.0
            waited, busy = total(after, "wait_s") - before.waited_s, total(after, "busy_s") - before.busy_s
            waiting = waited / (waited + busy) if waited + busy > 0.0 else None
        times = total(after, "wait_s"), total(after, "busy_s")
        self._before.append(_Before(after["wall_s"], after["samples"], *times, after["version"], t))
        values: dict[str, float | None] = {
            "samples_per_s": rate if after["samples"] else None,
            "version": float(after["version"]),
            "waiting": waiting,
            "alive": float(sum(worker["state"] in ("alive", "finished") for worker in after["per_worker"])),
            "loss": finite(after.get("loss")),
        }
        metrics = after.get("metrics") or {}
        for name in () if self._logs else metrics:
            if (curve := self._curve(name)) is not None:
                values[curve] = finite(metrics[name])
        if values["loss"] is None:
            values["loss"] = next((finite(metrics[name]) for name in LOSSES if name in metrics), None)
        return values

    def figures(self) -> list[list[str]]:
        """Return the page's five numbers: each one's curve, its name, the number, and a remark; of a job that has ended, of all of it."""
        after = self.summary
        recent = {name: [value for _, value in self.levels[name].recent] for name in OWN if name in self.levels}
        rate, waiting = (_mean(recent.get(name, ())[-SAMPLES:]) for name in ("samples_per_s", "waiting"))
        if self.over:
            rate, waiting = after.get("samples_per_s") or None, waiting_share(after.get("per_worker", ()))
        first, last = (self._before[0], self._before[-1]) if self._before else (None, None)
        pace = (last.version - first.version) / (last.t - first.t) if first and last and last.t > first.t else None
        if self.over and after.get("wall_s"):
            pace = after["version"] / after["wall_s"]
        workers, deaths = after.get("per_worker", ()), sum(worker["deaths"] for worker in after.get("per_worker", ()))
        alive, over = recent.get("alive"), "over the whole job" if self.over else "over the last seconds"
        told = {
            "samples_per_s": (figure(rate), over if rate else "the script does not say samples"),
            "version": (f"{after['version']:,}" if after else "-", "" if pace is None else f"{figure(pace)} a second"),
            "waiting": (share_of(waiting), "of the workers' time"),
            "loss": (figure(_mean(recent.get("loss", ())[-1:])), "mean over workers" if "loss" in recent else "not logged"),
            "alive": (
                f"{alive[-1]:,.0f} of {len(workers):,}" if alive else "-",
                f"{deaths:,} death{'s' * (deaths != 1)} so far" if deaths else "no deaths",
            ),
        }
        return [[name, OWN[name], *told[name]] for name in OWN]

    @property
    def seconds(self) -> Seconds:
        """The time that costs are a share of: from the first release until now."""
        if self.costs is not None:
            return self.costs.seconds
        return judged_s(self.summary) if self.summary else 0.0

    # Messages.

    def whole(self, source: Source | None = None) -> dict[str, Any]:
        """Return the whole of what is shown. Call `change` before it: what has not been sent yet is in this message, too.

        Args:
            source: the journal's file, if it has been read to its end, for a page that needs no server.
        """
        steps = self.steps
        steps.flush()
        packed = Packed(max(self.turns.now, self.t))
        complete = source is not None or (self.costs is not None and self.over)
        columns = steps.columns(None if complete else CHANGES_KEPT)
        packed.pushes(columns)
        packed.shares(steps.shares)
        packed.stretches(steps.stretches)
        since = 0.0 if complete else _unbroken(columns["number"], columns["arrived"])
        return {
            "whole": True,
            "name": self.source,
            "words": WORDS,
            "kinds": KINDS,
            "order": ORDER,
            "kind_of": KIND_OF,
            "fates": FATES,
            "live_s": WINDOW_S,
            "since": since,
            "window": steps.window if complete else 0.0,
            "stride": steps.stride,
            **self._moment(self.turns.workers),
            **self._state(),
            "html": self._sections(source),
            "recent": {name: list(map(list, self.levels[name].recent)) for name in OWN if name in self.levels},
            "packed": {**packed.plain(), "part": 0, "doing": [one[1] for one in steps.stretches]},
        }

    def change(self) -> dict[str, Any]:
        """Return what has changed since the last call."""
        steps, packed = self.steps, Packed(max(self.turns.now, self.t))
        fresh: dict[str, Any] = {}
        if self._fresh:
            steps.flush()
        packed.pushes(steps.changed())
        stretches = steps.stretches[self._sent_stretches :]
        self._sent_stretches = len(steps.stretches)
        packed.stretches(stretches)
        part = -1
        if self._fresh:
            part = steps.shares.changed_from()
            packed.shares(steps.shares, part)
            sections = self._sections(None)
            fresh = {**self._state(), "html": {name: html for name, html in sections.items() if self._sent.get(name) != html}}
            self._sent = sections
        if self._samples:
            fresh["samples"] = list(self._samples)
        if packed.columns:
            fresh["packed"] = {**packed.plain(), "part": part, "doing": [one[1] for one in stretches]}
        moment = self._moment(self.turns.workers if self._fresh else self._shown)
        self._samples.clear()
        self._fresh = self.dirty = False
        return {**moment, **fresh}

    def _sections(self, source: Source | None) -> dict[str, str]:
        from offbeat.view.page import sections  # the template's engine is slow to load

        return sections(context(self, source)) if self.summary or self.job else {}

    def _moment(self, workers: Iterable[int]) -> dict[str, Any]:
        """Return the time, and what workers do that has not ended: since when, what, and how long they waited before it."""
        tails: dict[int, list[Any]] = {}
        for number in workers:
            turn = self.turns.workers.get(number)
            if number in self._awaited:
                tails[number] = [self._awaited[number], "awaited"]
            elif turn is not None and turn.doing != "absent":
                tails[number] = [
                    round(turn.since, 4),
                    turn.doing,
                    *([round(turn.waited, 4)] if turn.waited and turn.doing == "computing" else []),
                ]
        return {"t": round(self.t, 4), "over": self.over, "live": self.live and not self.over, "tails": tails}

    def _state(self) -> dict[str, Any]:
        """Return what the page's scripts know of the job."""
        summary, seconds, steps, known = self.summary, self.seconds, self.steps, self.costs.workers if self.costs is not None else {}
        per_worker = summary.get("per_worker", ())
        count = min(MOST_WORKERS, max([steps.shares.longest.shape[0], *(number + 1 for number in self.turns.workers)]))
        costs = {worker["worker"]: worker.get("cost_s", 0.0) for worker in per_worker}
        told = 0 < len(per_worker) >= len(self.turns.workers)  # the newest summary may be older than the newest records
        self._shown = [number for number in (lanes(summary) if told else sorted(self.turns.workers)[:LANES]) if number < count]
        return {
            "began": self.turns.began or 0.0,
            "end": max(self.turns.now, 1e-6),
            "workers": count,
            "hosts": [self.hosts.get(number, "") for number in range(count)] if self.hosts else [],
            "lanes": self._shown,
            "slow": culprits(summary) if summary else [],
            "costs": [round(costs.get(number, 0.0), 4) for number in range(count)],
            "seconds": seconds,
            "deaths": [[number, one.t, one.back] for number, worker in known.items() for one in worker.deaths][:DEATHS],
            "reasons": steps.reasons.texts(),
            "enders": [ENDED_BY.get(kind, "") for kind in steps.kinds.texts()],
            "width": steps.shares.width,
            "parts": steps.shares.longest.shape[1],
            "pushes": steps.count,
            "ok": summary.get("ok"),
            "figures": self.figures() if summary else [],
            "advisable": self.advisable,
            "advised": bool(self.advice),
        }


def total(snapshot: Mapping[str, Any], key: str) -> float:
    """Return the sum of a figure over the workers."""
    return float(sum(worker[key] for worker in snapshot["per_worker"]))


def _unbroken(number: Column, arrived: Column) -> Seconds:
    """Return from when on all pushes are among these; 0: all of the job are."""
    first = int((np.diff(number) != 1).nonzero()[0].max(initial=-1)) + 1
    return 0.0 if not len(number) or number[first] == 1 else float(arrived[first])


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
