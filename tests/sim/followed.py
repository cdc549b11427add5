"""Follows a journal's folds by hand: what the parameters must have been after each, if the servers have done what the journal says.

The learning rate, the optimizer and the gradients are those of ``stepped_process.py``; the arithmetic is NumPy's, in double precision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.core.scripts import served
from tests.sim.stepped import SteppedJob
from tests.sim.stepped_process import LR

from offbeat.core.policy import Averaging
from offbeat.journal.records import Record
from offbeat.policies import rule
from offbeat.types import Clock, Incarnation, WorkerId

Vector: TypeAlias = NDArray[np.float64]
CLOSE = 1e-5


def follow(job: SteppedJob, live: Sequence[Record]) -> None:
    """Whether workers went on with these parameters, and the norms that the servers measured are those of what was pushed."""
    pushed = by_clock(job, live)
    policy = served(rule(job.script.sync))
    measured = {record["version"]: record for record in live if record["kind"] == "folded"}
    shards: dict[int | None, Vector] = {None: np.array([1.0, -1.0])}
    if policy.scope == "shard":
        shards = dict(enumerate(np.split(shards[None], job.script.cluster.servers)))
    momenta = {shard: np.zeros_like(parameters) for shard, parameters in shards.items()}
    for shard, parameters in shards.items():
        check(job, shard, 0, parameters)
    for fold in (record for record in live if record["kind"] == "fold"):
        shard, averaging = fold.get("shard"), policy.averaging
        parts = [pushed[part["worker"], part["incarnation"], part["clock"]] for part in fold["parts"]]
        vectors = np.stack(parts) if shard is None else np.stack([np.split(part, len(shards))[shard] for part in parts])
        weights = np.array([part["weight"] for part in fold["parts"]])
        if averaging is None:
            gradient = weights @ vectors
            shards[shard] = shards[shard] - LR * fold.get("scale", 1.0) * gradient
            if fold["version"] in measured:
                assert measured[fold["version"]]["squares"] == pytest.approx((vectors**2).sum(axis=1), rel=CLOSE)
                assert measured[fold["version"]]["total"] == pytest.approx((gradient**2).sum(), rel=CLOSE, abs=CLOSE)
        else:
            step = shards[shard] - combined(vectors, weights, averaging)
            momenta[shard] = averaging.outer_momentum * momenta[shard] + step
            shards[shard] = shards[shard] - averaging.outer_lr * (step + averaging.outer_momentum * momenta[shard])
        check(job, shard, fold["version"], shards[shard])


def check(job: SteppedJob, shard: int | None, version: int, parameters: Vector) -> None:
    for seen in job.seen.get((shard, version), ()):
        assert seen.numpy() == pytest.approx(parameters, rel=CLOSE, abs=CLOSE), f"version {version} of shard {shard}"


def combined(vectors: Vector, weights: Vector, averaging: Averaging) -> Vector:
    if averaging.combine == "mean":
        return weights @ vectors
    if averaging.combine == "median":
        return np.asarray(np.median(vectors, axis=0))
    from scipy.stats import trim_mean  # half a second, and few tests trim

    return np.asarray(trim_mean(vectors, averaging.trim, axis=0))


def by_clock(job: SteppedJob, live: Sequence[Record]) -> dict[tuple[WorkerId, Incarnation, Clock], Any]:
    """What was pushed, by what a fold says of it. A process's pushes have rising clocks; those after its death have clock 0."""
    clocks: dict[tuple[WorkerId, Incarnation], set[Clock]] = defaultdict(set)
    for record in live:
        if record["kind"] == "settle" and record["clock"]:
            clocks[record["worker"], record["incarnation"]].add(record["clock"])
    return {
        (*process, clock): vector.double().numpy()
        for process, vectors in job.offered.items()
        for clock, vector in zip(sorted(clocks[process]), vectors, strict=False)
    }
