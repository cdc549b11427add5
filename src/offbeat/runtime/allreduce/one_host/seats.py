"""Who takes part in the rounds of a host: what a rank, or the coordinator for it, may say of that, and what has happened so far."""

from __future__ import annotations

import time
from collections.abc import Callable

from offbeat.core.allreduce.policy import ABSENT
from offbeat.core.allreduce.rounds import RoundPart
from offbeat.core.rank_log import Entry
from offbeat.runtime.allreduce.one_host.shared_state import Shared, Ts
from offbeat.runtime.allreduce.one_host.state import State
from offbeat.types import Version, WorkerId

TICK_S = 0.05
"""How often somebody who waits looks for a fold that was left unfinished."""


class OneHostMembers:
    """The ranks of a host, as one process sees them and may change them. `OneHostRounds` is this and what a rank does itself."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    @property
    def number(self) -> Version:
        """Of the open round."""
        return self._shared.look(lambda state: state.rounds.number)

    @property
    def done(self) -> Version:
        """How many rounds are folded: the newest version."""
        return self._shared.look(lambda state: state.rounds.done)

    def version(self, rank: WorkerId) -> Version:
        """How many results a rank has taken."""
        return self._shared.look(lambda state: state.rounds.version(rank))

    def state(self, rank: WorkerId) -> int:
        """`ABSENT`, `ACTIVE` or `IDLE`, as in `offbeat.core.allreduce.policy`."""
        return self._shared.look(lambda state: state.rounds.state(rank))

    def present(self, rank: WorkerId) -> bool:
        """Whether a rank takes part."""
        return self.state(rank) != ABSENT

    def enter(self, rank: WorkerId, version: Version) -> tuple[RoundPart, ...]:
        """A rank takes part, with the parameters of this version; it gets the results from there on.

        Returns:
            What its predecessor had pending, and which nobody will sum.

        Raises:
            TooOld: results that it would need are gone.
        """
        return self._unless_summed(_enter, rank, version)

    def ticket(self, rank: WorkerId) -> int:
        """What another rank needs to let in the process that is this one now."""
        return self._shared.look(lambda state: state.tokens[rank])

    def forget(self, rank: WorkerId) -> None:
        """The process of a rank is gone, and nobody lets it in any more."""
        self._shared.change(State.forget, rank)

    def let_in(self, rank: WorkerId, version: Version, ticket: int, *, pause: bool = True) -> None:
        """Another rank takes part, with the parameters of this version, which this one has itself: it goes on only after this.

        Args:
            ticket: see `ticket`. If that process is gone by now, or takes part already, nothing happens.
            pause: nobody waits for it before it says `resume`.
        """
        self._unless_summed(_let_in, rank, version, ticket, pause)

    def leave(self, rank: WorkerId) -> None:
        """A rank is gone. What it has handed in stays in its round. Rounds that waited for it go on."""
        self._shared.change(State.leave, rank)
        self._look_after()

    def pause(self, rank: WorkerId) -> None:
        """A rank has nothing to compute until the epoch ends. If that is so for all, what is pending is folded."""
        self._shared.change(State.pause, rank)
        self._look_after()

    def resume(self, rank: WorkerId) -> None:
        """A rank computes again."""
        self._shared.change(State.resume, rank)

    def follow(self, start: int) -> list[Entry]:
        """What has happened: the log from this entry on. Those before it have been dealt with, and may be overwritten."""
        return self._shared.follow(start)

    def help(self) -> bool:
        """Take part in a fold that is under way. Returns whether there was anything to do."""
        return self._shared.help()

    def _unless_summed(self, enter: Callable[[State, *Ts], tuple[RoundPart, ...] | None], *args: *Ts) -> tuple[RoundPart, ...]:
        """Make this change, once it does not say that it cannot be made now."""
        while (dropped := self._shared.change(enter, *args)) is None:
            events = self._shared.events.value
            if not self.help() and self._shared.look(lambda state: state.closing()) is not None:
                self._sleep(events, None)
        return dropped

    def _look_after(self) -> None:
        """Something may have closed a round that nobody waits for: then it is folded here."""
        while self._shared.look(lambda state: state.closing() is not None and not state.rounds.awaited):
            if not self.help():
                break

    def _sleep(self, events: int, deadline: float | None) -> bool:
        """Until something happens, but not long. Returns whether there was time left."""
        remaining = TICK_S if deadline is None else min(TICK_S, deadline - time.monotonic())
        if remaining <= 0.0:
            return False
        self._shared.events.sleep(events, remaining)
        return True


def _enter(state: State, rank: WorkerId, version: Version) -> tuple[RoundPart, ...] | None:
    """None: not now, since a gradient of its predecessor is being summed."""
    closing = state.closing()
    if closing is not None and any(part.rank == rank for part in closing.round.parts):
        return None
    return state.enter(rank, version)


def _let_in(state: State, rank: WorkerId, version: Version, ticket: int, pause: bool) -> tuple[RoundPart, ...] | None:
    """As `_enter`, for the process with this ticket."""
    if ticket == 0 or state.tokens[rank] != ticket or state.rounds.state(rank) != ABSENT:
        return ()
    dropped = _enter(state, rank, version)
    if dropped is not None and pause:
        state.pause(rank)
    return dropped
