"""An auditor beside the coordinator: books of its own, made from events and effects alone, and one named check per promise.

It looks into the coordinator only to see whether the job has begun, who is active and at which clock, which no effect says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from offbeat.policies import ASP, BSP, DSSP, SSP, Backup
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.effects import Effect, EpochEnded, Fold, Grant, NoMore, Paused, Release, Settle, StateChanged
from offbeat.protocol.events import EpochWanted, Event, LeaseWanted, Pushed
from offbeat.protocol.policy import Policy
from offbeat.types import Fate, LeaseId, WorkerState

Who = tuple[int, int]
"""A worker and its incarnation."""


class Auditor:
    """Sees every event with its effects; raises AssertionError at the first broken promise."""

    def __init__(self, job: Coordinator, policy: Policy) -> None:
        self._job = job
        self._ledger = job._ledger
        self._policy = policy
        self._alive: dict[int, int] = {}
        self._open: dict[Who, Pushed] = {}
        """Pushes without a fate."""
        self._ranges: dict[LeaseId, tuple[int, int, int]] = {}
        self._folded: dict[int, set[int]] = {}
        self._paused: dict[int, Paused] = {}
        """Who waits for the end of an epoch, and of which."""
        self._version = 0
        self._due: list[Who] = []
        """Whose contributions the last fold has named and whose fates are still to come."""
        self.fates: Counter[Fate] = Counter()
        self.pushes = 0
        self.reports: list[dict[str, Any]] = []

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        if isinstance(event, Pushed):
            self._push(event, effects)
        for effect in effects:
            if isinstance(effect, Release):
                self._release(effect)
            elif isinstance(effect, Settle):
                self._settle(effect)
            elif isinstance(effect, Fold):
                self._fold(effect)
            elif isinstance(effect, StateChanged):
                self._state(effect)
            elif isinstance(effect, Grant):
                self._grant(effect)
            elif isinstance(effect, Paused):
                self._pause(effect, event, effects)
            elif isinstance(effect, NoMore):
                assert effect.worker not in self._paused, f"told to go on without samples while it waits for some: {effect}"
            elif isinstance(effect, EpochEnded):
                self._resume(effect)
                self._report(effect)
        assert not self._due, f"folded without a fate: {self._due}"
        self._the_paused_are_idle()
        self._bounds()
        self._nobody_waits_in_vain()

    def closed(self) -> None:
        """Every push has had exactly one fate, and nobody waits for an epoch any more."""
        assert not self._paused, f"paused for ever: {self._paused}"
        assert not self._open, f"pushes without a fate: {self._open}"
        assert sum(self.fates.values()) == self.pushes

    # Contributions.

    def _push(self, event: Pushed, effects: Sequence[Effect]) -> None:
        """What a fenced incarnation pushes is rejected at once, and nothing else happens to it."""
        self.pushes += 1
        who = event.worker, event.incarnation
        if self._alive.get(event.worker) != event.incarnation:
            settled = [effect for effect in effects if isinstance(effect, Settle)]
            assert [(s.worker, s.incarnation, s.fate) for s in settled] == [(*who, Fate.REJECTED)], "a fenced push has an effect"
            assert not any(isinstance(effect, Fold | Release) for effect in effects), "a fenced push has an effect"
            self._fenced = who
            return
        assert who not in self._open, f"{who} pushes while its last push has no fate"
        self._paused.pop(event.worker, None)
        self._open[who] = event
        self._fenced = None

    _fenced: Who | None = None

    def _settle(self, effect: Settle) -> None:
        """A fate is for a push that has none yet."""
        who = effect.worker, effect.incarnation
        self.fates[effect.fate] += 1
        if who == self._fenced:
            self._fenced = None
            return
        push = self._open.pop(who, None)
        assert push is not None, f"a second fate, or a fate without a push: {effect}"
        if effect.fate is not Fate.FOLDED:
            assert who not in self._due
            return
        assert push.nonfinite is None, "a gradient that is not finite was folded"
        assert self._due and self._due.pop(0) == who, "folded, but part of no fold"
        assert effect.version == self._version
        for lease in push.leases:
            epoch, start, stop = self._ranges[lease]
            positions = set(range(start, stop))
            done = self._folded.setdefault(epoch, set())
            assert not done & positions, f"positions folded twice in epoch {epoch}: {sorted(done & positions)}"
            done |= positions

    def _fold(self, effect: Fold) -> None:
        """Versions rise by one, weights are shares of the samples and add up to 1, and the staleness is what it says."""
        self._version += 1
        assert effect.version == self._version and not self._due
        pushes = [self._open[part.worker, part.incarnation] for part in effect.parts]
        total = sum(push.samples for push in pushes)
        for part, push in zip(effect.parts, pushes, strict=True):
            assert abs(part.weight - push.samples / total) < 1e-12
            assert part.staleness == self._version - 1 - push.version
            assert part.staleness == 0 or not isinstance(self._policy, BSP | Backup), "stale in a rule without staleness"
        assert abs(sum(part.weight for part in effect.parts) - 1.0) < 1e-12
        self._due = [(part.worker, part.incarnation) for part in effect.parts]

    def _release(self, effect: Release) -> None:
        """Only an alive worker's newest incarnation is released, to the newest version, and not before its push has a fate."""
        who = effect.worker, effect.incarnation
        assert self._alive.get(effect.worker) == effect.incarnation, f"released, but not alive: {who}"
        assert who not in self._open, f"released before its contribution has a fate: {who}"
        assert effect.version == self._version
        assert effect.worker not in self._paused or effect.reason == "asked for", f"released while it is paused: {effect}"
        if isinstance(self._policy, SSP | DSSP) and not effect.reason.endswith(("is over", "asked for", "come back")):
            bound = self._policy.staleness if isinstance(self._policy, SSP) else self._policy.upper
            assert effect.clock - self._ledger.slowest <= bound, f"admitted too far ahead: {effect}"

    def _state(self, effect: StateChanged) -> None:
        self._paused.pop(effect.worker, None)
        if effect.state is WorkerState.ALIVE:
            assert effect.incarnation > self._alive.get(effect.worker, 0)
            self._alive[effect.worker] = effect.incarnation
        else:
            self._alive.pop(effect.worker, None)

    # Rules.

    def _bounds(self) -> None:
        """The completed iterations of the active workers differ by one more than the bound at most."""
        if isinstance(self._policy, SSP | DSSP) and self._ledger.active:
            bound = self._policy.staleness if isinstance(self._policy, SSP) else self._policy.upper
            clocks = [self._ledger.clock(worker) for worker in self._ledger.active]
            assert max(clocks) - min(clocks) <= bound + 1, f"clocks {clocks} are further apart than {bound} + 1"
            assert self._ledger.slowest == min(clocks) and self._ledger.fastest == max(clocks)

    def _nobody_waits_in_vain(self) -> None:
        """Whoever still waits after an event has a reason among the living: the dead are never waited for."""
        if not self._ledger.waiting:
            return
        active, pending = self._ledger.active, self._ledger.pending
        assert active >= set(self._ledger.waiting)  # type: ignore[operator]
        computing = len([worker for worker in active if worker not in pending])
        assert computing == self._ledger.missing
        slowest = min(self._ledger.clock(worker) for worker in active)
        for worker in self._ledger.waiting:
            match self._policy:
                case BSP():
                    assert worker in pending and computing, f"worker {worker} waits at an open barrier"
                case Backup(b=b):
                    assert worker in pending and computing > b, f"worker {worker} waits with enough gradients in"
                case SSP(staleness=bound) | DSSP(lower=bound):
                    assert self._ledger.clock(worker) - slowest > bound, f"worker {worker} waits inside the bound"
                case ASP():
                    raise AssertionError(f"worker {worker} waits")

    # Samples.

    def _grant(self, effect: Grant) -> None:
        assert self._alive.get(effect.worker) == effect.incarnation and effect.start < effect.stop
        paused = self._paused.pop(effect.worker, None)
        assert effect.refreshed == (paused is not None), "the newest parameters come with samples for the paused, and for nobody else"
        assert paused is None or (paused.pool, paused.epoch) == (effect.pool, effect.epoch), f"paused for another epoch: {paused}"
        self._ranges[effect.lease] = (effect.epoch, effect.start, effect.stop)

    def _pause(self, effect: Paused, event: Event | None, effects: Sequence[Effect]) -> None:
        """A worker pauses because of what it has asked for itself, once, with nothing pending, and says so before what follows from it."""
        who = effect.worker, effect.incarnation
        assert isinstance(event, LeaseWanted | EpochWanted) and (event.worker, event.incarnation) == who, f"nobody asked: {effect}"
        assert effects[0] is effect and effect.epoch <= event.epoch
        assert self._alive.get(effect.worker) == effect.incarnation and who not in self._open
        assert effect.worker not in self._paused, f"paused twice: {self._paused[effect.worker]}, {effect}"
        self._paused[effect.worker] = effect

    def _resume(self, effect: EpochEnded) -> None:
        """The end of an epoch is for all who have paused for it, and for nobody else."""
        waited = {worker for worker, paused in self._paused.items() if (paused.pool, paused.epoch) == (effect.pool, effect.epoch)}
        assert waited == set(effect.workers), f"paused for epoch {effect.epoch}: {waited}, told of its end: {effect.workers}"
        for worker in waited:
            del self._paused[worker]

    def _the_paused_are_idle(self) -> None:
        """The rule counts on whoever is alive and has not paused, and on nobody else."""
        if self._job.begun:
            assert set(self._ledger.active) == self._alive.keys() - self._paused.keys(), f"paused: {self._paused}"

    def _report(self, effect: EpochEnded) -> None:
        """The report adds up, and its exceptions are exactly the positions that were not folded."""
        report = effect.report
        self.reports.append(report)
        assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"], report
        folded = self._folded.get(effect.epoch, set())
        excepted = [position for e in report["exceptions"] for position in range(e["start"], e["stop"])]
        assert report["folded"] == len(folded)
        assert sorted([*folded, *excepted]) == list(range(report["indices"])), report
