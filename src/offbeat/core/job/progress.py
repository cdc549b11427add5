"""Count the steps of each worker's script, so that a restarted worker can go on where it was, or where the others are by now."""

from __future__ import annotations

from collections.abc import Iterable

from offbeat.types import WorkerId


class Progress:
    """Keep the number of steps that each worker has made in this job, in all its processes.

    Args:
        steps: by worker, those of the job before, from whose checkpoint this one resumes.

    >>> progress = Progress()
    >>> for worker, steps in ((0, 1), (1, 1), (0, 4)):
    ...     progress.count(worker, steps)
    >>> progress.join(1, others=[0]), progress.join(2, others=[0, 1]), progress.join(0, others=[])
    (5, 5, 5)
    >>> for _ in range(16):  # several steps in its seventh iteration
    ...     progress.count(1, 1, place=7)
    >>> progress.join(1, others=[0])
    7
    """

    def __init__(self, steps: Iterable[tuple[WorkerId, int]] = ()) -> None:
        self._steps = dict(steps)

    def steps(self, worker: WorkerId) -> int:
        """Return the number of a worker's steps."""
        return self._steps.get(worker, 0)

    def count(self, worker: WorkerId, steps: int, place: int | None = None) -> None:
        """Add steps that a worker has pushed: one gradient, or several local steps. A script that counts iterations says its ``place``."""
        self._steps[worker] = self._steps.get(worker, 0) + steps if place is None else place

    def all(self) -> list[tuple[WorkerId, int]]:
        """Return each worker with its steps: plain data, for a checkpoint."""
        return list(self._steps.items())

    @property
    def begun(self) -> bool:
        """True once a worker has made a step."""
        return bool(self._steps)

    def begin_at(self, worker: WorkerId, steps: int) -> None:
        """Set the steps that a worker's script has made before this job, according to the checkpoint that it has loaded."""
        self._steps[worker] = steps

    def join(self, worker: WorkerId, others: Iterable[WorkerId]) -> int:
        """Return after how many steps a worker's new process goes on: its own, or those of the slowest of the others, if that is more."""
        slowest = min((self._steps.get(other, 0) for other in others if other != worker), default=0)
        steps = max(self._steps.get(worker, 0), slowest)
        if steps:
            self._steps[worker] = steps
        return steps
