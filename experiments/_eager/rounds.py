"""What the rounds of a rule consist of: who closes each, how many of its gradients are new, and how old the others are."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from offbeat.core.effects import Fold
from offbeat.core.events import Folded
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.sim.training.workload import Handed, Workload
from offbeat.types import Version, WorkerId


class Rounds(NamedTuple):
    """What was counted in a run, up to its last fold."""

    fresh: tuple[int, ...]
    """Of each round, the gradients computed from the newest version: those of the ranks that arrived before it closed."""
    closers: Counter[WorkerId]
    """The rounds that each rank closed."""
    folded: int
    """Gradients in rounds."""
    lost: int
    """Gradients handed in before the last round closed, and in no round."""
    twice: int
    """Gradients in more than one round."""
    stalest: Version
    """The most versions between the one that a gradient is computed from and the one that it is folded onto."""

    @property
    def arrivals(self) -> float:
        """Return the mean number of ranks that have arrived as a round closes."""
        return sum(self.fresh) / len(self.fresh)


class _Counted(Workload):
    """Counts the parts of each fold. A round is folded as its last rank arrives: the one that handed in last has closed it."""

    empty = False

    def __init__(self) -> None:
        self.handed = self.handed_before = 0
        self.fresh: list[int] = []
        self.closers: Counter[WorkerId] = Counter()
        self.parts: Counter[tuple[WorkerId, int]] = Counter()
        self.stalest = 0
        self._last = WorkerId(0)

    def handed_in(self, push: Handed) -> float | None:
        self.handed += 1
        self._last = push.worker
        return None

    def fold(self, effect: Fold) -> Folded:
        self.handed_before = self.handed
        self.closers[self._last] += 1
        self.fresh.append(sum(part.staleness == 0 for part in effect.parts))
        self.parts.update((part.worker, part.clock) for part in effect.parts)
        self.stalest = max(self.stalest, *(part.staleness for part in effect.parts))
        return super().fold(effect)


def counted(sync: str, cluster: Cluster, rounds: int) -> Rounds:
    """Run a rule for so many rounds. Messages take no time, and no two ranks must arrive at once."""
    content = _Counted()
    simulate(sync, cluster, Work(versions=rounds), content=content, counted=False)
    lost = content.handed_before - len(content.parts)
    twice = sum(count > 1 for count in content.parts.values())
    return Rounds(tuple(content.fresh), content.closers, sum(content.parts.values()), lost, twice, content.stalest)
