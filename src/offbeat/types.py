"""The vocabulary: one word per idea, used with this meaning everywhere.

worker        a process that computes gradients. Numbered 0 .. n-1 for the whole job; a restarted process keeps its number.
incarnation   how often a worker has joined the job, from 1. What an earlier incarnation sends is fenced: it is rejected.
rank          a worker of a job without servers: it has a replica of the model and an optimizer of its own.
server        a process that holds parameters. Numbered 0 .. S-1. Server 0 also hosts the coordinator.
shard         the part of the parameters, and of the optimizer's state, that one server holds.
coordinator   the ledger, the membership and the sample leases of a job, and the one rule it runs.
rule          a synchronization model: which contributions fold now, and which worker may go on.
push          a worker hands in one contribution and waits to be admitted.
contribution  what one push hands in: a gradient, the mean over ``samples`` samples, or the parameters that local steps have come to.
              Each has exactly one fate; in rules of shard scope, one at each shard.
gather        a contribution leaves its worker's memory for a sum that a later fold uses up.
fold          a weighted sum of contributions becomes one optimizer step: the next version of the parameters.
version       how many folds the parameters have seen, from 0.
staleness     the version a contribution is folded onto, minus the version it was computed from.
mass          push-sum: what a rank's parameters are divided by to give its model.
clock         how many iterations a worker has completed and pushed; a returning worker is set to the slowest clock.
plan          what an admitted worker does until its next push: how many local steps, with which batch size.
superstep     ElasticBSP: from one barrier to the next.
block         one shard's parameters at one version, as a worker of a rule of shard scope holds them.
split         the part of the data that is one worker's own, where the rule gives each one.
pull          an admitted worker receives the newest parameters.
lease         a range of positions of one epoch's sample order that one worker holds until it pushes or dies.
active        alive and not idle: a worker that the rule may wait for. Idle: it waits for an epoch to end.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeAlias

WorkerId: TypeAlias = int
Incarnation: TypeAlias = int
Version: TypeAlias = int
Clock: TypeAlias = int
LeaseId: TypeAlias = int
Epoch: TypeAlias = int
Seconds: TypeAlias = float
RecordId: TypeAlias = int
"""The number of an event's or effect's record in the journal, from 1."""

NO_CAUSE: Final[RecordId] = 0
"""Stands for the number of a record where there is none."""


class Fate(StrEnum):
    """What became of a contribution."""

    FOLDED = "folded"
    """It is part of a version of the parameters."""
    CARRIED = "carried"
    """It waits in its sender for a later round (partial collectives only)."""
    DROPPED = "dropped"
    """The rule had no use for it, for instance because it came too late."""
    REJECTED = "rejected"
    """It must not be used: sent by a fenced incarnation, not finite, or over samples that went to somebody else."""


class WorkerState(StrEnum):
    """A worker in the coordinator's eyes (EnsembleSync, section 3.3; the transitions are in ``core/membership.py``)."""

    EXPECTED = "expected"
    """Announced, not heard of yet."""
    ALIVE = "alive"
    DEAD = "dead"
    """Silent for longer than the timeout, disconnected, or reported dead. Nobody waits for it."""
    RECOVERED = "recovered"
    """Dead, then heard of again: told to rejoin, and counted again only once it has."""
    FINISHED = "finished"
    """Left by itself: its script has come to its end."""
