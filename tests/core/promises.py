"""What rules promise beyond what all of them do, checked at every step of a schedule: promises that several rules share.

A rule's own are in its test, ``tests/policies/test_<module>.py`` for the rules in ``policies/<module>.py``, under the name ``PROMISES``: by
class. A rule that is not there, nor derived from one that is, keeps the promises of its family.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from math import isclose
from typing import TYPE_CHECKING, Any

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect, Fold, Paused, Release
from offbeat.core.events import Event, Pushed
from offbeat.core.policy import Policy

if TYPE_CHECKING:
    from tests.core.audit import Auditor


class Promises:
    """What any rule promises: nothing more."""

    drops = False
    """Whether it drops gradients of living workers."""

    @staticmethod
    def most_stale(rule: Any, workers: int) -> int | None:
        """Return the greatest staleness that a gradient can have in a fold, with so many workers and no faults; None: any."""
        return None

    def __init__(self, audit: Auditor) -> None:
        self.audit = audit
        self.ledger = audit.ledger
        self.rule: Any = audit.policy

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        """A fold has been announced."""

    def release(self, effect: Release) -> None:
        """A worker has been released."""

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        """An event has been dealt with."""

    def lead(self, worker: int) -> int:
        """How far a worker is ahead of the slowest."""
        slowest: int = min(self.ledger.clock(other) for other in self.ledger.active)
        return int(self.ledger.clock(worker)) - slowest

    def computing(self) -> int:
        """How many active workers have nothing pending."""
        return len([worker for worker in self.ledger.active if worker not in self.ledger.pending])


def by_samples(effect: Fold, pushes: Sequence[Pushed]) -> None:
    """Weights are shares of the samples; equal where somebody does not count them."""
    counted = all(push.samples for push in pushes)
    total = sum(push.samples if counted else 1 for push in pushes)
    for part, push in zip(effect.parts, pushes, strict=True):
        assert isclose(part.weight, (push.samples if counted else 1) / total)


def fresh(effect: Fold) -> None:
    """Nothing stale."""
    assert all(part.staleness == 0 for part in effect.parts), f"stale: {effect}"


class Asynchronous(Promises):
    """Each push is folded by itself, and nobody waits."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        assert len(effect.parts) == 1

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        assert not self.ledger.waiting, f"worker {min(self.ledger.waiting)} waits"


class FreshOnly(Promises):
    """Nobody waits while all have pushed and the shards have said what they have measured."""

    drops = True

    @staticmethod
    def most_stale(rule: Any, workers: int) -> int:
        return 0

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        fresh(effect)
        by_samples(effect, pushes)

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        for worker in self.ledger.waiting:
            assert worker in self.ledger.pending, f"worker {worker} waits though the newest version is out"
            assert self.computing() or self.audit.unreported, f"worker {worker} waits with all gradients in"
            assert self.ledger.pending[worker].version == self.ledger.version, f"a gradient of worker {worker} is kept that is too late"


class AveragedAtBarrier(Promises):
    """A barrier between local steps, at which those wait, too, whose parameters are of no use."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        fresh(effect)
        if self.rule.combine == "samples":
            by_samples(effect, pushes)
        else:
            assert all(isclose(part.weight, 1 / len(pushes)) for part in effect.parts)

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        waiting = self.ledger.waiting
        assert not waiting or len(waiting) < len(self.ledger.active), f"{list(waiting)} wait at an open barrier"


class BoundedRounds(Promises):
    """Gradients are as old as the rule allows, but for those of ranks that were idle."""

    def __init__(self, audit: Auditor) -> None:
        super().__init__(audit)
        self.idle: set[tuple[int, int]] = set()
        """Ranks that have ever been, by worker and incarnation."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        for part in effect.parts:
            bound, who = self.rule.staleness, (part.worker, part.incarnation)
            assert bound is None or part.staleness <= bound or who in self.idle, f"staler than {bound}: {effect}"

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        self.idle |= {(effect.worker, effect.incarnation) for effect in effects if isinstance(effect, Paused)}


OF_A_FAMILY: dict[type, type[Promises]] = {RoundRule: BoundedRounds}


def promises_of(audit: Auditor) -> Promises:
    """Return the checks for the rule of this audit, or for the nearest that it is derived from."""
    return promised(type(audit.policy))(audit)


def promised(rule: type[Policy]) -> type[Promises]:
    """Return the class of checks for a rule's class."""
    if rule not in _FOUND:
        _FOUND[rule] = _found(rule)
    return _FOUND[rule]


_FOUND: dict[Any, type[Promises]] = {}


def _found(rule: type[Policy]) -> type[Promises]:
    for base in rule.__mro__:
        package, _, module = base.__module__.rpartition(".")
        test = f"tests.policies.test_{module}"
        if package == "offbeat.policies" and find_spec(test) is not None and base in (own := getattr(import_module(test), "PROMISES", {})):
            own_of_rule: type[Promises] = own[base]
            return own_of_rule
    return next((OF_A_FAMILY[base] for base in rule.__mro__ if base in OF_A_FAMILY), Promises)
