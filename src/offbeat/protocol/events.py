"""What can happen to a job, as the coordinator hears of it. Times are not in here: ``now`` comes beside the event."""

from __future__ import annotations

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


class LeaseWanted(NamedTuple):
    """A worker asks for the next samples of an epoch."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    """Which sampler of the script: 0 for the first that it makes."""
    epoch: Epoch
    size: int
    """The number of samples in the data set."""
    batch: int
    """The number of samples wanted."""


class EpochWanted(NamedTuple):
    """A worker will take no more samples of an epoch and waits for its end."""

    worker: WorkerId
    incarnation: Incarnation
    pool: int
    epoch: Epoch
    size: int


class PullWanted(NamedTuple):
    """An admitted worker asks for the newest parameters, without a push."""

    worker: WorkerId
    incarnation: Incarnation


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


Event: TypeAlias = Joined | Initialised | Heard | Pushed | PullWanted | LeaseWanted | EpochWanted | Lost | Left
