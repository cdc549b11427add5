"""Add up the time of every worker in equal parts of a job's time, however long the job is."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.core.phases import PHASES, Phase
from offbeat.journal.costs import QUEUED
from offbeat.types import Seconds

KINDS: Final = ("data", "forward", "backward", "computing", "own", "evaluation", "gc", "queued", "exchange", "wait", "idle", "dead")
"""What a worker does, as the page shows it."""
KIND_OF: Final = {
    **{name: name for name in ("data", "forward", "backward", "own", "evaluation", "gc", "queued", "wait")},
    **{"update": "computing", "compute": "computing", "save": "evaluation", "push": "exchange", "pull": "exchange"},
}
"""The kind of each phase."""
ORDER: Final = ("pull", "data", "forward", "backward", "own", "queued", "compute", "gc", "evaluation", "update", "save", "push")
"""Phases in the order in which a step has them, for drawing; within a step a phase may come several times."""
STRETCHES: Final = {"waiting": "wait", "idle": "idle", "dead": "dead", "computing": "computing"}
CELLS: Final = 1 << 19
"""Most workers times parts of the time."""
MOST_WORKERS: Final = 20_000
PARTS: Final = 2048
FEWEST: Final = 128
FEW: Final = 20
"""Adding so many times fewer numbers than there are cells is quicker one by one."""
WAIT, EXCHANGE = KINDS.index("wait"), KINDS.index("exchange")
OWN: Final = (*(name for name in PHASES if name != Phase.WAIT.label), QUEUED)
"""The phases and causes that a push has columns for: all but the wait, which the journal's own times tell."""
_COLUMNS: Final = [OWN.index(name) for name in ORDER]
_KINDS: Final = np.array([KINDS.index(KIND_OF[name]) for name in ORDER])

Reals = NDArray[np.float64]
Wholes = NDArray[np.int64]


class Shares:
    """Seconds of each worker by kind, in parts of the time; a part becomes twice as long whenever there would be too many.

    >>> shares = Shares()
    >>> shares.stretch(0, "dead", 1.0, 3.5)
    >>> round(float(shares.totals()[0, KINDS.index("dead")]), 3)
    2.5
    """

    def __init__(self) -> None:
        self.width: Seconds = 1e-3
        self.seconds: NDArray[np.float32] = np.zeros((0, 0, len(KINDS)), dtype=np.float32)
        """By worker, part and kind."""
        self.longest: NDArray[np.float32] = np.zeros((0, 0), dtype=np.float32)
        """By worker and part: the longest time of a push, without its wait."""
        self._since = 0
        """The first part that has changed since `changed_from` was called."""
        self._waiting: list[tuple[int, int, Seconds, Seconds]] = []
        """Stretches that have not been added yet."""

    @np.errstate(all="ignore")
    def pushes(self, worker: Wholes, begun: Reals, arrived: Reals, waited: Reals, phases: Reals) -> None:
        """Add pushes: from ``begun`` to ``arrived``, after a wait of ``waited``; ``phases`` is pushes by phases."""
        if not len(worker):
            return
        self._grow(int(worker.max()) + 1, float(arrived.max()))
        busy = np.maximum(arrived - begun, 0.0)
        measured = phases.sum(axis=1)
        scale = np.where(measured > busy, busy / np.maximum(measured, 1e-12), 1.0)
        parts = phases[:, _COLUMNS] * scale[:, None]
        link = busy - parts.sum(axis=1)
        lengths = np.concatenate([waited[:, None], link[:, None], parts], axis=1)
        stops = (begun - waited)[:, None] + np.cumsum(lengths, axis=1)
        kinds = np.broadcast_to(np.concatenate([[WAIT, EXCHANGE], _KINDS]), lengths.shape)
        some = lengths > 1e-9
        self._add(np.broadcast_to(worker[:, None], lengths.shape)[some], kinds[some], (stops - lengths)[some], stops[some])
        own = np.minimum(measured, busy)
        np.maximum.at(self.longest, (worker, self._part(arrived)), own.astype(np.float32))

    def stretch(self, worker: int, doing: str, start: Seconds, stop: Seconds) -> None:
        """Add a stretch of time without a push."""
        self._waiting.append((worker, KINDS.index(STRETCHES[doing]), start, stop))
        if len(self._waiting) >= 4096:
            self._take()

    def changed_from(self) -> int:
        """Return the first part of the time that has changed since the last call; after a change of the parts' width, 0."""
        self._take()
        since, self._since = self._since, self.seconds.shape[1]
        return since

    def totals(self) -> Reals:
        """Return the seconds of each worker by kind."""
        self._take()
        found: Reals = self.seconds.sum(axis=1, dtype=np.float64)
        return found

    def _take(self) -> None:
        if not self._waiting:
            return
        worker, kind, start, stop = (np.array(column) for column in zip(*self._waiting, strict=True))
        self._waiting = []
        self._grow(int(worker.max()) + 1, float(stop.max()))
        self._add(worker.astype(np.int64), kind.astype(np.int64), start.astype(np.float64), stop.astype(np.float64))

    def _part(self, t: Reals) -> Wholes:
        return np.clip((t / self.width).astype(np.int64), 0, self.seconds.shape[1] - 1)

    @np.errstate(all="ignore")  # what a journal that offbeat has not written holds may be out of any range
    def _add(self, worker: Wholes, kind: Wholes, start: Reals, stop: Reals) -> None:
        """Divide stretches among the parts of the time that they lie in."""
        start = np.maximum(start, 0.0)
        first, last = self._part(start), self._part(stop)
        self._since = min(self._since, int(first.min(initial=self._since)))
        count = last - first + 1
        which = np.repeat(np.arange(len(worker)), count)
        within = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        part = first[which] + within
        seconds = np.minimum(stop[which], (part + 1) * self.width) - np.maximum(start[which], part * self.width)
        workers, parts, kinds = self.seconds.shape
        index = (worker[which] * parts + part) * kinds + kind[which]
        seconds = np.maximum(seconds, 0.0)
        if len(index) * FEW < self.seconds.size:  # of a running job little is new each time
            np.add.at(self.seconds.reshape(-1), index, seconds.astype(np.float32))
            return
        sums = np.bincount(index, weights=seconds, minlength=workers * parts * kinds)
        self.seconds += sums.reshape(self.seconds.shape).astype(np.float32)

    def _grow(self, workers: int, until: Seconds) -> None:
        if not 0 < workers <= MOST_WORKERS:
            raise ValueError(f"worker {workers - 1} of a journal that can have {MOST_WORKERS:,}")
        workers = max(workers, self.seconds.shape[0])
        most = min(PARTS, max(FEWEST, CELLS // workers)) & ~1
        old_workers, parts = self.longest.shape
        while until >= self.width * most or parts > most:
            self.width *= 2.0
            self._since = 0
            if parts:
                padded = np.pad(self.seconds, ((0, 0), (0, parts % 2), (0, 0)))
                self.seconds = padded[:, 0::2] + padded[:, 1::2]
                padded_longest = np.pad(self.longest, ((0, 0), (0, parts % 2)))
                self.longest = np.maximum(padded_longest[:, 0::2], padded_longest[:, 1::2])
                parts = self.seconds.shape[1]
        needed = min(most, max(parts, int(until / self.width) + 1))
        if (workers, needed) != (old_workers, parts):
            self._since = self._since if workers == old_workers else 0
            self.seconds = np.pad(self.seconds, ((0, workers - old_workers), (0, needed - parts), (0, 0)))
            self.longest = np.pad(self.longest, ((0, workers - old_workers), (0, needed - parts)))
