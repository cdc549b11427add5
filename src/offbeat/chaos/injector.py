"""Carry out the faults of a schedule, prove that each has happened, and undo what has to be undone.

`Injector.tick` does what is due and never waits; everything that touches the machine goes through `Machine`. A process that a fault has
stopped is hit by no other one until it goes on. `Injector.release` leaves no process stopped and no link down, however a run ends.
"""

from __future__ import annotations

import heapq
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from offbeat.chaos.schedule import KINDS, Fault
from offbeat.types import Seconds

PROOF_S: Final[Seconds] = 10.0
"""Seconds within which a signal must show in ``/proc``, on a machine that is busy with other things."""
LEAVE_S: Final[Seconds] = 60.0
"""The same for a worker that is told to leave: it finishes its step, and saves, within ``--grace``."""
SEVERAL: Final = -1
"""In place of a worker's number: the workers of a host."""
PERIOD_S: Final[Seconds] = 0.25
"""Of ``slow``: once stopped and once running."""
LOOK_S: Final[Seconds] = 0.05
AGAIN_S: Final[Seconds] = 0.3
"""Seconds until a fault of a plan is tried again that has hit nobody, for instance while the server is just being started again."""
GONE: Final = {**dict.fromkeys(KINDS, "it was gone already"), "cut": "its links cannot be taken down", "disk": "no process writes to it"}


class Victim(Protocol):
    """What a fault hits: a process, a link, or the journal's file."""

    @property
    def name(self) -> str:
        """Return which one, in words."""

    @property
    def key(self) -> str:
        """Return what tells it from all others, for its whole life."""

    @property
    def worker(self) -> int | None:
        """Return the number of the worker that it is, or `SEVERAL`; None: it is none, or its number is not known."""

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal. Returns False if the process is gone, or is not the one that was found: then nothing is sent."""

    def state(self) -> str:
        """Return its state as ``/proc/PID/stat`` has it, "" if it is gone; of a link or a file: "down" or "up"."""

    def down(self) -> bool:
        """Take a link down, or limit the size of the file. Returns False if that is impossible."""

    def up(self) -> None:
        """Undo `down`; nothing happens if it is up."""


class Machine(Protocol):
    """Where the job runs."""

    def choose(self, target: str, pick: float, busy: set[str]) -> Victim | None:
        """Return the victim that a fault hits (`schedule.chosen`), not one of the keys ``busy``; None: there is none."""

    def last(self, victim: Victim) -> bool:
        """Return True if no other worker would be left that has not been told to leave."""


@dataclass
class Injected:
    """A fault that was carried out, or could not be."""

    fault: Fault
    at: Seconds
    """By the clock of the run."""
    victim: str = ""
    worker: int | None = None
    done: bool = False
    """False: there was nothing to hit."""
    proved: bool | None = None
    """Whether it is seen to have happened; None: not known yet."""
    until: Seconds | None = None
    """When the process, link or file was let go again."""
    note: str = ""


class Injector:
    """Run a schedule against a machine.

    Args:
        machine: where the job runs.
        faults: the schedule, by time.
        start: the time by the clock of the run that its seconds count from.
        told: called with each fault once it has been carried out.
        insists: True if a fault that hits nobody is tried again until it does: every one of a plan is to happen.
    """

    def __init__(
        self,
        machine: Machine,
        faults: Iterator[Fault],
        start: Seconds,
        told: Callable[[Injected], object] = lambda _: None,
        *,
        insists: bool = False,
    ) -> None:
        self.done: list[Injected] = []
        self._machine, self._faults, self._start, self._told = machine, faults, start, told
        self._insists = insists
        self._without: dict[int, Injected] = {}
        """By number: faults that have hit nobody so far."""
        self._next = next(faults, None)
        self._due: list[tuple[Seconds, int, Callable[[Seconds], None]]] = []
        self._order = 0
        self._held: dict[str, tuple[Victim, Injected]] = {}
        """By key: what is stopped or down."""
        self._unproved: list[tuple[Injected, Callable[[], bool]]] = []

    @property
    def exhausted(self) -> bool:
        """Return True if no fault is left and nothing is under way."""
        return self._next is None and not self._due

    def tick(self, now: Seconds) -> None:
        """Do what is due."""
        while self._next is not None and self._start + self._next.at_s <= now:
            fault, self._next = self._next, next(self._faults, None)
            self._inject(fault, now)
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2](now)

    def wake_at(self, now: Seconds) -> Seconds:
        """Return when to call `tick` next: at most a moment from now while a proof is awaited."""
        times = [due for due, _, _ in self._due[:1]]
        if self._next is not None:
            times.append(self._start + self._next.at_s)
        return min(times, default=now + 1.0)

    def release(self, now: Seconds) -> None:
        """Let everything go on that a fault has stopped, and drop what was due."""
        self._next = None
        self._due.clear()
        for entry, seen in self._unproved:
            entry.proved = seen() or None  # unknown: the job has ended before it could be seen
        self._unproved.clear()
        for victim, entry in self._held.values():
            victim.signal(signal.SIGCONT) if entry.fault.kind in ("stop", "slow") else victim.up()
            entry.until = now
        self._held.clear()
        for entry in self._without.values():
            self._note(entry)
        self._without.clear()

    # One fault.

    def _inject(self, fault: Fault, now: Seconds) -> None:
        entry = Injected(fault, now)
        victim = self._machine.choose(fault.target, fault.pick, set(self._held))
        if victim is None:
            entry.note = f"no {fault.target} to hit"
        elif fault.kind == "term" and self._machine.last(victim):
            entry.note = "not done: no other worker would be left"
        else:
            entry.victim, entry.worker = victim.name, victim.worker
            self._hit(victim, entry, now)
        if self._insists and not entry.done:
            self._without[fault.number] = entry
            self._later(now + AGAIN_S, lambda then: self._inject(fault, then))
        else:
            self._without.pop(fault.number, None)
            self._note(entry)

    def _note(self, entry: Injected) -> None:
        self.done.append(entry)
        self._told(entry)

    def _hit(self, victim: Victim, entry: Injected, now: Seconds) -> None:
        match entry.fault.kind:
            case "kill":
                entry.done = victim.signal(signal.SIGKILL)
                self._prove(entry, lambda: victim.state() in ("", "Z", "X"), now, PROOF_S)
            case "term":
                entry.done = victim.signal(signal.SIGTERM)
                self._prove(entry, lambda: victim.state() in ("", "Z", "X"), now, LEAVE_S)
            case "stop":
                self._hold(victim, entry, victim.signal(signal.SIGSTOP), now)
                self._prove(entry, lambda: victim.state() == "T", now, min(PROOF_S, entry.fault.seconds))
            case "slow":
                self._hold(victim, entry, victim.signal(signal.SIGSTOP), now)
                self._later(now + PERIOD_S * entry.fault.duty, lambda then: self._go(victim, entry, then))
                self._prove(entry, lambda: victim.state() == "T", now, entry.fault.seconds)
            case _:
                self._hold(victim, entry, victim.down(), now)
                self._prove(entry, lambda: victim.state() == "down", now, min(PROOF_S, entry.fault.seconds))
        if not entry.done:
            entry.note = GONE[entry.fault.kind]

    def _hold(self, victim: Victim, entry: Injected, done: bool, now: Seconds) -> None:
        entry.done = done
        if done:
            self._held[victim.key] = victim, entry
            self._later(now + entry.fault.seconds, lambda then: self._let_go(victim, entry, then))

    def _let_go(self, victim: Victim, entry: Injected, now: Seconds) -> None:
        if entry.fault.kind in ("stop", "slow"):
            victim.signal(signal.SIGCONT)
        else:
            victim.up()
        entry.until = now
        self._held.pop(victim.key, None)

    # slow: stopped and running in turn.

    def _go(self, victim: Victim, entry: Injected, now: Seconds) -> None:
        if entry.until is None and victim.signal(signal.SIGCONT):
            self._later(now + PERIOD_S * (1.0 - entry.fault.duty), lambda then: self._halt(victim, entry, then))

    def _halt(self, victim: Victim, entry: Injected, now: Seconds) -> None:
        if entry.until is None and victim.signal(signal.SIGSTOP):
            self._later(now + PERIOD_S * entry.fault.duty, lambda then: self._go(victim, entry, then))

    # Proofs.

    def _prove(self, entry: Injected, seen: Callable[[], bool], now: Seconds, within: Seconds) -> None:
        if entry.done:
            self._unproved.append((entry, seen))
            self._look(entry, seen, now, now + within)

    def _look(self, entry: Injected, seen: Callable[[], bool], now: Seconds, deadline: Seconds) -> None:
        if not (found := seen()) and now < deadline:
            self._later(now + LOOK_S, lambda then: self._look(entry, seen, then, deadline))
            return
        entry.proved = found
        entry.note = "" if found else f"not seen within {deadline - entry.at:.1f} s"
        self._unproved.remove((entry, seen))

    def _later(self, due: Seconds, what: Callable[[Seconds], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (due, self._order, what))
