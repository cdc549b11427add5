"""The effects that the coordinator returns for an event, in the order of their execution. Most have a reason in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from offbeat.core.partitions import Parts
from offbeat.core.policy import Plan
from offbeat.types import Clock, Epoch, Fate, Incarnation, LeaseId, Version, WorkerId, WorkerState

BARRIER: Final = -1
"""Stands for a pool of samples in a `Paused` at a barrier."""


class Part(NamedTuple):
    """One contribution's share in a fold."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    weight: float
    """The factor of its gradient in the sum; the weights of a fold add up to 1 (``sums``: to the number of parts), or each is
    1 / ``divisor`` (``sums``: 1)."""
    staleness: int
    gathered: float = 0.0
    """The factor with which it was gathered; 0: not gathered, the gradient is still in its worker's memory."""


class Initialise(NamedTuple):
    """Ask this worker for its parameters: they become version 0."""

    worker: WorkerId
    reason: str


class Fold(NamedTuple):
    """Every shard: g = sum(weight * gradient) over the parts, one optimizer step with g, and this is the new version."""

    version: Version
    parts: tuple[Part, ...]
    """In the order in which they are added up."""
    reason: str
    scale: float = 1.0
    """The factor of the learning rate in this step."""
    shard: int | None = None
    """The one shard that folds, in rules of shard scope; None: all."""
    divisor: int | None = None
    """Allreduce family: the number of living ranks, by which the sum of any number of gradients is divided; None: see the weights."""
    sums: bool = False
    """The gradients are sums over samples and are added up: the weights, or the divided sum, are multiplied by the number of parts, or of
    living ranks."""


class Gather(NamedTuple):
    """Every shard: add weight * gradient to the sum that is kept of this worker's gathered contributions. A later fold uses it up."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    weight: float
    reason: str


class Settle(NamedTuple):
    """The fate of a contribution. There is exactly one per push, and in rules of shard scope one per push and shard."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    fate: Fate
    reason: str
    version: Version
    """Folded: the version it is part of. Otherwise the version of the job at the time."""
    samples: int
    shard: int | None = None


class Release(NamedTuple):
    """Send this worker the parameters of this version: it may go on."""

    worker: WorkerId
    incarnation: Incarnation
    version: Version
    clock: Clock
    reason: str
    plan: Plan = Plan()


class Adopt(NamedTuple):
    """Gossip: this rank begins with a copy of another's model, optimizer state and buffers."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    """The number of steps with which it begins."""
    source: WorkerId | None
    """The rank to copy; None: there is none, it begins with the initial parameters."""
    reason: str


class Share(NamedTuple):
    """Gossip: the others mix in this rank's present parameters as those of its step ``clock``."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    to: tuple[WorkerId, ...]
    """The receivers."""
    weight: float
    """The weight of the parameters at each receiver."""


class Source(NamedTuple):
    """The parameters of another rank in a `Mix`."""

    worker: WorkerId
    clock: Clock
    """The number of steps after which it shared them."""
    weight: float


class Mix(NamedTuple):
    """Gossip: this rank's parameters become ``own`` times the present ones plus the weighted sum of parameters that others have shared."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    own: float
    sources: tuple[Source, ...]
    mass: float
    """Push-sum: from now on the rank's model is its parameters divided by this mass. 1 in the other rules."""


class Pair(NamedTuple):
    """Gossip: both ranks replace their parameters by the mean, at once. ``worker`` has requested it."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    partner: WorkerId


class WrittenOff(NamedTuple):
    """Gossip: mass and shares that are lost with a dead rank; or, across hosts, shares that a living rank cannot get from a dead one."""

    worker: WorkerId
    incarnation: Incarnation
    mass: float
    """Push-sum: its own mass, and that of the shares in transit to it."""
    sources: tuple[Source, ...]
    """The shares sent to it that it has not mixed in; across hosts also those that it has sent and nobody has got."""
    reason: str


class Undone(NamedTuple):
    """Without servers: a contribution reported as folded is not in that version. Either its host died before the sum, or the mean was not
    finite and no step was made."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    version: Version
    samples: int
    reason: str
    fate: Fate = Fate.DROPPED
    """The fate that replaces ``folded``."""


class Publish(NamedTuple):
    """Shard scope: send this shard's new block to these workers, (worker, incarnation), which may be computing."""

    shard: int
    version: Version
    workers: tuple[tuple[WorkerId, Incarnation], ...]
    reason: str


class Interrupt(NamedTuple):
    """Tell a worker that its computation is obsolete; it answers with `events.Abandoned`, unless it has sent its push already."""

    worker: WorkerId
    incarnation: Incarnation
    version: Version
    """The newer version that makes the computation obsolete."""
    at_once: bool
    """Stop now; otherwise finish the computation, and do not push."""
    reason: str


class Fence(NamedTuple):
    """Tell a process of a dead incarnation to join again."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class Grant(NamedTuple):
    """Lease positions ``start`` to ``stop``, of the epoch's order or of the worker's split, to this worker until it pushes or dies."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    lease: LeaseId
    start: int
    stop: int
    refreshed: bool = False
    """True if a `Release` with the newest parameters comes with the grant, since the worker was idle while others made versions."""
    parts: Parts = ()
    """The worker's split in this epoch, ranges of the data's fixed order, along which the positions count. Empty: all have one order."""


class Paused(NamedTuple):
    """Note that a worker has no samples until the epoch ends or some come back, or that it waits at a barrier.

    The rule does not wait for it meanwhile.
    """

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    """`BARRIER`: it waits at a barrier."""
    epoch: Epoch
    """Or the barrier's number."""
    reason: str


class SetAside(NamedTuple):
    """Note that a worker waits in the job of another optimizer of its process; this rule does not wait for it meanwhile."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class TakenBack(NamedTuple):
    """Note that the rule waits again for a worker that was set aside."""

    worker: WorkerId
    incarnation: Incarnation


class NoMore(NamedTuple):
    """Tell a worker that no samples of this epoch are left for it; it still holds leases, or has asked for the end of the epoch."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    refreshed: bool
    """True if a `Release` with the newest parameters comes with this effect."""
    reason: str
    over: bool = False
    """True if no later epoch will have samples for this worker either: the job has ended."""


class EpochEnded(NamedTuple):
    """An epoch has ended: its report counts every index. Separate `Release` effects admit the waiting workers."""

    pool: int
    epoch: Epoch
    report: dict[str, Any]
    """See ``core/leases.py``."""
    workers: tuple[WorkerId, ...]
    """The workers that waited for the end."""


class BarrierPassed(NamedTuple):
    """Tell the workers that wait at a barrier to go on. Separate `Release` effects admit them, with the newest parameters."""

    number: int
    version: Version
    workers: tuple[WorkerId, ...]
    past: bool = False
    """True: the others have passed it before; its one worker is late."""


class GoesOn(NamedTuple):
    """Tell a worker that has joined a running job after how many steps of its script it goes on."""

    worker: WorkerId
    incarnation: Incarnation
    steps: int
    restarted: bool
    """False: the whole job goes on from a checkpoint."""


class JobOver(NamedTuple):
    """Tell a worker that has joined the running job that the job has ended: its script gets no step more."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class Resized(NamedTuple):
    """Note new sizes of the workers' batches, of the first sampler whose sizes follow the measured speeds."""

    batches: Mapping[WorkerId, int]
    """By worker: samples of a batch, of all its processes together."""
    reason: str


class RuleChanged(NamedTuple):
    """Note that the job's rule decides as another one from this version on."""

    version: Version
    """The newest one: later ones are the other rule's."""
    rule: str
    """The spelling of the other rule."""
    reason: str


class StateChanged(NamedTuple):
    """A worker's state has changed."""

    worker: WorkerId
    incarnation: Incarnation
    state: WorkerState
    reason: str


Effect: TypeAlias = (
    Initialise
    | Fold
    | Gather
    | Settle
    | Release
    | Adopt
    | Share
    | Mix
    | Pair
    | WrittenOff
    | Undone
    | Publish
    | Interrupt
    | Fence
    | Grant
    | Paused
    | SetAside
    | TakenBack
    | NoMore
    | EpochEnded
    | BarrierPassed
    | GoesOn
    | JobOver
    | Resized
    | RuleChanged
    | StateChanged
)
