"""Work out what each worker costs its job, and why, record by record: the figures from which verdicts are made (``verdicts.py``).

*Where a fold is of several workers' pushes* it waits for the last of them. The time from the first arrival to the last is divided among
the workers that had not arrived yet, moment by moment, in equal shares (the Shapley value of this wait): with one late worker that worker
has all of it, and with three late ones of four each has a third. *Where each push is folded alone* the job loses what a worker computes
longer than the fast ones do, and the waits of the others that this causes; both count per worker of the job.

A worker's cost is divided by causes: by how much longer each phase of its push was than with the fastest quarter of the fold's workers.
Two causes are not phases. `QUEUED`: the script's thread was ready to run and had no core. `LINK`: the time between a release and the push
that the worker's own phases do not explain, so messages on their way, or a release that the worker had no core to read.

The first push after a worker has joined is left out: it contains the beginning of its script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from offbeat.core.phases import Phase
from offbeat.journal.arrivals import Record, host_in
from offbeat.journal.series import Series
from offbeat.types import Seconds

QUEUED, LINK = "queued", "link"
COMPUTE, WAIT = Phase.COMPUTE.label, Phase.WAIT.label
BUCKETS: Final = 32
"""In how many parts of the job's time costs are kept apart; a part becomes twice as long whenever there would be more."""
DEATHS_KEPT: Final = 20
"""Of each worker, the newest."""
NOTHING: Final = 1e-6
Causes = dict[str, Seconds]


@dataclass(slots=True)
class Death:
    """Of a process of a worker; times are the journal's."""

    t: Seconds
    """When the job knew."""
    reason: str
    stalled_s: Seconds
    """For how long all other workers had waited then."""
    samples: int
    """Samples that it had been dealt and not pushed: others get them, or its next process."""
    others: int
    """Workers that lived then, the dead one not among them."""
    back: Seconds | None = None
    """When a new process got its first parameters; None: none has come."""
    pushed: bool = False
    """A new process has pushed."""
    lost: bool = False
    """What ran it is gone with it: an agent with its machine, a command that had joined the job, an actor."""

    def away_s(self, now: Seconds) -> Seconds:
        """Return for how long no process of the worker had parameters, until ``now`` if none has come."""
        return (now if self.back is None else self.back) - self.t

    def cost_s(self, now: Seconds) -> Seconds:
        """Return what it has cost the job: the wait of the others until the job knew, and the worker's share while it was away."""
        return self.stalled_s + self.away_s(now) / (self.others + 1)


@dataclass(slots=True)
class WorkerCosts:
    """What is known of one worker. Times are the journal's; sums leave out the first push of each process."""

    present: bool = False
    released_at: Seconds = 0.0
    pushed_at: Seconds = 0.0
    last: Causes = field(default_factory=dict)
    """Seconds of the last push by phase and cause, waits left out."""
    fresh: bool = True
    """No push but the first of this process has come."""
    causes: Causes = field(default_factory=dict)
    """What it has cost, by cause."""
    series: Series = field(default_factory=lambda: Series(most=BUCKETS, width=1.0))
    """Its whole cost in parts of the job's time."""
    folds: int = 0
    """Folds that contain a push of it."""
    late: int = 0
    """Folds for which it was the last to arrive."""
    pushes: int = 0
    steps: int = 0
    samples: int = 0
    own_s: Seconds = 0.0
    waited_s: Seconds = 0.0
    woken_late_s: Seconds = 0.0
    """For how long, beyond its phases, it had no core: with a release there to read, as a rule. A part of `LINK`."""
    totals: Causes = field(default_factory=dict)
    """Seconds by phase and cause."""
    used: Causes = field(default_factory=dict)
    """Processor seconds by phase."""
    host_readings: dict[str, float] = field(default_factory=dict)
    cores: float = 0.0
    host: str = ""
    gpu_looks: int = 0
    gpu_throttled: float = 0.0
    """How often the GPU was looked at, and how often its clock was lowered then."""
    deaths: list[Death] = field(default_factory=list)
    exited: str = ""
    """How its process has ended, if nothing has happened to its processes since."""
    held: dict[int, int] = field(default_factory=dict)
    """Samples that it has been dealt and not pushed yet, by lease."""
    processes: dict[int, int] = field(default_factory=dict)
    """Of a worker of several processes: for how many pushes each was the one for which the others waited."""
    slowed: str = ""
    """How it is slowed on purpose."""

    @property
    def queue(self) -> float:
        """The seconds for which it queues for a core, for each second that it uses one."""
        used = sum(self.used.values())
        return self.totals.get(QUEUED, 0.0) / used if used > 0.0 else 0.0

    def name_cause(self) -> None:
        """Give the last death the end of the process as its reason: that of the process's connection says less."""
        if self.exited and self.deaths[-1].reason.startswith("connection closed"):
            self.deaths[-1].reason = f"its process {self.exited}"

    def read(self, host: Mapping[str, float]) -> None:
        """Take what the operating system has done to the process since its last push."""
        for name, value in host.items():
            if name == "cores":
                self.cores = value
            elif name == "gpu_throttled":
                self.gpu_looks += 1
                self.gpu_throttled += value
            elif not name.startswith("gpu_"):
                self.host_readings[name] = self.host_readings.get(name, 0.0) + value

    def cost(self, t: Seconds, seconds: Seconds, causes: Causes) -> None:
        """Divide a cost among causes in proportion."""
        whole, sums = sum(causes.values()), self.causes
        for cause, weight in causes.items():
            sums[cause] = sums.get(cause, 0.0) + seconds * weight / whole
        self.series.add(t, seconds)


class Costs:
    """Adds up costs from the records of one optimizer of a job.

    >>> costs = Costs()
    >>> for record in (
    ...     {"kind": "job", "t": 0.0, "workers": 2},
    ...     *({"kind": "release", "t": 1.0, "worker": worker} for worker in (0, 1)),
    ...     *({"kind": "pushed", "t": t, "worker": worker, "compute_s": t - 1.0} for worker, t in ((0, 1.5), (1, 2.0))),
    ...     *({"kind": "pushed", "t": t, "worker": worker, "compute_s": t - 2.0} for worker, t in ((0, 2.5), (1, 3.5))),
    ...     {"kind": "fold", "t": 3.5, "parts": [{"worker": 0}, {"worker": 1}]},
    ... ):
    ...     costs.add(record)
    >>> costs.workers[1].causes
    {'compute': 1.0}
    """

    def __init__(self) -> None:
        self.workers: dict[int, WorkerCosts] = {}
        self.began: Seconds | None = None
        """The first release."""
        self.now: Seconds = 0.0
        self.folds = self.parts = 0
        self._folded_at: Seconds = 0.0

    def add(self, record: Record) -> None:
        """Take account of the next record; kinds that say nothing of costs are passed over."""
        if (handler := COST_HANDLERS.get(record["kind"])) is not None:
            handler(self, record)
        self.now = max(self.now, record["t"])

    def _worker(self, number: int) -> WorkerCosts:
        if number not in self.workers:
            self.workers[number] = WorkerCosts()
        return self.workers[number]

    def _released(self, record: Record) -> None:
        worker, t = self._worker(record["worker"]), record["t"]
        if self.began is None:
            self.began = t
        worker.released_at = t
        if worker.deaths and worker.deaths[-1].back is None:
            worker.deaths[-1].back = t

    def _pushed(self, record: Record) -> None:
        if record.get("shard") and not record.get("alone"):
            return
        worker, t, host = self._worker(record["worker"]), record["t"], record.get("host")
        seconds, waited = spent(record)
        own, woken_late_s = sum(seconds.values()), 0.0
        known = own + record.get("elsewhere_s", 0.0)
        # With blocks (`held`) no release says when.
        if "phases" in record and "held" not in record and (link := t - worker.released_at - known) > 0.0:
            seconds[LINK] = link
            if host:
                woken_late_s = min(link, max(0.0, host.get("queued_s", 0.0) - seconds.get(QUEUED, 0.0)))
        worker.pushed_at, worker.last = t, seconds
        worker.pushes += 1
        worker.steps += record.get("steps", 1)
        worker.samples += record.get("samples", 0)
        if worker.held:
            for lease in record.get("leases", ()):
                worker.held.pop(lease, None)
        worker.fresh = worker.pushes < 2
        if worker.deaths:
            worker.fresh = worker.fresh or not worker.deaths[-1].pushed
            worker.deaths[-1].pushed = True
        if host:
            worker.read(host)
        if worker.fresh:
            return
        if (process := record.get("process")) is not None:
            worker.processes[process] = worker.processes.get(process, 0) + 1
        worker.own_s += own
        worker.waited_s += waited
        worker.woken_late_s += woken_late_s
        if (processor := record.get("processor")) is not None:
            _add(worker.used, processor)
        _add(worker.totals, seconds)

    def _folded(self, record: Record) -> None:
        if record.get("shard"):
            return
        t, before = record["t"], self._folded_at
        self._folded_at = t
        known = self.workers
        self.folds += 1
        if len(parts := record["parts"]) == 1:  # nobody waited for another one's
            if (alone := known.get(parts[0]["worker"])) is not None:
                self.parts += 1
                alone.folds += 1
            return
        workers = {number: known[number] for part in parts if (number := part["worker"]) in known}
        self.parts += len(workers)
        fresh = False
        for worker in workers.values():
            worker.folds += 1
            fresh = fresh or worker.fresh
        if len(workers) < 2 or fresh:
            return
        arrivals = sorted([(max(before, worker.pushed_at), number) for number, worker in workers.items()])
        arrivals = [(min(t, at), number) for at, number in arrivals]
        if arrivals[-1][0] - arrivals[0][0] < NOTHING:
            return
        workers[arrivals[-1][1]].late += 1
        usual = _usual([worker.last for worker in workers.values()])
        share = 0.0
        for place in range(1, len(arrivals)):
            share += (arrivals[place][0] - arrivals[place - 1][0]) / (len(arrivals) - place)
            worker = workers[arrivals[place][1]]
            if share >= NOTHING:
                worker.cost(t, share, _longer(worker.last, usual))

    def _changed(self, record: Record) -> None:
        worker, t = self._worker(record["worker"]), record["t"]
        was, worker.present = worker.present, record["state"] == "alive"
        if record["state"] == "dead" and was and worker.pushes:
            others = [other for other in self.workers.values() if other.present and other.pushes]
            waiting = others and all(other.pushed_at >= other.released_at for other in others)
            stalled_s = t - max(worker.released_at, *(other.pushed_at for other in others)) if waiting else 0.0
            samples, worker.held = sum(worker.held.values()), {}
            worker.deaths.append(Death(t, record.get("reason", ""), max(0.0, stalled_s), samples, len(others)))
            del worker.deaths[:-DEATHS_KEPT]
            worker.name_cause()

    def _job(self, record: Record) -> None:
        for number in range(record["workers"]):
            self.workers[number] = WorkerCosts()

    def _granted(self, record: Record) -> None:
        self._worker(record["worker"]).held[record["lease"]] = record["stop"] - record["start"]

    def _no_more(self, record: Record) -> None:
        self._worker(record["worker"]).held.clear()

    def _given_back(self, record: Record) -> None:
        for lease in record.get("leases", ()):
            self._worker(record["worker"]).held.pop(lease, None)

    def _stood_still(self, record: Record) -> None:
        for worker in self.workers.values():
            worker.released_at += record["seconds"]

    def _fault(self, record: Record) -> None:
        if record["what"] == "slow" and record["worker"] in self.workers:
            self.workers[record["worker"]].slowed = record["detail"] or "a fault of kind slow"

    def _process(self, record: Record) -> None:
        if record["role"] != "worker":
            return
        worker = self._worker(record["number"])
        worker.host = host_in(record["detail"]) or worker.host
        worker.exited = record["detail"] if record["what"] == "exited" else ""
        if worker.deaths and (death := worker.deaths[-1]).back is None:
            death.lost = death.lost or record["what"] == "lost"
            worker.name_cause()

    def _ended(self, record: Record) -> None:
        """Forget the deaths of a failed job after which nothing was folded: they are its end, or come with it, and the reason says why."""
        for worker in () if record.get("ok", True) else self.workers.values():
            if worker.deaths and worker.deaths[-1].back is None and worker.deaths[-1].t >= self._folded_at:
                del worker.deaths[-1]

    @property
    def seconds(self) -> Seconds:
        """The time from the first release until now."""
        return 0.0 if self.began is None else self.now - self.began

    @property
    def together(self) -> bool:
        """True if folds are of several workers' pushes."""
        return self.parts > 1.5 * self.folds

    def times_of(self, number: int, digits: int | None) -> dict[str, dict[str, float]]:
        """Return where a worker's time went: seconds and processor seconds by phase and cause, and what its host did to it.

        ``digits``: to how many decimal places it is rounded; None: not at all, which is quicker.
        """
        worker = self.workers.get(number) or WorkerCosts()
        wait = {WAIT: worker.waited_s} if worker.waited_s else {}
        cores = {"cores": worker.cores} if worker.cores else {}
        found = {"phases": {**worker.totals, **wait}, "processor": dict(worker.used), "host": {**worker.host_readings, **cores}}
        if digits is None:
            return found
        return {name: {key: round(value, digits) for key, value in values.items()} for name, values in found.items()}

    def by_worker(self) -> dict[int, Causes]:
        """Return what each worker costs the job, in seconds by cause, less what every worker costs it: that is nobody's."""
        counted = {number: worker for number, worker in self.workers.items() if worker.pushes > 1}
        if len(counted) < 2:
            return {}
        costs = {number: dict(worker.causes) for number, worker in counted.items()} if self.together else self._alone(counted)
        # Of workers that most folds leave out, nothing is known: the rule waits for others.
        most = max(worker.folds for worker in counted.values())
        least = min(sum(causes.values()) for number, causes in costs.items() if 2 * counted[number].folds >= most)
        queues = {number: worker.queue for number, worker in counted.items()}
        usual = min(queues.values())
        return {number: _less(_due(causes, queues[number], usual), least) for number, causes in costs.items()}

    def _alone(self, counted: Mapping[int, WorkerCosts]) -> dict[int, Causes]:
        """Return the costs where no fold waits for a worker: what a worker computes longer than the fast ones, and the waits for it."""
        mean = {number: {name: value / worker.steps for name, value in worker.totals.items()} for number, worker in counted.items()}
        usual = _usual(list(mean.values()))
        longer_s = {number: max(0.0, sum(mean[number].values()) - sum(usual.values())) * worker.steps for number, worker in counted.items()}
        whole = sum(longer_s.values())
        least = min(worker.waited_s for worker in counted.values())
        waits_s = sum(worker.waited_s - least for worker in counted.values())
        costs: dict[int, Causes] = {}
        for number, seconds in longer_s.items():
            seconds = (seconds + (waits_s * seconds / whole if whole > NOTHING else 0.0)) / len(counted)
            causes = _longer(mean[number], usual)
            of_all = sum(causes.values())
            costs[number] = {name: seconds * value / of_all for name, value in causes.items()}
        return costs


COST_HANDLERS: Final[Mapping[str, Callable[[Costs, Record], None]]] = {
    "pushed": Costs._pushed,
    "release": Costs._released,
    "fold": Costs._folded,
    "state_changed": Costs._changed,
    "process": Costs._process,
    "stood_still": Costs._stood_still,
    "grant": Costs._granted,
    "no_more": Costs._no_more,
    "abandoned": Costs._given_back,
    "skipped": Costs._given_back,
    "fault": Costs._fault,
    "job": Costs._job,
    "end": Costs._ended,
}


def spent(record: Record) -> tuple[Causes, Seconds]:
    """Return the seconds of a push by phase and cause, without the wait, and the wait."""
    phases: Mapping[str, Seconds] | None = record.get("phases")
    if not phases:
        return {COMPUTE: record["compute_s"]}, 0.0
    seconds = dict(phases)
    waited = seconds.pop(WAIT, 0.0)
    host, processor = record.get("host"), record.get("processor")
    if host and processor and (queued := host.get("queued_s", 0.0)) > 0.0:
        idle = {name: value - processor.get(name, 0.0) for name, value in seconds.items() if value > processor.get(name, 0.0)}
        whole = sum(idle.values())
        moved = min(queued, whole)
        if moved > NOTHING:
            for name, value in idle.items():
                seconds[name] -= moved * value / whole
            seconds[QUEUED] = moved
    return seconds, waited


def _add(sums: Causes, more: Mapping[str, Seconds]) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0.0) + value


def _usual(pushes: Sequence[Causes]) -> Causes:
    """Return the mean of the fastest quarter."""
    fastest = sorted(pushes, key=lambda seconds: sum(seconds.values()))[: -(-len(pushes) // 4)]
    names = {name for seconds in fastest for name in seconds}
    return {name: sum(seconds.get(name, 0.0) for seconds in fastest) / len(fastest) for name in names}


def _longer(seconds: Causes, usual: Causes) -> Causes:
    """Return by how much each phase is longer than usual; where none is, the worker began later than others: it was on its way."""
    found = {name: longer for name, value in seconds.items() if (longer := value - usual.get(name, 0.0)) > NOTHING}
    return found or {LINK: 1.0}


def _due(causes: Causes, queue: float, usual: float) -> Causes:
    """Return the costs with the queueing that every worker has counted to the work for which it was queued: who works more queues more."""
    queued = causes.get(QUEUED, 0.0)
    others = sum(causes.values()) - queued
    due = queued * min(1.0, usual / queue) if queue > 0.0 and others > NOTHING else 0.0
    if due <= 0.0:
        return causes
    return {name: value - due if name == QUEUED else value + due * value / others for name, value in causes.items()}


def _less(causes: Causes, seconds: Seconds) -> Causes:
    whole = sum(causes.values())
    factor = 1.0 - seconds / whole if whole > seconds else 0.0
    return {name: value * factor for name, value in causes.items()}
