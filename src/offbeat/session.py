"""One process's part in its job: the interface between the public API (`optimizer`, `sampler`) and the runtime.

`LocalSession` is a job of one worker and no server: ``python script.py`` without a launcher. The sessions of jobs with several processes
are in ``runtime/``, for instance ``runtime/parameter_server/worker_side.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, SupportsFloat

from offbeat.core.batch_sizes import Deal
from offbeat.core.gradient_contents import GradientContents
from offbeat.core.leases import Leases
from offbeat.core.partitions import Parts, size_of
from offbeat.core.phases import UNMEASURED, PhaseClock
from offbeat.errors import JobEnded, warn
from offbeat.gradient_watch import GradientWatch
from offbeat.types import FIRST_WORKER, Epoch, Fate, LeaseId, Reduction, Version, WorkerId

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler


PROCESS: Final = "OFFBEAT_PROCESS"
"""The variable by which a process of a worker of several knows its place."""
LEADERLESS: Final = 75
"""The exit status of a process whose leader has ended before it."""

REPORTS_KEPT: Final = 1_000
"""Of how many epochs a worker keeps the reports."""


class Place(NamedTuple):
    """The place of a process in its worker, which may consist of several; see `offbeat.runtime.group`."""

    rank: int = 0
    """0: the leader, which takes part in the job for all."""
    size: int = 1
    links: tuple[int, ...] = ()
    """Sockets: the leader's to each other process, by rank; another process's to the leader."""

    @classmethod
    def of_process(cls) -> Place:
        """Return the place of this process."""
        rank, size, links = json.loads(os.environ.get(PROCESS, "[0, 1, []]"))
        return cls(rank, size, tuple(links))

    @property
    def worker_pid(self) -> int:
        """Return the number of the process that the engine has started as this worker, by which the supervisor knows it."""
        return os.getpid() if self.size == 1 else os.getppid()

    def part(self, batch: list[int]) -> list[int]:
        """Return this process's part of the worker's batch. All parts are equally long: the first samples are repeated for this.

        >>> [Place(rank, 2).part([7, 8, 9]) for rank in range(2)]
        [[7, 8], [9, 7]]
        """
        if self.size == 1:
            return batch
        each = -(-len(batch) // self.size)
        padded = [batch[number % len(batch)] for number in range(each * self.size)]
        return padded[self.rank * each : (self.rank + 1) * each]


class LeasedRange(NamedTuple):
    """A grant of positions ``start`` to ``stop``, of an epoch's order or of this worker's split, to this worker."""

    pool: int
    lease: LeaseId
    start: int
    stop: int
    parts: Parts = ()
    """This worker's split in this epoch, as ranges of the data's fixed order; positions are positions of the split. Empty: no splits."""
    rows: int | None = None
    """The number of samples; None: one at each position; 0: unknown."""

    @property
    def samples(self) -> int:
        return self.stop - self.start if self.rows is None else self.rows


@dataclass(slots=True)
class SplitProgress:
    """A worker's progress through its split of an epoch, for plans that push at fractions of the split. Each epoch has a new object.

    >>> progress = SplitProgress()
    >>> progress.deal(((0, 10),), samples=4, batch=4)
    >>> progress.done, progress.batches
    (0, 3)
    """

    done: int = 0
    """Batches used in a step."""
    batches: int | None = None
    """Batches in the split; None: this worker has no split, or has not requested samples yet."""
    dealt: int = 0
    """Batches dealt to the worker, used or not."""
    samples: int = 0
    """Samples in the batches dealt."""

    def deal(self, parts: Parts, samples: int, batch: int) -> None:
        """Count ``samples`` more samples as dealt to this worker; the rest of its split will come in batches of ``batch``."""
        self.dealt += 1
        self.samples += samples
        if parts:
            self.batches = self.dealt + -(-max(0, size_of(parts) - self.samples) // batch)


class Barrier(NamedTuple):
    """What `offbeat.barrier` returns: which barrier this was, and whose model each worker has after it."""

    number: int
    """Of the barrier, from 0 in each job; a restarted worker goes on with the job's number."""
    version: Version
    """The version of the model that this worker has now."""
    workers: tuple[WorkerId, ...]
    """The workers that have come to it."""
    shared: bool
    """True: every worker has the same model, of this version. False: under this rule each worker keeps a model of its own
    (``dpsgd``, ``adpsgd``, ``sgp``), and ``version`` counts the steps that are in this worker's."""
    past: bool = False
    """True: the others passed this barrier before this worker's process was there. A restarted worker passes over epochs that are over:
    what belongs to such an epoch, an evaluation or a save, has been done."""


class Snapshot(NamedTuple):
    """The contents of a checkpoint, all of one version if the rule has one; the model then has the parameters of that version."""

    version: Version
    optimizer: dict[str, Any]
    """The optimizer's ``state_dict``."""
    places: dict[int, dict[str, Any]]
    """The position of each sampler, by its number; see `core.leases.Leases.place`."""
    others: dict[WorkerId, dict[str, Any]]
    """The parts of this checkpoint that other workers have sent, by worker."""


class Session(ABC):
    """One worker's part in a job."""

    worker: WorkerId = FIRST_WORKER
    workers: int = 1
    seed: int = 0
    version: Version = 0
    chief: bool = True
    batch: int | None = None
    """The batch size that the rule sets for the samplers; None: the script's."""
    phases: PhaseClock = UNMEASURED
    """Where this process's time goes."""
    resumes: bool = True
    """Whether state that the script loads is used. False: this worker has joined a running job and takes the job's state."""
    reduction: Reduction = "mean"
    """What a gradient of this worker is of its samples' gradients."""
    servers_step: bool = False
    """Whether the servers make the optimizer's steps, and have its state."""
    shares: bool = False
    """Whether another wrapped optimizer of this process has some of the same parameters: its steps are no writes of the script."""
    overlap: float | None = None
    """The fraction of the data that all workers' splits share; None: no splits, samples are dealt out from one pool."""

    plans_batches: str | None = None
    """The job's rule, spelled, if it sets the batch sizes of the workers by itself; None: it does not."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps that this process has made."""
        self.before = 0
        """Steps of this worker's script before this process: of its earlier processes, or before the checkpoint that it has loaded."""
        self.restarted = False
        """Whether this process takes the place of an earlier one, or has joined a job that has made steps before."""
        self.resumed = False
        """Whether this process begins where a worker of an earlier job was, according to the checkpoint from which the job is resumed."""
        self.counts = False
        """Whether the script counts with `offbeat.steps`, or with `offbeat.epochs`."""
        self._iteration: tuple[int, int] | None = None
        """The iteration of `offbeat.steps` that the script is in, and the steps that this process had made when it began; None: it does
        not count with them."""
        self.barriers_before = 0
        """The number of the next barrier when the checkpoint that the script has loaded was saved."""
        self.takes_means = False
        """Whether each gradient is the mean over its samples, of however many batches it is."""
        self.keeps_place = False
        """Whether the script goes on where the job is: it counts with `offbeat.steps` or `offbeat.epochs`, or has loaded a checkpoint."""
        self.over: str | None = None
        """Why the job has ended for this worker, which its script has not; None: it has not ended."""
        self.closed = False
        """Whether the script has closed the optimizer."""
        self.ended = False
        """Whether the script has been told of the end: by an empty pass, or, without a sampler, by the next step."""
        self.progress = SplitProgress()
        self.metrics: dict[str, float] = {}
        self.reports: list[dict[str, Any]] = []
        """Of the newest epochs, at most `REPORTS_KEPT`."""
        self.reported = 0
        """The number of reports so far."""
        self._pools = 0
        self.chosen: list[int] = []
        """Of samplers that choose a part of a data set, or have an order of their own: checksums of what each has chosen."""
        self.deals: dict[int, Deal] = {}
        """Of samplers that are not dealt out from one pool in batches of one size: how they are."""
        self._rests: dict[int, tuple[Epoch, Sequence[Sequence[int]]]] = {}
        """By sampler: an epoch, and the ranges left of it according to the checkpoint that the script has loaded."""
        self._loss: float | None = None
        self._outstanding: list[LeasedRange] = []
        """Grants dealt to this worker and not pushed yet, oldest first."""
        self.thread = threading.get_ident()
        """The script's own, in which it makes its steps."""
        self.contents = GradientContents()
        """Which of the batches that the script has been given are in its gradient."""
        self.watch = GradientWatch(self.contents)
        self.consumed = 0
        """The number of steps over samples so far."""
        self._batch_samples = 0
        """Samples in the batch of the last step."""
        self._used_by_others: set[LeaseId] | None = set()
        """Batches over which another optimizer has made a step, since this one's last; None: the script has been told what that means."""

    @property
    def made(self) -> int:
        """How far the script is: iterations of `offbeat.steps` in which it has made a step, or the steps themselves."""
        if self._iteration is None:
            return self.before + self.steps
        iteration, before = self._iteration
        return iteration + (self.steps > before)

    @property
    def iterations(self) -> int | None:
        """After how many iterations of `offbeat.steps` a new process goes on; None: the script does not count with them."""
        return None if self._iteration is None else self.made

    def begin(self, iteration: int) -> None:
        """Note that the script begins an iteration of `offbeat.steps`. It may make one step in it, or several, or none."""
        self.keeps_place = self.counts = True
        self._iteration = iteration, self.steps

    def new_pool(self) -> int:
        """Return the number of a new sampler; scripts make their samplers in the same order on every worker."""
        self._pools += 1
        return self._pools - 1

    @property
    def has_sampler(self) -> bool:
        """Return whether the script has made a sampler; then a step without samples is intended, and causes no warning."""
        return self._pools > 0

    def note_report(self, report: dict[str, Any]) -> None:
        """Keep the report of an epoch that has ended."""
        self.reports.append(report)
        self.reported += 1
        del self.reports[:-REPORTS_KEPT]

    def reports_since(self, reported: int) -> list[dict[str, Any]]:
        """Return the reports that have come since ``reported`` had this value, as far as they are kept."""
        return self.reports[max(0, len(self.reports) - (self.reported - reported)) :]

    def log(self, values: dict[str, float]) -> None:
        """Store metrics; ``loss`` is sent with the next push."""
        self._loss = values.get("loss", self._loss)
        self.metrics.update(values)

    def consume(self) -> tuple[tuple[LeaseId, ...], int]:
        """Return the leases of the batches in the gradient, which a step uses now, and their number of samples; 0: not known."""
        ids = set(self.contents.step(written=self.watch.written))
        taken = [grant for grant in self._outstanding if grant.lease in ids]
        self._outstanding = [grant for grant in self._outstanding if grant.lease not in ids]
        self._forget_left_out()
        self.progress.done += sum(grant.pool == 0 for grant in taken)
        samples = _samples(taken)
        if taken:
            if self._used_by_others:
                self._used_by_others.clear()
            self.consumed += 1
            self._batch_samples = samples
        return tuple(grant.lease for grant in taken), samples

    def _forget_left_out(self) -> None:
        """Give up the batches that the script has left out since the last call, and tell the job."""
        if (left_out := self.contents.left_out()) and (held := {grant.lease for grant in self._outstanding}.intersection(left_out)):
            self._outstanding = [grant for grant in self._outstanding if grant.lease not in held]
            self._warn_of_others(held, "they are reported as skipped")
            self._leave_out(tuple(lease for lease in left_out if lease in held))

    def _warn_of_others(self, leases: set[LeaseId], so: str) -> None:
        """Warn once if another optimizer has made a step with one of these batches, and this one none."""
        if self._used_by_others and leases & self._used_by_others:
            self._used_by_others = None
            warn(
                "this loader's batches are dealt out in the job of one optimizer, which makes no step with some of them, and another "
                f"one does: {so}. Name the optimizer that steps with each batch: offbeat.elastic(..., optimizer=...), or its batch_sampler"
            )

    @abstractmethod
    def _leave_out(self, leases: tuple[LeaseId, ...]) -> None:
        """Tell the job that no step of this worker will use these samples."""

    def under_way(self, stepped: bool) -> int:
        """Return the number of samples of the current batch, for the step of another optimizer over the same batch.

        Args:
            stepped: this session has made its step over that batch already.
        """
        current = self.contents.current()
        if self._used_by_others is not None:
            self._used_by_others.update(current)
        ahead = _samples([grant for grant in self._outstanding if grant.lease in current])
        return self._batch_samples if stepped or not ahead else ahead

    @property
    def outstanding(self) -> Sequence[LeasedRange]:
        """The grants that no step has used yet, of all samplers, oldest first."""
        return self._outstanding

    def held(self, pool: int) -> list[LeasedRange]:
        """Return one sampler's grants that no gradient contains, oldest first."""
        return [grant for grant in self._outstanding if grant.pool == pool and not self.contents.contains(grant.lease)]

    def deliver(self, grant: LeasedRange, alive: Callable[[], bool] | None = None) -> None:
        """Note that the script has received the batch of this grant; a step does not use batches that a loader has only fetched ahead.

        Args:
            grant: of the batch.
            alive: tells whether the script still holds the batch; None: it cannot be known.
        """
        if grant in self._outstanding:  # a grant of an abandoned pass may have gone back to the job
            fetched = threading.get_ident() != self.thread  # by a thread that holds batches before the script computes with them
            self.contents.deliver(grant.pool, grant.lease, None if fetched else alive)

    def take_back(self, pool: int) -> None:
        """Mark a sampler's delivered batches as not delivered: the next pass delivers them again."""
        self._warn_of_others({grant.lease for grant in self.held(pool)}, "the next pass has the same batches again")
        self.contents.take_back(pool)

    def cleared(self) -> None:
        """Note that the script has cleared the gradients."""
        self.contents.clear()

    def amend(self, grant: LeasedRange, by: LeasedRange | None) -> None:
        """Replace a grant by a corrected one; ``by`` is None if there is nothing at its positions."""
        at = self._outstanding.index(grant)
        self._outstanding[at : at + 1] = [] if by is None else [by]

    def leave_epoch(self, pool: int, *, exhausted: bool) -> tuple[LeaseId, ...]:
        """Give up one sampler's grants at the end of its epoch, but those in the gradient, which are returned.

        Args:
            pool: the sampler's number.
            exhausted: see `GradientContents.leave`.
        """
        self.watch.look()
        kept = self.contents.leave(pool, exhausted=exhausted)
        self._forget_left_out()
        self._outstanding = [grant for grant in self._outstanding if grant.pool != pool or grant.lease in kept]
        return kept

    @property
    def inside(self) -> bool:
        """Whether the script is inside a call of this session, which may step the wrapped optimizer."""
        return False

    def interruptible(self) -> AbstractContextManager[None]:
        """Return the context manager for a computation that the job may interrupt."""
        return nullcontext()

    @abstractmethod
    def step(self, samples: int | None) -> None:
        """Push the gradients, wait to be admitted, pull."""

    @abstractmethod
    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        """Return the next samples of an epoch, ``self.batch`` or else ``batch`` of them; None once the epoch is over for this worker."""

    def check_end(self) -> None:
        """Raise `JobEnded` where the job has ended and this worker's script has been told so."""
        if self.ended:
            assert self.over is not None, "a script is told of the end of a job that has ended"
            raise JobEnded(self.over)

    def look(self) -> None:  # noqa: B027 without a launcher nothing comes
        """Read what the job has to say, without waiting."""

    @property
    def barriers(self) -> int:
        """The number of the script's next barrier."""
        return 0

    def go_on(self, steps: int, barriers: int) -> None:
        """Note the steps that the script has made, and the barriers, according to the checkpoint that it has loaded."""
        self.keeps_place, self.barriers_before = True, barriers
        if self.resumes:
            self.before = steps

    @abstractmethod
    def barrier(self) -> Barrier:
        """Wait until every living worker has come, and load the newest parameters."""

    @abstractmethod
    def pull(self) -> None:
        """Load the newest parameters into the model."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in the format of the wrapped optimizer."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the optimizer's state."""

    # Checkpoints.

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return the contents of a checkpoint, with the model at the same version."""

    @abstractmethod
    def place(self, pool: int) -> dict[str, Any] | None:
        """Return the position of a sampler, see `core.leases.Leases.place`; None: no worker has asked for its samples."""

    def known_as(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 without a launcher nothing is saved unasked
        """Note the object that the script uses as its optimizer: its schedulers hold it, or the wrapped one."""

    def schedulers(self) -> list[LRScheduler]:
        """Return the schedulers of the script's optimizer, those that exist now."""
        return []

    def hand_in(self, part: dict[str, Any]) -> None:  # noqa: B027 without a launcher no other process saves
        """Send this worker's part of a checkpoint to the worker that writes the file."""

    def go_on_from(self, pool: int, epoch: Epoch, rest: Sequence[Sequence[int]]) -> None:
        """Resume in the middle of an epoch: only the ranges ``rest`` of it are left."""
        if self.resumes:
            self._rests[pool] = epoch, rest

    def rest_of(self, pool: int, epoch: Epoch) -> Sequence[Sequence[int]] | None:
        """Return the ranges left of an epoch according to the loaded checkpoint; None: all."""
        of, rest = self._rests.get(pool, (None, None))
        return rest if of == epoch else None

    @abstractmethod
    def close(self) -> None:
        """Leave the job."""


def _samples(grants: Sequence[LeasedRange]) -> int:
    """Return the number of samples of the grants; 0 if one of them is unknown."""
    counts = [grant.samples for grant in grants]
    return sum(counts) if all(counts) else 0


class LocalSession(Session):
    """A job of one worker, without servers: the wrapped optimizer makes the steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._leases = Leases()
        self._ending: set[int] = set()
        """Pools whose epoch has been dealt out while some of its batches have not been used in a step yet."""
        self._stepping = False
        self.watch.follow(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._barriers = 0

    @property
    def inside(self) -> bool:
        return self._stepping

    def step(self, samples: int | None) -> None:
        self.steps += 1
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False
        self.version += 1
        self._settle(Fate.FOLDED, "")

    def reject(self, reason: str) -> None:
        """Skip this step: its samples are rejected with the reason."""
        self.steps += 1
        self._settle(Fate.REJECTED, reason)

    def _settle(self, fate: Fate, reason: str) -> None:
        ids, _ = self.consume()
        self._leases.submit(ids)
        self._leases.settle(ids, fate, reason)
        for pool in [pool for pool in self._ending if not self._holds(pool)]:
            self._end(pool)

    def _leave_out(self, leases: tuple[LeaseId, ...]) -> None:
        self._leases.leave_out(self.worker, leases)

    def _holds(self, pool: int) -> bool:
        return any(grant.pool == pool for grant in self._outstanding)

    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        self._leases.open(pool, epoch, size, rest=self.rest_of(pool, epoch))
        if epoch > self._leases.epoch(pool):  # the loop over the previous epoch was left early
            self._end(pool)
            self._leases.open(pool, epoch, size)
        if epoch < self._leases.epoch(pool):
            return None
        self._leases.bound(pool, size)
        lease = self._leases.take(self.worker, pool, batch)
        if lease is None:
            self._ending.add(pool) if self._holds(pool) else self._end(pool)
            return None
        grant = LeasedRange(pool, lease.id, lease.start, lease.stop)
        self._outstanding.append(grant)
        return grant

    def _end(self, pool: int) -> None:
        kept = self.leave_epoch(pool, exhausted=pool in self._ending)
        self._ending.discard(pool)
        self._leases.give_back(self.worker, pool, but=kept)
        self._leases.keep(self.worker, kept)
        epoch = self._leases.epoch(pool)
        self.note_report({"epoch": epoch, **self._leases.end(pool)})

    @property
    def barriers(self) -> int:
        return self._barriers

    def barrier(self) -> Barrier:
        self._barriers += 1
        return Barrier(self._barriers - 1, self.version, (self.worker,), True)

    def pull(self) -> None:
        """End the epochs that have no more samples; the parameters are in this process."""
        for pool in list(self._ending):
            self._end(pool)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)

    def snapshot(self) -> Snapshot:
        places = {pool: place for pool in self._leases.pools() if (place := self._leases.place(pool)) is not None}
        return Snapshot(self.version, self._optimizer.state_dict(), places, {})

    def place(self, pool: int) -> dict[str, Any] | None:
        return self._leases.place(pool)

    def close(self) -> None:
        """Do nothing: there is no job to leave."""


class Preemption(NamedTuple):
    """An order to leave, see `preemption`."""

    reason: str
    """The signal that this process got, such as "SIGUSR1"; "launcher": no signal, the launcher ends the job or has read the notice."""
    since: float
    """When the signal came, or else the launcher's order, in seconds since the epoch."""


UNSEEN_MAX: Final = 16
"""Most steps that a script which asks for orders may make without having seen one."""


@dataclass(slots=True)
class Orders:
    """What this process has heard of its end, and whether its script looks."""

    noticed: Preemption | None = None
    """The first signal. It is no order yet: the launcher may want a last checkpoint first."""
    given: Preemption | None = None
    """The order to leave; None: there is none."""
    shared: bool = True
    """False in a worker of several processes until each of them can see the order: after the call in which the leader has got it."""
    asked: bool = False
    """True once the script has called `preemption`: from then on it sees an order before it has to leave."""
    seen: bool = False
    steps: int = 0
    """Steps that have returned since the order."""
    last_step: bool = False
    """True inside the step with which the worker leaves."""

    def note(self, signal: str | None) -> None:
        """Note a signal, by its name, or an order (None). For signal handlers."""
        if signal is not None:
            self.noticed = self.noticed or Preemption(signal, time.time())
        else:
            self.given = self.given or self.noticed or Preemption("launcher", time.time())

    @property
    def cut_waits(self) -> bool:
        """True if an order to leave ends a wait."""
        return self.given is None or not self.asked or self.last_step

    @property
    def had_its_turn(self) -> bool:
        """True if a script that asks has seen the order, or has had the time to."""
        return self.asked and self.shown is not None and (self.seen or self.steps >= UNSEEN_MAX)

    @property
    def shown(self) -> Preemption | None:
        """The order that the script sees; None: there is none yet."""
        return self.given if self.shared else None


orders = Orders()
"""Those of this process."""


def preemption() -> Preemption | None:
    """Return the order to leave that this worker has got; None: it has got none.

    A worker is ordered to leave if its machine is taken away, or its job is told to end. Call this function once after each step. A script
    that does so sees the order before the process ends: the step in which the order comes returns as usual, and calls that save or load are
    not cut off. The script may end then, or go on: the next step is pushed, and the process ends in it, with status 143 by a `SystemExit`;
    before, if the script asks for the next batch or comes to a barrier.

    In a script that does not call it the `SystemExit` comes at once in a call that waits, or else in the step. A ``finally`` or an
    ``except SystemExit`` may call this function, and save.

    Returns:
        The signal and its time. None also in a process without a launcher, before the optimizer exists, in a script that handles SIGTERM
        itself, and where the script is not in the main thread. All processes of a worker see it after the same call of offbeat.

    >>> preemption() is None
    True
    """
    orders.asked = "OFFBEAT_WORKER" in os.environ
    orders.seen = orders.shown is not None
    return orders.shown


current: Session | None = None
"""The main session of this process: that of its first `DistributedOptimizer`; without a launcher, that of the newest."""
_waiting: list[Callable[[Session], None]] = []
"""Calls that wait for the first session of this process."""


def made(session: Session) -> None:
    """Register the session of a new `DistributedOptimizer`, and make the waiting calls.

    The first one stays the main session until the script closes its optimizer and makes another. Without a launcher the newest one is it.
    """
    global current
    if current is None or current.closed or isinstance(session, LocalSession):
        current = session
    waiting = list(_waiting)
    _waiting.clear()
    for call in waiting:
        call(session)


def when_made(call: Callable[[Session], None]) -> None:
    """Call with the main session: at once if it exists, otherwise when the first session is made, in the order of these calls."""
    if current is not None:
        call(current)
    else:
        _waiting.append(call)


def log(**metrics: SupportsFloat) -> None:
    """Report metrics of this worker: ``loss`` is shown in the job's progress line, the others in its table and summary.

    The summary has the value of each metric that was logged last.

    Args:
        metrics: numbers: plain ones, those of NumPy, and tensors or arrays of one element.

    Raises:
        TypeError: a value is not a number.

    >>> import numpy
    >>> log(loss=0.25, accuracy=numpy.float32(0.75))
    """
    values = {name: _number(name, value) for name, value in metrics.items()}
    if current is not None:
        current.log(values)


def _number(name: str, value: SupportsFloat) -> float:
    """Return the value of a metric. A text that looks like a number is none, and a truth value was hardly meant as one."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of several elements, or complex ones
        plain = value.item() if hasattr(value, "item") else value
        if not isinstance(plain, bool | str | bytes):
            return float(plain)
    raise TypeError(f"offbeat.log({name}={value!r}): pass one number; of several values, for instance their mean")


def rank() -> int:
    """Return this worker's number in the job, from 0; 0 without a launcher.

    Usable before the optimizer exists, for a seed or a share of the data that differs from worker to worker. A restarted worker keeps its
    number.

    >>> rank()
    0
    """
    return current.worker if current is not None else int(os.environ.get("OFFBEAT_WORKER", "0"))


def world_size() -> int:
    """Return the number of workers with which the job was started, dead ones included; 1 without a launcher.

    Usable before the optimizer exists.

    >>> world_size()
    1
    """
    return current.workers if current is not None else int(os.environ.get("OFFBEAT_WORKERS", "1"))


def chief() -> bool:
    """Return whether this is the worker that evaluates, prints and saves; True without a launcher.

    Of the workers connected when the job begins, the one with the lowest number is the chief. If the chief dies or gets SIGTERM, the
    living worker with the lowest number becomes chief, and stays chief even if the first chief returns. When the chief's script ends, no
    other worker becomes chief, so that workers that end later do not save the same files again. Before the optimizer exists, worker 0 is
    chief.

    >>> chief()
    True
    """
    return current.chief if current is not None else rank() == 0


def is_main_process() -> bool:
    """Return `chief()`, under the name that other libraries use.

    >>> if is_main_process():
    ...     print("printed by one worker")
    printed by one worker
    """
    return chief()
