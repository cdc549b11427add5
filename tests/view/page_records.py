"""Records of jobs that have not taken place, for tests of the page."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tests.journal import records

from offbeat.journal.records import Record, job_record
from offbeat.journal.summary import Tally
from offbeat.view.columns import GROWS, REAL, SIGNED
from offbeat.view.job_view import JobView


def head(workers: int = 2, script: str = "train.py") -> Record:
    return job_record(sync="bsp", workers=workers, servers=1, seed=0, started="simulated", script=script)


def joined(worker: int, t: float = 0.0, incarnation: int = 1) -> Record:
    return {**records.state(t, worker, "alive", incarnation), "reason": "joined"}


def died(worker: int, t: float, reason: str = "killed by SIGKILL") -> Record:
    return {**records.state(t, worker, "dead"), "reason": reason}


def release(worker: int, t: float, version: int = 0) -> Record:
    return records.release(t, worker, version, clock=version)


def pushed(worker: int, t: float, version: int = 0, /, **phases: float) -> Record:
    return records.push(t, worker, version, compute_s=sum(phases.values()), loss=0.5, phases=phases)


def fold(version: int, t: float, workers: int) -> Record:
    return records.fold(t, version, *((worker, version, 1.0 / workers, 0) for worker in range(workers)))


def logged(t: float, version: int = 0, /, **values: float) -> Record:
    return {"kind": "metrics", "t": t, "worker": 0, "version": version, "values": values}


def steps(workers: int, versions: int, slow: int | None = None) -> Iterator[Record]:
    """A job in which each step takes 0.1 s, and a slow worker's 0.3 s, most of it for data."""
    yield head(workers)
    yield from (joined(worker) for worker in range(workers))
    yield from (release(worker, 1.0) for worker in range(workers))
    t, whole = 1.0, 0.1 if slow is None else 0.3
    for version in range(1, versions + 1):
        for worker in sorted(range(workers), key=lambda worker: worker == slow):
            phases = {"data": 0.25, "forward": 0.02, "backward": 0.03} if worker == slow else {"data": 0.01, "forward": 0.09}
            wait = {"wait": whole - sum(phases.values())} if version > 1 else {}
            yield pushed(worker, t + sum(phases.values()), version - 1, **{name: s for name, s in (wait | phases).items() if s > 1e-9})
        t += whole
        yield fold(version, t, workers)
        yield from (records.settle(t, worker, version, version=version) for worker in range(workers))
        yield from (release(worker, t, version) for worker in range(workers))


def summary(*records: Record) -> dict[str, Any]:
    return Tally.of(records).summary(brief=True)


def view_of(*records: Record) -> JobView:
    view = JobView()
    for record in records:
        view.record(record)
    view.status(summary(*records))
    return view


def unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Read packed columns as the page's scripts do."""
    raw, at, columns = zlib.decompress(base64.b64decode(packed["text"])), 0, dict[str, Any]()
    for name, count, width, how in packed["columns"]:
        planes = np.frombuffer(raw, np.uint8, width * count, at).reshape(width, count)
        at += planes.size
        values = sum((plane.astype(np.int64) << (8 * place) for place, plane in enumerate(planes)), np.zeros(count, dtype=np.int64))
        if how & REAL:
            values = np.ascontiguousarray(planes.T).view("<f4").ravel()
        if how & SIGNED:
            values = np.where(values & 1, -(values >> 1) - 1, values >> 1)
        columns[name] = np.cumsum(values) if how & GROWS else values
    assert at == len(raw)
    return columns
