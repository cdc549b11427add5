"""Change and read which ranks of a host take part in its gossip, and follow the log of what has happened."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.core.gossip.push_sum import Loss
from offbeat.core.rank_log import Entry, EntryKind
from offbeat.runtime.gossip.memory import GossipState
from offbeat.runtime.gossip.waiting import GossipRank
from offbeat.types import Clock, WorkerId


class GossipMembers(GossipRank):
    """The ranks of a host, as one process sees and changes them. `OneHostGossip` adds what a rank does itself."""

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return self._memory.read(lambda state: rank in state.gossip.present)

    @property
    def steps(self) -> Clock:
        """Return how many steps all ranks have made together."""
        return self._memory.read(lambda state: state.steps)

    def enter(self, rank: WorkerId) -> None:
        """Let a rank take part; its process must then call `begin`. The parameters of an earlier process are lost."""
        self._memory.change(self._enter, rank)

    def _enter(self, state: GossipState, rank: WorkerId) -> None:
        state.gossip.leave(rank)
        state.incarnations[rank] += 1.0
        if self.rule.exchange != "push":  # with "push", messages stay in their slots until they are read
            self._memory.forget(rank)
        state.gossip.enter(rank)
        state.note(EntryKind.ENTER, rank)

    def ticket(self, rank: WorkerId) -> int:
        """Return the number with which another rank may `admit` the rank's current process."""
        return self._memory.read(lambda state: int(state.incarnations[rank]))

    def forget(self, rank: WorkerId) -> None:
        """Void the ticket of a rank that does not take part: its process is gone."""

        def forget(state: GossipState) -> None:
            if rank not in state.gossip.present:
                state.incarnations[rank] += 1.0

        self._memory.change(forget)

    def admit(self, rank: WorkerId, ticket: int) -> None:
        """Let another rank take part. No rank waits for it before its `resume`. Does nothing if the ticket is void."""

        def admit(state: GossipState) -> None:
            if state.incarnations[rank] == ticket and rank not in state.gossip.present:
                self._enter(state, rank)
                state.gossip.pause(rank)
                state.note(EntryKind.PAUSE, rank)

        self._memory.change(admit)

    def leave(self, rank: WorkerId | None = None, note: Callable[[Loss], None] | None = None) -> Loss | None:
        """Remove a rank, by default this one, from the gossip. No rank waits for it any more, and its mass is written off.

        Args:
            rank: which one.
            note: called with what is lost, under the lock and before the change is complete.

        Returns:
            What was lost with it; None if it did not take part.
        """
        gone = self._mine() if rank is None else rank

        def leave(state: GossipState) -> Loss | None:
            loss = state.gossip.leave(gone)
            if loss is not None:
                state.incarnations[gone] += 1.0
                state.note(EntryKind.LEAVE, gone)
                if note is not None:
                    note(loss)
            return loss

        return self._memory.change(leave)

    def masses(self) -> tuple[float, float, float, float]:
        """push-sum: return the mass of all ranks, the mass of messages under way, the lost mass, and the mass that has entered."""

        def masses(state: GossipState) -> tuple[float, float, float, float]:
            gossip = state.gossip
            return sum(map(gossip.mass, gossip.present)), gossip.in_flight(), gossip.lost, gossip.entered

        return self._memory.read(masses)

    def follow(self, start: int) -> list[Entry]:
        """Return the log from entry ``start`` on. A rank's step is an arrival, whose version is the number of its steps after it.

        A `GossipLedger` that gets the same events makes the same decisions, with one exception: messages under way while a rank leaves may
        be mixed in a step sooner or later than the log says.
        """
        return self._memory.follow(start)

    def close(self) -> None:
        """Release the memory. The rank still takes part afterwards, as after the end of this process: `leave` removes it."""
        self.block.close()
