"""Make a cluster of a journal: the measured steps of a live job, its deaths and returns, and what its pushes and folds took besides.

A worker's turn lasts from its release to its push. Three parts of it are replayed: computing, as the worker has measured it; the fold,
which occupies the server; and the rest, which counts as the way of the push. So a simulation of the journal's own rule takes as long as the
job did, and the differences between rules are in whom they wait for, and in how many folds they make.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from offbeat.core.batch_sizes import BatchOrder
from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import FoldedSamples, Record, host_in
from offbeat.journal.file import Records
from offbeat.journal.summary import Tally
from offbeat.journal.turns import Turn, Turns, Watcher
from offbeat.report.figures import TOLD_TO_LEAVE
from offbeat.sim.cluster import Cluster
from offbeat.sim.faults import Join, Kill, Restart, Script, Slow
from offbeat.sim.latency.recorded import Column, Recorded, column
from offbeat.sim.latency.registry import Constant
from offbeat.types import Seconds, WorkerId, worker_ids

TURNS: Final = 20
"""The least turns of a worker, first ones of its processes not counted, from which its times are known."""
FOLD_SHARE: Final = 0.25
"""The part of a turn's unexplained time that is the fold's: the rest are messages, and the server's and the worker's waking. From runs
of `benchmarks.advice --calibrate`, which are not those that the benchmark judges."""
LEAST_PART: Final = 0.2
"""A run is replayed until its first script ends by itself, where that is this part of the time or more: later, workers are missing."""
STILL: Final = 1e6
"""The factor that slows a worker down so far that it pushes nothing: its process starts, or has died and the job does not know it yet."""


Happening: TypeAlias = Kill | Restart | Join | Slow
"""What a journal tells of a worker's processes."""


class Measured(NamedTuple):
    """One turn of a worker. Times are the journal's."""

    begun: Seconds
    compute_s: Seconds
    """Of one step, where the turn has several."""
    besides_s: Seconds
    """What the turn took beyond its computing."""
    link_s: Seconds | None
    """The part of that which no phase of the worker explains; None: it has not measured phases."""


@dataclass(slots=True)
class _Worker:
    turns: list[Measured] = field(default_factory=list)
    alive_at: Seconds | None = None
    released_at: Seconds = 0.0
    pushed_at: Seconds = 0.0
    owes: bool = False
    """True from its release to its push."""
    fresh: bool = True
    """True until the first push of its process."""
    samples: int = 0
    steps: int = 0
    came_at: list[Seconds] = field(default_factory=list)
    """When each process was admitted, and"""
    ready_at: list[Seconds] = field(default_factory=list)
    """when it first pushed, in the order of the processes; the end of the time if it never did."""
    died: list[tuple[Seconds, Seconds]] = field(default_factory=list)
    """When the job knew of each death, and since when the worker had owed a push then."""


class _Recorder(Watcher):
    def __init__(self) -> None:
        self.workers: dict[WorkerId, _Worker] = {}
        self.turns = Turns((self,))
        self.folded: list[tuple[Seconds, int, int]] = []
        """Of each fold: its time, the version, and all samples until then."""
        self.job: Record = {}
        self.hosts: dict[str, str] = {}
        """The host of each process whose record names one: ``worker 0`` or ``server 0``."""
        self.finished_at: Seconds | None = None
        """When the first script ended by itself."""
        self.dealt = False
        """True if the job dealt samples out, in epochs that ended at these times:"""
        self.epochs: list[Seconds] = []
        self._samples = 0
        self._of_folds = FoldedSamples()

    def add(self, record: Record) -> None:
        """Take the next record of the first optimizer."""
        kind, t = record["kind"], record["t"]
        if record.get("optimizer"):
            return
        if kind == "job" and not self.job:
            self.job = record
        elif kind == "state_changed":
            self._changed(self._worker(record["worker"]), record)
        elif kind == "release":
            worker = self._worker(record["worker"])
            worker.released_at, worker.owes = t, True
        elif kind == "process" and (host := host_in(record["detail"])):
            self.hosts[f"{record['role']} {record['number']}"] = host
        elif kind == "settle":
            self._samples += self._of_folds.settled(record, record["samples"] or 1)
        elif kind == "fold" and (self._of_folds.alone or not record.get("shard")):
            self.folded.append((t, record["version"], self._samples))
        elif kind == "epoch_ended":
            self.epochs.append(t)
        self.dealt = self.dealt or (kind == "pushed" and bool(record["leases"]))
        self.turns.add(record)

    def push(self, turn: Turn, record: Record, begun: Seconds) -> int:
        worker, t = self._worker(record["worker"]), record["t"]
        if record["kind"] != "pushed":
            return 0
        self._of_folds.pushed(record)
        worker.pushed_at, worker.owes = t, False
        if worker.fresh:
            worker.fresh = False
            worker.ready_at.append(t)
            return 0
        steps = max(1, record.get("steps", 1))
        worker.samples += record.get("samples", 0)
        worker.steps += steps
        phases = record.get("phases") or {}
        exchanged = phases.get("push", 0.0) + phases.get("pull", 0.0)
        if self.turns.blocks:  # no record says when the worker went on
            besides, link = exchanged, None
        else:
            besides = max(0.0, t - begun - record["compute_s"])
            link = max(0.0, besides - exchanged) if phases else None
        worker.turns.append(Measured(begun, record["compute_s"] / steps, besides, link))
        return 0

    def _worker(self, number: int) -> _Worker:
        return self.workers.setdefault(WorkerId(number), _Worker())

    def _changed(self, worker: _Worker, record: Record) -> None:
        state, t = record["state"], record["t"]
        if state == "alive" and worker.alive_at is None:
            worker.alive_at, worker.fresh = t, True
            self._of_folds.joined(record["worker"], record["incarnation"])
            worker.came_at.append(t)
        elif state == "dead" and worker.alive_at is not None:
            if worker.fresh:
                worker.ready_at.append(t)
            worker.died.append((t, max(worker.alive_at, worker.released_at) if worker.owes else t))
            worker.alive_at = None
        elif state == "finished" and record["reason"] != TOLD_TO_LEAVE and self.finished_at is None:
            self.finished_at = t
        elif state == "finished" and worker.alive_at is not None:
            worker.died.append((t, t))
            worker.alive_at = None


class Part(NamedTuple):
    """What a simulated worker is made from."""

    like: WorkerId
    """The measured worker whose times it takes."""
    own: WorkerId | None
    """The measured worker whose deaths and batches it has; None: it never dies."""


@dataclass(frozen=True)
class Recording:
    """A live job as the simulator replays it. Times are in seconds since `began`, after the first push of the first worker."""

    path: str
    summary: dict[str, Any]
    job: Record
    began: Seconds
    """In the journal's time."""
    seconds: Seconds
    """How long it lasted."""
    workers: tuple[WorkerId, ...]
    """Those whose times are known;"""
    unknown: tuple[WorkerId, ...]
    """and those that pushed too seldom: they are taken to be like the median worker."""
    compute: dict[WorkerId, Column]
    besides: dict[WorkerId, Column]
    """What a turn takes beyond computing and the fold."""
    fold_s: Seconds
    batches: dict[WorkerId, int]
    """Samples of a step; 0: not known."""
    faults: tuple[Happening, ...]
    folded: tuple[tuple[Seconds, int, int], ...]
    """Of each fold: its time, the version, and all folded samples before it."""
    hosts: dict[str, str]
    cut: str | None
    """What is missing of the journal, a sentence; None: nothing is."""
    epochs: tuple[Seconds, ...] | None = None
    """When epochs ended; None: the job dealt no samples."""

    @property
    def total(self) -> int:
        """The number of the job's workers."""
        return len(self.workers) + len(self.unknown)

    @property
    def rate(self) -> float:
        """Folded samples a second, or folded steps where samples are not known; the beginning of the scripts is left out."""
        inside = [(t, samples) for t, _, samples in self.folded if 0.0 <= t <= self.seconds]
        if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def by_speed(self) -> list[WorkerId]:
        """Return the workers whose times are known, the fastest first."""
        return sorted(self.workers, key=lambda worker: self.compute[worker].mean)

    @property
    def usual(self) -> WorkerId:
        """The median worker."""
        order = self.by_speed()
        return order[(len(order) - 1) // 2]

    def cast(self, workers: int | None = None, repaired: Collection[WorkerId] = ()) -> tuple[Part, ...]:
        """Return what each of so many simulated workers is like.

        Args:
            workers: fewer than the job has: the slowest are left out; more: further ones are like the median. None: as many.
            repaired: workers that become like the median one.
        """
        own = [Part(worker if worker in self.compute else self.usual, worker) for worker in worker_ids(self.total)]
        own = [part._replace(like=self.usual) if part.own in repaired else part for part in own]
        workers = self.total if workers is None else workers
        if workers < self.total:
            order = self.by_speed()
            own = sorted(own, key=lambda part: (order.index(part.like), part.own))[:workers]
            own.sort(key=lambda part: part.own or 0)
        return (*own, *[Part(self.usual, None)] * (workers - self.total))

    def cluster(
        self,
        cast: Sequence[Part],
        *,
        begin: Seconds = 0.0,
        seconds: Seconds | None = None,
        turned: int = 0,
        seed: int = 0,
        servers: int | None = None,
        fold_s: Seconds | None = None,
        link: float | None = None,
        model_size: float | None = None,
        entry: Literal["at_once", "next_epoch"] = "at_once",
    ) -> Cluster:
        """Return the machines of this run.

        Args:
            cast: what each simulated worker is like.
            begin: the second of the run with which the simulation begins.
            seconds: how much of the run is simulated: later deaths are left out.
            turned: the step of each worker with which the rest that does not last begins: another order of the same noise.
            seed: of the rule's own draws.
            servers: None: as in the job.
            fold_s: None: as in the job.
            link, model_size: see `Cluster`: what messages took in the job is left out, and their bytes take time. None: as in the job.
            entry: when a process that comes takes part, see `Policy.entry`. Epochs end when they did in the job.
        """
        last = self.seconds if seconds is None else begin + seconds
        compute: list[Column] = []
        besides: list[Column] = []
        for place, (like, _) in enumerate(cast):
            copies = sum(before.like == like for before in cast[:place])
            for found, columns in ((self.compute, compute), (self.besides, besides)):
                one = found[like]
                columns.append(one.moved((copies * len(one.factors)) // (copies + 1)) if copies else one)
        places = {part.own: WorkerId(place) for place, part in enumerate(cast) if part.own is not None}
        faults = self.faults if entry == "at_once" or self.epochs is None else _entering(self.faults, self.epochs)
        moved = [fault._replace(worker=places[fault.worker]) for fault in faults if fault.worker in places]
        pushes = Recorded(what=f"pushes of {self.path}", columns=tuple(besides), begin=begin, turned=turned)
        return Cluster(
            workers=len(cast),
            servers=servers or self.job["servers"],
            compute=Recorded(what=f"computing of {self.path}", columns=tuple(compute), begin=begin, turned=turned),
            push_delay=pushes if link is None else Constant(seconds=0.0),
            update_s=self.fold_s if fold_s is None else fold_s,
            link=link,
            model_size=model_size,
            hosts=None if link is None else self.hosts_of(len(cast)),
            faults=Script(_within(moved, begin, last)),
            seed=seed,
        )

    def hosts_of(self, workers: int) -> int | None:
        """Return on how many hosts so many workers and the servers are, if the job's were on several; None: each on its own."""
        of_workers = self._hosts("worker")
        if len(of_workers) < 2 or self.apart:
            return None
        return max(1, min(workers, round(workers * len(of_workers) / self.total)))

    @property
    def apart(self) -> bool:
        """Whether a server was on a host without workers, as far as is known."""
        return not self._hosts("server") <= self._hosts("worker")

    def _hosts(self, role: str) -> set[str]:
        return {host for name, host in self.hosts.items() if name.startswith(f"{role} ")}

    def sizes(self, cast: Sequence[Part]) -> tuple[int, BatchOrder]:
        """Return the samples of a step, and the workers for which it is another number."""
        known = sorted(size for size in self.batches.values() if size)
        if not known:
            return 1, BatchOrder()
        usual = known[len(known) // 2]
        own = [usual if part.own is None else self.batches.get(part.own, 0) or usual for part in cast]
        named = tuple((place, size) for place, size in enumerate(own) if size != usual)
        return usual, BatchOrder(usual, named)


def recorded(path: Path | str, *listeners: Callable[[Record], None]) -> Recording:
    """Read a journal; ``listeners`` are handed each record too.

    Raises:
        ConfigurationError: it is no journal, or too short to tell how long the workers' steps take.
    """
    recorder, tally = _Recorder(), Tally()

    def add(record: Record) -> None:
        for take in (tally.add, recorder.add, *listeners):
            take(record)

    records = Records(path, tolerant=True)
    records.feed(add)
    summary = tally.summary()
    _check(path, recorder, summary)
    workers = {number: worker for number, worker in recorder.workers.items() if number < recorder.job["workers"] or worker.turns}
    known = tuple(number for number, worker in sorted(workers.items()) if len(worker.turns) >= TURNS)
    began = min(workers[number].turns[0].begun for number in known)
    ended = max(*(workers[number].pushed_at for number in known), recorder.folded[-1][0] if recorder.folded else 0.0)
    if recorder.finished_at is not None and recorder.finished_at - began > LEAST_PART * (ended - began):
        ended = min(ended, recorder.finished_at)
    links = [median(link) for number in known if (link := [turn.link_s for turn in workers[number].turns if turn.link_s is not None])]
    fold_s = FOLD_SHARE * min(links, default=0.0)
    compute, besides = {}, {}
    for number in known:
        turns = workers[number].turns
        times = [turn.begun - began for turn in turns]
        compute[number] = column(times, [turn.compute_s for turn in turns])
        besides[number] = column(times, [max(0.0, turn.besides_s - fold_s) for turn in turns])
    faults = [fault for number, worker in workers.items() for fault in _faults(number, worker, began, ended, _turn_s(worker, workers))]
    return Recording(
        path=Path(path).name,
        summary=summary,
        job=recorder.job,
        began=began,
        seconds=ended - began,
        workers=known,
        unknown=tuple(number for number in sorted(workers) if number not in known),
        compute=compute,
        besides=besides,
        fold_s=fold_s,
        batches={number: round(worker.samples / worker.steps) if worker.steps else 0 for number, worker in workers.items()},
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        folded=tuple((t - began, version, samples) for t, version, samples in recorder.folded),
        hosts=recorder.hosts,
        cut=records.cut,
        epochs=tuple(t - began for t in recorder.epochs) if recorder.dealt else None,
    )


def _check(path: Path | str, recorder: _Recorder, summary: dict[str, Any]) -> None:
    if not recorder.job:
        raise ConfigurationError(f"{path}: not a journal of a job: it has no 'job' record")
    counts = {number: len(worker.turns) for number, worker in recorder.workers.items()}
    most = sorted(counts.get(number, 0) for number in worker_ids(recorder.job["workers"]))
    usual = most[len(most) // 2]  # with a worker that died early, or that a rule hardly waits for, something is known all the same
    if usual >= TURNS:
        return
    version = summary["version"]
    needed = -(-version * (TURNS + 1) // (usual + 1))
    raise ConfigurationError(
        f"{path}: too short to advise from: it has {version:,} versions, and half of the workers have made at most {usual} steps, "
        f"first ones left out; it takes {TURNS} steps of most workers, about {max(needed, version + 1):,} versions: let it run longer"
    )


def _turn_s(worker: _Worker, workers: dict[WorkerId, _Worker]) -> Seconds:
    """Return how long a turn of this worker takes as a rule, or one of the others."""
    turns = worker.turns or [turn for one in workers.values() for turn in one.turns]
    return median(turn.compute_s + turn.besides_s for turn in turns)


def _faults(number: WorkerId, worker: _Worker, began: Seconds, ended: Seconds, turn_s: Seconds) -> list[Happening]:
    """Return the deaths and returns of a worker. Until its first push a new process starts: it is there, and others may wait for it."""
    found: list[Happening] = []
    for place, came in enumerate(worker.came_at):
        ready = worker.ready_at[place] if place < len(worker.ready_at) else ended
        if came > began:
            at = came - began
            found.append(Restart(at, number) if place else Join(at, number))
            if ready - came > turn_s:
                found.append(Slow(at, number, ready - came - turn_s, STILL))
        if place < len(worker.died):
            died, owed_since = worker.died[place]
            if died >= ended:
                break
            since = max(owed_since, ready, began)
            if died > since:
                found.append(Slow(since - began, number, died - since, STILL))
            found.append(Kill(max(0.0, died - began), number))
    if not worker.came_at:
        found.append(Kill(0.0, number))
    return found


def _entering(faults: Sequence[Happening], epochs: Sequence[Seconds]) -> list[Happening]:
    """Return the faults of a run in which a process takes part from the next epoch on, or never."""
    found: list[Happening] = []
    for worker in sorted({fault.worker for fault in faults}):
        enters: Seconds = 0.0
        came: list[Happening] = []
        """Of the present process; it counts once the process takes part."""
        absent = worker in Script(tuple(faults)).absent
        for fault in (one for one in faults if one.worker == worker):
            if isinstance(fault, Restart | Join):
                enters = min((end for end in epochs if end > fault.at_s), default=math.inf)
                came = [(Join if absent else Restart)(enters, worker)] if enters < math.inf else []
            elif isinstance(fault, Slow):
                begin, end = max(fault.at_s, enters), fault.at_s + fault.for_s
                came += [fault._replace(at_s=begin, for_s=end - begin)] if end > begin else []
            elif fault.at_s < enters:
                enters, came = math.inf, []
            else:
                found += [*came, fault]
                absent, came = False, []
        found += came
    return sorted(found, key=lambda fault: fault.at_s)


def _within(faults: Sequence[Happening], begin: Seconds, end: Seconds) -> tuple[Happening, ...]:
    """Return the faults of a part of the run. A worker that is not there when the part begins joins later, or never."""
    away: dict[WorkerId, bool] = {}
    found: list[Happening] = []
    for fault in faults:
        worker = fault.worker
        if isinstance(fault, Slow):
            start, stop = max(fault.at_s, begin), min(fault.at_s + fault.for_s, end)
            if stop > start:
                found.append(fault._replace(at_s=start - begin, for_s=stop - start))
        elif fault.at_s <= begin:
            away[worker] = isinstance(fault, Kill)
        elif fault.at_s < end:
            returns = isinstance(fault, Restart | Join)
            moved = fault._replace(at_s=fault.at_s - begin)
            found.append(Join(moved.at_s, worker) if returns and away.pop(worker, False) else moved)
        elif isinstance(fault, Join) and worker not in away:
            away[worker] = True
    found += [Kill(0.0, worker) for worker, gone in away.items() if gone]
    return tuple(sorted(found, key=lambda fault: fault.at_s))
