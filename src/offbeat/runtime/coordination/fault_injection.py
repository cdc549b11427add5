"""Inject faults, for demos and tests, and to try out a setting beforehand: what ``--slow``, ``--late`` and ``--kill`` order.

A slow worker waits before it pushes (`runtime.worker.connection.WorkerConnection.linger`), a late server before it sends
(``runtime/parameter_server/per_shard.py``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from offbeat.journal.records import Record, fault_record
from offbeat.runtime.job.settings import ANY, InjectedKill, JobSettings, ReplayedTrace, WorkerSettings
from offbeat.types import NO_WORKER, Seconds, Version, WorkerId


def lateness(settings: WorkerSettings, step: int, version: Version) -> Seconds:
    """Return by how many seconds this worker's step is slowed down.

    Args:
        settings: of the worker.
        step: the number of the step, counted over all processes that this worker has had.
        version: the newest that the worker knows.

    Raises:
        ConfigurationError: a trace cannot be read on this machine.

    >>> from offbeat.runtime.job.settings import InjectedSlowdown
    >>> slow = (InjectedSlowdown(worker=1, seconds=0.2, start=10, stop=20), InjectedSlowdown(worker=1, seconds=0.1))
    >>> settings = WorkerSettings(worker=1, workers=4, token="", servers=(), slow=slow)
    >>> lateness(settings, step=0, version=3), round(lateness(settings, step=0, version=10), 3)
    (0.1, 0.3)
    """
    if not settings.slow:
        return 0.0
    chosen = {settings.worker}
    if drawn(settings.seed, step, settings.workers) == settings.worker:
        chosen.add(ANY)
    late = (s for s in settings.slow if (s.trace or s.worker in chosen) and s.start <= version and (s.stop is None or version <= s.stop))
    return sum(slow.seconds if slow.trace is None else _replayed(slow.trace, settings.worker, step) for slow in late)


def _replayed(trace: ReplayedTrace, worker: WorkerId, step: int) -> Seconds:
    """Return a worker's value in a trace for a step; after the last row the first one follows."""
    column = _column(trace, worker)
    return column[step % len(column)]


@lru_cache(maxsize=8)
def _column(trace: ReplayedTrace, worker: WorkerId) -> Sequence[Seconds]:
    from offbeat import traces  # not loaded by a worker that replays nothing

    seconds: list[Seconds] = (traces.read(trace.path, trace.job)[:, trace.column + worker] * trace.scale).tolist()
    return seconds


def drawn(seed: int, step: int, workers: int) -> WorkerId:
    """Return the worker that ``any`` means in step number ``step``: the same draw in every process."""
    return WorkerId(random.Random(seed * 1_000_003 + step).randrange(workers))


class Kills:
    """Return the deaths that ``--kill`` orders, each once.

    >>> from offbeat.runtime.job.settings import InjectedKill
    >>> kills = Kills([InjectedKill(worker=1, version=5)])
    >>> kills.due(4), kills.due(6), kills.due(7)
    ([], [1], [])
    """

    def __init__(self, ordered: Sequence[InjectedKill]) -> None:
        self.ordered = list(ordered)
        """Those that have not happened yet."""

    def due(self, version: Version) -> list[WorkerId]:
        """Return the workers to kill now that the job has reached this version."""
        due = [kill for kill in self.ordered if version >= kill.version]
        self.ordered = [kill for kill in self.ordered if kill not in due]
        return [kill.worker for kill in due]


def announced(settings: JobSettings, now: Seconds) -> list[Record]:
    """Return the journal's records of the faults that are ordered for the whole job."""
    records = []
    for slow in settings.slow:
        if (trace := slow.trace) is not None:
            scaled = "" if trace.scale == 1.0 else f" x {trace.scale:.4g}"
            name = Path(trace.path).name
            texts = (f"trace {name}, column {trace.column + worker}{scaled}" for worker in range(settings.workers))
            records += [fault_record(now, WorkerId(worker), "slow", text) for worker, text in enumerate(texts)]
            continue
        who = "one worker, drawn anew each step" if slow.worker == ANY else "each step"
        records.append(fault_record(now, slow.worker, "slow", f"{slow.seconds:g} s, {who}"))
    for late in settings.late:
        whose = "every server" if late.server == ANY else f"server {late.server}"
        records.append(fault_record(now, NO_WORKER, "late", f"{late.seconds:g} s, {late.share:.4g} of the blocks of {whose}"))
    return records
