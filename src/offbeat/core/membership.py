"""Members of the job: their states and incarnations, and the detection of silent workers. Contributions are not handled here.

```
            joins                      silent, disconnected, reported dead
 EXPECTED ─────────────────► ALIVE ────────────────────────────────────────► DEAD
     │                        ▲  │ leaves                                     │  heard of again: fenced
     │ lost before it joined  │  └────────► FINISHED                          ▼
     └──────────► DEAD        └───────────────── joins, new incarnation ── RECOVERED ── silent, disconnected ──► DEAD
```

A worker can join from every state, also from DEAD (a restarted process) and ALIVE (the end of the previous process has not been detected
yet). Each join begins a new incarnation; messages of older incarnations are fenced.

Source: EnsembleSync, section 3.3 (alive, dead, recovered). Departures: heartbeats keep a busy or blocked worker alive, where the paper's
only sign of life is an operation; a rejoining worker of a gradient rule takes part at once, not from the next epoch on.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from offbeat.core.patience import Patience
from offbeat.types import NOT_JOINED, Incarnation, Seconds, WorkerId, WorkerState, worker_ids


@dataclass(slots=True)
class Member:
    """The state of one worker."""

    state: WorkerState = WorkerState.EXPECTED
    incarnation: Incarnation = NOT_JOINED
    heard_at: Seconds = 0.0
    patience: Patience | None = None
    """How long it may be silent, as learned of all its incarnations; None: the timeout of all."""
    completed: bool = False
    """Whether it has left at the end of its script: it was not told to leave, and no later failure of its process is known."""
    goes_on: bool = False
    """Whether its process goes on after it has left: its script has closed the optimizer, and may make another one."""


class Membership:
    """The states of workers 0 .. n-1; more may join.

    Args:
        workers: how many are expected at the start.
        timeout_s: silence after which an alive worker is dead; None: never.
        learns: True if a worker whose signs of life come more often is found dead earlier, see `Patience`; the timeout is its cap then.
    """

    def __init__(self, workers: int, timeout_s: Seconds | None, *, learns: bool = False) -> None:
        self._members = {worker: Member() for worker in worker_ids(workers)}
        self._timeout_s, self._learns = timeout_s, learns
        self._expected = list(worker_ids(workers))
        """Workers not seen yet; pruned lazily by `expecting`."""
        self._silences: list[tuple[Seconds, WorkerId]] = []
        """A heap of times at which workers have been silent for too long. Each worker that can fall silent has an entry that is not later
        than its own time; entries that are earlier are corrected when they are due."""
        self._timed: dict[WorkerId, Seconds] = {}
        """By worker: its earliest entry in that heap."""
        self._chief: WorkerId | None = None

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self._members

    def __getitem__(self, worker: WorkerId) -> Member:
        return self._members.setdefault(worker, Member())

    def __iter__(self) -> Iterator[WorkerId]:
        return iter(sorted(self._members))

    def __len__(self) -> int:
        return len(self._members)

    def in_state(self, *states: WorkerState) -> list[WorkerId]:
        """Return the workers in one of these states, in order of their numbers."""
        return [worker for worker in self if self._members[worker].state in states]

    @property
    def expecting(self) -> bool:
        """Whether any worker is still expected. A worker that has left this state never returns to it."""
        expected = self._expected
        while expected and self._members[expected[-1]].state is not WorkerState.EXPECTED:
            expected.pop()
        return bool(expected)

    @property
    def chief(self) -> WorkerId | None:
        """The worker that evaluates and saves: at first the lowest-numbered living worker, which keeps the role until it dies or is told to
        leave.

        A chief whose script has ended, or has closed the optimizer, keeps the role, since it has saved its files already. None: no worker
        is left to become chief.
        """
        if self._chief is None or not self._serves(self._members[self._chief]):
            self._chief = next(iter(self.in_state(WorkerState.ALIVE)), None)
        return self._chief

    @staticmethod
    def _serves(member: Member) -> bool:
        return member.state is WorkerState.ALIVE or (member.state is WorkerState.FINISHED and (member.completed or member.goes_on))

    def speaks(self, worker: WorkerId, incarnation: Incarnation, now: Seconds) -> bool:
        """Record a sign of life; return True if it is from an alive worker's newest incarnation, False if it must be fenced."""
        member = self._members.get(worker)
        if member is None or incarnation != member.incarnation:
            return False
        self._note(worker, member, now)
        return member.state is WorkerState.ALIVE

    def join(self, worker: WorkerId, now: Seconds) -> Incarnation:
        """Begin a new incarnation of the worker and return its number."""
        member = self[worker]
        member.state = WorkerState.ALIVE
        member.incarnation = Incarnation(member.incarnation + 1)
        member.completed = member.goes_on = False
        if self._learns and self._timeout_s is not None and member.patience is None:
            member.patience = Patience(self._timeout_s)
        member.heard_at = now  # the time without a process is no silence
        self._note(worker, member, now)
        return member.incarnation

    def silent(self, now: Seconds) -> list[WorkerId]:
        """Return the workers, alive or told to rejoin, that have been silent for too long."""
        due = self.wake_at()
        if self._timeout_s is None or due is None or now < due:
            return []
        # The same sum as in `wake_at`: a difference may round to less than the timeout at the very time that `wake_at` has announced.
        return [w for w in self.in_state(WorkerState.ALIVE, WorkerState.RECOVERED) if now >= self._dead_at(self._members[w])]

    def wake_at(self) -> Seconds | None:
        """Return the time at which the next worker will have been silent for too long; None: never."""
        if self._timeout_s is None:
            return None
        while self._silences:
            due, worker = self._silences[0]
            member = self._members[worker]
            if member.state not in (WorkerState.ALIVE, WorkerState.RECOVERED):
                heapq.heappop(self._silences)
                self._timed.pop(worker, None)
            elif (later := self._dead_at(member)) != due:
                heapq.heapreplace(self._silences, (later, worker))
                self._timed[worker] = later
            else:
                return due
        return None

    def _dead_at(self, member: Member) -> Seconds:
        """Return when this worker will have been silent for too long."""
        assert self._timeout_s is not None, "without a timeout no silence is too long"
        return member.heard_at + (self._timeout_s if member.patience is None else member.patience.seconds)

    def _note(self, worker: WorkerId, member: Member, now: Seconds) -> None:
        if member.patience is not None:
            member.patience.interval(now - member.heard_at)
        member.heard_at = now
        if self._timeout_s is not None and (worker not in self._timed or self._dead_at(member) < self._timed[worker]):
            self._timed[worker] = self._dead_at(member)
            heapq.heappush(self._silences, (self._timed[worker], worker))
