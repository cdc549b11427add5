"""Turn what is known of a job into what its page shows, in bounded memory: the messages of the event stream. Pure.

A message is JSON. The first one that a browser gets is whole; each later one has what has changed since the one before it. Texts of
scripts go into it as they are: the page shows them as text, never as markup.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low
from typing import Any, Final, Literal, NamedTuple

from offbeat.journal.arrivals import Record, host_in
from offbeat.journal.verdicts import LEAST
from offbeat.journal.worker_summary import NOT_COME
from offbeat.report.remarks import verdict_sentence
from offbeat.types import Seconds
from offbeat.view.extracts import by_cost, finite, histogram, marks, total, verdict_of
from offbeat.view.happenings import cut, happening
from offbeat.view.heat import DEAD, FIRST, LAST, Heat
from offbeat.view.heat import LEAST as HEAT_LEAST
from offbeat.view.heat import MOST as HEAT_MOST
from offbeat.view.lanes import ORDER, WINDOW_S, Entry, Lanes, plain_tail
from offbeat.view.levels import Levels

KINDS: Final = (
    "job",
    "pushed",
    "release",
    "fold",
    "state_changed",
    "process",
    "fault",
    "warning",
    "exception",
    "checkpoint",
    "rule_changed",
    "stood_still",
    "epoch_ended",
    "end",
)
"""The records that the page is made from, beside the job's figures."""
LANES_ALL: Final = 12
"""Most workers of which each has a lane;"""
LANES_SOME: Final = 8
"""of more workers, those that cost most."""
ROWS: Final = 50
"""Most rows of the table of workers."""
EVENTS: Final = 200
METRICS: Final = 32
"""Most names of which the page keeps curves, the first ones; others have only their newest value, in the job's figures."""
NAME_MAX: Final = 80
VERDICTS: Final = 8
SAMPLES: Final = 5
"""Rates are those since so many figures ago: at one a second, of five seconds."""
FOLDS_PER_S: Final = 40.0
OWN: Final = ("samples_per_s", "version", "waiting", "loss", "alive")
"""The page's five numbers."""
LOSSES: Final = ("loss", "train/loss", "train_loss", "training_loss")


class _Before(NamedTuple):
    """The figures of some seconds ago, from which rates are counted."""

    wall_s: Seconds
    samples: int
    waited_s: Seconds
    busy_s: Seconds


class JobView:
    """What the page of one job shows.

    Args:
        source: what it is about, if not the script's name: a journal's.
        live: True if the job runs while this is looked at, so that its clock goes on between two records.
    """

    def __init__(self, source: str = "", *, live: bool = True) -> None:
        self._source, self.live = source, live
        self._job: dict[str, Any] = {}
        self._snapshot: Mapping[str, Any] = {}
        self._lanes = Lanes()
        self._heat: Heat | None = None
        self._hosts: dict[int, str] = {}
        self._events: deque[tuple[Seconds, str]] = deque(maxlen=EVENTS)
        self._folds: deque[Seconds] = deque(maxlen=round(WINDOW_S * FOLDS_PER_S))
        self._before: deque[_Before] = deque(maxlen=SAMPLES)
        self.levels: dict[str, Levels] = {}
        """The curves by name."""
        self._metrics: dict[str, str] = {}
        """The curves' names of what the script logs, by its names."""
        self.notes: dict[str, str] = {}
        """Sentences about what is shown, by their reason: what is missing, for instance."""
        self._advice: list[dict[str, Any]] = []
        self.advisable: Literal["yes", "asked"] | None = None
        """Whether a reader can ask for an advice, or has asked."""
        self.t: Seconds = 0.0
        """The newest time."""
        self.over = False
        """True once the end of the job is known."""
        self._died: set[int] = set()
        """Workers whose death was told, until they are alive again."""
        self._missed = 0
        self._unreadable = 0
        self.dirty = True
        """True if something has changed since the last message."""
        self._fresh_events: deque[tuple[Seconds, str]] = deque(maxlen=EVENTS)
        self._fresh_folds: deque[Seconds] = deque(maxlen=self._folds.maxlen)
        self._fresh_samples: deque[list[float | None]] = deque(maxlen=61)
        self._fresh_state = True
        self._shown: list[int] = []
        self._width: Seconds = 0.0

    def record(self, record: Record) -> None:
        """Take the next record of the journal. One that is not as it should be is counted and passed over."""
        try:
            if not math.isfinite(t := float(record["t"])):
                raise ValueError(t)
            self.t = max(self.t, t)
            if not record.get("optimizer"):
                self._record(record)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            self._unreadable += 1
        self.dirty = True

    def status(self, snapshot: Mapping[str, Any]) -> None:
        """Take the job's figures, as `Tally.summary` gives them."""
        self.t = max(self.t, snapshot["elapsed_s"])
        if not self._job and snapshot.get("workers"):
            self._begin(snapshot)
        self._sample(snapshot)
        self._snapshot = snapshot
        self.over = self.over or snapshot.get("ok") is not None
        self._fresh_state = self.dirty = True

    def missed(self, records: int) -> None:
        """Note that so many records are missing here."""
        self._missed += records

    def note(self, about: str, text: str | None) -> None:
        """Show a sentence about what is shown, or no longer."""
        if self.notes.get(about) != text:
            self.notes = {key: value for key, value in {**self.notes, about: text}.items() if value is not None}
            self._fresh_state = self.dirty = True

    def advise(self, rows: Sequence[dict[str, Any]]) -> None:
        """Show what other rules would have made of the job: rows as `report.page.render` takes them, the job itself first."""
        self._advice, self.advisable = list(rows), self.advisable and "yes"
        self._fresh_state = self.dirty = True

    def ask(self) -> None:
        """Show that an advice is being worked out."""
        self.advisable = "asked"
        self._fresh_state = self.dirty = True

    # Records.

    def _record(self, record: Record) -> None:
        t, kind = float(record["t"]), record["kind"]
        if kind == "pushed":
            if record.get("alone") or not record.get("shard"):
                own = self._lanes.pushed(record)
                if own is not None and self._heat is not None:
                    whole = sum((record.get("phases") or {"": record.get("compute_s", 0.0)}).values())
                    self._heat.step(record["worker"], t - whole, t, own)
        elif kind == "release":
            self._lanes.release(record["worker"], t)
        elif kind == "fold":
            if not record.get("shard") and not (self._folds and t - self._folds[-1] < 1.0 / FOLDS_PER_S):
                self._folds.append(t)
                self._fresh_folds.append(t)
        elif kind == "job":
            self._begin(record)
        elif kind == "state_changed":
            if self._changed(record, t):
                return
        elif kind == "process" and record["role"] == "worker" and (host := host_in(record["detail"])):
            self._hosts[record["number"]] = cut(host, NAME_MAX)
            if self._heat is not None:
                self._heat.by_host(self._hosts)
        elif kind == "end":
            self.over = self._fresh_state = True
        if (said := happening(record)) is not None:
            self._events.append((t, said))
            self._fresh_events.append((t, said))

    def _begin(self, job: Mapping[str, Any]) -> None:
        self._job = {key: job.get(key) for key in ("sync", "workers", "servers", "started", "script")}
        workers = int(job.get("workers") or 0)
        self._lanes.begin(workers)
        if workers > LANES_ALL and self._heat is None:
            self._heat = Heat(workers)
        self._fresh_state = True

    def _changed(self, record: Record, t: Seconds) -> bool:
        """Take a worker's state. Returns True where this is the end of a death that was told: a late message of the dead one is no life."""
        worker, state = record["worker"], record["state"]
        again = state == "dead" and worker in self._died
        if state == "dead":
            self._died.add(worker)
            self._lanes.died(worker, t, "awaited" if record["reason"] in NOT_COME else "dead")
        elif state != "recovered":
            self._died.discard(worker)
        if state == "alive":
            self._lanes.alive(worker, t)
        elif state == "finished":
            self._lanes.gone(worker)
        if self._heat is not None:
            change = self._heat.died if state == "dead" else self._heat.alive
            change(worker, t)
        return again

    # Figures.

    def _sample(self, snapshot: Mapping[str, Any]) -> None:
        before, t = self._snapshot, float(snapshot["elapsed_s"])
        if before and t <= before["elapsed_s"]:
            return
        values = self._values(snapshot)
        for name, value in values.items():
            if value is not None:
                self.levels.setdefault(name, Levels()).add(t, value)
        self._fresh_samples.append([t, *(values.get(name) for name in OWN)])

    def _values(self, after: Mapping[str, Any]) -> dict[str, float | None]:
        rate = waiting = None
        if self._before:
            before = self._before[0]
            seconds = after["wall_s"] - before.wall_s  # up to a fold: samples come with folds
            rate = (after["samples"] - before.samples) / seconds if seconds > 0.0 else 0.0
            waited, busy = total(after, "wait_s") - before.waited_s, total(after, "busy_s") - before.busy_s
            waiting = waited / (waited + busy) if waited + busy > 0.0 else None
        self._before.append(_Before(after["wall_s"], after["samples"], total(after, "wait_s"), total(after, "busy_s")))
        values: dict[str, float | None] = {
            "samples_per_s": rate if after["samples"] else None,
            "version": float(after["version"]),
            "waiting": waiting,
            "alive": float(sum(worker["state"] in ("alive", "finished") for worker in after["per_worker"])),
            "loss": finite(after.get("loss")),
        }
        metrics = after.get("metrics") or {}
        for name in metrics:
            if name in self._metrics or len(self._metrics) < METRICS:
                values[self._metrics.setdefault(name, f"metric {len(self._metrics)}")] = finite(metrics[name])
        if values["loss"] is None:
            values["loss"] = next((finite(metrics[name]) for name in LOSSES if name in metrics), None)
        return {name: None if value is None or not math.isfinite(value) else value for name, value in values.items()}

    # Messages.

    def whole(self) -> dict[str, Any]:
        """Return the whole of what is shown. Call `change` before it: what has not been sent yet is in this message, too."""
        lanes = {number: self._entries(self._lanes.of(number)) for number in self._shown}
        recent = {name: [[t, value] for t, value in self.levels[name].recent] for name in OWN if name in self.levels}
        return {
            "whole": True,
            "order": ORDER,
            "window": WINDOW_S,
            **self._moment(),
            "state": self._state(),
            "lanes": {number: {"entries": entries, "all": True} for number, entries in lanes.items()},
            "folds": [round(t, 3) for t in self._folds],
            "events": self._plain(self._events),
            "recent": recent,
            "heat": self._heat_columns(whole=True),
        }

    def change(self) -> dict[str, Any]:
        """Return what has changed since the last call."""
        if self._heat is not None and not self.over:
            self._heat.now(self.t)
        before, self._shown = self._shown, self._chosen()
        lanes = {}
        for number in self._shown:
            entries = self._lanes.take(number)
            if number not in before:
                lanes[number] = {"entries": self._entries(self._lanes.of(number)), "all": True}
            elif entries:
                lanes[number] = {"entries": self._entries(entries)}
        fresh = {
            "folds": [round(t, 3) for t in self._fresh_folds],
            "events": self._plain(self._fresh_events),
            "samples": list(self._fresh_samples),
            "state": self._state() if self._fresh_state else None,
            "heat": self._heat_columns(),
        }
        for sent in (self._fresh_folds, self._fresh_events, self._fresh_samples):
            sent.clear()
        self._fresh_state = self.dirty = False
        return {**self._moment(), "lanes": lanes, **{name: value for name, value in fresh.items() if value}}

    def lane(self, number: int) -> dict[str, Any] | None:
        """Return one worker's lane; None: there is no such worker."""
        if number not in self._lanes.workers:
            return None
        return {"entries": self._entries(self._lanes.of(number)), "tail": plain_tail(self._lanes.workers[number]), "t": self.t}

    def _moment(self) -> dict[str, Any]:
        tails = {number: plain_tail(self._lanes.lane(number)) for number in self._shown}
        return {"t": round(self.t, 4), "over": self.over, "live": self.live and not self.over, "shown": self._shown, "tails": tails}

    def _entries(self, entries: Sequence[Entry]) -> list[list[float]]:
        return [entry.plain() for entry in entries if entry.stop >= self.t - WINDOW_S]

    @staticmethod
    def _plain(events: Iterable[tuple[Seconds, str]]) -> list[list[Any]]:
        return [[round(t, 2), text] for t, text in events]

    def _heat_columns(self, *, whole: bool = False) -> dict[str, Any] | None:
        if self._heat is None:
            return None
        resized = self._heat.width != self._width and not whole
        columns = self._heat.take(whole=whole or resized)
        if not columns:
            return None
        self._width = self._heat.width
        encoded = {at: b64encode(column).decode() for at, column in columns.items()}
        scale = {"dead": DEAD, "first": FIRST, "last": LAST, "least": HEAT_LEAST, "most": HEAT_MOST}
        found = {"width": self._heat.width, "columns": encoded, "all": whole or resized}
        return {**found, "rows": self._heat.rows, "scale": scale} if found["all"] else found

    def _chosen(self) -> list[int]:
        """Return the workers whose lanes are shown."""
        if len(self._lanes.workers) <= LANES_ALL:
            return sorted(self._lanes.workers)
        costliest = sorted(self._snapshot.get("per_worker", ()), key=by_cost)[:LANES_SOME]
        return [worker["worker"] for worker in costliest]

    def _state(self) -> dict[str, Any]:
        snapshot = self._snapshot
        per_worker = snapshot.get("per_worker", ())
        verdicts = snapshot.get("verdicts") or []
        seconds = next((one["cost_s"] / one["share"] for one in verdicts if one["share"] > 0.0), snapshot.get("wall_s") or 0.0)
        usual = {number: lane.usual for number, lane in self._lanes.workers.items()}
        known = [own for own in usual.values() if own is not None]
        middle = median_low(known) if known else None
        rows = [self._row(worker, seconds, usual.get(worker["worker"]), middle) for worker in sorted(per_worker, key=by_cost)[:ROWS]]
        slow = [verdict for verdict in verdicts if verdict["kind"] != "death"]
        deaths = [verdict for verdict in verdicts if verdict["kind"] == "death"]
        return {
            "job": {**self._job, "script": cut(self._job.get("script") or "", NAME_MAX), "source": self._source},
            "ok": snapshot.get("ok"),
            "reason": cut(snapshot.get("reason") or ""),
            "folds": snapshot.get("version", 0),
            "seconds": seconds,
            "verdicts": [verdict_of(verdict) for verdict in slow[:VERDICTS]],
            "deaths": [cut(verdict_sentence(verdict)) for verdict in deaths],
            "died": sum(worker["deaths"] for worker in per_worker),
            "least": LEAST,
            "workers": {"rows": rows, "all": len(per_worker), "median": middle},
            "marks": marks(rows, slow, deaths) if self._heat is not None else [],
            "steps": histogram(usual) if len(per_worker) > LANES_ALL else None,
            "metrics": self._logged(snapshot),
            "advice": self._advice,
            "advisable": self.advisable,
            "notes": [*self.notes.values(), *self._lacks()],
        }

    def _row(self, worker: Mapping[str, Any], seconds: Seconds, own: Seconds | None, middle: Seconds | None) -> dict[str, Any]:
        longest = self._lanes.lane(worker["worker"]).longest()
        whole = worker["wait_s"] + worker["busy_s"]
        return {
            "worker": worker["worker"],
            "host": self._hosts.get(worker["worker"], ""),
            "doing": worker["doing"] if worker["state"] != "dead" else "awaited" if worker["reason"] in NOT_COME else "dead",
            "step": own,
            "ratio": own / middle if own is not None and middle else None,
            "longest": longest,
            "waiting": worker["wait_s"] / whole if whole > 0.0 else None,
            "folded": worker["fates"]["folded"],
            "deaths": worker["deaths"],
            "cost": worker.get("cost_s", 0.0) / seconds if seconds > 0.0 else 0.0,
        }

    def _logged(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        metrics = snapshot.get("metrics") or {}
        values = [[curve, cut(name, NAME_MAX), finite(metrics.get(name))] for name, curve in self._metrics.items()]
        return {"values": values, "more": max(0, len(metrics) - len(values))}

    def _lacks(self) -> list[str]:
        lacks = {
            "records are missing here: they came faster than this page reads. The job has lost nothing.": self._missed,
            "records were not as this version of offbeat expects them, and are left out.": self._unreadable,
        }
        return [f"{count:,} {what}" for what, count in lacks.items() if count]
