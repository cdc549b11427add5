"""Find out which effect an event of a worker follows from, by what the coordinator has told whom.

A simulated worker hands each event in with the number of its cause, which its state machine carries (``core/worker.py``). A live worker's
messages do not carry numbers: a worker acts on the newest effect that concerns it, and the coordinator knows which that is. So nothing
that a worker sends can forge the story that a journal tells, and messages stay as short as they are.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from offbeat.core.effects import BarrierPassed, Effect, EpochEnded, Fence, Fold, Grant, Initialise, Interrupt, NoMore, Publish, Release
from offbeat.core.events import (
    Abandoned,
    BarrierWanted,
    EpochWanted,
    Event,
    Folded,
    Initialised,
    Joined,
    LeaseWanted,
    Left,
    PullWanted,
    Pushed,
)
from offbeat.types import NO_CAUSE, RecordId, Version, WorkerId

FOLDS_KEPT: Final = 1_000
"""Of how many folds the numbers are kept until they are measured; most rules measure nothing."""
BLOCKS_KEPT: Final = 1_000
"""Of how many blocks the numbers are kept; a worker that computes from an older one has its push without a cause."""


class Causes:
    """Remember the last effect that each worker has been told.

    >>> causes = Causes()
    >>> causes.told(Release(2, incarnation=1, version=7, clock=0, reason="it has joined"), 31)
    >>> causes.of(Pushed(2, incarnation=1, version=7, samples=32, compute_s=0.5))
    31
    >>> causes.of(Pushed(0, incarnation=1, version=7, samples=32, compute_s=0.5))
    0
    """

    def __init__(self) -> None:
        self._turns: dict[WorkerId, RecordId] = {}
        """The newest effect that has given each worker's script control."""
        self._interrupts: dict[WorkerId, RecordId] = {}
        self._fences: dict[WorkerId, RecordId] = {}
        self._folds: dict[Version, RecordId] = {}
        self._blocks: dict[tuple[int, Version], RecordId] = {}
        self._order: deque[tuple[int, Version]] = deque()
        """The blocks, oldest first."""

    def told(self, effect: Effect, number: RecordId) -> None:
        """Note an effect, which the journal has under this number."""
        match effect:
            case Release() | Grant() | NoMore() | Initialise():
                self._turns[effect.worker] = number
            case EpochEnded() | BarrierPassed():
                self._turns |= dict.fromkeys(effect.workers, number)
            case Interrupt():
                self._interrupts[effect.worker] = number
            case Fence():
                self._fences[effect.worker] = number
            case Fold(shard=None):
                self._folds[effect.version] = number
                self._folds.pop(Version(effect.version - FOLDS_KEPT), None)
            case Publish():
                self._published(effect, number)

    def of(self, event: Event) -> RecordId:
        """Return the number of the effect from which an event follows; `NO_CAUSE`: it follows from none."""
        match event:
            case Pushed(held=(_, *_)):
                blocks = max(self._blocks.get(block, NO_CAUSE) for block in enumerate(event.held))
                return max(blocks, self._turns.get(event.worker, NO_CAUSE))
            case Pushed() | LeaseWanted() | EpochWanted() | BarrierWanted() | PullWanted() | Left() | Initialised():
                return self._turns.get(event.worker, NO_CAUSE)
            case Abandoned():
                return self._interrupts.get(event.worker, NO_CAUSE)
            case Joined():
                return self._fences.pop(event.worker, NO_CAUSE)
            case Folded():
                return self._folds.pop(event.version, NO_CAUSE)
        return NO_CAUSE

    def _published(self, effect: Publish, number: RecordId) -> None:
        self._blocks[effect.shard, effect.version] = number
        self._order.append((effect.shard, effect.version))
        if len(self._order) > BLOCKS_KEPT:
            del self._blocks[self._order.popleft()]
        self._interrupts |= {worker: number for worker, _ in effect.workers}
