"""Train for real under virtual time in the allreduce family: sum a round's gradients, and step with the ranks' own optimizers.

With ``delivery=replay`` every rank applies every result, so that replicas at the same version are equal: one set of parameters and one
optimizer serve all. With ``latest`` each rank has its own. A gradient is computed when it is folded, from the parameters that its rank had
when it began to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.sim.training.engine import Engine, Key, Schedule, State, average, copied
from offbeat.sim.training.gossip_replicas import Vector
from offbeat.sim.training.model import Model
from offbeat.sim.training.workload import Handed
from offbeat.tensors.absent import ABSENT, is_absent
from offbeat.tensors.layout import view
from offbeat.tensors.optimizers import weighted_decay
from offbeat.types import Version, WorkerId


class Replicas(Engine):
    """The engine of rules with ``delivery=replay``: replicas stay equal.

    A late gradient is scaled down to the norm ``carry_clip``, taken over all parameters together, before it is added.
    """

    def __init__(self, model: Model, policy: RoundRule, schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, schedule, optimizer)
        self._clip = policy.carry_clip
        self._sum = torch.zeros_like(self.memory)
        self._weight = 0.0
        """The sum of the weights of the gradients in `_sum`."""
        self._places = [view(self._sum, tensor) for tensor in model.layout.tensors]

    def fold(self, effect: Fold) -> Folded:
        factor = self.factor(effect.version, self.pushes(effect)) * effect.scale
        self.set_rates(factor)
        self._add_up(effect)
        self._apply(effect)
        return Folded(effect.version, (), 0.0, self._lrs[0] * factor)

    def _apply(self, effect: Fold) -> None:
        """Every rank steps with the sum."""
        self.memory.copy_(self._stepped(self.memory, self._sum, self._weight))

    def _parameters_of(self, push: Handed) -> torch.Tensor:
        """Return the parameters that a contribution is computed from."""
        return self._snapshots[push.version]

    def _add_up(self, effect: Fold) -> None:
        for place in self._places:
            place.fill_(ABSENT)
        self._weight = 0.0
        for part in sorted(effect.parts, key=lambda part: part.staleness):  # load each version only once
            push = self._handed[part.worker, part.incarnation, part.clock]
            gradient, _ = self.gradient(push, self._parameters_of(push))
            weight = part.weight
            if part.staleness and self._clip is not None:
                weight *= min(1.0, self._clip / max(_norm(gradient), 1e-30))
            self._weight += weight
            for place, piece in zip(self._places, gradient, strict=True):
                if piece is not None:
                    place.add_(piece, alpha=weight)

    def _stepped(self, parameters: torch.Tensor, total: torch.Tensor, weight: float) -> torch.Tensor:
        """Make a step of the optimizer, with its present state, from these parameters, with a sum of gradients and the sum of their
        weights. Returns the model's memory, which the next call overwrites."""
        model = self.model
        model.stale()
        model.memory.copy_(parameters)
        with weighted_decay(self._optimizer, weight):
            gradients = (view(total, tensor) for tensor in model.layout.tensors)
            self.step([None if is_absent(gradient) else gradient for gradient in gradients])
        for parameter in model.parameters:
            parameter.grad = None
        return model.memory


class DriftingReplicas(Replicas):
    """The engine of rules with ``delivery=latest``: a rank applies only the newest of the results that it missed, so that replicas differ.

    After each ``model_sync_every`` rounds, once every rank has applied that round's result, the replicas and the floating point tensors of
    the optimizer states are set to their means. The gradient of a rank that computes meanwhile is that of its earlier parameters. A joiner
    copies the living rank with the lowest number. The model that is evaluated and returned is the mean of the replicas.
    """

    def __init__(self, model: Model, policy: RoundRule, schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, policy, schedule, optimizer)
        self._every = policy.model_sync_every
        self.replicas: dict[WorkerId, torch.Tensor] = {}
        """The parameters of each rank. Never changed in place: computations may still need a rank's earlier parameters."""
        self._applied: dict[WorkerId, Version] = {}
        """The version whose result each rank applied last."""
        self._states: dict[WorkerId, State] = {}
        self._begun: dict[WorkerId, torch.Tensor] = {}
        """The parameters with which each rank computes its next gradient."""
        self._from: dict[Key, torch.Tensor] = {}
        """The parameters from which each contribution without a fate is computed."""
        self._newest = (0, torch.zeros_like(self.memory), 0.0)
        """The newest version, the sum that made it, and the sum of its weights."""
        self._last = self.memory.clone()
        """The parameters of the last rank that left while no other was there."""

    def released(self, worker: WorkerId, version: Version) -> None:
        if worker not in self.replicas:
            self._adopt(worker)
        self._catch_up(worker)
        self._begun[worker] = self.replicas[worker]

    def gone(self, worker: WorkerId) -> None:
        if self.replicas.keys() == {worker}:
            self._last = self.replicas[worker]
        for per_rank in (self.replicas, self._applied, self._states, self._begun):
            per_rank.pop(worker, None)

    def handed_in(self, push: Handed) -> float | None:
        if push.worker in self._begun:
            key = push.worker, push.incarnation, push.clock
            self._handed[key], self._from[key] = push, self._begun[push.worker]
        return None

    def settled(self, effect: Settle) -> None:
        key = effect.worker, effect.incarnation, effect.clock
        self._handed.pop(key, None)
        self._from.pop(key, None)

    def newest(self) -> torch.Tensor:
        self.memory.copy_(_mean(self.model, [*self.replicas.values()] or [self._last]))
        return self.memory

    def _parameters_of(self, push: Handed) -> torch.Tensor:
        return self._from[push.worker, push.incarnation, push.clock]

    def _apply(self, effect: Fold) -> None:
        """Apply the sum to the replicas of the ranks that wait for it; the others apply it when they are released."""
        self._newest = effect.version, self._sum.clone(), self._weight
        sync = self._every is not None and effect.version % self._every == 0
        for worker in list(self.replicas) if sync else [part.worker for part in effect.parts if not part.staleness]:
            if worker in self.replicas:
                self._catch_up(worker)
        if sync and self.replicas:
            mean = _mean(self.model, list(self.replicas.values()))
            self.replicas = dict.fromkeys(self.replicas, mean)
            average(list(self._states.values()))

    def _catch_up(self, worker: WorkerId) -> None:
        version, total, weight = self._newest
        if self._applied[worker] < version:
            self._applied[worker] = version
            self._optimizer.state = self._states[worker]
            self.replicas[worker] = self._stepped(self.replicas[worker], total, weight).clone()

    def _adopt(self, worker: WorkerId) -> None:
        source = min(self.replicas, default=None)
        self.replicas[worker] = self._last if source is None else self.replicas[source]
        self._applied[worker] = self._newest[0] if source is None else self._applied[source]
        self._states[worker] = defaultdict(dict) if source is None else copied(self._states[source])


def _norm(gradient: Sequence[torch.Tensor | None]) -> float:
    squares = [float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2 for piece in gradient if piece is not None]
    return float(sum(squares) ** 0.5)


def _mean(model: Model, replicas: Sequence[torch.Tensor]) -> torch.Tensor:
    mean = Vector(model.layout, torch.zeros_like(replicas[0]))
    for replica in replicas:
        mean.add(Vector(model.layout, replica), 1.0 / len(replicas))
    return mean.memory
