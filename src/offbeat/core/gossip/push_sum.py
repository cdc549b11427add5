"""Decide how ranks mix their parameters with those of a few neighbours: the neighbours of each step, and the weights.

This file keeps the graph over the living and active ranks, each rank's number of steps, the weights of push-sum and the messages on their
way. It knows no contributions (``core/gossip/ledger.py`` does) and sees no parameters: a `Mixture` says what to add up.

There are three kinds of exchange. *average*: a rank's new parameters are a weighted mean of its own and those of all neighbours, each as of
the same step. *push*: after its step a rank sends shares of its parameters and of its mass to the peers of this step, and adds up the
shares that it has received. *pair*: two ranks replace their parameters by their mean, at any time, and no rank waits.

A rank waits only for neighbours that have made fewer steps, so the rank with the fewest steps never waits, whatever the graph and its
changes. No rank waits for one that is not active. The parameters of a dead rank and the messages on their way to it are lost. In push-sum
they have mass, which `leave` returns: ``sum of mass = mass entered - mass lost``, with the mass of messages on their way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from offbeat.core.gossip.topology import Graph
from offbeat.core.policy import Policy
from offbeat.types import Clock, WorkerId

Exchange: TypeAlias = Literal["average", "push", "pair"]
Edges: TypeAlias = Callable[[int, int, int], tuple[int, ...]]


class GossipRule(Policy, ABC):
    """A rule of this family: says how to exchange, and on which graph. `Gossip` asks it."""

    family = "gossip"

    exchange: ClassVar[Exchange]
    """How parameters are exchanged; see the top of this file."""

    @property
    @abstractmethod
    def edges(self) -> Graph:
        """The graph that says which ranks are neighbours."""

    @property
    def delay_steps(self) -> int:
        """push: what is sent at step k is added up at step k + this."""
        return 0


class GossipMessage(NamedTuple):
    """Parameters that are to be mixed in: those that a rank had after so many steps, times a weight."""

    sender: WorkerId
    steps: Clock
    weight: float
    mass: float = 0.0
    """push: what comes with it."""


class Mixture(NamedTuple):
    """A rank's new parameters: ``x = own * x + sum of weight * message``."""

    own: float
    messages: tuple[GossipMessage, ...]
    mass: float
    """The rank's mass after it; 1 but for push. Its model is x / mass."""


class Sent(NamedTuple):
    """Describe the shares that a rank has sent."""

    to: tuple[WorkerId, ...]
    weight: float
    """Mass of each share, and of the part that the rank has kept."""


class Loss(NamedTuple):
    """Describe the mass and the messages that were lost with a rank."""

    mass: float
    """Its own mass and that of the messages."""
    messages: tuple[GossipMessage, ...]
    """That it had not read."""


@dataclass(slots=True)
class _Standing:
    steps: Clock
    oldest: Clock
    """average: it still has its parameters as of this many steps, and all since: those of its last two."""
    mass: float = 1.0
    own: float = 1.0
    """push: how much of its parameters it has kept since its last step; they are scaled down when it next mixes."""
    inbox: list[GossipMessage] = field(default_factory=list)


class Gossip:
    """The exchanges of one job.

    Args:
        rule: how, and on which graph.
        seed: of what is drawn.

    >>> from offbeat.policies import rule
    >>> gossip = Gossip(rule("sgp"))
    >>> for rank in range(4):
    ...     _ = gossip.enter(rank)
    >>> gossip.step(0), gossip.behind(0)
    (Sent(to=(1,), weight=0.5), (3,))
    >>> gossip.step(3), gossip.behind(0)
    (Sent(to=(0,), weight=0.5), ())
    >>> gossip.mix(0)
    Mixture(own=0.5, messages=(GossipMessage(sender=3, steps=1, weight=0.5, mass=0.5),), mass=1.0)
    """

    def __init__(self, rule: GossipRule, seed: int = 0) -> None:
        self._edges, self._exchange, self._delay, self._seed = rule.edges, rule.exchange, rule.delay_steps, seed
        self._there: dict[WorkerId, _Standing] = {}
        self._active: list[WorkerId] = []
        """In ascending order: the places of the graph."""
        self._floor: Clock = 0
        """The fewest steps of an active rank, when there last was one."""
        self._before: dict[WorkerId, Clock] = {}
        """The steps of ranks that have left."""
        self.entered = 0.0
        """The mass of all that have ever entered."""
        self.lost = 0.0
        """The mass of all that have left."""

    @property
    def active(self) -> tuple[WorkerId, ...]:
        """Ranks that others wait for."""
        return tuple(self._active)

    @property
    def present(self) -> tuple[WorkerId, ...]:
        """Active or idle, in the order in which they have entered."""
        return tuple(self._there)

    def steps(self, rank: WorkerId) -> Clock:
        return self._there[rank].steps

    def mass(self, rank: WorkerId) -> float:
        """A rank's own; what is on its way to it is not in it."""
        return self._there[rank].mass

    def in_flight(self) -> float:
        """The mass of all messages that have not been read."""
        return sum(message.mass for standing in self._there.values() for message in standing.inbox)

    def slowest(self) -> Clock:
        """Return the fewest steps of an active rank; without active ranks, those of the last one. The number never falls."""
        return min((self._there[rank].steps for rank in self._active), default=self._floor)

    # Members.

    def enter(self, rank: WorkerId) -> Clock:
        """Add a rank with a copy of another's model, a mass of 1, and the steps of the slowest rank.

        If it had made more steps before, it keeps that number: its new messages must not be taken for its earlier ones.
        """
        assert rank not in self._there, f"rank {rank} is there already"
        steps = max(self.slowest(), self._before.get(rank, 0))
        self._there[rank] = _Standing(steps, steps)
        insort(self._active, rank)
        self.entered += 1.0
        return steps

    def leave(self, rank: WorkerId) -> Loss | None:
        """Remove a rank; its mass and the messages on their way to it are lost. Returns None if the rank was not there."""
        if rank not in self._there:
            return None
        self._deactivate(rank)
        standing = self._there.pop(rank)
        self._before[rank] = standing.steps
        mass = standing.mass + sum(message.mass for message in standing.inbox)
        self.lost += mass
        return Loss(mass, tuple(standing.inbox))

    def pause(self, rank: WorkerId) -> None:
        """Remove a rank without samples from the graph until `resume`.

        The caller mixes in the messages on their way to it (`pending`), since the length of the pause is unknown.
        """
        self._deactivate(rank)

    def _deactivate(self, rank: WorkerId) -> None:
        if rank in self._active:
            self._active.remove(rank)
            if not self._active:
                self._floor = self._there[rank].steps

    def resume(self, rank: WorkerId) -> bool:
        """Let a rank compute again. Returns True if its number of steps was raised to that of the slowest."""
        if rank in self._active:
            return False
        standing, before = self._there[rank], self._there[rank].steps
        standing.steps = max(before, self.slowest())
        standing.oldest = standing.steps if standing.steps > before else standing.oldest
        insort(self._active, rank)
        return standing.steps > before

    # Exchanges.

    def neighbours(self, rank: WorkerId) -> tuple[WorkerId, ...]:
        """Return the ranks whose parameters this rank averages with its own."""
        return self._at(self._edges.into, rank, 0)

    def behind(self, rank: WorkerId) -> tuple[WorkerId, ...]:
        """Return the ranks for which this rank must wait before it can `mix`."""
        others, due = self._sources(rank, self._there[rank].steps)
        return tuple(other for other in others if self._there[other].steps < due)

    def ahead(self, rank: WorkerId) -> tuple[tuple[WorkerId, Clock], ...]:
        """Return what a rank between two steps mixes at the next one, if no rank comes or goes: the senders, and as of which of their
        steps."""
        others, due = self._sources(rank, self._there[rank].steps + (self._exchange == "push"))
        return tuple((other, due) for other in others)

    def _sources(self, rank: WorkerId, steps: Clock) -> tuple[tuple[WorkerId, ...], Clock]:
        """Return whose parameters this rank mixes once it has made so many steps, and as of which of their steps."""
        if self._exchange == "average":
            return self.neighbours(rank), steps
        due = steps - self._delay
        return (self._at(self._edges.into, rank, due - 1) if self._exchange == "push" and due > 0 else ()), due

    def step(self, rank: WorkerId) -> Sent:
        """Count a rank's step; under *push*, this sends its shares. Under *average* the rank has mixed before, under *push* it mixes
        after."""
        standing = self._there[rank]
        standing.oldest = max(standing.oldest, standing.steps)
        standing.steps += 1
        if self._exchange == "average":
            others = self.neighbours(rank)
            return Sent(others, 1.0 / (1 + len(others)))
        if self._exchange == "pair":
            return Sent((), 1.0)
        others = self._at(self._edges.out, rank, standing.steps - 1)
        share = 1.0 / (1 + len(others))
        standing.mass *= share
        standing.own *= share
        for other in others:
            self._there[other].inbox.append(GossipMessage(rank, standing.steps, share, standing.mass))
        return Sent(others, share)

    def stepped(self, rank: WorkerId) -> None:
        """Count a step that a live rank has reported, without its messages."""
        self._there[rank].steps += 1

    def mix(self, rank: WorkerId) -> Mixture:
        """Return how a rank's parameters are mixed; the rank must not be `behind` another."""
        assert not self.behind(rank), f"rank {rank} mixes before {self.behind(rank)}"
        if self._exchange == "push":
            return self.took(rank, self.due(rank))
        others = self.neighbours(rank)
        weight = 1.0 / (1 + len(others))
        steps = self._there[rank].steps
        return Mixture(weight, tuple(GossipMessage(other, self._kept(other, steps), weight) for other in others), 1.0)

    def due(self, rank: WorkerId) -> Mixture:
        """Return the messages that a rank may mix in by now under *push*, also while it waits for more. They stay in place until `took`."""
        standing = self._there[rank]
        limit = standing.steps - self._delay
        messages = tuple(message for message in standing.inbox if message.steps <= limit)
        return Mixture(standing.own, messages, standing.mass + sum(message.mass for message in messages))

    def pending(self, rank: WorkerId) -> Mixture:
        """Return all messages of a rank under *push*, due or not."""
        standing = self._there[rank]
        return Mixture(standing.own, tuple(standing.inbox), standing.mass + sum(message.mass for message in standing.inbox))

    def took(self, rank: WorkerId, mixture: Mixture, missed: Sequence[GossipMessage] = ()) -> Mixture:
        """Remove messages that a rank has mixed in under *push*. Returns the mixture with the rank's mass after it.

        ``missed``: messages that the rank cannot get, since their sender is gone: they are lost.
        """
        standing = self._there[rank]
        got, gone = ([message for message in those if message in standing.inbox] for those in (mixture.messages, missed))
        standing.inbox = [message for message in standing.inbox if message not in got and message not in gone]
        standing.mass += sum(message.mass for message in got)
        standing.own = 1.0
        self.lost += sum(message.mass for message in gone)
        return mixture._replace(mass=standing.mass)

    def strand(self, sender: WorkerId, lost: Callable[[WorkerId, GossipMessage], bool]) -> list[GossipMessage]:
        """Write off messages of a sender that nobody can get any more; ``lost`` says which, given the receiver. Returns them."""
        found: list[GossipMessage] = []
        for rank, standing in self._there.items():
            gone = [message for message in standing.inbox if message.sender == sender and lost(rank, message)]
            standing.inbox = [message for message in standing.inbox if message not in gone] if gone else standing.inbox
            found += gone
        self.lost += sum(message.mass for message in found)
        return found

    def unread(self, rank: WorkerId, steps: Clock) -> bool:
        """Return True if a message that this rank has sent at this step or before is not mixed in yet, under *push*."""
        return any(m.sender == rank and m.steps <= steps for standing in self._there.values() for m in standing.inbox)

    def partner(self, rank: WorkerId) -> WorkerId | None:
        """Return the partner of this rank's next step under *pair*; None: the rank does not choose, others choose it."""
        place = bisect_left(self._active, rank)
        if place % 2 == 0:
            return None
        partners = self._edges.partners(place, len(self._active))
        return self._active[partners[_drawn(self._seed, rank, self._there[rank].steps) % len(partners)]]

    # For processes that share it.

    def words(self) -> list[float]:
        """Return the whole state as numbers, for `restore`."""
        out = [self._floor, self.entered, self.lost, len(self._before), len(self._there)]
        for rank, steps in self._before.items():
            out += (rank, steps)
        for rank, s in self._there.items():
            out += (rank, rank in self._active, s.steps, s.oldest, s.mass, s.own, len(s.inbox))
            for message in s.inbox:
                out += message
        return out

    def restore(self, words: Sequence[float]) -> None:
        """Restore the state that `words` has returned."""
        take = iter(words)
        self._floor, self.entered, self.lost = int(next(take)), next(take), next(take)
        before, there = int(next(take)), int(next(take))
        self._before = {WorkerId(int(next(take))): int(next(take)) for _ in range(before)}
        self._there, self._active = {}, []
        for _ in range(there):
            rank, active, steps, oldest = WorkerId(int(next(take))), next(take), int(next(take)), int(next(take))
            mass, own, count = next(take), next(take), int(next(take))
            inbox = [GossipMessage(WorkerId(int(next(take))), int(next(take)), next(take), next(take)) for _ in range(count)]
            self._there[rank] = _Standing(steps, oldest, mass, own, inbox)
            if active:
                insort(self._active, rank)

    def _at(self, edges: Edges, rank: WorkerId, step: Clock) -> tuple[WorkerId, ...]:
        """Return the ranks at the other ends of this rank's edges at a step."""
        active = self._active
        place = bisect_left(active, rank)
        if place == len(active) or active[place] != rank:
            return ()
        return tuple(active[other] for other in edges(place, len(active), step))

    def _kept(self, rank: WorkerId, steps: Clock) -> Clock:
        """Return the step nearest to ``steps`` of which the rank has parameters. They differ only after a rank has come or gone."""
        standing = self._there[rank]
        return min(max(steps, standing.oldest), standing.steps)


def _drawn(seed: int, rank: WorkerId, step: Clock) -> int:
    """Return a pseudo-random number that all ranks compute alike (splitmix64)."""
    mask = 0xFFFFFFFFFFFFFFFF
    x = (seed * 0x9E3779B97F4A7C15 + rank * 0xBF58476D1CE4E5B9 + step * 0x94D049BB133111EB + 0x2545F4914F6CDD1D) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)
