"""The vocabulary: one word per idea, used with this meaning everywhere.

worker        a process that computes gradients. Numbered 0 .. n-1 for the whole job; a restarted process keeps its number.
incarnation   the number of times that a worker has joined the job, from 1. Messages of earlier incarnations are fenced: they are rejected.
rank          a worker of a job without servers: it has a replica of the model and an optimizer of its own.
server        a process that holds parameters. Numbered 0 .. S-1. Server 0 also hosts the coordinator.
shard         the part of the parameters, and of the optimizer's state, that one server holds.
coordinator   the ledger, the membership and the sample leases of a job, and the one rule it runs.
rule          a synchronization model: decides which contributions fold now, and which workers may continue.
push          a worker hands in one contribution and waits to be admitted.
contribution  the content of one push: a gradient, the mean over ``samples`` samples, or the parameters after local steps. Each has exactly
              one fate; under rules of shard scope, one at each shard.
gather        a contribution moves from its worker's memory into a sum that a later fold uses.
fold          a weighted sum of contributions becomes one optimizer step: the next version of the parameters.
version       the number of folds in the parameters, from 0.
staleness     the version onto which a contribution is folded, minus the version from which it was computed.
mass          push-sum: the number by which a rank's parameters are divided to give its model.
clock         the number of iterations that a worker has completed and pushed; a returning worker gets the slowest clock.
plan          the work of an admitted worker until its next push: the number of local steps and the batch size.
superstep     ElasticBSP: the time from one barrier to the next.
block         one shard's parameters at one version, held by a worker under a rule of shard scope.
split         one worker's own part of the data, under rules that divide the data.
pull          an admitted worker receives the newest parameters.
lease         a range of positions of one epoch's sample order that one worker holds until it pushes or dies.
active        alive and not idle: a worker that the rule may wait for. An idle worker waits for an epoch to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, Literal, NewType, TypeAlias, cast, get_args

# Identifiers are types of their own, so that mypy finds a worker's number where an incarnation is due. An identifier is made where it
# begins (a counter, a message header, the command line, a journal) and nowhere else; at run time it is the int itself.
WorkerId = NewType("WorkerId", int)
Incarnation = NewType("Incarnation", int)
LeaseId = NewType("LeaseId", int)
RecordId = NewType("RecordId", int)
"""The number of an event's or effect's record in the journal, from 1."""

# Counts and times stay aliases: rules and ledgers add, subtract and divide them, and the result would be a plain number at each step.
Version: TypeAlias = int
Clock: TypeAlias = int
Epoch: TypeAlias = int
Seconds: TypeAlias = float

WireFormat: TypeAlias = Literal["float32", "bf16", "int8"]
"""How gradients and parameters travel between processes that do not share memory; see ``tensors/wire_formats.py``."""
WIRE_FORMATS: Final[tuple[WireFormat, ...]] = get_args(WireFormat)
PlaneChoice: TypeAlias = Literal["host", "device", "auto"]
"""Whose memory gradients are exchanged in: the host's, that of the GPU where the model is, or the GPU's where that can be."""
PLANES: Final[tuple[PlaneChoice, ...]] = get_args(PlaneChoice)
Reduction: TypeAlias = Literal["mean", "sum"]
"""What a worker's gradient is of its samples' gradients."""
REDUCTIONS: Final[tuple[Reduction, ...]] = get_args(Reduction)

FIRST_WORKER: Final = WorkerId(0)
"""The number of a job's first worker, and of the only one where a script runs alone."""
NO_WORKER: Final = WorkerId(-1)
"""Stands for a worker's number where none is meant."""
NOT_JOINED: Final = Incarnation(0)
"""Stands for the incarnation of a worker that has not joined yet."""
NO_CAUSE: Final = RecordId(0)
"""The record number of an effect that no event has caused."""


def worker_ids(workers: int) -> Sequence[WorkerId]:
    """Return the numbers of the workers of a job: 0 .. workers - 1.

    >>> list(worker_ids(3))
    [0, 1, 2]
    """
    return cast("Sequence[WorkerId]", range(workers))


class Fate(StrEnum):
    """The fate of a contribution."""

    FOLDED = "folded"
    """Part of a version of the parameters."""
    CARRIED = "carried"
    """In a later contribution of its worker, whose fate its samples share: parameters that the worker has pushed again."""
    DROPPED = "dropped"
    """Not used by the rule, for instance because it arrived too late."""
    REJECTED = "rejected"
    """Not usable: sent by a fenced incarnation, not finite, or computed over samples that were dealt to another worker meanwhile."""
    SKIPPED = "skipped"
    """Of samples only, which no contribution contains: the script has left them out, or thrown their gradient away."""


class WorkerState(StrEnum):
    """The state of a worker as the coordinator sees it (EnsembleSync, section 3.3; transitions: ``core/membership.py``)."""

    EXPECTED = "expected"
    """Part of the job, but has not joined yet."""
    ALIVE = "alive"
    DEAD = "dead"
    """Silent for longer than the timeout, disconnected, or reported dead. No rule waits for a dead worker."""
    RECOVERED = "recovered"
    """Dead, then sent a message: it has been told to rejoin, and counts again once it has rejoined."""
    FINISHED = "finished"
    """Left the job after its script ended."""
