"""Change and read which ranks of a host take part in its rounds, and follow the log of what has happened."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.core.allreduce.policy import ABSENT
from offbeat.core.allreduce.rounds import RoundPart
from offbeat.core.rank_log import Entry
from offbeat.runtime.allreduce.one_host.memory import RoundsMemory
from offbeat.runtime.allreduce.one_host.state import RoundsState
from offbeat.runtime.shared_memory.state import Ts
from offbeat.types import Version, WorkerId


class OneHostMembers:
    """The ranks of a host, as one process sees and changes them. `OneHostRounds` adds what a rank does itself."""

    def __init__(self, memory: RoundsMemory) -> None:
        self._memory = memory

    @property
    def number(self) -> Version:
        """The number of the open round."""
        return self._memory.look(lambda state: state.rounds.number)

    @property
    def done(self) -> Version:
        """Return the number of folded rounds: the newest version."""
        return self._memory.look(lambda state: state.rounds.done)

    def version(self, rank: WorkerId) -> Version:
        """Return how many results a rank has taken."""
        return self._memory.look(lambda state: state.rounds.version(rank))

    def state(self, rank: WorkerId) -> int:
        """Return `ABSENT`, `ACTIVE` or `IDLE`, as in `offbeat.core.allreduce.policy`."""
        return self._memory.look(lambda state: state.rounds.state(rank))

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self.state(rank) != ABSENT

    def enter(self, rank: WorkerId, version: Version) -> tuple[RoundPart, ...]:
        """Let a rank take part, with the parameters of this version; it gets the results from there on.

        Returns:
            The gradients that the rank's earlier process had pending; they are dropped.

        Raises:
            TooOld: results that the rank would need are no longer kept.
        """
        return self._unless_summed(_enter, rank, version)

    def ticket(self, rank: WorkerId) -> int:
        """Return a number with which another rank may `admit` the rank's current process, once. It voids the ticket before."""
        return self._memory.change(RoundsState.ticket, rank)

    def forget(self, rank: WorkerId) -> None:
        """Void the ticket of a rank whose process is gone: from now on no other rank can admit it."""
        self._memory.change(RoundsState.forget, rank)

    def admit(self, rank: WorkerId, version: Version, ticket: int, *, pause: bool = True) -> None:
        """Let another rank take part, with the parameters of this version. The caller has them, and goes on only after this call.

        If the rank has been admitted before with an earlier ticket, it has not begun, and now begins at this version: the process that
        admitted it is gone, and so are the parameters for it.

        Args:
            ticket: see `ticket`. If it is void, nothing happens.
            pause: no round waits for the rank before it calls `resume`.
        """
        self._unless_summed(_admit, rank, version, ticket, pause)

    def leave(self, rank: WorkerId) -> None:
        """Remove a rank. Its gradient stays in its round; rounds that waited for the rank go on."""
        self._memory.change(RoundsState.leave, rank)
        self._look_after()

    def pause(self, rank: WorkerId) -> None:
        """Let no round wait for a rank, which has nothing to compute until the epoch ends. If all pause, pending gradients are folded."""
        self._memory.change(RoundsState.pause, rank)
        self._look_after()

    def resume(self, rank: WorkerId) -> None:
        """Let rounds wait for a rank again."""
        self._memory.change(RoundsState.resume, rank)

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on. Earlier entries may be overwritten from now on."""
        return self._memory.follow(start)

    def help(self) -> bool:
        """Help with a fold that is under way. Returns True if anything was done."""
        return self._memory.help()

    def _unless_summed(self, enter: Callable[[RoundsState, *Ts], tuple[RoundPart, ...] | None], *args: *Ts) -> tuple[RoundPart, ...]:
        """Make a change with ``enter``. While it returns None (the change is not possible yet), help with the fold that blocks it."""
        while (dropped := self._memory.change(enter, *args)) is None:
            events = self._memory.events.value
            if not self.help() and self._memory.look(lambda state: state.closing()) is not None:
                self._memory.sleep(events, None)
        return dropped

    def _look_after(self) -> None:
        """Fold a round that was closed by something other than an arrival, if no rank waits for it."""
        while self._memory.look(lambda state: state.closing() is not None and not state.rounds.awaited):
            if not self.help():
                break


def _enter(state: RoundsState, rank: WorkerId, version: Version) -> tuple[RoundPart, ...] | None:
    """Return None, and change nothing, while a gradient of the rank's earlier process is being summed."""
    closing = state.closing()
    if closing is not None and any(part.rank == rank for part in closing.round.parts):
        return None
    return state.enter(rank, version)


def _admit(state: RoundsState, rank: WorkerId, version: Version, ticket: int, pause: bool) -> tuple[RoundPart, ...] | None:
    """Do as `_enter` for the process with this ticket."""
    if ticket == 0 or state.tickets[rank] != ticket:
        return ()
    dropped = _enter(state, rank, version)
    if dropped is not None and pause:
        state.pause(rank)
    return dropped
