"""Rehearsed slowness: the delays that ``--slow`` orders, for demos, for tests, and for users who want to know before it happens.

The worker lets this time pass before it pushes (`worker_link.WorkerLink.linger`).
"""

from __future__ import annotations

import random

from offbeat.runtime.settings import ANY, WorkerSettings
from offbeat.types import Seconds, Version, WorkerId


def lateness(settings: WorkerSettings, step: int, version: Version) -> Seconds:
    """How much longer this worker's step takes, in seconds.

    >>> from offbeat.runtime.settings import Slow
    >>> slow = (Slow(worker=1, seconds=0.2, start=10, stop=20), Slow(worker=1, seconds=0.1))
    >>> settings = WorkerSettings(worker=1, workers=4, token="", servers=(), slow=slow)
    >>> lateness(settings, step=0, version=3), round(lateness(settings, step=0, version=10), 3)
    (0.1, 0.3)
    """
    chosen = {settings.worker}
    if drawn(settings.seed, step, settings.workers) == settings.worker:
        chosen.add(ANY)
    late = (s for s in settings.slow if s.worker in chosen and s.start <= version and (s.stop is None or version <= s.stop))
    return sum(slow.seconds for slow in late)


def drawn(seed: int, step: int, workers: int) -> WorkerId:
    """The one worker that ``any`` names in everybody's step number ``step``: the same draw in every process."""
    return random.Random(seed * 1_000_003 + step).randrange(workers)
