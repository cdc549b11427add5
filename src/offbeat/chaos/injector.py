"""Carry out the faults of a schedule, prove that each has happened, and undo what has to be undone.

`Injector.tick` does what is due and never waits; everything that touches the machine goes through a `Victim`. A process that a fault has
stopped is hit by no other one until it goes on, and a process that was killed by none. `Injector.release` leaves no process stopped and
no link down, however a run ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Mapping
from itertools import count
from typing import Final, Protocol, TypeAlias

from offbeat.chaos.schedule import DEADLY, Fault, chosen
from offbeat.types import Seconds

PROOF_S: Final[Seconds] = 10.0
"""Seconds within which a fault must show in ``/proc``, on a machine that is busy with other things."""
LEAVE_S: Final[Seconds] = 60.0
"""The same for a worker that is told to leave: it finishes its step, and saves, within ``--grace``."""
PERIOD_S: Final[Seconds] = 0.25
"""Of ``slow``: once stopped and once running."""
LOOK_S: Final[Seconds] = 0.05
AGAIN_S: Final[Seconds] = 0.3
"""Seconds until a fault of a plan is tried again that has hit nobody, for instance while the server is just being started again."""


class Victim(Protocol):
    """What a fault hits: a process, the links of a host, or the journal's file."""

    name: str
    """Which one, in words."""
    key: str
    """What tells it from all others, for its whole life."""
    worker: int | None
    """The number of the worker that it is; None: it is none, or its number is not known."""
    spared: str
    """Why it could not be hit, if it could not."""

    def down(self, kind: str) -> bool:
        """Let a fault of this kind happen. Returns False if that is impossible; a process that is not the one that was found is spared."""

    def is_down(self, kind: str) -> bool:
        """Return True once it has happened."""

    def up(self) -> None:
        """Undo what can be undone; nothing happens if nothing has to be."""


Find: TypeAlias = Callable[[str], tuple[Mapping[int, Victim], int]]
"""Returns the victims of a target by number, and how many there are when none is away."""


class Injector:
    """Run a schedule. Times are seconds after the first pushes.

    Args:
        find: finds the victims.
        faults: the schedule, by time.
        told: called with each fault once it has been carried out, or could not be.
        insists: True if a fault that hits nobody is tried again until it does: every one of a plan is to happen.
    """

    def __init__(
        self, find: Find, faults: Iterable[Fault], told: Callable[[Fault], object] = lambda _: None, *, insists: bool = False
    ) -> None:
        self.faults: list[Fault] = []
        """Those that were due so far."""
        self._find, self._coming, self._told, self._insists = find, iter(faults), told, insists
        self._next = next(self._coming, None)
        self._now: Seconds = 0.0
        self._due: list[tuple[Seconds, int, Generator[Seconds]]] = []
        """The courses of faults that have more to do, by time."""
        self._order = count()
        self._held: set[str] = set()
        """Keys of what is stopped, down or dying."""
        self._noticed: set[str] = set()
        """Keys of the workers that have been told to leave."""

    def tick(self, now: Seconds) -> None:
        """Do what is due."""
        self._now = now
        while self._next is not None and self._next.at_s <= now:
            self.faults.append(self._next)
            heapq.heappush(self._due, (self._next.at_s, next(self._order), self._course(self._next)))
            self._next = next(self._coming, None)
        while self._due and self._due[0][0] <= now:
            _, _, course = heapq.heappop(self._due)
            if (due := next(course, None)) is not None:
                heapq.heappush(self._due, (due, next(self._order), course))

    def wake_at(self, now: Seconds) -> Seconds:
        """Return when to call `tick` next."""
        times = [due for due, _, _ in self._due[:1]]
        return min(times if self._next is None else [*times, self._next.at_s], default=now + 1.0)

    def release(self, now: Seconds) -> None:
        """Let everything go on that a fault has stopped, and drop what was due."""
        self._now, self._next = now, None
        while self._due:
            self._due.pop()[2].close()

    def _course(self, fault: Fault) -> Generator[Seconds]:
        """Carry out one fault, and see that it has happened; yields when there is more to do. Closed, it undoes what it has done."""
        while (victim := self._hit(fault)) is None and self._insists:
            yield self._now + AGAIN_S
        if victim is None:
            self._told(fault)
            return
        began, stopped = self._now, True
        over = began + {"kill": PROOF_S, "term": LEAVE_S}.get(fault.kind, fault.seconds)
        turn = began + PERIOD_S * fault.duty if fault.kind == "slow" else over
        try:
            self._told(fault)
            while self._now < over:
                if self._now >= turn:
                    stopped = not stopped
                    victim.down(fault.kind) if stopped else victim.up()
                    turn = self._now + PERIOD_S * (fault.duty if stopped else 1.0 - fault.duty)
                fault.proved = fault.proved or victim.is_down(fault.kind) or None
                if fault.proved and fault.kind in DEADLY:
                    return
                yield min(turn, over, over if fault.proved else self._now + LOOK_S)
        finally:
            if not fault.proved:  # None: the job has ended before it could be seen
                fault.proved = victim.is_down(fault.kind) or (None if self._now < over else False)
                fault.note = "" if fault.proved is not False else f"not seen within {over - began:.1f} s"
            if fault.kind not in DEADLY:
                victim.up()
                fault.until_s = self._now
            self._held.discard(victim.key)

    def _hit(self, fault: Fault) -> Victim | None:
        """Let a fault begin. Returns what it has hit; None: nothing."""
        fault.injected_at_s = self._now
        there, total = self._find(fault.target)
        number = chosen(fault.pick, [number for number, victim in there.items() if victim.key not in self._held], total)
        if number is None:
            fault.note = f"no {fault.target} to hit"
            return None
        victim = there[number]
        if fault.kind == "term" and fault.target == "worker" and self._is_last(victim.key, there.values()):
            fault.note = "not done: no other worker would be left"
            return None
        fault.victim, fault.worker, fault.done = victim.name, victim.worker, victim.down(fault.kind)
        fault.note = "" if fault.done else victim.spared
        if fault.done and fault.kind != "term":
            self._held.add(victim.key)  # a process that dies of SIGKILL would take a SIGSTOP, and not show it
        return victim if fault.done else None

    def _is_last(self, key: str, workers: Iterable[Victim]) -> bool:
        """Return True if no other worker would be left that has not been told to leave; otherwise this one is told to now."""
        there = {worker.key for worker in workers}
        last = there <= self._noticed | {key}
        self._noticed |= set() if last else {key}
        return last
