"""An auditor beside the coordinator: books of its own, made from events and effects alone, and one named check per promise.

It looks into the coordinator only to see whether the job has begun, who is active and at which clock, and who is kept outside, which no
effect says. What a rule promises beyond what all of them do is in `promises.py`,
and the books of samples are in `samples.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import isclose, isfinite
from typing import Any

from tests.core.promises import Promises, promises_of
from tests.core.samples import Samples
from tests.core.scripts import served

from offbeat.core.effects import (
    BARRIER,
    BarrierPassed,
    Effect,
    EpochEnded,
    Fold,
    Gather,
    Grant,
    Interrupt,
    NoMore,
    Paused,
    Release,
    Settle,
    StateChanged,
)
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Event, Folded, LeaseWanted, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Policy
from offbeat.types import Clock, Fate, WorkerState

Who = tuple[int, int]
"""A worker and its incarnation."""
Key = tuple[int, int, Clock]
"""A contribution: its worker, the incarnation, and the worker's clock after the push."""


class Auditor:
    """Sees every event with its effects; raises AssertionError at the first broken promise."""

    def __init__(self, job: Coordinator, policy: Policy) -> None:
        self.job = job
        self.ledger: Any = job.ledger
        self.policy = policy
        self._asked = served(policy)
        self.promises: Promises = promises_of(self)
        self.now = 0.0
        self.alive: dict[int, int] = {}
        self.open: dict[Key, Pushed] = {}
        """Contributions without a fate."""
        self.gathered: dict[Key, float] = {}
        """Those of them that have been gathered, with their factors."""
        self.unreported = 0
        """Folds of which the shards have not said yet what they measured."""
        self.version = 0
        self.fates: Counter[Fate] = Counter()
        self.pushes = 0
        self.samples = Samples(policy)
        self.rounds = policy.family == "allreduce"
        """Whether gradients may be late, and their worker goes on before they have a fate."""
        self._paused: dict[int, Paused] = {}
        """Who waits for the end of an epoch, and of which."""
        self.barriers = 0
        """Those that have been passed."""
        self._joined_since: set[int] = set()
        """Workers that have joined the running job and come to no barrier since: they may be past that at which others wait."""
        self._due: list[Key] = []
        """What the last fold has named and whose fates are still to come."""
        self._fenced: Who | None = None
        self._told: dict[int, int] = {}
        """Who has been told since its release that its work is of no more use."""

    def step(self, event: Event | None, effects: Sequence[Effect], now: float) -> None:
        self.now = now
        if isinstance(event, Pushed):
            self._push(event, effects)
        elif isinstance(event, Abandoned):
            self._abandon(event, effects)
        elif isinstance(event, Folded):
            self.unreported -= 1
        for effect in effects:
            check = self._checks.get(type(effect))
            if check is not None:
                check(self, effect)
            elif isinstance(effect, Paused):
                self._pause(effect, event, effects)
        assert not self._due, f"folded without a fate: {self._due}"
        self._the_paused_are_idle()
        self._nobody_waits_for_nobody()
        self.promises.step(event, effects)

    def closed(self) -> None:
        """Every push has had exactly one fate, and nobody waits for an epoch any more."""
        assert not self._paused, f"paused for ever: {self._paused}"
        assert not self.open and not self.gathered, f"pushes without a fate: {self.open}"
        assert sum(self.fates.values()) == self.pushes

    def waits_to_be_folded(self, worker: int) -> bool:
        """Whether the newest contribution of a worker is still in its own memory."""
        return any(key[:2] == (worker, self.alive.get(worker)) and key not in self.gathered for key in self.open)

    # Contributions.

    def _push(self, event: Pushed, effects: Sequence[Effect]) -> None:
        """What a fenced incarnation pushes is rejected at once, and nothing else happens to it."""
        self.pushes += 1
        self._fenced = None
        if self.alive.get(event.worker) != event.incarnation:
            self._fenced = event.worker, event.incarnation
            settled = [effect for effect in effects if isinstance(effect, Settle)]
            assert [(s.worker, s.incarnation, s.fate) for s in settled] == [(*self._fenced, Fate.REJECTED)], "a fenced push has an effect"
            assert not any(isinstance(effect, Fold | Gather | Release) for effect in effects), "a fenced push has an effect"
            return
        left = sum(key[0] == event.worker for key in self.open)
        assert left <= (1 if self.rounds else 0) or not self.waits_to_be_folded(event.worker), (
            f"{left} of worker {event.worker} have no fate"
        )
        self._paused.pop(event.worker, None)
        named = [one.clock for one in effects if isinstance(one, Settle | Gather) and one[:2] == (event.worker, event.incarnation)]
        if (pending := getattr(self.ledger, "pending", {}).get(event.worker)) is not None and pending.incarnation == event.incarnation:
            named.append(pending.clock)
        clock = max(named, default=self.ledger.clock(event.worker))  # the ledger's may have been raised, after a change of the rule
        self.open[event.worker, event.incarnation, clock] = event

    def _abandon(self, event: Abandoned, effects: Sequence[Effect]) -> None:
        """A worker that is listened to has been told to; one that is not gets no answer."""
        if self.alive.get(event.worker) == event.incarnation:
            assert event.worker in self._told, f"worker {event.worker} gives up what nobody has told it to give up"
            assert not self.waits_to_be_folded(event.worker)
        else:
            assert not any(isinstance(effect, Fold | Settle | Release) for effect in effects), "a fenced incarnation is listened to"

    def _gather(self, effect: Gather) -> None:
        """What is gathered has no fate, and is gathered once."""
        key = effect.worker, effect.incarnation, effect.clock
        assert key in self.open and key not in self.gathered, f"gathered twice, or without a push: {effect}"
        assert effect.weight > 0.0 and isfinite(effect.weight) and self.open[key].nonfinite is None
        self.gathered[key] = effect.weight

    def _settle(self, effect: Settle) -> None:
        """A fate is for a push that has none yet."""
        self.fates[effect.fate] += 1
        if (effect.worker, effect.incarnation) == self._fenced and effect.clock == 0:
            self._fenced = None
            return
        key = effect.worker, effect.incarnation, effect.clock
        push = self.open.pop(key, None)
        self.gathered.pop(key, None)
        assert push is not None, f"a second fate, or a fate without a push: {effect}"
        if effect.fate is not Fate.FOLDED:
            assert key not in self._due
            return
        assert push.nonfinite is None, "a gradient that is not finite was folded"
        assert key in self._due, "folded, but part of no fold"
        self._due.remove(key)
        assert effect.version == self.version
        self.samples.folded(push)

    def _fold(self, effect: Fold) -> None:
        """Versions rise by one, weights are positive and add up to 1, the staleness is what it says, and each part is one open push."""
        self.version += 1
        self.unreported += self._asked.measures != "nothing"
        assert effect.version == self.version and not self._due and effect.scale > 0.0 and isfinite(effect.scale)
        self._due = [(part.worker, part.incarnation, part.clock) for part in effect.parts]
        assert len(set(self._due)) == len(self._due) and (self._due or self.rounds)
        pushes = [self.open[key] for key in self._due]
        for part, push in zip(effect.parts, pushes, strict=True):
            assert part.staleness == self.version - 1 - push.version >= 0
            assert part.weight > 0.0
        if self.rounds:
            assert effect.divisor == max(1, len(self.alive))
            if not {part.weight for part in effect.parts} <= {1.0 / effect.divisor}:
                each = [part.weight / push.samples for part, push in zip(effect.parts, pushes, strict=True)]
                assert max(each) <= min(each) * (1 + 1e-9), "a sample weighs more than another"
                if sorted(part.worker for part in effect.parts) == sorted(self.alive):
                    assert isclose(sum(part.weight for part in effect.parts), 1.0, rel_tol=1e-9)
        else:
            assert isclose(sum(part.weight for part in effect.parts), 1.0, rel_tol=1e-9) and effect.divisor is None
        self._sums_are_used_up(effect)
        self.promises.fold(effect, pushes)

    def _sums_are_used_up(self, effect: Fold) -> None:
        """All that was gathered from a worker is one sum: a fold has all of it or nothing, in the proportions in which it was gathered."""
        factors: dict[int, list[float]] = defaultdict(list)
        for part, key in zip(effect.parts, self._due, strict=True):
            assert part.gathered == self.gathered.get(key, 0.0), f"gathered or not? {part}"
            if part.gathered:
                factors[part.worker].append(part.weight / part.gathered)
        for worker, of_worker in factors.items():
            assert len(of_worker) == len([key for key in self.gathered if key[0] == worker]), f"some of worker {worker}'s sum stays behind"
            assert isclose(min(of_worker), max(of_worker), rel_tol=1e-9), f"worker {worker}'s sum does not have these proportions"

    def _release(self, effect: Release) -> None:
        """Only an alive worker's newest incarnation is released, to the newest version, and not before its push has left its memory."""
        worker = effect.worker
        assert self.alive.get(worker) == effect.incarnation, f"released, but not alive: {effect}"
        late = self.rounds and worker not in self.ledger.waiting
        assert late or not self.waits_to_be_folded(worker), f"released before its contribution has a fate: {effect}"
        assert effect.version == self.version
        assert worker not in self._paused or effect.reason == "asked for", f"released while it is paused: {effect}"
        assert effect.plan.steps == 1 or self._asked.averaging is not None, f"local steps where gradients are exchanged: {effect}"
        assert effect.plan.steps >= 1 and (effect.plan.batch is None or effect.plan.batch >= 1)
        self._told.pop(worker, None)
        self.promises.release(effect)

    def _interrupt(self, effect: Interrupt) -> None:
        """Told once per release, because of a newer version, and only in rules whose workers stop for that."""
        assert self._asked.obsolete_work != "push_and_wait" and self.alive.get(effect.worker) == effect.incarnation
        assert effect.at_once == (self._asked.obsolete_work == "push_and_interrupt")
        assert effect.version == self.version and effect.worker not in self.ledger.waiting
        assert effect.worker not in self._told, f"told twice: {effect}"
        self._told[effect.worker] = effect.version

    def _state(self, effect: StateChanged) -> None:
        self._paused.pop(effect.worker, None)
        self._told.pop(effect.worker, None)
        if effect.state is WorkerState.ALIVE:
            assert effect.incarnation > self.alive.get(effect.worker, 0)
            self.alive[effect.worker] = effect.incarnation
            if self.job.start.begun and not self.job.start.first(effect.worker):
                self._joined_since.add(effect.worker)
        else:
            self.alive.pop(effect.worker, None)

    def _nobody_waits_for_nobody(self) -> None:
        """While workers wait, another one computes, or the rule is about to be asked again."""
        active, waiting = self.ledger.active, self.ledger.waiting
        assert active >= set(waiting)
        if self.rounds:
            assert self.ledger.unsettled == {key[0] for key in self.open}
            assert not waiting or len(waiting) < len(active), f"nobody computes, and {sorted(waiting)} wait"
            return
        assert self.ledger.missing == len([worker for worker in active if worker not in self.ledger.pending])
        assert self.ledger.pending.keys() | {c.worker for c in self.ledger.gathered} == {key[0] for key in self.open}
        if waiting and len(waiting) == len(active):
            assert self.unreported or self.soon(), f"nobody computes, and {sorted(waiting)} wait"

    def soon(self) -> bool:
        """Whether the rule wants to be asked again at this very instant."""
        wake = self.ledger.wake_at()
        return wake is not None and wake <= self.now

    # Samples.

    def _grant(self, effect: Grant) -> None:
        assert self.alive.get(effect.worker) == effect.incarnation
        paused = self._paused.pop(effect.worker, None)
        assert effect.refreshed == (paused is not None), "the newest parameters come with samples for the paused, and for nobody else"
        assert paused is None or (paused.pool, paused.epoch) == (effect.pool, effect.epoch), f"paused for another epoch: {paused}"
        self.samples.granted(effect)

    def _pause(self, effect: Paused, event: Event | None, effects: Sequence[Effect]) -> None:
        """A worker pauses because of what it has asked for itself, once, with nothing pending, and says so before what follows from it."""
        who = effect.worker, effect.incarnation
        wishes = BarrierWanted if effect.pool == BARRIER else LeaseWanted | EpochWanted
        assert isinstance(event, wishes) and (event.worker, event.incarnation) == who, f"nobody asked: {effect}"
        asked = event.number if isinstance(event, BarrierWanted) else event.epoch
        assert effects[0] is effect and (asked is None or effect.epoch <= asked)
        assert self.alive.get(effect.worker) == effect.incarnation and (self.rounds or not self.waits_to_be_folded(effect.worker))
        assert effect.worker not in self._paused, f"paused twice: {self._paused[effect.worker]}, {effect}"
        self._paused[effect.worker] = effect
        if effect.pool == BARRIER:
            self._joined_since.discard(effect.worker)
        self._told.pop(effect.worker, None)

    def _no_more(self, effect: NoMore) -> None:
        assert effect.worker not in self._paused, f"told to go on without samples while it waits for some: {effect}"

    def _end_of_epoch(self, effect: EpochEnded) -> None:
        """The end of an epoch is for all who have paused for it, and for nobody else; nobody is kept outside after it."""
        waited = {worker for worker, paused in self._paused.items() if (paused.pool, paused.epoch) == (effect.pool, effect.epoch)}
        assert waited == set(effect.workers), f"paused for epoch {effect.epoch}: {waited}, told of its end: {effect.workers}"
        for worker in waited:
            del self._paused[worker]
        assert not self.job.participants.outside, f"kept outside after the end of epoch {effect.epoch}: {self.job.participants.outside}"
        self.samples.report(effect)

    def _barrier(self, effect: BarrierPassed) -> None:
        """A barrier is for all who wait at it; whoever does not is dead, outside, late, or waits for what only these can do."""
        if effect.past:  # one that came late goes on alone
            assert effect.number < self.barriers
            assert not self._paused.keys() & set(effect.workers)
            return
        assert effect.number == self.barriers and not self.open, f"passed with contributions that have no fate: {self.open}"
        self.barriers += 1
        ahead = self.job.participants.outside.keys() | self._joined_since
        here = {worker for worker, paused in self._paused.items() if paused.pool == BARRIER}
        assert here == set(effect.workers) and {self._paused[worker].epoch for worker in here} == {effect.number}
        assert self.alive.keys() - ahead <= self._paused.keys(), "passed without a worker that may come"
        for worker in here:
            del self._paused[worker]

    def _the_paused_are_idle(self) -> None:
        """The rule counts on whoever is alive, inside, and has not paused, and on nobody else."""
        outside = self.job.participants.outside.keys()
        if self.job.start.begun:
            assert set(self.ledger.active) == self.alive.keys() - self._paused.keys() - outside, f"paused: {self._paused}"
        assert not outside or (self.policy.entry == "next_epoch" and self.alive.keys() > outside), f"kept outside of nothing: {outside}"

    _checks: dict[type, Any] = {  # noqa: RUF012 - a table of the methods above
        Release: _release,
        Settle: _settle,
        Fold: _fold,
        Gather: _gather,
        Interrupt: _interrupt,
        StateChanged: _state,
        Grant: _grant,
        NoMore: _no_more,
        EpochEnded: _end_of_epoch,
        BarrierPassed: _barrier,
    }
