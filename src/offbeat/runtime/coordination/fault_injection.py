"""Inject faults, for demos and tests, and to try out a setting beforehand: what ``--slow``, ``--late`` and ``--kill`` order.

A slow worker waits before it pushes (`runtime.worker.connection.WorkerConnection.linger`), a late server before it sends
(``runtime/parameter_server/per_shard.py``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from offbeat.journal.records import Record, fault_record
from offbeat.runtime.job.settings import ANY, InjectedKill, JobSettings, WorkerSettings
from offbeat.types import NO_WORKER, Seconds, Version, WorkerId


def lateness(settings: WorkerSettings, step: int, version: Version) -> Seconds:
    """Return by how many seconds this worker's step is slowed down.

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
    late = (s for s in settings.slow if s.worker in chosen and s.start <= version and (s.stop is None or version <= s.stop))
    return sum(slow.seconds for slow in late)


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
        who = "one worker, drawn anew each step" if slow.worker == ANY else "each step"
        records.append(fault_record(now, slow.worker, "slow", f"{slow.seconds:g} s, {who}"))
    for late in settings.late:
        whose = "every server" if late.server == ANY else f"server {late.server}"
        records.append(fault_record(now, NO_WORKER, "late", f"{late.seconds:g} s, {late.share:.4g} of the blocks of {whose}"))
    return records
