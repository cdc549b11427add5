"""Records of a journal, written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from offbeat.core.effects import Effect
from offbeat.core.events import Event
from offbeat.core.policy import Policy
from offbeat.journal.records import UNRECORDED, end_record, job_record, record

Record: TypeAlias = dict[str, Any]

JOB = {"kind": "job", "t": 0, "format": 1, "sync": "bsp", "workers": 2, "servers": 1, "seed": 0}
END = {"kind": "end", "t": 9.0, "ok": True, "reason": "done"}


def release(t: float, worker: int, version: int = 0, clock: int = 0, incarnation: int = 1, **more: Any) -> Record:
    fields = {"worker": worker, "incarnation": incarnation, "version": version, "clock": clock}
    return {"kind": "release", "t": t, **fields, "reason": "go on", **more}


def push(
    t: float, worker: int, version: int = 0, compute_s: float = 0.5, loss: float | str | None = None, incarnation: int = 1, **more: Any
) -> Record:
    fields = {"worker": worker, "incarnation": incarnation, "version": version, "samples": 8, "compute_s": compute_s}
    return {"kind": "pushed", "t": t, **fields, "leases": [], "nonfinite": None, "loss": loss, **more}


def abandoned(t: float, worker: int, version: int = 0, compute_s: float = 0.5) -> Record:
    fields = {"worker": worker, "incarnation": 1, "version": version, "compute_s": compute_s}
    return {"kind": "abandoned", "t": t, **fields, "leases": []}


def interrupt(t: float, worker: int, version: int = 1) -> Record:
    fields = {"worker": worker, "incarnation": 1, "version": version, "at_once": True}
    return {"kind": "interrupt", "t": t, **fields, "reason": f"version {version} has overtaken it"}


def plan(**given: Any) -> dict[str, Any]:
    return {"per_epoch": 0, "batch": None, **given}


def epoch_ended(t: float, epoch: int, *workers: int) -> Record:
    return {"kind": "epoch_ended", "t": t, "pool": 0, "epoch": epoch, "report": {"indices": 16, "folded": 16}, "workers": list(workers)}


def state(t: float, worker: int, state: str, incarnation: int = 1) -> Record:
    return {"kind": "state_changed", "t": t, "worker": worker, "incarnation": incarnation, "state": state, "reason": "so it is"}


def gather(t: float, worker: int, clock: int, weight: float = 8.0) -> Record:
    return {"kind": "gather", "t": t, "worker": worker, "incarnation": 1, "clock": clock, "weight": weight, "reason": "kept"}


def part(worker: int, clock: int, weight: float = 1.0, staleness: int = 0, **more: Any) -> Record:
    return {"worker": worker, "incarnation": 1, "clock": clock, "weight": weight, "staleness": staleness, **more}


def fold(t: float, version: int, *parts: tuple[int, int, float, int] | Record, **more: Any) -> Record:
    named = [one if isinstance(one, dict) else part(*one) for one in parts]
    return {"kind": "fold", "t": t, "version": version, "parts": named, "reason": "all are here", **more}


def settle(t: float, worker: int, clock: int, fate: str = "folded", version: int = 1, samples: int = 8, **more: Any) -> Record:
    fields = {"worker": worker, "incarnation": 1, "clock": clock, "fate": fate, "version": version, "samples": samples}
    return {"kind": "settle", "t": t, **fields, "reason": "all are here", **more}


def publish(t: float, shard: int, version: int) -> Record:
    return {"kind": "publish", "t": t, "shard": shard, "version": version, "workers": [[0, 1], [1, 1]], "reason": "all are here"}


def paused(t: float, worker: int) -> Record:
    return {"kind": "paused", "t": t, "worker": worker, "incarnation": 1, "pool": 0, "epoch": 0, "reason": "waits for the end of epoch 0"}


def metrics(worker: int, version: int, accuracy: float) -> Record:
    return {"kind": "metrics", "t": 1.0, "worker": worker, "version": version, "values": {"accuracy": accuracy}}


def round_of_two() -> list[Record]:
    """Two workers, one fold."""
    return [
        JOB,
        release(1.0, 0),
        release(1.0, 1),
        push(1.5, 0, loss=2.0),
        push(2.0, 1, compute_s=1.0, loss=1.0),
        fold(2.0, 1, (0, 1, 0.5, 0), (1, 1, 0.5, 0)),
        settle(2.0, 0, 1),
        settle(2.0, 1, 1),
        release(2.25, 0, 1, 1),
        release(2.5, 1, 1, 1),
        END,
    ]


def two_shards() -> list[Record]:
    """Two workers, two shards: worker 0 goes on without shard 1, which folds its first gradient with its second."""
    return [
        JOB | {"sync": "psp(c=1, b=0.5)", "servers": 2},
        release(1.0, 0),
        release(1.0, 1),
        push(2.0, 0, compute_s=1.0, shard=0, held=[0, 0]),
        fold(2.0, 1, (0, 1, 1.0, 0), shard=0, scale=2.0),
        settle(2.0, 0, 1, shard=0),
        publish(2.0, 0, 1),
        push(2.5, 0, compute_s=1.0, shard=1, held=[0, 0]),
        push(5.0, 0, 1, compute_s=1.5, shard=0, held=[1, 0]),
        fold(5.0, 2, (0, 2, 1.0, 0), shard=0, scale=2.0),
        settle(5.0, 0, 2, version=2, shard=0),
        publish(5.0, 0, 2),
        push(5.0, 0, 1, compute_s=1.5, shard=1, held=[1, 0]),
        settle(5.0, 0, 1, "dropped", 0, shard=1),
        push(6.0, 1, compute_s=4.0, shard=1, held=[0, 0]),
        fold(6.0, 1, (1, 1, 0.5, 0), (0, 2, 0.5, 0), shard=1, scale=4.0),
        settle(6.0, 1, 1, shard=1),
        settle(6.0, 0, 2, shard=1),
        publish(6.0, 1, 1),
        push(6.5, 1, compute_s=4.0, shard=0, held=[0, 0]),
        settle(6.5, 1, 1, "dropped", 2, shard=0),
        END,
    ]


Log: TypeAlias = Sequence[tuple[float, Event | None, tuple[Effect, ...]]]


def journal_of(policy: Policy, workers: int, servers: int, log: Log) -> Iterator[Record]:
    """What the runtime would have written down of a test's world: its ``log``, which has every (time, event, effects)."""
    yield job_record(sync=policy.spelling, workers=workers, servers=servers, seed=0, started="simulated", script="")
    now = 0.0
    for now, event, effects in log:
        for item in (*([event] if event is not None else []), *effects):
            if type(item) not in UNRECORDED:
                yield record(item, now)
    yield end_record(now, True, "the job is over")
