"""Train for real under rules that average parameters: each worker makes local steps, with its own optimizer, from the version it had."""

from __future__ import annotations

from collections import defaultdict

import torch

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.core.policy import Averaging, ServerRule
from offbeat.sim.training.engine import Engine, Key, Schedule, State, average
from offbeat.sim.training.model import Model
from offbeat.sim.training.workload import Handed
from offbeat.tensors.averaging import AveragingShard
from offbeat.tensors.layout import Span
from offbeat.types import WorkerId


class LocalSteps(Engine):
    """The engine of rules that average parameters.

    The steps of a contribution are computed when it is folded. A dropped contribution does not change its worker's optimizer state: only
    pushes of a process that has died are dropped, and the restarted process begins with a new optimizer. ``Averaging.momentum``:
    ``reset`` discards the optimizer states of the workers folded, ``average`` replaces them by their mean.
    """

    def __init__(
        self, model: Model, policy: ServerRule, schedule: Schedule | None, optimizer: torch.optim.Optimizer, averaging: Averaging
    ) -> None:
        super().__init__(model, schedule, optimizer, uses_loss=policy.uses_loss)
        self._averaging = averaging
        self._shard = AveragingShard(model.layout, Span(0, model.layout.nbytes), self.memory, averaging)
        self._states: dict[WorkerId, State] = {}
        self._results: dict[Key, torch.Tensor] = {}
        """Parameters after the local steps, computed at the push because the rule uses the loss."""
        self._factor = 1.0

    def gone(self, worker: WorkerId) -> None:
        super().gone(worker)
        self._states.pop(worker, None)

    def loss(self, push: Handed) -> float | None:
        parameters, loss = self._run(push)
        self._results[push.worker, push.incarnation, push.clock] = parameters
        return loss

    def settled(self, effect: Settle) -> None:
        self._results.pop((effect.worker, effect.incarnation, effect.clock), None)
        super().settled(effect)

    def fold(self, effect: Fold) -> Folded:
        self._factor = self.factor(effect.version, self.pushes(effect)) * effect.scale
        parts = []
        for part in effect.parts:
            key = part.worker, part.incarnation, part.clock
            result = self._results.pop(key, None)
            parts.append((self._run(self._handed[key])[0] if result is None else result, part.weight))
        self._shard.fold(parts)
        self._exchange_states([part.worker for part in effect.parts])
        return Folded(effect.version, (), 0.0, self._lrs[0] * self._factor)

    def _run(self, push: Handed) -> tuple[torch.Tensor, float]:
        """Make a contribution's local steps; return the resulting parameters and the mean loss of the steps."""
        model, losses = self.model, []
        model.load(self._snapshots[push.version])
        self._optimizer.state = self._states.setdefault(push.worker, defaultdict(dict))
        self.set_rates(self._factor)
        for step in push.steps:
            gradients, loss = model.gradient(push.worker, step)
            self.step(gradients)
            losses.append(loss)
            self.computed += 1
        model.stale()
        return model.memory.clone(), sum(losses) / len(losses)

    def _exchange_states(self, workers: list[WorkerId]) -> None:
        momentum = self._averaging.momentum
        if momentum == "reset":
            for worker in workers:
                self._states.pop(worker, None)
        elif momentum == "average":
            average([self._states[worker] for worker in workers if worker in self._states])
