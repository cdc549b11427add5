"""What one process knows of its job: the interface between the user's face (`optimizer`, `sampler`) and whatever runs beneath it.

`LocalSession` is a job of one worker and no server: ``python script.py`` without a launcher. ``runtime/parameter_server/worker_side.py``
has the other.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.core.leases import Leases
from offbeat.core.partitions import Parts, size_of
from offbeat.types import Epoch, Fate, LeaseId, Version, WorkerId

if TYPE_CHECKING:
    import torch


class LeasedRange(NamedTuple):
    """Positions ``start`` to ``stop``, of an epoch's order or of this worker's split, are this worker's."""

    pool: int
    lease: LeaseId
    start: int
    stop: int
    parts: Parts = ()
    """This worker's split in this epoch, ranges of the data's fixed order, along which the positions count. Empty: all have one order."""
    rows: int | None = None
    """How many samples these are; None: one at each position. 0: nobody knows."""

    @property
    def samples(self) -> int:
        return self.stop - self.start if self.rows is None else self.rows


@dataclass(slots=True)
class SplitProgress:
    """How far a worker has come in its own split of an epoch; for plans that push at fractions of it. Each epoch begins with a new one.

    >>> progress = SplitProgress()
    >>> progress.deal(((0, 10),), samples=4, batch=4)
    >>> progress.done, progress.batches
    (0, 3)
    """

    done: int = 0
    """Batches stepped on."""
    batches: int | None = None
    """In all; None: this worker has no split of its own, or has not asked for samples yet."""
    dealt: int = 0
    """Batches dealt to it, used or not."""
    samples: int = 0
    """In these."""

    def deal(self, parts: Parts, samples: int, batch: int) -> None:
        """This worker has been dealt so many samples of its split, and will take the rest in batches of ``batch``."""
        self.dealt += 1
        self.samples += samples
        if parts:
            self.batches = self.dealt + -(-max(0, size_of(parts) - self.samples) // batch)


class Snapshot(NamedTuple):
    """What a checkpoint needs, all of one version where the rule has one. The model then has the parameters of that version."""

    version: Version
    optimizer: dict[str, Any]
    """The optimizer's ``state_dict``."""
    places: dict[int, dict[str, Any]]
    """Where each sampler stands, by its number; see `core.leases.Leases.place`."""
    others: dict[WorkerId, dict[str, Any]]
    """What other workers have handed in for this checkpoint, by worker."""


class Session(ABC):
    """One worker's part in a job."""

    worker: WorkerId = 0
    workers: int = 1
    seed: int = 0
    version: Version = 0
    chief: bool = True
    batch: int | None = None
    """The batch size that the rule wants of the samplers; None: the script's."""
    resumes: bool = True
    """What the script loads counts. False: this worker has come to a running job, whose state goes before."""
    overlap: float | None = None
    """Each worker has a split of its own, this fraction of the data being in all of them; None: samples are dealt out from one pool."""

    def __init__(self) -> None:
        self.progress = SplitProgress()
        self.metrics: dict[str, float] = {}
        self.reports: list[dict[str, Any]] = []
        self._pools = 0
        self._rests: dict[int, tuple[Epoch, Sequence[Sequence[int]]]] = {}
        """By sampler: an epoch, and what is left of it, by a checkpoint that the script has loaded."""
        self._loss: float | None = None
        self._outstanding: list[LeasedRange] = []
        """Dealt to this worker and not pushed yet, oldest first."""
        self._in_hand: dict[int, set[LeaseId]] = {}
        """Delivered to the script and not pushed yet, by sampler; only of those whose loader says what it delivers."""
        self._backwards = 0
        """Of the last step over samples."""
        self._warned_of_passes = False
        self.consumed = 0
        """How many steps over samples there were."""
        self._batch_samples = 0
        """In the batch of the last of them."""

    def new_pool(self) -> int:
        """Number a sampler; scripts make their samplers in the same order everywhere."""
        self._pools += 1
        return self._pools - 1

    @property
    def has_sampler(self) -> bool:
        """Whether the script has made a sampler: then it knows what it does about samples, also where a step uses none of them."""
        return self._pools > 0

    def log(self, values: dict[str, float]) -> None:
        """Note metrics; ``loss`` goes with the next push."""
        self._loss = values.get("loss", self._loss)
        self.metrics.update(values)

    def consume(self, backwards: int) -> tuple[tuple[LeaseId, ...], int]:
        """The leases that a push was computed over, and their number of samples: of each sampler the oldest, one for each backward pass.

        Of each, because a script that draws from two samplers at once makes one backward pass over a batch of both. If there are more
        passes than batches in the script's hands, as in a GAN, some were over the same batch.
        """
        taken = self._oldest(max(1, backwards))
        self._outstanding = [grant for grant in self._outstanding if grant not in taken]
        for grant in taken:
            self._in_hand.get(grant.pool, set()).discard(grant.lease)
        self.progress.done += sum(grant.pool == 0 for grant in taken)
        samples = _samples(taken)
        if taken:
            self.consumed += 1
            self._backwards = backwards
            self._batch_samples = samples
        return tuple(grant.lease for grant in taken), samples

    def _oldest(self, number: int) -> list[LeasedRange]:
        left, taken = dict.fromkeys((grant.pool for grant in self._outstanding), number), []
        for grant in self._outstanding:
            if left[grant.pool] and grant.lease in self._in_hand.get(grant.pool, (grant.lease,)):
                left[grant.pool] -= 1
                taken.append(grant)
        return taken

    def under_way(self, stepped: bool) -> int:
        """The number of samples of the batch under way, for the step of another optimizer over the same batch.

        Args:
            stepped: this session has made its step over that batch already.
        """
        if stepped and self._backwards > 1 and any(grant.pool not in self._in_hand for grant in self._outstanding):
            self._warn_of_passes()
        ahead = _samples(self._oldest(1))
        return self._batch_samples if stepped or not ahead else ahead

    def held(self, pool: int) -> list[LeasedRange]:
        """One sampler's grants that no step has used yet, oldest first."""
        return [grant for grant in self._outstanding if grant.pool == pool]

    def deliver(self, grant: LeasedRange) -> None:
        """The script has the batch of this grant in its hands; a step uses none that a loader has only fetched ahead."""
        in_hand = self._in_hand.setdefault(grant.pool, set())
        if grant in self._outstanding:  # of a pass that was left early it may have gone back to the job
            in_hand.add(grant.lease)

    def take_back(self, pool: int) -> None:
        """What was delivered of a sampler's batches will be delivered again."""
        self._in_hand.get(pool, set()).clear()

    def _warn_of_passes(self) -> None:
        if not self._warned_of_passes:
            self._warned_of_passes = True
            warnings.warn(
                f"a step of the first optimizer was over {self._backwards} backward passes, and counts as many batches, while its "
                "DataLoader fetches batches ahead. If the passes were over one batch, as in a GAN, its pushes have wrong weights: make the "
                "loader with offbeat.elastic(dataset, ...), which says what it delivers, or with num_workers=0",
                stacklevel=4,
            )

    def amend(self, grant: LeasedRange, by: LeasedRange | None) -> None:
        """More is known of a grant than when it came; None: there is nothing at its positions."""
        at = self._outstanding.index(grant)
        self._outstanding[at : at + 1] = [] if by is None else [by]

    def drop(self, pool: int) -> None:
        """Forget what is left of one sampler's grants: they go back to the job."""
        self._outstanding = [grant for grant in self._outstanding if grant.pool != pool]
        self.take_back(pool)

    def interruptible(self) -> AbstractContextManager[None]:
        """What a computation is wrapped in that may be broken off."""
        return nullcontext()

    @abstractmethod
    def step(self, samples: int | None) -> None:
        """Push what the gradients hold, wait to be admitted, pull."""

    @abstractmethod
    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        """The next samples of an epoch, ``self.batch`` of them or, if that is None, ``batch``; None once it is over for this worker."""

    @abstractmethod
    def pull(self) -> None:
        """Get the newest parameters."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, as the wrapped optimizer would give it."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the optimizer's state."""

    # Checkpoints.

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Bring the model to one version with the rest of what a checkpoint needs, and return that."""

    @abstractmethod
    def place(self, pool: int) -> dict[str, Any] | None:
        """Where a sampler stands; None: nobody has asked for samples of it. See `core.leases.Leases.place`."""

    def hand_in(self, part: dict[str, Any]) -> None:  # noqa: B027 without a launcher nobody else saves
        """Give this worker's part of a checkpoint to the worker that writes it."""

    def go_on_from(self, pool: int, epoch: Epoch, rest: Sequence[Sequence[int]]) -> None:
        """A checkpoint is from the middle of this epoch: only these ranges of it are left."""
        if self.resumes:
            self._rests[pool] = epoch, rest

    def rest_of(self, pool: int, epoch: Epoch) -> Sequence[Sequence[int]] | None:
        """What is left of an epoch by the checkpoint that the script has loaded; None: all of it."""
        of, rest = self._rests.get(pool, (None, None))
        return rest if of == epoch else None

    @abstractmethod
    def close(self) -> None:
        """Leave the job."""


def _samples(grants: Sequence[LeasedRange]) -> int:
    """How many samples these are; 0 if it is not known of each."""
    counts = [grant.samples for grant in grants]
    return sum(counts) if all(counts) else 0


class LocalSession(Session):
    """A job of one worker, without servers: the wrapped optimizer does the step itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._leases = Leases()
        self._ending: set[int] = set()
        """Pools of which an epoch has been dealt out while batches of it are still to be stepped on."""

    def step(self, samples: int | None) -> None:
        self._optimizer.step()
        self.version += 1
        self._settle(Fate.FOLDED, "")

    def reject(self, reason: str) -> None:
        """Leave out this step."""
        self._settle(Fate.REJECTED, reason)

    def _settle(self, fate: Fate, reason: str) -> None:
        ids, _ = self.consume(len(self._outstanding))
        self._leases.submit(ids)
        self._leases.settle(ids, fate, reason)
        for pool in [pool for pool in self._ending if not self.held(pool)]:
            self._end(pool)

    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        self._leases.open(pool, epoch, size, rest=self.rest_of(pool, epoch))
        if epoch > self._leases.epoch(pool):  # the loop over the epoch before was left early
            self._end(pool)
            self._leases.open(pool, epoch, size)
        if epoch < self._leases.epoch(pool):
            return None
        self._leases.bound(pool, size)
        lease = self._leases.take(self.worker, pool, batch)
        if lease is None:
            self._ending.add(pool) if self.held(pool) else self._end(pool)
            return None
        grant = LeasedRange(pool, lease.id, lease.start, lease.stop)
        self._outstanding.append(grant)
        return grant

    def _end(self, pool: int) -> None:
        self._ending.discard(pool)
        self.drop(pool)
        self._leases.give_back(self.worker, pool)
        epoch = self._leases.epoch(pool)
        self.reports.append({"epoch": epoch, **self._leases.end(pool)})

    def pull(self) -> None:
        """Nothing to do: the parameters are here."""

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


current: Session | None = None
"""The main session of this process: that of its first `DistributedOptimizer`; without a launcher, of the one made last."""
_waiting: list[Callable[[Session], None]] = []
"""What is to be done with the first session of this process."""


def made(session: Session) -> None:
    """Note the session of a new `DistributedOptimizer`."""
    global current
    if current is None or isinstance(session, LocalSession):
        current = session
    waiting = list(_waiting)
    _waiting.clear()
    for call in waiting:
        call(session)


def when_made(call: Callable[[Session], None]) -> None:
    """Call with the main session, or else, in the order of these calls, of the first that is made."""
    if current is not None:
        call(current)
    else:
        _waiting.append(call)


def log(**metrics: float) -> None:
    """Report numbers of this worker: ``loss`` shows in the job's progress line, the others in its table and summary.

    A metric's value in the summary is the one that was logged last.

    Args:
        metrics: plain numbers; call ``.item()`` on tensors.

    Raises:
        TypeError: a value is no number.
    """
    for name, value in metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"offbeat.log({name}={value!r}): pass a number; for a tensor, its .item()")
    if current is not None:
        current.log({name: float(value) for name, value in metrics.items()})


def rank() -> int:
    """Return this worker's number in the job, from 0; 0 without a launcher.

    Usable before the optimizer exists, for a seed or a share of the data that differs from worker to worker. A restarted worker has the
    number of the process before it.

    >>> rank()
    0
    """
    return current.worker if current is not None else int(os.environ.get("OFFBEAT_WORKER", "0"))


def world_size() -> int:
    """Return how many workers the job was started with, whether they live or not; 1 without a launcher. Usable before the optimizer exists.

    >>> world_size()
    1
    """
    return current.workers if current is not None else int(os.environ.get("OFFBEAT_WORKERS", "1"))


def chief() -> bool:
    """Return whether this is the worker that evaluates, prints and saves; True without a launcher.

    The chief is the lowest-numbered worker that is there when the job begins. If it dies, or is told to leave (SIGTERM), the
    lowest-numbered living worker takes its place and keeps it, also when the first one comes back. The end of its script passes the role to
    nobody: what it has saved is not saved again by workers that end later. Before the optimizer exists the answer is that of worker 0.

    >>> chief()
    True
    """
    return current.chief if current is not None else rank() == 0


def is_main_process() -> bool:
    """Return what `chief` returns, under the name that users of other libraries look for.

    >>> if is_main_process():
    ...     print("one worker says this")
    one worker says this
    """
    return chief()
