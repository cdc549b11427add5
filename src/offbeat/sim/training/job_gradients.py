"""Compute real gradients under rules with servers and job scope: one shard has all parameters, and a fold sums whole gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.core.policy import ServerRule
from offbeat.sim.training.engine import Engine, Key, Schedule
from offbeat.sim.training.model import Model
from offbeat.sim.training.workload import Handed
from offbeat.tensors.absent import ABSENT
from offbeat.tensors.layout import Span, view
from offbeat.tensors.optimizers import spec_of
from offbeat.tensors.shard import Shard
from offbeat.types import Version


class JobGradients(Engine):
    """The engine of rules of job scope that fold gradients."""

    def __init__(self, model: Model, policy: ServerRule, schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, schedule, optimizer, uses_loss=policy.uses_loss)
        self._measures = policy.measures
        self._shard = Shard(model.layout, Span(0, model.layout.nbytes), spec_of(optimizer), self.memory)
        self._sum = torch.zeros_like(self.memory)
        self._places = [view(self._sum, tensor) for tensor in model.layout.tensors]
        self._ready: dict[Key, list[torch.Tensor | None]] = {}
        """Gradients computed at the push because the rule uses their loss."""
        self._version: Version = 0

    def loss(self, push: Handed) -> float | None:
        if push.version != self._version:
            return None  # no rule uses the loss of a gradient that is too late for the next fold
        gradient, loss = self._compute(push)
        self._ready[push.worker, push.incarnation, push.clock] = gradient
        return loss

    def settled(self, effect: Settle) -> None:
        self._ready.pop((effect.worker, effect.incarnation, effect.clock), None)
        super().settled(effect)

    def fold(self, effect: Fold) -> Folded:
        factor = self.factor(effect.version, self.pushes(effect)) * effect.scale
        for place in self._places:
            place.fill_(ABSENT)
        squares: dict[int, float] = {}
        order = sorted(range(len(effect.parts)), key=lambda i: effect.parts[i].staleness)  # load each version only once
        for i in order:
            part = effect.parts[i]
            key = part.worker, part.incarnation, part.clock
            gradient = self._ready.pop(key, None) or self._compute(self._handed[key])[0]
            squares[i] = self._add(gradient, part.weight)
        norms = self._shard.fold([(self._sum, 1.0)], scale=factor, measures=self._measures)
        self._version = effect.version
        lr = self._lrs[0] * factor
        if norms is None:
            return Folded(effect.version, (), 0.0, lr)
        return Folded(effect.version, tuple(squares[i] for i in range(len(effect.parts))), norms.total, lr, norms.difference)

    def _compute(self, push: Handed) -> tuple[list[torch.Tensor | None], float]:
        return self.gradient(push, self._snapshots[push.version])

    def _add(self, gradient: Sequence[torch.Tensor | None], weight: float) -> float:
        """Add a weighted gradient to the sum; return its squared norm, or 0 if the rule measures nothing."""
        square = 0.0
        for place, part in zip(self._places, gradient, strict=True):
            if part is not None:
                place.add_(part, alpha=weight)
                if self._measures != "nothing":
                    flat = part.reshape(-1)
                    square += float(torch.dot(flat, flat))
        return square
