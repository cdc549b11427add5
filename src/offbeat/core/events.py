"""The events that the coordinator receives. Events have no times: ``now`` is a separate argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from offbeat.core.batch_sizes import Deal
from offbeat.types import Epoch, Incarnation, LeaseId, Seconds, Version, WorkerId


class Joined(NamedTuple):
    """A worker has connected to every shard and asks to take part, for the first time or again."""

    worker: WorkerId


class Initialised(NamedTuple):
    """Every shard has the initial parameters of this worker: version 0 exists."""

    worker: WorkerId


class Resumed(NamedTuple):
    """The script of a worker has loaded a checkpoint before which it had made this many steps."""

    worker: WorkerId
    incarnation: Incarnation
    steps: int


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
    """From the worker's admission to the push, without waits for samples."""
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
    alone: bool = False
    """Shard scope: ``shard`` gets the whole push, the parameters of its fragment; False: it gets its part of a gradient."""
    sums: bool = False
    """The gradient is the sum over its samples, and a fold adds such gradients up; False: it is their mean."""
    place: int | None = None
    """After how many iterations of `offbeat.steps` a new process of its worker goes on; None: the script does not count with it."""
    phases: Mapping[str, Seconds] | None = None
    """Where the time since its worker's last push has gone, by the names of `core.phases.Phase`; None: it was not measured."""
    processor: Mapping[str, Seconds] | None = None
    """The processor time in each of them."""
    host: Mapping[str, float] | None = None
    """What the operating system has done to the process meanwhile, see ``runtime/worker/host_readings.py``."""
    process: int | None = None
    """Of a worker of several processes: the one whose account this is, for which the others waited."""


class Abandoned(NamedTuple):
    """A worker has abandoned a computation after an interrupt, and waits to be admitted."""

    worker: WorkerId
    incarnation: Incarnation
    version: Version
    """The version that it was computing from."""
    compute_s: Seconds
    leases: tuple[LeaseId, ...] = ()
    """The leases of the computation; they return to their pool."""


class Folded(NamedTuple):
    """Every shard has made this version; the event has their measurements, summed over the shards."""

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
    """A gradient was lost before it was summed, and the job goes on without the gradient.

    With ranks on different hosts, a host died with the only copy. With servers that have standbys, a leader died that had received the
    gradient, and its worker cannot send the gradient again.
    """

    worker: WorkerId
    number: Version
    """The round for which the gradient was submitted; with servers, the newest version."""


class Voided(NamedTuple):
    """Without servers: the mean of a round is not finite. Every rank skips the step."""

    number: Version


class LeaseWanted(NamedTuple):
    """A worker asks for the next samples of an epoch."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    """The number of the script's sampler: 0 for the first."""
    epoch: Epoch
    size: int | None
    """The number of samples in the data set; None: a stream that this worker has not read to its end."""
    batch: int
    """The number of samples wanted."""
    rest: Sequence[Sequence[int]] | None = None
    """The ranges left of the epoch, if the script has loaded a checkpoint from its middle; None: all."""
    deal: Deal = Deal()
    """How the samples of this sampler are dealt out."""


class EpochWanted(NamedTuple):
    """A worker will take no more samples of an epoch and waits for its end."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    size: int | None
    kept: tuple[LeaseId, ...] = ()
    """The leases whose gradient the worker has accumulated and not pushed: it takes them along into the next epoch."""


class Skipped(NamedTuple):
    """A worker's script has left samples out: no gradient that it pushes will contain them."""

    worker: WorkerId
    incarnation: Incarnation
    leases: tuple[LeaseId, ...]


class BarrierWanted(NamedTuple):
    """A worker has come to a barrier and waits until every living worker has."""

    worker: WorkerId
    incarnation: Incarnation
    number: int | None
    """Of the barrier, from 0 in each job; None: a process that has joined the running job and has passed none: the next one."""


class PullWanted(NamedTuple):
    """An admitted worker asks for the newest parameters, without a push."""

    worker: WorkerId
    incarnation: Incarnation


class Stands(NamedTuple):
    """A worker reports that it waits for others, or no longer waits: under rules in which workers admit themselves."""

    worker: WorkerId
    incarnation: Incarnation
    still: bool


class Elsewhere(NamedTuple):
    """A worker waits with another optimizer of its process: it cannot work for this one, whose rule must not wait for it."""

    worker: WorkerId
    reason: str


class Returned(NamedTuple):
    """A worker no longer waits with another optimizer."""

    worker: WorkerId


class Lost(NamedTuple):
    """A worker is dead: its connection closed, or the supervisor detected the end of its process."""

    worker: WorkerId
    reason: str
    incarnation: Incarnation | None = None
    """The incarnation that is dead; None: the current one."""


class Left(NamedTuple):
    """A worker leaves the job: its script has ended or has closed the optimizer, or it was told to leave."""

    worker: WorkerId
    incarnation: Incarnation
    noticed: bool = False
    """It was told to leave (SIGTERM) before the end of its script."""
    exits: bool = True
    """False: its process goes on, and may make another optimizer. When that process ends, the event comes again."""


Event: TypeAlias = (
    Joined
    | Initialised
    | Resumed
    | Heard
    | Pushed
    | Abandoned
    | Folded
    | Withdrawn
    | Voided
    | PullWanted
    | BarrierWanted
    | LeaseWanted
    | EpochWanted
    | Skipped
    | Stands
    | Elsewhere
    | Returned
    | Lost
    | Left
)
