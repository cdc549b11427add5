"""Train for real under virtual time in the gossip family: each rank has a replica and an optimizer state, and replicas are mixed.

A rank's gradient is computed when it is folded, at the model that the rank had when it began to compute; the optimizer's step at that
model is added to the rank's parameters. The job's model, which is evaluated and returned, is the mean of the living ranks' models.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from offbeat.core.effects import Adopt, Fold, Mix, Pair, Settle, Share, Source, WrittenOff
from offbeat.core.events import Folded
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.sim.training.engine import Engine, Key, Schedule, State, copied
from offbeat.sim.training.model import Model
from offbeat.sim.training.workload import Exchanged, Handed
from offbeat.tensors.layout import DTYPES, Layout, elements
from offbeat.types import Clock, Version, WorkerId


class Vector:
    """Parameters with vector arithmetic: bytes in the order of a layout, and a view of them for each element type."""

    def __init__(self, layout: Layout, memory: torch.Tensor) -> None:
        self.layout, self.memory = layout, memory
        bounds: dict[str, tuple[int, int]] = {}
        for spec in layout.tensors:
            start, stop = bounds.get(spec.dtype, (spec.offset, spec.stop))
            bounds[spec.dtype] = min(start, spec.offset), max(stop, spec.stop)
        self.parts = [elements(memory, a, (b - a) // DTYPES[name].itemsize, DTYPES[name]) for name, (a, b) in bounds.items()]

    def copy(self) -> Vector:
        return Vector(self.layout, self.memory.clone())

    def scale(self, factor: float) -> None:
        if factor != 1.0:
            for part in self.parts:
                part.mul_(factor)

    def add(self, other: Vector, weight: float = 1.0) -> None:
        for part, more in zip(self.parts, other.parts, strict=True):
            part.add_(more, alpha=weight)


class _Shared(NamedTuple):
    parameters: Vector
    left: list[int]
    """With exchange "push": how many receivers have not mixed these parameters in yet. A list, so that it can be changed."""


class GossipReplicas(Engine):
    """Replicas of rules of the gossip family."""

    def __init__(self, model: Model, policy: GossipRule, schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, schedule, optimizer)
        self._exchange = policy.exchange
        self._initial = Vector(model.layout, model.memory.clone())
        self.replicas: dict[WorkerId, Vector] = {}
        self.masses: dict[WorkerId, float] = {}
        self._states: dict[WorkerId, State] = {}
        self._shared: dict[tuple[WorkerId, Clock], _Shared] = {}
        self._begun: dict[WorkerId, Vector] = {}
        """The model with which each rank computes its next gradient."""
        self._results: dict[Key, tuple[Handed, Vector]] = {}
        """Contributions without a fate, each with the model that it is computed from."""
        self._gone: list[Vector] = []
        """Models of ranks that have left since the last fold; if no rank remains, the run's model is their mean."""

    def released(self, worker: WorkerId, version: Version) -> None:
        self._begun[worker] = self.model_of(worker)

    def model_of(self, worker: WorkerId) -> Vector:
        """Return a copy of a rank's model, its parameters divided by its mass."""
        model = self.replicas[worker].copy()
        model.scale(1.0 / self.masses[worker])
        return model

    def gone(self, worker: WorkerId) -> None:
        if worker in self.replicas:
            self._gone.append(self.model_of(worker))
        for per_rank in (self.replicas, self.masses, self._states, self._begun):
            per_rank.pop(worker, None)

    def handed_in(self, push: Handed) -> float | None:
        if push.worker in self._begun:
            self._results[push.worker, push.incarnation, push.clock] = push, self._begun[push.worker]
        return None

    def settled(self, effect: Settle) -> None:
        self._results.pop((effect.worker, effect.incarnation, effect.clock), None)

    def fold(self, effect: Fold) -> Folded:
        (part,) = effect.parts
        push, begun = self._results[part.worker, part.incarnation, part.clock]
        factor = self.factor(effect.version, [push]) * effect.scale
        self._gone.clear()
        gradients, _ = self.gradient(push, begun.memory)
        self._optimizer.state = self._states.setdefault(push.worker, defaultdict(dict))
        self.set_rates(factor)
        self.step(gradients)
        self.model.stale()
        replica = self.replicas[push.worker]
        replica.add(Vector(self.model.layout, self.model.memory))
        replica.add(begun, -1.0)
        return Folded(effect.version, (), 0.0, self._lrs[0] * factor)

    # Exchanges.

    def exchanged(self, effect: Exchanged) -> None:
        """Carry out an effect of the ledger on the replicas."""
        if isinstance(effect, Adopt):
            self._adopt(effect)
        elif isinstance(effect, Share):
            self._share(effect)
        elif isinstance(effect, Mix):
            replica = self.replicas[effect.worker]
            replica.scale(effect.own)
            for source in effect.sources:
                replica.add(self._take(source), source.weight)
            self.masses[effect.worker] = effect.mass
        elif isinstance(effect, Pair):
            one, other = self.replicas[effect.worker], self.replicas[effect.partner]
            one.add(other)
            one.scale(0.5)
            other.memory.copy_(one.memory)
        elif isinstance(effect, WrittenOff):
            for source in effect.sources:
                self._take(source)

    def _adopt(self, effect: Adopt) -> None:
        worker, source = effect.worker, effect.source
        for key in [key for key in self._shared if key[0] == worker and self._exchange == "average"]:
            del self._shared[key]
        self.replicas[worker] = self._initial.copy() if source is None else self.model_of(source)
        self.masses[worker] = 1.0
        if source in self._states:
            self._states[worker] = copied(self._states[source])

    def _share(self, effect: Share) -> None:
        self._shared[effect.worker, effect.clock] = _Shared(self.replicas[effect.worker].copy(), [len(effect.to)])
        if self._exchange == "average":
            self._shared.pop((effect.worker, effect.clock - 2), None)

    def _take(self, source: Source) -> Vector:
        key = source.worker, source.clock
        shared = self._shared[key]
        if self._exchange == "push":
            shared.left[0] -= 1
            if not shared.left[0]:
                del self._shared[key]
        return shared.parameters

    def newest(self) -> torch.Tensor:
        models = [self.model_of(worker) for worker in self.replicas] or self._gone
        if models:
            mean = models[0].copy()
            for model in models[1:]:
                mean.add(model)
            mean.scale(1.0 / len(models))
            self.memory.copy_(mean.memory)
        return self.memory
