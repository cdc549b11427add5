"""What the shell of a worker tells its state machine, and what the machine tells the shell. The machine is in ``worker.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from offbeat.core.batch_sizes import Deal
from offbeat.core.effects import Effect, Grant
from offbeat.core.events import Event
from offbeat.types import Epoch, LeaseId, RecordId, Version

# Stimuli. The effects of ``core/effects.py`` that concern the worker are stimuli too.


class BlockArrived(NamedTuple):
    """A block of one shard is in this worker's memory; only in rules of shard scope."""

    shard: int
    version: Version


class Woken(NamedTuple):
    """Something may have changed: blocks have arrived, or the time of `Worker.wake_at` has come."""


class Stepped(NamedTuple):
    """The script has computed a gradient, or has made this many local optimizer steps."""

    leases: tuple[LeaseId, ...] = ()
    """Leases of the samples of these steps."""
    samples: int = 0
    """The number of samples in these steps; 0: not known."""
    loss: float | None = None
    nonfinite: str | None = None
    """The tensor in which a gradient was not finite."""
    steps: int = 1
    done: int = 0
    """Batches of this worker's own split of the epoch that it has stepped on."""
    batches: int = 0
    """Number of batches in the worker's own split; 0: it has no split."""
    taken: int = 1
    """Number of batches that this stimulus adds to ``done``."""
    held: int = 0
    """Grants that the script has fetched ahead and made no step on."""


class SamplesWanted(NamedTuple):
    """The script asks for the next samples of an epoch; the fields are those of `events.LeaseWanted`."""

    pool: int
    epoch: Epoch
    size: int | None
    batch: int
    rest: Sequence[Sequence[int]] | None = None
    held: int = 0
    """Grants that the script has fetched ahead and made no step on."""
    deal: Deal = Deal()


class EpochEndWanted(NamedTuple):
    """The script takes no more samples of an epoch and waits for its end; the fields are those of `events.EpochWanted`."""

    pool: int
    epoch: Epoch
    size: int | None
    kept: tuple[LeaseId, ...] = ()


class BarrierAsked(NamedTuple):
    """The script has come to a barrier; for the number see `events.BarrierWanted`."""

    number: int | None


class Advanced(NamedTuple):
    """Without servers: results of rounds have brought this rank's replica to this version."""

    version: Version


class HandIn(NamedTuple):
    """Report that the script wants its local steps pushed now, before the plan asks for a push."""


class PullAsked(NamedTuple):
    """The script asks for the newest parameters."""


class Finished(NamedTuple):
    """The script has come to its end; ``noticed``: it was told to leave before."""

    noticed: bool = False


Stimulus: TypeAlias = (
    BlockArrived | Woken | Stepped | Advanced | HandIn | SamplesWanted | EpochEndWanted | BarrierAsked | PullAsked | Finished | Effect
)


# Instructions.


class Send(NamedTuple):
    """Send the coordinator this event. A `Pushed` goes with the gradient or the parameters, an `Initialised` never comes from here."""

    event: Event
    cause: RecordId


class Compute(NamedTuple):
    """Give control to the script."""

    grant: Grant | None
    """The samples that it has asked for; None: it has none, and asks again unless the epoch is ``over``."""
    over: bool
    """The epoch has nothing more for this worker."""
    cause: RecordId


Instruction: TypeAlias = Send | Compute
