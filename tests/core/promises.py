"""What each rule promises beyond what all of them do, checked at every step of a schedule. `PROMISES` says whose are whose.

A rule that is not in it, nor derived from one that is, keeps the promises of all rules.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import isclose
from typing import TYPE_CHECKING, Any

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Effect, Fold, Gather, Paused, Release, StateChanged
from offbeat.core.events import Event, Pushed
from offbeat.policies import ASP, BSP, DSSP, SSP, Backup, ElasticBSP, Quorum, Rennala, Ringmaster, Solo
from offbeat.policies.fresh import FirstFresh
from offbeat.policies.rounds import AveragedRounds
from offbeat.policies.superstep import Superstep

if TYPE_CHECKING:
    from tests.core.audit import Auditor


class Promises:
    """What any rule promises: nothing more."""

    drops = False
    """Whether it drops gradients of living workers."""

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


class Barrier(Promises):
    """Fold when everybody who computes has pushed."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        fresh(effect)
        by_samples(effect, pushes)

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        for worker in self.ledger.waiting:
            assert worker in self.ledger.pending and self.computing(), f"worker {worker} waits at an open barrier"


class Asynchronous(Promises):
    """Each push is folded by itself, and nobody waits."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        assert len(effect.parts) == 1

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        assert not self.ledger.waiting, f"worker {min(self.ledger.waiting)} waits"


class Capped(Asynchronous):
    """The same, and nothing that is folded is as stale as the threshold."""

    drops = True

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        super().fold(effect, pushes)
        assert effect.parts[0].staleness < self.rule.threshold


class Batched(Promises):
    """Fresh gradients, as many as the rule says unless nobody computes, and nobody waits."""

    drops = True

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        fresh(effect)
        short = effect.reason.endswith("nobody computes")
        assert len(effect.parts) < self.rule.batch if short else len(effect.parts) == self.rule.batch

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        assert not self.ledger.waiting, f"worker {min(self.ledger.waiting)} waits"
        assert len(self.ledger.gathered) < self.rule.batch


class Bounded(Asynchronous):
    """The completed iterations of the active workers differ by one more than the bound at most; nobody waits inside the lower bound."""

    def release(self, effect: Release) -> None:
        if not effect.reason.endswith(("is over", "asked for", "come back")):
            assert effect.clock - self.ledger.slowest <= self._bounds()[1], f"admitted too far ahead: {effect}"

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        lower, upper = self._bounds()
        clocks = [self.ledger.clock(worker) for worker in self.ledger.active]
        if clocks:
            assert max(clocks) - min(clocks) <= upper + 1, f"clocks {clocks} are further apart than {upper} + 1"
            assert self.ledger.slowest == min(clocks) and self.ledger.fastest == max(clocks)
        for worker in self.ledger.waiting:
            assert self.lead(worker) > lower, f"worker {worker} waits inside the bound"

    def _bounds(self) -> tuple[int, int]:
        if isinstance(self.rule, SSP):
            return self.rule.staleness, self.rule.staleness
        assert isinstance(self.rule, DSSP)
        return self.rule.lower, self.rule.upper


class FreshOnly(Promises):
    """Nobody waits while all have pushed and the shards have said what they have measured."""

    drops = True

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        fresh(effect)
        by_samples(effect, pushes)

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        for worker in self.ledger.waiting:
            assert worker in self.ledger.pending, f"worker {worker} waits though the newest version is out"
            assert self.computing() or self.audit.unreported, f"worker {worker} waits with all gradients in"
            assert self.ledger.pending[worker].version == self.ledger.version, f"a gradient of worker {worker} is kept that is too late"


class Spared(FreshOnly):
    """Nobody waits once n - b fresh gradients are in."""

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        super().step(event, effects)
        assert not self.ledger.waiting or self.computing() > self.rule.b, f"{list(self.ledger.waiting)} wait with enough gradients in"


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


class Elastic(Promises):
    """Supersteps: everybody leaves a barrier with one version, nobody gets too far ahead, and what is gathered is folded at the barrier."""

    def __init__(self, audit: Auditor) -> None:
        super().__init__(audit)
        self.made: Counter[int] = Counter()
        """Pushes since the barrier of those who were there, by an account of our own."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        mode = self.rule.mode
        if mode == "async":
            assert len(effect.parts) == 1
            return
        fresh(effect)
        assert len(effect.parts) == len(self.audit.open), "something is left for another superstep"
        size: Counter[int] = Counter()
        share: dict[int, float] = defaultdict(float)
        counted = all(push.samples for push in pushes)
        for part, push in zip(effect.parts, pushes, strict=True):
            size[part.worker] += push.steps if mode == "local" else push.samples if counted else 1
            share[part.worker] += part.weight
        for worker in size:
            expected = 1 / len(size) if self.rule.weighting == "workers" else size[worker] / sum(size.values())
            assert isclose(share[worker], expected), f"worker {worker}'s share is {share[worker]}, not {expected}"

    def release(self, effect: Release) -> None:
        assert 1 <= effect.plan.steps <= self.rule.R

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        if self.rule.mode != "async" and any(isinstance(effect, Fold) for effect in effects):
            released = {effect.worker for effect in effects if isinstance(effect, Release)}
            assert released >= set(self.ledger.active), "a fold while somebody computes"
        if self.rule.mode == "local":
            for worker in self.ledger.waiting:
                assert worker in self.ledger.pending and self.computing(), f"worker {worker} waits at an open barrier"
            return
        assert not self.ledger.pending, "a push is folded or gathered as it arrives"
        if self.audit.gathered and len(self.ledger.waiting) == len(self.ledger.active):
            assert self.audit.soon(), "nobody computes, and gradients stay gathered"
        self._nobody_is_far_ahead(effects)
        self._the_barrier_is_one(effects)
        self._the_held_have_come_to_their_limit()

    def _the_barrier_is_one(self, effects: Sequence[Effect]) -> None:
        """Who leaves a barrier leaves it with everybody else, and with the same version."""
        leaving = [e for e in effects if isinstance(e, Release) and e.reason == "the barrier is open"]
        if leaving:
            assert len({e.version for e in leaving}) == 1 and not self.ledger.waiting, "some stay at the barrier"
            self.made = Counter(dict.fromkeys(self.ledger.active, 0))

    def _nobody_is_far_ahead(self, effects: Sequence[Effect]) -> None:
        for worker in self.made.keys() - set(self.ledger.active):
            del self.made[worker]
        for effect in effects:
            if isinstance(effect, StateChanged):
                self.made.pop(effect.worker, None)
            elif isinstance(effect, Gather):
                self._made(effect.worker)
            elif isinstance(effect, Fold) and self.rule.mode == "async":
                self._made(effect.parts[0].worker)
        if self.made:
            assert max(self.made.values()) - min(self.made.values()) <= 2 * self.rule.R, f"iterations are far apart: {self.made}"

    def _made(self, worker: int) -> None:
        if worker in self.made:
            self.made[worker] += 1

    def _the_held_have_come_to_their_limit(self) -> None:
        """By the rule's own counts, newcomers included, and our own search for the least of them, which the rule avoids for speed."""
        superstep: Superstep = self.ledger._policy.superstep
        paces = {worker: superstep._paces[worker] for worker in self.ledger.active if worker in superstep._paces}
        least = min((pace.count for pace in paces.values()), default=0)
        assert all(pace.count - least <= 2 * self.rule.R for pace in paces.values()), f"iterations are far apart: {paces}"
        for worker in self.ledger.waiting:
            pace = paces[worker]
            held = pace.count >= pace.limit if superstep._planned else pace.count - least >= self.rule.R
            assert held or self.audit.soon(), f"worker {worker} waits, and could go on: {pace}"


class Partial(Promises):
    """Gradients are as old as the rule allows, but for those of who was idle; and who has arrived on time waits for somebody."""

    def __init__(self, audit: Auditor) -> None:
        super().__init__(audit)
        self.idle: set[tuple[int, int]] = set()
        """Who has ever been, by worker and incarnation."""

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        for part in effect.parts:
            bound, who = self.rule.staleness, (part.worker, part.incarnation)
            assert bound is None or part.staleness <= bound or who in self.idle, f"staler than {bound}: {effect}"

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        self.idle |= {(effect.worker, effect.incarnation) for effect in effects if isinstance(effect, Paused)}
        waiting, active = len(self.ledger.waiting), len(self.ledger.active)
        if isinstance(self.rule, Solo):
            assert not waiting or self.rule.staleness is not None, "somebody waits"
        elif isinstance(self.rule, Quorum) and self.rule.staleness is None:
            assert waiting < min(self.rule.q, active) or not waiting, f"{waiting} wait"


PROMISES: dict[type, type[Promises]] = {
    BSP: Barrier,
    ASP: Asynchronous,
    SSP: Bounded,
    DSSP: Bounded,
    Backup: Spared,
    Ringmaster: Capped,
    Rennala: Batched,
    FirstFresh: FreshOnly,
    ElasticBSP: Elastic,
    AveragedRounds: AveragedAtBarrier,
    RoundRule: Partial,
}


def promises_of(audit: Auditor) -> Promises:
    """The checks for the rule of this audit, or for the nearest that it is derived from."""
    kind = next((PROMISES[base] for base in type(audit.policy).__mro__ if base in PROMISES), Promises)
    return kind(audit)
