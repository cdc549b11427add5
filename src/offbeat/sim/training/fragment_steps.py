"""Train for real under rules that average fragments: each worker has parameters of its own, steps them, and mixes in what comes."""

from __future__ import annotations

from collections import defaultdict

import torch

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.core.fragments import Fragments
from offbeat.core.policy import ServerRule
from offbeat.sim.training.engine import Engine, Key, Schedule, State
from offbeat.sim.training.model import Model, Snapshots
from offbeat.sim.training.workload import Handed, Load
from offbeat.tensors.averaging import AveragingShard, mix
from offbeat.tensors.layout import Span
from offbeat.tensors.optimizers import spec_of
from offbeat.types import Version, WorkerId


class FragmentSteps(Engine):
    """The engine of rules of shard scope that average parameters.

    The steps of a push are computed when it is handed in, since those of the next one begin where they end.

    Args:
        shards: the number of fragments.
    """

    def __init__(self, model: Model, policy: ServerRule, schedule: Schedule | None, optimizer: torch.optim.Optimizer, shards: int) -> None:
        super().__init__(model, schedule, optimizer, uses_loss=policy.uses_loss)
        averaging, fragments = policy.averaging, policy.blocks(shards)
        assert averaging is not None and isinstance(fragments, Fragments), f"{policy.spelling} does not average fragments"
        self._alpha = fragments.alpha
        self._spans = [Span(*span) for span in model.layout.spans(shards, spec_of(optimizer).elementwise)]
        self._memories = [self.memory[start:stop] for start, stop in self._spans]
        self._shards = [AveragingShard(model.layout, span, own, averaging) for span, own in zip(self._spans, self._memories, strict=True)]
        self._blocks: list[Snapshots[Version]] = [Snapshots(own) for own in self._memories]
        self._versions = [0] * shards
        self._sent: dict[WorkerId, list[tuple[int, Version]]] = {}
        """For each worker: the blocks, shard and version, that it may still take."""
        self._used: dict[WorkerId, tuple[Version, ...]] = {}
        """The version of each fragment that each worker has taken last."""
        self._own: dict[WorkerId, torch.Tensor] = {}
        """The parameters of each worker."""
        self._states: dict[WorkerId, State] = {}
        self._pushed: dict[Key, torch.Tensor] = {}
        """The fragment in each push without a fate."""
        self._factor = 1.0

    def released(self, worker: WorkerId, version: Version) -> None:
        for shard, newest in enumerate(self._versions):
            self.published(shard, newest, (worker,))

    def published(self, shard: int, version: Version, workers: tuple[WorkerId, ...]) -> None:
        for worker in workers:
            self._sent.setdefault(worker, []).append((shard, version))
            self._blocks[shard].hold(version)

    def gone(self, worker: WorkerId) -> None:
        for shard, version in self._sent.pop(worker, []):
            self._blocks[shard].drop(version)
        self._own.pop(worker, None)
        self._used.pop(worker, None)
        self._states.pop(worker, None)

    def handed_in(self, push: Handed) -> float | None:
        worker = push.worker
        if worker not in self._sent:
            return None  # the coordinator takes the worker for dead and will reject the push
        assert push.shard is not None
        model, losses = self.model, []
        model.stale()
        model.memory.copy_(self._own.setdefault(worker, torch.zeros_like(self.memory)))
        self._optimizer.state = self._states.setdefault(worker, defaultdict(dict))
        self.set_rates(self._factor)
        loads = list(push.loads)
        for done, step in enumerate(push.steps):
            while loads and loads[0].steps <= done:
                self._load(worker, loads.pop(0))
            gradients, loss = model.gradient(worker, step)
            self.step(gradients)
            losses.append(loss)
            self.computed += 1
        for load in loads:
            self._load(worker, load)
        self._own[worker].copy_(model.memory)
        start, stop = self._spans[push.shard]
        self._handed[key := (worker, push.incarnation, push.clock)] = push
        self._pushed[key] = model.memory[start:stop].clone()
        old = [(shard, version) for shard, version in self._sent[worker] if version < push.held[shard]]
        for shard, version in old:
            self._sent[worker].remove((shard, version))
            self._blocks[shard].drop(version)
        return sum(losses) / len(losses) if self._uses_loss and losses else None

    def settled(self, effect: Settle) -> None:
        key = effect.worker, effect.incarnation, effect.clock
        self._handed.pop(key, None)
        self._pushed.pop(key, None)

    def fold(self, effect: Fold) -> Folded:
        shard = effect.shard
        assert shard is not None
        self._factor = self.factor(effect.version, self.pushes(effect)) * effect.scale
        parts = [(self._pushed[part.worker, part.incarnation, part.clock], part.weight) for part in effect.parts]
        if self._spans[shard].nbytes:
            self._shards[shard].fold(parts)
        self._versions[shard] = effect.version
        return Folded(effect.version, (), 0.0, self._lrs[0] * self._factor)

    def _load(self, worker: WorkerId, load: Load) -> None:
        """Let the worker, whose parameters the model has, take what has come."""
        before, self._used[worker] = self._used.get(worker), load.versions
        for shard, (span, version) in enumerate(zip(self._spans, load.versions, strict=True)):
            if load.whole or before is None or version > before[shard]:
                own = self.model.memory[span.start : span.stop]
                mix(self.model.layout, span, own, self._blocks[shard][version], 0.0 if load.whole else self._alpha)
