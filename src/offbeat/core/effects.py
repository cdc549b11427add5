"""What to do about an event, in the order in which it is to be done. Each effect carries its reason in words."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from offbeat.core.partitions import Parts
from offbeat.core.policy import Plan
from offbeat.types import Clock, Epoch, Fate, Incarnation, LeaseId, Version, WorkerId, WorkerState


class Part(NamedTuple):
    """One contribution's share in a fold."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    weight: float
    """The factor of its gradient in the sum; the weights of a fold add up to 1, or each is 1 / ``divisor``."""
    staleness: int
    gathered: float = 0.0
    """The factor with which it was gathered; 0: it was not, the gradient is still in its worker's memory."""


class Initialise(NamedTuple):
    """Ask this worker for its parameters: they become version 0."""

    worker: WorkerId
    reason: str


class Fold(NamedTuple):
    """Every shard: g = sum(weight * gradient) over the parts, one optimizer step with g, and this is the new version."""

    version: Version
    parts: tuple[Part, ...]
    reason: str
    scale: float = 1.0
    """The factor of the learning rate in this step."""
    shard: int | None = None
    """The one shard that folds, in rules of shard scope; None: all."""
    divisor: int | None = None
    """Allreduce family: the living ranks, by which the sum of the gradients is divided, however many there are; None: see the weights."""


class Gather(NamedTuple):
    """Every shard: add weight * gradient to the sum that is kept of this worker's gathered contributions. A later fold uses it up."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    weight: float
    reason: str


class Settle(NamedTuple):
    """A contribution has met its fate. There is exactly one of these per push, and in rules of shard scope one per push and shard."""

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
    """The steps that it is taken to have made."""
    source: WorkerId | None
    """None: with the initial parameters, there is nobody to copy."""
    reason: str


class Share(NamedTuple):
    """Gossip: this rank's parameters, as they are now, are what the others mix in as those of its step ``clock``."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    to: tuple[WorkerId, ...]
    """For whom they are meant."""
    weight: float
    """With which they count there."""


class Source(NamedTuple):
    """Another's parameters in a `Mix`."""

    worker: WorkerId
    clock: Clock
    """They are those that it shared after so many steps."""
    weight: float


class Mix(NamedTuple):
    """Gossip: this rank's parameters become ``own`` times what they are plus the weighted sum of what others have shared."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    own: float
    sources: tuple[Source, ...]
    mass: float
    """Push-sum: the rank's model is its parameters divided by this from now on. 1 in the other rules."""


class Pair(NamedTuple):
    """Gossip: these two ranks take on the mean of their parameters, at once. The first has asked for it."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    partner: WorkerId


class WrittenOff(NamedTuple):
    """Gossip: what went with a rank that is gone."""

    worker: WorkerId
    incarnation: Incarnation
    mass: float
    """Push-sum: its own, and that of what was on its way to it."""
    sources: tuple[Source, ...]
    """What had been shared with it and it has not mixed in."""
    reason: str


class Undone(NamedTuple):
    """Without servers: a contribution that was folded into a version is not in it after all. It went with its host before the sum, or the
    mean was not finite and the version is the one before."""

    worker: WorkerId
    incarnation: Incarnation
    clock: Clock
    version: Version
    samples: int
    reason: str
    fate: Fate = Fate.DROPPED
    """What has become of it instead."""


class Publish(NamedTuple):
    """Shard scope: send this shard's new block to these workers, (worker, incarnation), which may be computing."""

    shard: int
    version: Version
    workers: tuple[tuple[WorkerId, Incarnation], ...]
    reason: str


class Interrupt(NamedTuple):
    """Tell a worker that its computation is of no more use; its answer is `events.Abandoned`, unless its push is under way already."""

    worker: WorkerId
    incarnation: Incarnation
    version: Version
    """The version that has overtaken it."""
    at_once: bool
    """Break off now; otherwise finish, and do not push."""
    reason: str


class Fence(NamedTuple):
    """Tell a process that speaks for a dead incarnation to join again."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class Grant(NamedTuple):
    """Positions ``start`` to ``stop``, of the epoch's order or of the worker's split, are this worker's until it pushes, or dies."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    lease: LeaseId
    start: int
    stop: int
    refreshed: bool = False
    """Whether a `Release` with the newest parameters comes with it: the worker has been idle, and the others have gone on."""
    parts: Parts = ()
    """The worker's split in this epoch, ranges of the data's fixed order, along which the positions count. Empty: all have one order."""


class Paused(NamedTuple):
    """A worker has nothing to do until the epoch ends, or samples come back; the rule does not wait for it meanwhile."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    reason: str


class SetAside(NamedTuple):
    """A worker waits in the job of another optimizer of its process; this rule does not wait for it meanwhile."""

    worker: WorkerId
    incarnation: Incarnation
    reason: str


class TakenBack(NamedTuple):
    """A worker that was set aside counts again."""

    worker: WorkerId
    incarnation: Incarnation


class NoMore(NamedTuple):
    """Nothing of this epoch is left for this worker, which still holds leases of it or has come after its end."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    refreshed: bool
    """Whether a `Release` with the newest parameters comes with it."""
    reason: str


class EpochEnded(NamedTuple):
    """Every index of an epoch is accounted for. The waiting workers are released beside this."""

    pool: int
    epoch: Epoch
    report: dict[str, Any]
    """See ``core/leases.py``."""
    workers: tuple[WorkerId, ...]
    """Who was waiting for it."""


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
    | StateChanged
)
