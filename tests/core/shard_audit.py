"""An auditor for rules of shard scope: books of its own, made from events and effects alone, and one named check per promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from experiments.psp_table1.listing import Listing

from offbeat.core.effects import Effect, EpochEnded, Fold, Publish, Release, Settle, StateChanged
from offbeat.core.events import Event, Pushed
from offbeat.core.policy import ServerRule
from offbeat.policies import PSP, Decoupled
from offbeat.types import Fate, WorkerState

Gradient = tuple[int, int, int]
"""A worker, its incarnation, and its clock after the push."""


@dataclass
class _Sent:
    t: int
    held: tuple[int, ...]


class ShardAuditor:
    """Sees every event with its effects; raises AssertionError at the first broken promise."""

    def __init__(self, policy: ServerRule, shards: int) -> None:
        self._policy = policy
        self._printed = isinstance(policy, Listing)
        """The listing as printed breaks some promises."""
        self._need, self._max_skew, self._scaling = 0, None, None
        if isinstance(policy, PSP):
            self._need, self._max_skew, self._scaling = ceil(policy.b * shards - 1e-9), policy.max_skew, policy.scaling
        self._versions = [0] * shards
        self._alive: dict[int, int] = {}
        self._clock: dict[tuple[int, int], int] = {}
        """Of a worker's incarnation: what its last release said, and one more for each push since."""
        self._sent: dict[Gradient, _Sent] = {}
        self._begun: dict[tuple[int, int], int] = {}
        self._arrived: Counter[tuple[int, int, int]] = Counter()
        """Pushes without a fate, by worker, incarnation and shard."""
        self._due: list[tuple[Gradient, int]] = []
        self.fates: Counter[Fate] = Counter()
        self.arrivals = 0
        self.folds: list[Fold] = []
        self.reports: list[dict[str, Any]] = []

    # What workers do.

    def begins(self, worker: int, incarnation: int, t: int, used: tuple[int, ...]) -> None:
        """Enough blocks of the iteration or later are in use, none is too far behind, and iterations do not go backwards."""
        if self._printed:
            return
        assert sum(version >= t for version in used) >= self._need, f"iteration {t} begun with {used}"
        assert self._max_skew is None or min(used) >= t - self._max_skew
        assert t >= self._begun.get((worker, incarnation), 0)
        self._begun[worker, incarnation] = t

    def pushes(self, worker: int, incarnation: int, t: int, used: tuple[int, ...]) -> None:
        self._clock[worker, incarnation] += 1
        self._sent[worker, incarnation, self._clock[worker, incarnation]] = _Sent(t, used)

    def releases(self, effect: Release, versions: list[int]) -> None:
        who = effect.worker, effect.incarnation
        assert self._alive.get(effect.worker) == effect.incarnation and effect.version == min(versions) == min(self._versions)
        self._clock[who] = max(effect.clock, self._clock.get(who, 0))

    # What the job does.

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        if isinstance(event, Pushed):
            assert event.shard is not None
            self.arrivals += 1
            self._arrived[event.worker, event.incarnation, event.shard] += 1
        for effect in effects:
            if isinstance(effect, Settle):
                self._settle(effect)
            elif isinstance(effect, Fold):
                self._fold(effect)
            elif isinstance(effect, Publish):
                self._publish(effect)
            elif isinstance(effect, StateChanged):
                self._state(effect)
            elif isinstance(effect, EpochEnded):
                report = effect.report
                self.reports.append(report)
                assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"], report
        assert not self._due, f"folded without a fate: {self._due}"

    def closed(self) -> None:
        """Every push has had exactly one fate at every shard that has heard of it."""
        assert not +self._arrived, f"pushes without a fate: {+self._arrived}"
        assert sum(self.fates.values()) == self.arrivals

    def _settle(self, effect: Settle) -> None:
        assert effect.shard is not None
        place = effect.worker, effect.incarnation, effect.shard
        assert self._arrived[place] > 0, f"a second fate, or a fate without a push: {effect}"
        self._arrived[place] -= 1
        self.fates[effect.fate] += 1
        gradient = effect.worker, effect.incarnation, effect.clock
        assert effect.clock == 0 or gradient in self._sent, f"nobody has sent this: {effect}"
        if effect.fate is Fate.FOLDED:
            assert (gradient, effect.shard) in self._due, "folded, but part of no fold"
            self._due.remove((gradient, effect.shard))
            assert effect.version == self._versions[effect.shard]

    def _fold(self, effect: Fold) -> None:
        """Versions of a shard rise by one; nothing is late; a worker counts once; the staleness is that of this shard's block."""
        shard = effect.shard
        assert shard is not None and not self._due
        before = self._versions[shard]
        assert effect.version == before + 1
        self._versions[shard] += 1
        self.folds.append(effect)
        assert abs(sum(part.weight for part in effect.parts) - 1.0) < 1e-9
        assert self._scaling is None or effect.scale == (len(effect.parts) if self._scaling == "linear" else 1.0)
        workers = [part.worker for part in effect.parts]
        assert self._printed or len(workers) == len(set(workers)), f"a worker counts twice: {effect}"
        for part in effect.parts:
            sent = self._sent[part.worker, part.incarnation, part.clock]
            assert sent.t >= before or isinstance(self._policy, Decoupled), f"of iteration {sent.t}, folded at {before}"
            assert part.staleness == before - sent.held[shard] >= 0
            assert self._max_skew is None or part.staleness <= before - sent.t + self._max_skew
        self._due = [((part.worker, part.incarnation, part.clock), shard) for part in effect.parts]

    def _publish(self, effect: Publish) -> None:
        """The newest version, to the living."""
        assert effect.version == self._versions[effect.shard]
        for worker, incarnation in effect.workers:
            assert self._alive.get(worker) == incarnation, f"published to the dead: {worker}"

    def _state(self, effect: StateChanged) -> None:
        if effect.state is WorkerState.ALIVE:
            self._alive[effect.worker] = effect.incarnation
        else:
            self._alive.pop(effect.worker, None)
