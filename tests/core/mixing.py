"""What gossip comes to: by the pure machine, with all ranks in step; and by what a ledger says, with one number for a rank's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from offbeat.core.effects import Adopt, Effect, Fold, Mix, Pair, Release, Settle, Share, Source, WrittenOff
from offbeat.core.gossip.push_sum import Gossip, GossipRule
from offbeat.types import Clock, Fate, WorkerId


def in_step(
    rule: GossipRule, begin: Sequence[Any], steps: int, moved: Callable[[WorkerId, Clock], Any] = lambda rank, step: 0.0
) -> tuple[list[Any], Gossip]:
    """Let everybody make a step, then everybody mix, and so on.

    Args:
        rule: how; who is first matters only to pairs.
        begin: each rank's parameters, numbers or vectors.
        steps: how many.
        moved: what a rank's optimizer adds in a step.

    Returns:
        Each rank's parameters before the division by its mass, and the machine.
    """
    gossip, x = Gossip(rule, seed=3), list(begin)
    for rank in range(len(x)):
        gossip.enter(rank)
    kept = {(rank, 0): value for rank, value in enumerate(x)}

    def mix() -> None:
        mixtures = [gossip.mix(rank) for rank in range(len(x))]
        x[:] = [
            m.own * x[rank] + sum(part.weight * kept[part.sender, part.steps] for part in m.messages) for rank, m in enumerate(mixtures)
        ]

    for step in range(1, steps + 1):
        if rule.exchange == "average":
            mix()
        for rank in range(len(x)):
            if rule.exchange == "pair" and (partner := gossip.partner(rank)) is not None:
                x[rank] = x[partner] = (x[rank] + x[partner]) / 2
            x[rank] = x[rank] + moved(rank, step)
            gossip.step(rank)
            kept[rank, step] = x[rank]
        if rule.exchange == "push":
            mix()
    return x, gossip


class Replicas:
    """Every rank's parameter, what is on its way, and the books of it.

    Args:
        exchange: of the rule.
        gradient: what each step adds to its rank's parameter, given (rank, clock).
    """

    def __init__(self, exchange: str, gradient: float = 1.0) -> None:
        self.exchange, self.gradient = exchange, gradient
        self.x: dict[WorkerId, float] = {}
        self.mass: dict[WorkerId, float] = {}
        self.own: dict[WorkerId, float] = {}
        """push: what part of its parameters each has kept since its last step."""
        self.shared: dict[tuple[WorkerId, Clock], float] = {}
        self.flying: dict[tuple[WorkerId, Clock, WorkerId], float] = {}
        """push: what is on its way, weighted, by sender, clock and receiver."""
        self.added = self.lost = self.entered = 0.0
        self.clocks: dict[WorkerId, Clock] = {}
        self.fates: list[tuple[WorkerId, int, Clock, Fate]] = []
        self.released: list[WorkerId] = []

    def follow(self, effects: Iterable[Effect], initial: float = 0.0) -> None:
        for effect in effects:
            self._follow(effect, initial)

    def total(self) -> float:
        """All parameters, what is on its way included. (What a sender has given away is still in its x until it mixes.)"""
        return sum(self.x[rank] * self.own[rank] for rank in self.x) + sum(self.flying.values())

    def _follow(self, effect: Effect, initial: float) -> None:
        match effect:
            case Adopt(worker=worker, source=source):
                self.x[worker] = initial if source is None else self.x[source] / self.mass[source]
                self.mass[worker] = self.own[worker] = 1.0
                self.entered += self.x[worker]
            case Fold(parts=(part,)):
                self.x[part.worker] += self.gradient
                self.added += self.gradient
            case Share(worker=worker, clock=clock, to=to, weight=weight):
                self.shared[worker, clock] = self.x[worker]
                if self.exchange == "push":
                    self.own[worker] = weight
                    for other in to:
                        self.flying[worker, clock, other] = weight * self.x[worker]
            case Mix(worker=worker, own=own, sources=sources, mass=mass):
                if self.exchange == "average":
                    assert abs(own + sum(source.weight for source in sources) - 1.0) < 1e-12
                else:
                    assert own == self.own[worker]
                self.x[worker] = own * self.x[worker] + sum(self._take(source, worker) for source in sources)
                self.mass[worker], self.own[worker] = mass, 1.0
            case Pair(worker=worker, partner=partner):
                self.x[worker] = self.x[partner] = (self.x[worker] + self.x[partner]) / 2
            case WrittenOff(worker=worker, sources=sources):
                self.lost += sum(self._take(source, worker) for source in sources)
            case Settle(worker=worker, incarnation=incarnation, clock=clock, fate=fate):
                self.fates.append((worker, incarnation, clock, fate))
            case Release(worker=worker, clock=clock):
                self.clocks[worker] = clock
                self.released.append(worker)
            case _:
                raise AssertionError(effect)

    def gone(self, worker: WorkerId) -> None:
        """Before the ledger is told."""
        self.lost += self.x.pop(worker) * self.own.pop(worker)
        del self.mass[worker]

    def _take(self, source: Source, reader: WorkerId) -> float:
        if self.exchange == "push":
            return self.flying.pop((source.worker, source.clock, reader))
        return source.weight * self.shared[source.worker, source.clock]
