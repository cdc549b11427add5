"""Predict what a rule makes of turns that were measured: replay each worker's in their order, again and again.

A turn lasts from a worker's release to its push, so waits for others are not in it. The order is kept, as a worker that was slow for ten
turns is predicted to be slow for ten turns. No model of the times is assumed. How long a fold keeps a server is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from math import sqrt
from typing import Final, NamedTuple, TypeAlias

from offbeat.core.effects import Effect, Release
from offbeat.core.events import Pushed
from offbeat.core.policy import ServerRule
from offbeat.core.server.ledger import Ledger
from offbeat.types import Incarnation, Seconds, Version, WorkerId

SINGLE: Final = 0.5
"""The step with a single, stale gradient, as a part of an n-th of a barrier's: the least of the factors in docs/learning-rates.md."""
KEEPS: Final = 0.75
"""The least part of the gradients of a fold for which docs/learning-rates.md has measured the rate of a barrier to be right."""
FIRST: Final = Incarnation(1)
Turns: TypeAlias = Sequence[Sequence[Seconds]]
"""By worker, the lengths of its turns in the order in which it made them; none is empty."""


class Outlook(NamedTuple):
    """What a rule is predicted to make."""

    gradients: float
    """Folded gradients a second."""
    steps: float
    """Steps a second, counted in steps of a barrier's length: a step with a part of its rate is that part of one."""
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


def part_of_rate(k: int, n: int) -> float:
    """Return the part of a barrier's rate that a fold of k of n gradients has: all of it, but ``sqrt(k / n)`` below three quarters.

    1 is right where gradients agree, ``k / n`` where they are noise; their geometric mean is off by the same factor at both ends.

    >>> part_of_rate(3, 4), round(part_of_rate(2, 4), 2)
    (1.0, 0.71)
    """
    return 1.0 if k >= KEEPS * n else sqrt(k / n)


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
    >>> first_fresh([[1.0], [4.0]], 1, 25)
    Outlook(gradients=1.0, steps=0.7071067811865476, folded=(20, 0))
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
    return _outlook(folded, version * part_of_rate(k, len(turns)), last)


def nobody_waits(turns: Turns) -> Outlook:
    """Return the outlook of a fold of each gradient by itself, at a 2n-th of the rate, where no worker waits: no rule folds more of them.

    >>> nobody_waits([[1.0], [1.0], [4.0]])
    Outlook(gradients=2.25, steps=0.375, folded=(4, 4, 1))
    """
    paces = [len(own) / sum(own) for own in turns]
    longest = max(map(sum, turns))
    gradients = sum(paces)
    return Outlook(gradients, SINGLE * gradients / len(turns), tuple(round(longest * pace) for pace in paces))


def one_by_one(rule: ServerRule, turns: Turns, pushes: int) -> Outlook | None:
    """Return the outlook of a rule that folds each gradient by itself, at a 2n-th of the rate, and holds workers.

    The rule itself decides, on a ledger of its own. As many pushes as are counted go before, in which workers get ahead or are measured.

    Args:
        rule: folds every push as it arrives.
        turns: of n workers.
        pushes: how many are counted.

    Returns:
        None if the rule lets all workers wait.

    >>> from offbeat.policies.ssp import SSP
    >>> one_by_one(SSP(staleness=3), [[1.0], [1.0], [4.0]], 9 * 4)
    Outlook(gradients=0.75, steps=0.125, folded=(12, 12, 12))
    """
    ledger, n = Ledger(rule), len(turns)
    made, before = [0] * n, [0] * n
    due: list[tuple[Seconds, WorkerId, Version]] = []
    now = began = 0.0
    for worker in map(WorkerId, range(n)):
        _begin(ledger.enter(worker, FIRST, now, more=worker < n - 1), now, turns, made, due)
    for number in range(2 * pushes):
        if number == pushes:
            before, began = list(made), now
        while (wake := ledger.wake_at()) is not None and (not due or wake <= due[0][0]):
            _begin(ledger.wake(now := max(now, wake)), now, turns, made, due)
        if not due:
            return None
        now, worker, version = heappop(due)
        made[worker] += 1
        _begin(ledger.push(Pushed(worker, FIRST, version, 1, 0.0), now), now, turns, made, due)
    folded = [after - one for after, one in zip(made, before, strict=True)]
    return _outlook(folded, SINGLE * pushes / n, now - began)


def _begin(
    effects: Sequence[Effect], now: Seconds, turns: Turns, made: Sequence[int], due: list[tuple[Seconds, WorkerId, Version]]
) -> None:
    """Note when the workers that are released will push."""
    for effect in effects:
        if isinstance(effect, Release):
            own = turns[effect.worker]
            heappush(due, (now + own[made[effect.worker] % len(own)], effect.worker, effect.version))


def _outlook(folded: Sequence[int], steps: float, seconds: Seconds) -> Outlook | None:
    total = sum(folded)
    if not total or seconds <= 0.0:
        return None
    return Outlook(total / seconds, steps / seconds, tuple(folded))
