"""A world of scripted workers around one `Coordinator`: a heap of (time, priority, serial), a virtual clock, and faults at given times.

Messages take no time, so that the order of things at one instant is the heap's, and equal schedules give equal logs; only what shards
measure at a fold arrives a little later now and then. What a worker does is in `scripts.py`; what must hold at every step is in `audit.py`,
whose `Auditor` sees each event with its effects.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

from tests.core.audit import Auditor
from tests.core.scripts import Process, Schedule, Script, served

from offbeat.core.effects import BarrierPassed, Effect, EpochEnded, Fence, Fold, Grant, Initialise, Interrupt, NoMore, Release
from offbeat.core.events import Event, Folded, Heard, Joined, Left, Lost, Skipped
from offbeat.core.job.coordinator import Coordinator


def whole(time: float) -> float:
    """Return the time, rounded up to a multiple of 2**-20: the sum of such times is exact, so that a pause between two moves no third."""
    return math.ceil(time * 2**20) / 2**20


class World:
    """Plays one schedule; afterwards `log` holds every (time, event, effects)."""

    def __init__(self, schedule: Schedule, job: Coordinator | None = None) -> None:
        self.schedule = schedule
        self.job = Coordinator(schedule.policy, schedule.workers, schedule.timeout_s) if job is None else job
        self.log: list[tuple[float, Event | None, tuple[Effect, ...]]] = []
        self.audit = Auditor(self.job, schedule.policy)
        self._audited = job is None
        """False for a job that resumes: the audit knows only jobs from version 0 on."""
        self.now = 0.0
        self._random = random.Random(schedule.seed)
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._serial = 0
        self._in_sight = 0.0
        """The time of the last thing that is to happen, signs of life left out."""
        self._measured_at = 0.0
        """When what the shards measured last arrives."""
        self.processes: dict[int, Process] = {}

    def run(self) -> World:
        """Play the schedule to its end, check that everybody has come to an end, and close the job."""
        for worker in range(self.schedule.workers):
            self._start(worker, after=self._random.randrange(3))
        for what, worker, tick in self.schedule.faults:
            self._at(tick, lambda what=what, worker=worker: getattr(self, f"fault_{what}")(worker))  # type: ignore[misc]
        while True:
            wake = self.job.wake_at()
            if wake is not None and (not self._heap or whole(wake) <= self._heap[0][0]):
                self.now = max(self.now, whole(wake))
                self._note(None, self.job.wake(self.now))
                later = self.job.wake_at()
                assert later is None or later > self.now, "waking up at the announced time has changed nothing"
            elif self._heap:
                self.now, _, _, action = heapq.heappop(self._heap)
                action()
            else:
                break
            patience = 3.0 * (self.schedule.timeout_s or 0.0)
            assert self.now <= self._in_sight + patience, f"waits forever: {self.unfinished()}"
        assert not self.unfinished(), f"waits forever: {self.unfinished()}"
        assert self.job.over, "nobody is left, and the job is not over"
        self._note(None, self.job.close(self.now, "the job is over"))
        if self._audited:
            self.audit.closed()
        return self

    def unfinished(self) -> list[tuple[int, int]]:
        """The living processes whose script has not ended."""
        return [(p.worker, p.incarnation) for p in self.processes.values() if not p.gone]

    # What can go wrong. Each is harmless where its victim is not there.

    def fault_kill(self, worker: int) -> None:
        """The process ends, and everybody sees it."""
        process = self.processes.get(worker)
        if process is not None:
            self._end(process)

    def fault_vanish(self, worker: int) -> None:
        """The process ends and nobody sees it: only its silence tells."""
        process = self.processes.get(worker)
        if process is None or self.schedule.timeout_s is None or not process.incarnation:
            self.fault_kill(worker)
        else:
            process.gone = True

    def fault_freeze(self, worker: int) -> None:
        """The process stands still, perhaps for longer than the timeout, and goes on."""
        self._freeze(worker, self._random.choice((2, 5, 20, 40)))

    def fault_restart(self, worker: int) -> None:
        """The process ends; a new one takes its place after a while."""
        self.fault_kill(worker)
        self._start(worker, after=self._random.randrange(6))

    def fault_usurp(self, worker: int) -> None:
        """A new process joins while its predecessor has only been standing still; later that one goes on with what it was doing."""
        old = self.processes.get(worker)
        if old is not None and old.incarnation:
            self._freeze(worker, 4)
            self._start(worker, after=self._random.randrange(3))

    def fault_newcomer(self, worker: int) -> None:
        """One more worker, whom nobody has expected."""
        self._start(self.schedule.workers + worker, after=0)

    def fault_poison(self, worker: int) -> None:
        """Its next gradient is not finite."""
        if worker in self.processes:
            self.processes[worker].poisoned = True

    def fault_haste(self, worker: int) -> None:
        """It breaks out of its epoch."""
        if worker in self.processes:
            self.processes[worker].hasty = True

    def fault_skip(self, worker: int) -> None:
        """Its script leaves its next batch out."""
        if worker in self.processes:
            self.processes[worker].skips = True

    def fault_keep(self, worker: int) -> None:
        """Its script makes no step with the next gradient, but adds the one after it; the end of an epoch may come between."""
        if worker in self.processes:
            self.processes[worker].keeps = True

    # Processes.

    def _start(self, worker: int, after: float) -> None:
        process = Process(worker, self.schedule, self._random, counts=self._random.random() < 0.9)
        self.processes.setdefault(worker, process)
        self._at(after, lambda: self._join(process))

    def _join(self, process: Process) -> None:
        if process.gone:
            return
        if process.frozen_until > self.now:
            self._at(process.frozen_until - self.now, lambda: self._join(process))
            return
        replaced = self.processes[process.worker]
        if replaced is not process:
            self._at(9.0, lambda: self._end(replaced))
        self.processes[process.worker] = process
        process.script, process.waits = process.live(), False
        process.inbox.clear()
        process.incarnation = self.job.membership[process.worker].incarnation + 1
        self._send(Joined(process.worker))
        self._beat(process)
        self._resume(process, process.script)

    def _freeze(self, worker: int, ticks: int) -> None:
        process = self.processes.get(worker)
        if process is not None and process.incarnation:
            process.frozen_until = max(process.frozen_until, self.now + ticks)
            self._in_sight = max(self._in_sight, process.frozen_until)  # only then does it learn that it was thought dead

    def _end(self, process: Process) -> None:
        if process.closed:
            process.closed = False
            self._send(Lost(process.worker, "its process has ended"))
        elif not process.gone:
            process.gone = True
            self._send(Lost(process.worker, "its process has ended", process.incarnation or None))

    def _exit(self, process: Process) -> None:
        """The script ends after it has closed the optimizer."""
        if process.closed:
            process.closed = False
            self._send(Left(process.worker, process.incarnation))

    def _beat(self, process: Process, incarnation: int | None = None) -> None:
        """A sign of life now and then, from a process that is there and has not joined anew since."""
        if self.schedule.timeout_s is None or process.gone or process.script is None or incarnation not in (None, process.incarnation):
            return
        if process.frozen_until <= self.now:
            self._send(Heard(process.worker, process.incarnation))
        mine = process.incarnation
        self._at(self.schedule.timeout_s / 3.0, lambda: self._beat(process, mine), beat=True)

    def _wake(self, process: Process, after: float) -> None:
        """Wake up a process that computes, unless it has gone on by then."""
        script, alarm = process.script, process.alarm
        self._at(after, lambda: self._resume(process, script) if process.alarm == alarm else None)

    def _resume(self, process: Process, script: Script | None) -> None:
        """Let a process go on with its script until it computes, or waits for something that has not come."""
        while script is not None and script is process.script and not process.gone:
            if process.waits and not process.inbox:
                return
            if process.frozen_until > self.now:
                self._wake(process, process.frozen_until - self.now)
                return
            message = process.inbox.popleft() if process.waits else None
            process.waits, process.now = False, self.now
            process.alarm += 1
            wish = script.send(message)
            if isinstance(wish, float):
                self._wake(process, wish)
                return
            process.waits = not isinstance(wish, Skipped)  # to which there is no answer
            if wish is not None:
                self._send(wish)
            if isinstance(wish, Left) and process.closed:
                process.gone = True
                self._at(self._random.choice((1, 5, 20)), lambda: self._exit(process))
            elif isinstance(wish, Left):
                self._end(process)

    # The clock and the coordinator.

    def _at(self, after: float, action: Callable[[], None], beat: bool = False) -> None:
        self._serial += 1
        then = whole(self.now + after)
        if not beat:
            self._in_sight = max(self._in_sight, then)
        heapq.heappush(self._heap, (then, beat, self._serial, action))

    def _send(self, event: Event) -> None:
        self._note(event, self.job.on(event, self.now))

    def _note(self, event: Event | None, effects: list[Effect]) -> None:
        self.log.append((self.now, event, tuple(effects)))
        if self._audited:
            self.audit.step(event, effects, self.now)
        for effect in effects:
            if isinstance(effect, Fold):
                self._measure(effect)
            elif isinstance(effect, Interrupt):
                self._interrupt(effect)
            elif isinstance(effect, EpochEnded | BarrierPassed):
                for worker in effect.workers:
                    self._deliver(self.processes[worker], effect)
            elif isinstance(effect, Fence):
                fenced = self.processes[effect.worker]
                if fenced.incarnation == effect.incarnation:
                    self._at(1.0, lambda fenced=fenced: self._join(fenced))  # type: ignore[misc]
            elif isinstance(effect, Initialise | Release | Grant | NoMore):
                process = self.processes.get(effect.worker)
                if process is not None and getattr(effect, "incarnation", process.incarnation) == process.incarnation:
                    self._deliver(process, effect)

    def _measure(self, fold: Fold) -> None:
        """The shards report on a fold: at once or a little later, in order. Now and then there is nothing that they could measure."""
        if served(self.schedule.policy).measures == "nothing":
            return
        draw = self._random.random
        squares = tuple(10.0 * draw() for _ in fold.parts) if draw() < 0.9 else ()
        total = draw() * max(squares, default=1.0) if draw() < 0.95 else float("inf")
        difference = draw() if served(self.schedule.policy).measures == "differences" and fold.version > 1 else None
        event = Folded(fold.version, squares, total, 0.1 * fold.scale, difference)
        self._measured_at = max(self._measured_at, self.now + self._random.choice((0, 0, 0, 1, 2)))
        self._at(self._measured_at - self.now, lambda: self._send(event))

    def _interrupt(self, effect: Interrupt) -> None:
        """A process that computes breaks off at the next tick, or when it has finished; or its push is under way already."""
        process = self.processes[effect.worker]
        if process.incarnation != effect.incarnation or process.gone or self._random.random() < 0.2:
            return
        process.overtaken = effect.version
        if effect.at_once and not process.waits:
            self._wake(process, 1.0)

    def _deliver(self, process: Process, effect: Effect) -> None:
        """Into the inbox; a waiting process looks at it as the next thing at this instant."""
        process.inbox.append(effect)
        if process.waits and len(process.inbox) == 1:
            script = process.script
            self._at(0.0, lambda: self._resume(process, script) if process.waits else None)
