"""Train for real under rules of shard scope: a gradient is computed from blocks of different versions, and each shard folds its part."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.core.policy import ServerRule
from offbeat.sim.training.engine import Engine, Key, Schedule
from offbeat.sim.training.model import Model, Snapshots
from offbeat.sim.training.workload import Handed
from offbeat.tensors.absent import ABSENT
from offbeat.tensors.layout import Span, view
from offbeat.tensors.optimizers import spec_of
from offbeat.tensors.shard import Shard
from offbeat.types import Version, WorkerId


@dataclass(slots=True)
class _Open:
    """A contribution that some shard has not settled yet."""

    push: Handed
    shards: int
    """The number of shards that have not settled it."""
    gradient: torch.Tensor | None = None
    """The whole gradient, computed when the first shard folds its part."""


class ShardGradients(Engine):
    """The engine of rules of shard scope.

    Args:
        shards: the number of shards into which the parameters are divided.
    """

    def __init__(self, model: Model, policy: ServerRule, schedule: Schedule | None, optimizer: torch.optim.Optimizer, shards: int) -> None:
        super().__init__(model, schedule, optimizer, uses_loss=policy.uses_loss)
        spec = spec_of(optimizer)
        self._spans = model.layout.spans(shards, spec.elementwise)
        memories = [self.memory[start:stop] for start, stop in self._spans]
        self._shards = [Shard(model.layout, Span(*span), spec, own) for span, own in zip(self._spans, memories, strict=True)]
        self._blocks: list[Snapshots[Version]] = [Snapshots(own) for own in memories]
        self._versions = [0] * shards
        self._sent: dict[WorkerId, list[deque[Version]]] = {}
        """For each worker and shard: the versions of the blocks that the worker holds or that are in transit to it, oldest first."""
        self._open: dict[Key, _Open] = {}
        self._parameters = torch.empty_like(self.memory)

    def released(self, worker: WorkerId, version: Version) -> None:
        for shard, newest in enumerate(self._versions):
            self.published(shard, newest, (worker,))

    def published(self, shard: int, version: Version, workers: tuple[WorkerId, ...]) -> None:
        for worker in workers:
            sent = self._sent.setdefault(worker, [deque() for _ in self._shards])[shard]
            if not sent or sent[-1] != version:
                sent.append(version)
                self._blocks[shard].hold(version)

    def gone(self, worker: WorkerId) -> None:
        for shard, sent in enumerate(self._sent.pop(worker, [])):
            for version in sent:
                self._blocks[shard].drop(version)

    def handed_in(self, push: Handed) -> float | None:
        if push.worker not in self._sent:
            return None
        self._open[push.worker, push.incarnation, push.clock] = _Open(push, len(self._shards))
        for shard, version in enumerate(push.held):
            self._blocks[shard].hold(version)
            sent = self._sent[push.worker][shard]
            while sent[0] < version:
                self._blocks[shard].drop(sent.popleft())
        return None

    def settled(self, effect: Settle) -> None:
        key = effect.worker, effect.incarnation, effect.clock
        entry = self._open.get(key)
        if entry is None or effect.shard is None:
            return
        entry.shards -= 1
        if not entry.shards:
            self._drop_blocks(entry)
            del self._open[key]

    def fold(self, effect: Fold) -> Folded:
        shard = effect.shard
        assert shard is not None
        entries = [self._open[part.worker, part.incarnation, part.clock] for part in effect.parts]
        factor = self.factor(effect.version, [entry.push for entry in entries], share=1.0 / len(self._shards)) * effect.scale
        start, stop = self._spans[shard]
        parts = [(self._gradient(entry)[start:stop], part.weight) for entry, part in zip(entries, effect.parts, strict=True)]
        if start < stop:
            self._shards[shard].fold(parts, scale=factor)
        self._versions[shard] = effect.version
        return Folded(effect.version, (), 0.0, 0.0)

    def _drop_blocks(self, entry: _Open) -> None:
        """Drop the blocks held for computing this gradient, unless it has been computed and they are dropped already."""
        if entry.gradient is None:
            for blocks, version in zip(self._blocks, entry.push.held, strict=True):
                blocks.drop(version)

    def _gradient(self, entry: _Open) -> torch.Tensor:
        if entry.gradient is None:
            model = self.model
            for (start, stop), blocks, version in zip(self._spans, self._blocks, entry.push.held, strict=True):
                self._parameters[start:stop] = blocks[version]
            model.stale()
            gradients, _ = self.gradient(entry.push, self._parameters)
            self._drop_blocks(entry)
            entry.gradient = torch.zeros_like(self.memory)
            for tensor, gradient in zip(model.layout.tensors, gradients, strict=True):
                place = view(entry.gradient, tensor)
                place.fill_(ABSENT) if gradient is None else place.copy_(gradient)
        return entry.gradient
