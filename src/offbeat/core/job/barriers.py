"""Keep the workers that wait at a barrier of their scripts (`offbeat.barrier`), and the number of the next barrier.

A worker at a barrier is paused, as at an epoch's end: the rule does not wait for it. The barrier is passed when no living worker that
takes part can come to it any more but those that are there, and no contribution waits for its fate. A worker that waits for the end of
an epoch counts as come if nobody is left who could end that epoch: scripts whose barriers do not match do not wait for each other for ever.
A worker that has joined the running job goes on where the others are; if that is past the place at which they wait, it does not come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from offbeat.core.events import BarrierWanted
from offbeat.types import WorkerId


class Barriers:
    """Count the barriers of one job.

    >>> barriers = Barriers()
    >>> [barriers.come(BarrierWanted(worker, 1, 0), steps=5) for worker in (2, 0)]
    [0, 0]
    >>> barriers.complete(inside=(0, 1, 2), elsewhere=())
    False
    >>> barriers.complete(inside=(0, 2), elsewhere=())
    True
    >>> barriers.end(), barriers.number
    ((0, 2), 1)
    >>> barriers.come(BarrierWanted(1, 1, 0), steps=5) is None
    True
    """

    def __init__(self) -> None:
        self.number = 0
        """Of the next barrier."""
        self._waiting: dict[WorkerId, int] = {}
        """With the number of steps that each has made."""
        self._began: dict[WorkerId, int] = {}
        """After how many steps each worker has joined the running job that has come to no barrier since."""

    @property
    def waiting(self) -> Collection[WorkerId]:
        """Return the workers that wait at the barrier."""
        return self._waiting.keys()

    def joined(self, worker: WorkerId, steps: int) -> None:
        """Note that a worker has joined the running job and goes on after this many steps."""
        self._began[worker] = steps

    def come(self, event: BarrierWanted, steps: int) -> int | None:
        """Note that a worker has come, after this many steps.

        Returns:
            The number of the barrier at which it waits; None: the others have passed it already.
        """
        if event.number is not None and event.number < self.number:
            return None
        self._began.pop(event.worker, None)
        self._waiting[event.worker] = steps
        return self.number

    def leave(self, worker: WorkerId) -> bool:
        """Note that a worker is gone, or waits no longer. Returns whether it was at the barrier."""
        self._began.pop(worker, None)
        return self._waiting.pop(worker, None) is not None

    def complete(self, inside: Iterable[WorkerId], elsewhere: Collection[WorkerId]) -> bool:
        """Return whether every worker that takes part is here, or waits ``elsewhere`` for something that none of the others can do."""
        if not self._waiting:
            return False
        place = max(self._waiting.values())
        return all(w in self._waiting or w in elsewhere or self._began.get(w, -1) >= place for w in inside)

    def end(self) -> tuple[WorkerId, ...]:
        """Open the barrier and return the workers that have waited; the next one gets the next number."""
        waited = tuple(sorted(self._waiting))
        self._waiting.clear()
        self.number += 1
        return waited
