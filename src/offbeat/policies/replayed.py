"""Predict what a rule makes of turns that were measured: replay each worker's in their order, again and again.

A turn lasts from a worker's release to its push, so waits for others are not in it. The order is kept, as a worker that was slow for ten
turns is predicted to be slow for ten turns. No model of the times is assumed. How long a fold keeps a server is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import inf, sqrt
from typing import Final, NamedTuple, TypeAlias

from offbeat.types import Seconds

SINGLE: Final = 0.5
"""The step with a single, stale gradient, as a part of an n-th of a barrier's: the least of the factors in docs/learning-rates.md."""
Turns: TypeAlias = Sequence[Sequence[Seconds]]
"""By worker, the lengths of its turns in the order in which it made them; none is empty."""


class Outlook(NamedTuple):
    """What a rule is predicted to make."""

    gradients: float
    """Folded gradients a second."""
    steps: float
    """Steps a second, counted in steps of a barrier's length: a step with a rate divided by 2n is so small a part of one."""
    folded: tuple[int, ...]
    """By worker: how many of its gradients are folded in the replay."""

    @property
    def progress(self) -> float:
        """The geometric mean of gradients and steps a second.

        Gradients count where they are mostly noise, steps where they agree; the mean is off by the same factor at both ends.

        >>> Outlook(8.0, 2.0, (16, 16)).progress
        4.0
        """
        return sqrt(self.gradients * self.steps)

    @property
    def least(self) -> float:
        """The part of a fair share of the gradients that the worker has which weighs least."""
        return min(self.folded) * len(self.folded) / sum(self.folded)

    def fair(self, part: float) -> bool:
        """Return whether every worker keeps this part of a fair share, give or take the standard deviation of so few gradients.

        >>> Outlook(1.0, 1.0, (4, 4, 1)).fair(0.5), Outlook(1.0, 1.0, (40, 40, 10)).fair(0.5)
        (True, False)
        """
        expected = part * sum(self.folded) / len(self.folded)
        return min(self.folded) >= expected - sqrt(expected)


def first_fresh(turns: Turns, k: int, pushes: int, *, ahead: bool = False) -> Outlook | None:
    """Return the outlook of a fold of the first k gradients of each version; later ones are dropped.

    Args:
        turns: of n workers.
        k: at least 1; at most n unless ``ahead``.
        pushes: how many are replayed.
        ahead: a worker goes on after its push, with the same version; otherwise it waits for the fold, as under `Backup`.

    Returns:
        None if there is no version among so many pushes.

    >>> first_fresh([[1.0], [1.0], [4.0]], 3, 30)
    Outlook(gradients=0.75, steps=0.25, folded=(10, 10, 10))
    >>> first_fresh([[1.0], [1.0], [4.0]], 2, 31)
    Outlook(gradients=2.0, steps=1.0, folded=(14, 14, 0))
    """
    lengths = [len(own) for own in turns]
    made = [1] * len(turns)
    due = [(own[0], worker, 0) for worker, own in enumerate(turns)]
    heapify(due)
    folded, waiting, version, last = [0] * len(turns), [], 0, 0.0
    for _ in range(pushes):
        now, worker, read = heappop(due)
        begin = [worker]
        if read == version:
            waiting.append(worker)
            if len(waiting) == k:
                version, last = version + 1, now
                for one in waiting:
                    folded[one] += 1
                begin = begin if ahead else waiting
                waiting = []
            elif not ahead:
                continue
        for one in begin:
            heappush(due, (now + turns[one][made[one] % lengths[one]], one, version))
            made[one] += 1
    return _outlook(folded, version, last)


def one_by_one(turns: Turns, bound: float, pushes: int) -> Outlook | None:
    """Return the outlook of a fold of each gradient by itself, at a 2n-th of the rate, where no worker is more than ``bound`` turns ahead.

    Pushes are replayed after as many others as it takes until a worker of half the speed is ``bound`` turns behind.

    >>> one_by_one([[1.0], [1.0], [4.0]], inf, 9 * 4)
    Outlook(gradients=2.25, steps=0.375, folded=(16, 16, 4))
    """
    lengths = [len(own) for own in turns]
    made = [0] * len(turns)
    due = [(own[0], worker) for worker, own in enumerate(turns)]
    heapify(due)
    held, slowest, now = [], 0, 0.0
    before, began = [0] * len(turns), 0.0
    ahead = 0 if bound == inf else 2 * int(bound) * len(turns)
    for number in range(ahead + pushes):
        if number == ahead:
            before, began = list(made), now
        now, worker = heappop(due)
        made[worker] += 1
        held.append(worker)
        if made[worker] == slowest + 1:
            slowest = min(made)
        elif made[worker] - slowest > bound:
            continue
        for one in [one for one in held if made[one] - slowest <= bound]:
            held.remove(one)
            heappush(due, (now + turns[one][made[one] % lengths[one]], one))
    folded = [after - one for after, one in zip(made, before, strict=True)]
    return _outlook(folded, SINGLE * pushes / len(turns), now - began)


def _outlook(folded: Sequence[int], steps: float, seconds: Seconds) -> Outlook | None:
    total = sum(folded)
    if not total or seconds <= 0.0:
        return None
    return Outlook(total / seconds, steps / seconds, tuple(folded))
