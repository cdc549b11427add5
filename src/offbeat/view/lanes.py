"""Keep what each worker has done in the last seconds, phase by phase, in bounded memory; and what it usually does. Pure.

A push says where the time since the push before has gone. The phases are laid out in the order of a step, which begins with the wait for
the push before: no record says when each has begun. Short steps of one worker are brought together, so that a lane has a bounded number
of entries, however fast the steps are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final, NamedTuple

from offbeat.core.phases import PHASES, Phase
from offbeat.journal.arrivals import Record
from offbeat.types import Seconds

WINDOW_S: Final[Seconds] = 15.0
ORDER: Final = (
    "wait",
    "pull",
    "update",
    "data",
    "forward",
    "backward",
    "gc",
    "own",
    "evaluation",
    "save",
    "compute",
    "push",
    "work",
    *(AWAY := ("dead", "awaited")),
)
"""The kinds of time in the order of a step; entries have their places in it. ``work``: of a step that has not ended in a push. ``awaited``:
nobody has come for this worker yet."""
ENTRY_S: Final[Seconds] = 0.025
"""An entry lasts at least so long: steps that are shorter are brought together."""
ENTRIES: Final = 60_000
"""About how many entries all lanes together may have; with many workers each entry lasts longer."""
STEPS: Final = 31
"""The number of newest pushes from which a worker's usual step is taken."""
_PLACE: Final = {name: place for place, name in enumerate(ORDER)}
_AGREE_S: Final[Seconds] = 0.01

assert {*PHASES} == {*ORDER} - {"work", *AWAY}


class Entry(NamedTuple):
    """A stretch of a lane."""

    start: Seconds
    parts: dict[int, Seconds]
    """By the place in `ORDER`."""

    @property
    def stop(self) -> Seconds:
        return self.start + sum(self.parts.values())

    def plain(self) -> list[float]:
        """Return the start in seconds, then each part's place and its milliseconds."""
        flat = [round(self.start, 4)]
        for place in sorted(self.parts):
            flat += (place, round(1e3 * self.parts[place], 1))
        return flat


@dataclass(slots=True)
class Lane:
    """What is known of one worker's time."""

    entries: deque[Entry] = field(default_factory=deque)
    open: Entry | None = None
    """The newest entry, to which more may come."""
    fresh: list[Entry] = field(default_factory=list)
    """Entries that the page has not been sent yet."""
    tail: list[tuple[Seconds, str]] = field(default_factory=list)
    """What it does since its last push, and since when: ``wait``, ``work``, ``dead`` or ``awaited``; empty: it is not there."""
    steps: deque[tuple[Seconds, Mapping[str, Seconds]]] = field(default_factory=lambda: deque(maxlen=STEPS))
    """Of its newest pushes: own seconds of a step, and seconds by phase."""

    @property
    def usual(self) -> Seconds | None:
        """The median of its own seconds in a step; None: it has not pushed twice."""
        return median_low(seconds for seconds, _ in self.steps) if self.steps else None

    def longest(self) -> tuple[str, float] | None:
        """Return the phase that takes most of its own time, and the share of this; None: there is none."""
        totals: dict[str, Seconds] = {}
        for _, phases in self.steps:
            for name, seconds in phases.items():
                if name != "wait":
                    totals[name] = totals.get(name, 0.0) + seconds
        whole = sum(totals.values())
        if whole <= 0.0:
            return None
        name = max(totals, key=lambda name: totals[name])
        return name, totals[name] / whole


class Lanes:
    """The lanes of all workers.

    >>> lanes = Lanes()
    >>> lanes.begin(1)
    >>> lanes.release(0, 1.0)
    >>> lanes.pushed({"t": 2.0, "worker": 0, "phases": {"data": 0.75, "forward": 0.25}})
    >>> [entry.plain() for entry in lanes.of(0)], lanes.workers[0].tail
    ([[1.0, 3, 750.0, 4, 250.0]], [(2.0, 'wait')])
    """

    def __init__(self) -> None:
        self.workers: dict[int, Lane] = {}
        self._entry_s = ENTRY_S
        self._now: Seconds = 0.0

    def begin(self, workers: int) -> None:
        """Take the number of workers."""
        self._entry_s = max(ENTRY_S, WINDOW_S * workers / ENTRIES)
        for number in range(workers):
            self.workers.setdefault(number, Lane())

    def lane(self, number: int) -> Lane:
        """Return a worker's lane. Raises ValueError if this is no worker's number."""
        if type(number) is not int or number < 0:
            raise ValueError(number)
        return self.workers.setdefault(number, Lane())

    def release(self, number: int, t: Seconds) -> None:
        """Note that a worker goes on."""
        lane = self.lane(number)
        if not (lane.tail and lane.tail[-1][1] == "work"):
            lane.tail = [*lane.tail[-1:], (t, "work")]

    def pushed(self, record: Record) -> Seconds | None:
        """Take a push. Returns the own seconds of a step; None for the first push of a process, which contains the script's beginning."""
        lane, t = self.lane(record["worker"]), float(record["t"])
        phases = record.get("phases") or {Phase.COMPUTE.label: record.get("compute_s", 0.0)}
        parts = {_PLACE[name]: seconds for name, seconds in phases.items() if name in _PLACE and seconds > 0.0}
        covered = self._covered(lane)
        first = not any(what in ("wait", "work") for _, what in lane.tail) or covered == 0.0
        start = t - sum(parts.values())
        if not math.isfinite(start):
            raise ValueError(phases)
        if not record.get("phases") and covered < start and lane.tail:  # what is not computing was a wait
            parts[0] = start - covered
            start = covered
        if start < covered - _AGREE_S:  # it was dead, or another process of this worker
            parts = _clipped(parts, covered - start)
            start = covered
        lane.tail = [(t, "wait")]
        self._add(lane, Entry(start, parts))
        if first:
            return None
        own: Seconds = sum(seconds for place, seconds in parts.items() if place) / max(1, int(record.get("steps", 1)))
        lane.steps.append((own, phases))
        return own

    def died(self, number: int, t: Seconds, kind: str = "dead") -> None:
        """Note that a worker is dead, or awaited."""
        lane = self.lane(number)
        lane.tail = [*lane.tail, (t, kind)] if not (lane.tail and lane.tail[-1][1] in AWAY) else lane.tail

    def alive(self, number: int, t: Seconds) -> None:
        """Note that a worker has a new process."""
        lane = self.lane(number)
        if lane.tail and lane.tail[-1][1] in AWAY:
            for (since, what), until in zip(lane.tail, [*(later for later, _ in lane.tail[1:]), t], strict=True):
                self._close(lane)
                self._add(lane, Entry(since, {_PLACE[what]: max(0.0, until - since)}))
            self._close(lane)
        lane.tail = []

    def gone(self, number: int) -> None:
        """Note that a worker has finished."""
        self._close(self.lane(number))
        self.lane(number).tail = []

    def of(self, number: int) -> list[Entry]:
        """Return the entries of a worker in the last `WINDOW_S` seconds."""
        lane = self.lane(number)
        return [*lane.entries, lane.open] if lane.open is not None else list(lane.entries)

    def take(self, number: int) -> list[Entry]:
        """Return a worker's entries since the last call, all complete."""
        lane = self.lane(number)
        self._close(lane)
        fresh, lane.fresh = lane.fresh, []
        return fresh

    def _covered(self, lane: Lane) -> Seconds:
        newest = lane.open or (lane.entries[-1] if lane.entries else None)
        return 0.0 if newest is None else newest.stop

    def _add(self, lane: Lane, entry: Entry) -> None:
        self._now = max(self._now, entry.stop)
        if lane.open is not None:
            if entry.start - lane.open.stop < _AGREE_S and lane.open.stop - lane.open.start < self._entry_s:
                for place, seconds in entry.parts.items():
                    lane.open.parts[place] = lane.open.parts.get(place, 0.0) + seconds
                return
            self._close(lane)
        lane.open = Entry(entry.start, dict(entry.parts))

    def _close(self, lane: Lane) -> None:
        if lane.open is not None:
            lane.entries.append(lane.open)
            lane.fresh.append(lane.open)
            lane.open = None
        while lane.entries and lane.entries[0].stop < self._now - WINDOW_S:
            lane.entries.popleft()
        while lane.fresh and lane.fresh[0].stop < self._now - WINDOW_S:
            del lane.fresh[0]


def _clipped(parts: dict[int, Seconds], less_s: Seconds) -> dict[int, Seconds]:
    """Return the parts without the first seconds."""
    left: dict[int, Seconds] = {}
    for place in sorted(parts):
        cut = min(parts[place], less_s)
        less_s -= cut
        if parts[place] > cut:
            left[place] = parts[place] - cut
    return left


def plain_tail(lane: Lane) -> list[list[Any]]:
    """Return a lane's tail as JSON can carry it."""
    return [[round(t, 4), what] for t, what in lane.tail]
