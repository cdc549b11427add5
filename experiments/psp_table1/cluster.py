"""The paper's cluster as far as its running times need it: workers, shards and late messages on a virtual clock, around the rule itself.

Nothing here decides who folds or who goes on: that is `ShardedLedger` with the rule, and the rule's `blocks` for each worker, the
objects that a live job runs. What is modelled is time: how long an iteration takes, and which replies to pulls come late.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from offbeat.core.block_cache import Blocks
from offbeat.core.effects import Effect, Fold, Publish, Release
from offbeat.core.events import Pushed
from offbeat.core.server.per_shard_ledger import ShardedLedger
from offbeat.policies import PSP
from offbeat.types import Incarnation, WorkerId, worker_ids


class Setting(NamedTuple):
    """The paper's cluster and job; times in seconds."""

    workers: int = 32
    shards: int = 32
    samples: int = 160
    """Of one worker's batch."""
    iterations: int = 879
    """90 epochs of 50,000 samples, 5,120 at a time."""
    base_s: float = 8.97
    """What an iteration takes at least, everything that is not waiting included: calibrated, see README.md."""
    jitter_s: float = 0.3
    """The mean of what comes on top, exponentially distributed."""
    late: float = 0.0032
    """How probable it is that a shard's new block comes late to one worker: two replies, each late with 0.16 %."""
    late_s: float = 4.0


class Outcome(NamedTuple):
    """What came of a run."""

    seconds: float
    """Until every shard has made its last version."""
    gradients: float
    """The mean number of gradients in a fold."""
    wasted: float
    """The fraction of the iterations begun that came to nothing: their gradients were dropped, or they were broken off."""
    staleness: float
    """The mean, over blocks and gradients, of the versions between a gradient's block and the fold."""


_FIRST: Final = Incarnation(1)
"""The incarnation of every worker: none is ever restarted here."""


@dataclass(eq=False)
class _Worker:
    number: WorkerId
    blocks: Blocks
    runs: int = 0
    """Iterations begun; what belongs to an earlier one is void."""
    busy: bool = False


class Cluster:
    """Runs one setting of the rule."""

    def __init__(self, policy: PSP, setting: Setting, seed: int) -> None:
        self._setting = setting
        self._rng = np.random.default_rng(seed)
        self._ledger = ShardedLedger(policy, setting.shards)
        self._workers = [_Worker(number, policy.blocks(setting.shards)) for number in worker_ids(setting.workers)]
        self._heap: list[tuple[float, int, _Worker, int, int]] = []
        """(time, serial, worker, shard, version) for a block that is under way; shard -1: the end of that run."""
        self._serial = 0
        self._now = 0.0
        self._finished = 0
        self._folds = self._folded = self._stale = 0

    def run(self) -> Outcome:
        """From the first release until the last shard has made its last version."""
        for worker in self._workers:
            self._do(self._ledger.enter(worker.number, _FIRST, now=0.0))
        while self._finished < self._setting.shards:
            self._now, _, worker, shard, version = heapq.heappop(self._heap)
            if shard >= 0:
                self._receive(worker, shard, version)
            elif worker.busy and version == worker.runs:
                self._push(worker)
        over = sum(worker.runs - worker.busy for worker in self._workers) * self._setting.shards
        return Outcome(self._now, self._folded / self._folds, 1.0 - self._folded / over, self._stale / self._folded)

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                self._publish(effect)
            elif isinstance(effect, Fold):
                self._folds += 1
                self._folded += len(effect.parts)
                self._stale += sum(part.staleness for part in effect.parts)
            elif isinstance(effect, Release):
                worker = self._workers[effect.worker]
                for shard in range(self._setting.shards):
                    worker.blocks.received(shard, 0, self._now)
                worker.blocks.released()
                self._start_if_ready(worker)

    def _publish(self, effect: Publish) -> None:
        self._finished += effect.version == self._setting.iterations
        late = self._rng.random(len(effect.workers)) < self._setting.late
        for (number, _), delayed in zip(effect.workers, late.tolist(), strict=True):
            if delayed:
                self._at(self._setting.late_s, self._workers[number], effect.shard, effect.version)
            else:
                self._receive(self._workers[number], effect.shard, effect.version)

    def _receive(self, worker: _Worker, shard: int, version: int) -> None:
        worker.blocks.received(shard, version, self._now)
        if worker.busy and worker.blocks.overtaken:
            worker.busy = False
        self._start_if_ready(worker)

    def _start_if_ready(self, worker: _Worker) -> None:
        if worker.busy or not worker.blocks.ready(self._now):
            return
        worker.blocks.advance()
        worker.busy = True
        worker.runs += 1
        self._at(self._setting.base_s + self._setting.jitter_s * self._rng.standard_exponential(), worker, -1, worker.runs)

    def _push(self, worker: _Worker) -> None:
        setting, blocks = self._setting, worker.blocks
        t, used = blocks.t, blocks.used  # the first shards may answer, and the worker go on, before the last has the push
        worker.busy = False
        for shard in self._rng.permutation(setting.shards).tolist():
            push = Pushed(worker.number, _FIRST, t, setting.samples, setting.base_s, shard=shard, held=used)
            self._do(self._ledger.push(push, self._now))
        self._start_if_ready(worker)

    def _at(self, after_s: float, worker: _Worker, shard: int, version: int) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self._now + after_s, self._serial, worker, shard, version))
