"""What can happen to a job, as the coordinator hears of it. Times are not in here: ``now`` comes beside the event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from offbeat.types import Epoch, Incarnation, LeaseId, Seconds, Version, WorkerId


class Joined(NamedTuple):
    """A worker is connected to every shard and asks to take part, for the first time or again."""

    worker: WorkerId


class Initialised(NamedTuple):
    """Every shard has the initial parameters of this worker: version 0 exists."""

    worker: WorkerId


class Heard(NamedTuple):
    """A sign of life."""

    worker: WorkerId
    incarnation: Incarnation


class Pushed(NamedTuple):
    """A contribution has arrived at every shard."""

    worker: WorkerId
    incarnation: Incarnation
    version: Version
    """The version of the parameters it was computed from."""
    samples: int
    """Its weight: the number of samples it is the mean of; 0 where the worker cannot know."""
    compute_s: Seconds
    """From the worker's admission to the push, waits for samples left out."""
    leases: tuple[LeaseId, ...] = ()
    """The leases it was computed over, if the job deals out the samples."""
    nonfinite: str | None = None
    """The tensor in which the worker found infinity or NaN; such a contribution is rejected."""
    loss: float | None = None
    steps: int = 1
    """The local optimizer steps in it; 1 where gradients are exchanged."""
    shard: int | None = None
    """The one shard at which it has arrived, in rules of shard scope; None: every shard has it."""
    held: tuple[Version, ...] = ()
    """Shard scope: the version of each block that it was computed from."""


class Abandoned(NamedTuple):
    """A worker has given up a computation that it was told is of no more use, and waits to be admitted."""

    worker: WorkerId
    incarnation: Incarnation
    version: Version
    """The version that it was computing from."""
    compute_s: Seconds
    leases: tuple[LeaseId, ...] = ()
    """Go back to their pool."""


class Folded(NamedTuple):
    """Every shard has made this version; what they have measured, summed over the shards."""

    version: Version
    squares: tuple[float, ...]
    """The squared norm of each gradient in the fold, in the order of its parts."""
    total: float
    """The squared norm of their weighted sum g."""
    lr: float
    """The learning rate of the step, of the first parameter group."""
    difference: float | None = None
    """The squared norm of g minus the g of the version before; None: not measured."""


class Withdrawn(NamedTuple):
    """Ranks of different hosts: a gradient went with its host before it was in any result; its round goes on without it."""

    worker: WorkerId
    number: Version
    """The round that it was for."""


class Voided(NamedTuple):
    """Without servers: the mean of a round is beyond the range of the numbers. Its step is left out, by every rank."""

    number: Version


class LeaseWanted(NamedTuple):
    """A worker asks for the next samples of an epoch."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    """Which sampler of the script: 0 for the first that it makes."""
    epoch: Epoch
    size: int | None
    """The number of samples in the data set; None: it is a stream, to whose end this worker has not read yet."""
    batch: int
    """The number of samples wanted."""
    rest: Sequence[Sequence[int]] | None = None
    """The ranges that are left of the epoch, where the script has loaded a checkpoint from its middle; None: all."""


class EpochWanted(NamedTuple):
    """A worker will take no more samples of an epoch and waits for its end."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    size: int | None


class PullWanted(NamedTuple):
    """An admitted worker asks for the newest parameters, without a push."""

    worker: WorkerId
    incarnation: Incarnation


class Stands(NamedTuple):
    """A worker says that it has to wait for others, or that it does so no more: under rules that let workers see to that themselves."""

    worker: WorkerId
    incarnation: Incarnation
    still: bool


class Elsewhere(NamedTuple):
    """A worker waits in the job of another optimizer of its process: it cannot work for this one, and nobody here shall wait for it."""

    worker: WorkerId
    reason: str


class Returned(NamedTuple):
    """A worker does not wait elsewhere any more."""

    worker: WorkerId


class Lost(NamedTuple):
    """A worker is gone: its connection closed, or the supervisor saw its process end."""

    worker: WorkerId
    reason: str
    incarnation: Incarnation | None = None
    """The incarnation that is gone; None: whichever there is."""


class Left(NamedTuple):
    """A worker leaves by itself: its script has come to its end."""

    worker: WorkerId
    incarnation: Incarnation
    noticed: bool = False
    """It was told to leave (SIGTERM), and its script has not come to its end."""


Event: TypeAlias = (
    Joined
    | Initialised
    | Heard
    | Pushed
    | Abandoned
    | Folded
    | Withdrawn
    | Voided
    | PullWanted
    | LeaseWanted
    | EpochWanted
    | Stands
    | Elsewhere
    | Returned
    | Lost
    | Left
)
