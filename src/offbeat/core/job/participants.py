"""Keep the workers that take part: those alive and let in. Changes of their states become effects, and fenced workers are told.

Where the rule lets newcomers in at the next epoch only, they are alive and outside until then, and no other worker waits for them.
"""

from __future__ import annotations

from offbeat.core.effects import Effect, Fence, StateChanged
from offbeat.core.membership import Membership
from offbeat.types import Incarnation, Seconds, WorkerId, WorkerState


class Participants:
    """Keep the members of a job that take part, and those that will with the next epoch.

    Args:
        membership: of the job.
        effects: of the event in hand; this object appends its own.
    """

    def __init__(self, membership: Membership, effects: list[Effect]) -> None:
        self.membership, self._effects = membership, effects
        self.outside: dict[WorkerId, None] = {}
        """Workers that are alive and not let in before the next epoch, in the order in which they came."""

    def alive(self) -> list[WorkerId]:
        """Return the living workers, in order of their numbers."""
        return self.membership.in_state(WorkerState.ALIVE)

    def inside(self) -> list[WorkerId]:
        """Return the living workers that take part, in order of their numbers."""
        return [worker for worker in self.alive() if worker not in self.outside]

    def present(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this is the newest incarnation of a worker that is alive."""
        if worker not in self.membership:
            return False
        member = self.membership[worker]
        return member.state is WorkerState.ALIVE and incarnation == member.incarnation

    def join(self, worker: WorkerId, now: Seconds) -> None:
        """Begin a worker's next incarnation."""
        incarnation = self.membership.join(worker, now)
        self._effects.append(StateChanged(worker, incarnation, WorkerState.ALIVE, "joined"))

    def leave(self, worker: WorkerId, state: WorkerState, reason: str) -> bool:
        """Note that a worker is dead or has finished; return False if it was one of the two before, which changes nothing."""
        member = self.membership[worker]
        if member.state in (WorkerState.DEAD, WorkerState.FINISHED):
            return False
        self._change(worker, state, reason)
        self.outside.pop(worker, None)
        return True

    def died(self, worker: WorkerId, reason: str) -> None:
        """Note that the process of a worker is dead which had left, and gone on with its script."""
        self._change(worker, WorkerState.DEAD, reason)

    def _change(self, worker: WorkerId, state: WorkerState, reason: str) -> None:
        member = self.membership[worker]
        member.state = state
        self._effects.append(StateChanged(worker, member.incarnation, state, reason))

    def speaks(self, worker: WorkerId, incarnation: Incarnation, now: Seconds) -> bool:
        """Note a sign of life; return whether its sender may speak.

        A dead worker's own process is told, once, to join again. A process whose place another one has taken is not answered.
        """
        if self.membership.speaks(worker, incarnation, now):
            return True
        if worker not in self.membership:
            return False
        member = self.membership[worker]
        if member.state is WorkerState.DEAD and incarnation == member.incarnation:
            member.state = WorkerState.RECOVERED
            self._effects.append(StateChanged(worker, incarnation, WorkerState.RECOVERED, "heard of again"))
            self._effects.append(Fence(worker, incarnation, f"incarnation {incarnation} was declared dead"))
        return False
