"""Decide what each rank of a live gossip job may do next: take part, count a step, and take what neighbours have sent.

All ranks ask one `GossipTable`, one after the other: on one host it is in shared memory under a lock (``runtime/gossip/one_host.py``),
across hosts it is in server 0 (``runtime/gossip/sequenced.py``). Parameters are not in it. A rank's step is counted before the rank has the
parameters that it mixes; so a rank may find out that it cannot have some, since their sender has died. It then goes on without them: under
*average* their weight is its own, under *push* their mass is written off (`took`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple, TypeAlias

from offbeat.core.gossip.push_sum import Gossip, GossipMessage, GossipRule, Loss, Mixture
from offbeat.core.rank_log import EntryKind, Fenced
from offbeat.types import Clock, WorkerId

Note: TypeAlias = Callable[[EntryKind, WorkerId, Clock, int | None], None]
"""Logs an entry: kind, rank, the rank's steps, and 0 if a gradient came with the step."""
Request: TypeAlias = Literal["step", "take", "rest"]
"""What a rank may ask for: a method of `GossipTable`."""
AHEAD = 3
"""Slots beyond those that the rule's delay needs: a rank can be this many steps ahead of the readers of its messages."""


def slots_of(rule: GossipRule) -> int:
    """Return how many vectors of parameters each rank keeps for others."""
    return {"push": rule.delay_steps + AHEAD, "average": 3, "pair": 1}[rule.exchange]


class Stepped(NamedTuple):
    """A step that was counted."""

    steps: Clock
    """Steps of the rank, this one included."""
    mixture: Mixture
    """average: what the rank's parameters are mixed of before it adds its own step."""
    partner: WorkerId | None
    """pair: the rank to exchange with."""


class GossipTable:
    """The members of one job's gossip, their steps, and the messages between them.

    Args:
        rule: says which ranks exchange.
        ranks: the greatest number of ranks.
        seed: seed of the rule's draws.
        note: logs what happens.

    >>> from offbeat.policies import rule
    >>> table = GossipTable(rule("sgp"), 2, 0, lambda *entry: None)
    >>> table.enter(0), table.enter(1), table.step(0, True).steps, table.blocked(0, "take")
    (None, None, 1, 'the step of rank 1')
    >>> table.step(1, True).steps, table.blocked(0, "take"), [message.sender for message in table.take(0).messages]
    (1, None, [1])
    """

    def __init__(self, rule: GossipRule, ranks: int, seed: int, note: Note) -> None:
        self.exchange, self.slots = rule.exchange, slots_of(rule)
        self.gossip = Gossip(rule, seed)
        self._note = note
        self.processes = [0] * ranks
        """By rank: a number that changes with the rank's process."""
        self.steps = 0
        """Steps that all ranks have made together."""

    def words(self) -> list[float]:
        """Return the whole table as numbers, for `restore`."""
        return [self.steps, *self.processes, *self.gossip.words()]

    def restore(self, words: Sequence[float]) -> None:
        """Restore the table that `words` has returned."""
        fixed = 1 + len(self.processes)
        self.steps, self.processes = int(words[0]), [int(word) for word in words[1:fixed]]
        self.gossip.restore(words[fixed:])

    # Members.

    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""
        return rank in self.gossip.present

    def check(self, rank: WorkerId, process: int | None = None) -> None:
        """Raise `Fenced` unless the rank takes part, and this is the number of its process."""
        if not self.present(rank):
            raise Fenced(f"rank {rank} does not take part: it was declared dead, or has left")
        if process is not None and self.processes[rank] != process:
            raise Fenced(f"another process is rank {rank} now: this one was declared dead while it was silent")

    def enter(self, rank: WorkerId) -> None:
        """Let a rank take part. The parameters of an earlier process are lost."""
        self.gossip.leave(rank)
        self.processes[rank] += 1
        self._note(EntryKind.ENTER, rank, self.gossip.enter(rank), None)

    def forget(self, rank: WorkerId) -> None:
        """Void the ticket of a rank that does not take part: its process is gone. A ticket is the number of the rank's process."""
        if not self.present(rank):
            self.processes[rank] += 1

    def admit(self, rank: WorkerId, ticket: int) -> bool:
        """Let a rank take part on the word of another one. No rank waits for it before `resume`. Returns False if the ticket is void."""
        if self.processes[rank] != ticket or self.present(rank):
            return False
        self.enter(rank)
        self.pause(rank)
        return True

    def leave(self, rank: WorkerId, lost: Callable[[WorkerId, GossipMessage], bool] | None = None) -> Loss | None:
        """Remove a rank, and write off its mass and the messages for it. Returns None if it did not take part.

        Args:
            rank: which one.
            lost: says which of the messages that this rank has sent, given the receiver, have gone with it.
        """
        if not self.present(rank):
            return None
        stranded = [] if lost is None else self.gossip.strand(rank, lost)
        self.processes[rank] += 1
        self._note(EntryKind.LEAVE, rank, self.gossip.steps(rank), None)
        loss = self.gossip.leave(rank)
        assert loss is not None
        return Loss(loss.mass + sum(message.mass for message in stranded), (*loss.messages, *stranded))

    def pause(self, rank: WorkerId) -> None:
        """Let no rank wait for a rank, which has nothing to compute."""
        if rank in self.gossip.active:
            self.gossip.pause(rank)
            self._note(EntryKind.PAUSE, rank, self.gossip.steps(rank), None)

    def resume(self, rank: WorkerId) -> Clock | None:
        """Let ranks wait for a rank again. Returns its steps if they were raised: its parameters count as those of this step then."""
        if not self.present(rank) or rank in self.gossip.active:
            return None
        raised = self.gossip.resume(rank)
        self._note(EntryKind.RESUME, rank, self.gossip.steps(rank), None)
        return self.gossip.steps(rank) if raised else None

    # A rank's step.

    def blocked(self, rank: WorkerId, request: Request) -> str | None:
        """Return what a rank has to wait for before this request; None: nothing."""
        gossip = self.gossip
        if request == "rest":
            return None
        if request == "step" and self.exchange == "push":
            blocked = gossip.unread(rank, gossip.steps(rank) + 1 - self.slots)
            return "neighbours to read what it has sent" if blocked else None
        behind = gossip.behind(rank)
        return f"the step of rank {behind[0]}" if behind else None

    def step(self, rank: WorkerId, gradient: bool) -> Stepped:
        """Count a step of a rank, which is not `blocked`. ``gradient``: whether there is one in it."""
        gossip = self.gossip
        mixture = gossip.mix(rank) if self.exchange == "average" else Mixture(1.0, (), 1.0)
        partner = gossip.partner(rank) if self.exchange == "pair" else None
        gossip.step(rank)
        self.steps += 1
        self._note(EntryKind.ARRIVE, rank, gossip.steps(rank), 0 if gradient else None)
        return Stepped(gossip.steps(rank), mixture, partner)

    def take(self, rank: WorkerId) -> Mixture:
        """Return what a rank mixes in after its step under *push*; the messages stay until `took`."""
        return self.gossip.due(rank)

    def rest(self, rank: WorkerId) -> Mixture:
        """Return what a rank mixes in under *push* while it is paused: all messages for it. Nothing if it is not paused."""
        return Mixture(1.0, (), self.gossip.mass(rank)) if rank in self.gossip.active else self.gossip.pending(rank)

    def took(self, rank: WorkerId, mixture: Mixture, got: Collection[GossipMessage]) -> tuple[GossipMessage, ...]:
        """Remove the messages that a rank has been given with `take`. It has mixed in those it has got; returns the others, now lost."""
        missed = tuple(message for message in mixture.messages if message not in got)
        self.gossip.took(rank, mixture._replace(messages=tuple(got)), missed)
        return missed
