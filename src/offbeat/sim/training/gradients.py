"""Real training under virtual time: the gradients of a real model, computed only for contributions that are folded.

`Training` is what a simulation is given as its content. The rule decides how it trains: here for the rules that exchange gradients, in
``local_steps.py`` for those that exchange parameters, in ``shard_gradients.py`` for those of shard scope, in ``replicas.py`` and
``gossip_replicas.py`` for those without servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.training.engine import Engine, Key, Schedule
from offbeat.sim.training.gossip_replicas import GossipReplicas
from offbeat.sim.training.local_steps import LocalSteps
from offbeat.sim.training.model import Loss, Model
from offbeat.sim.training.replicas import DriftingReplicas, Replicas
from offbeat.sim.training.shard_gradients import ShardGradients
from offbeat.sim.training.workload import Exchanged, Handed, Workload
from offbeat.tensors.layout import Span, view
from offbeat.tensors.optimizers import spec_of
from offbeat.tensors.shard import Shard
from offbeat.types import Seconds, Version, WorkerId


class Training(Workload):
    """A model, its data and its optimizer, for one simulated run.

    Folds and steps are those of a live job's shards, with the class of the given optimizer. A contribution's gradient is computed when it
    is folded, from the parameters of the version that its worker had; dropped ones cost nothing. What `Work.batch` or the rule's
    plan says is the size of a batch. Gradients are not looked through for infinity and NaN.

    Args:
        model: trained in place; it ends with the newest parameters.
        loss: takes output and targets, returns the mean over the batch.
        data: inputs and targets, tensors with a row for each sample. Where `Work.samples` deals them out it must be their number.
        optimizer: over the model's parameters.
        schedule: the factor of the learning rates at a fold, given the version that it makes and how often the data set has been gone
            through by then.
        evaluate: given the model with the newest parameters, in evaluation mode and without gradients, returns numbers for the journal
            and the result's curve.
        every: evaluate each so many versions, and the first.
        until: given these numbers, whether the run has come to its end.

    Raises:
        ConfigurationError: model, data and optimizer do not belong together.

    >>> from offbeat.sim.cluster import Cluster, Work
    >>> from offbeat.sim.run import simulate
    >>> model = nn.Linear(1, 1)
    >>> x = torch.linspace(-1.0, 1.0, 64).unsqueeze(1)
    >>> training = Training(model, nn.functional.mse_loss, (x, 3 * x + 1), torch.optim.SGD(model.parameters(), lr=0.05))
    >>> result = simulate("ssp(staleness=3)", Cluster(workers=4), Work(versions=200, batch=16), content=training)
    >>> round(model.weight.item(), 2), round(model.bias.item(), 2)
    (3.0, 1.0)
    """

    empty = False

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        data: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None = None,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        every: int = 1,
        until: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> None:
        whole_number("training", "every", every, least=1)
        self.model = Model(model, loss, data, optimizer)
        self._optimizer = optimizer
        self._schedule = schedule
        self._evaluate, self._every, self._until = evaluate, every, until
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """What trains; there is one once a run has begun."""
        assert self._engine is not None
        return self._engine

    def start(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        if self._engine is not None:
            raise ConfigurationError("this training has been run already: make a new one, with a new model, for each run")
        self.model.start(seed)
        if policy.averaging is not None:
            self._engine = LocalSteps(self.model, policy, self._schedule, self._optimizer, policy.averaging)
        elif isinstance(policy, GossipRule):
            self._engine = GossipReplicas(self.model, policy, self._schedule, self._optimizer)
        elif isinstance(policy, RoundRule):
            kind = Replicas if policy.delivery == "replay" else DriftingReplicas
            self._engine = kind(self.model, policy, self._schedule, self._optimizer)
        elif policy.scope == "shard":
            self._engine = ShardGradients(self.model, policy, self._schedule, self._optimizer, servers)
        else:
            self._engine = JobGradients(self.model, policy, self._schedule, self._optimizer)

    def released(self, worker: WorkerId, version: Version) -> None:
        self.engine.released(worker, version)

    def published(self, shard: int, version: Version, workers: tuple[WorkerId, ...]) -> None:
        self.engine.published(shard, version, workers)

    def gone(self, worker: WorkerId) -> None:
        self.engine.gone(worker)

    def handed_in(self, push: Handed) -> float | None:
        return self.engine.handed_in(push)

    def exchanged(self, effect: Exchanged) -> None:
        self.engine.exchanged(effect)

    def fold(self, effect: Fold) -> Folded:
        return self.engine.fold(effect)

    def settled(self, effect: Settle) -> None:
        self.engine.settled(effect)

    def evaluate(self, version: Version, now: Seconds) -> Mapping[str, float] | None:
        if self._evaluate is None or (version > 1 and version % self._every):
            return None
        self.finish()
        module = self.model.module
        module.eval()
        with torch.no_grad():
            return self._evaluate(module)

    def reached(self, values: Mapping[str, float]) -> bool:
        return self._until is not None and self._until(values)

    def finish(self) -> None:
        # The model gets the newest parameters.
        self.model.memory.copy_(self.engine.newest())
        self.model.stale()


class JobGradients(Engine):
    """Gradients of rules of job scope."""

    def __init__(self, model: Model, policy: Policy, schedule: Schedule | None, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, policy, schedule, model.memory.clone())
        spec = spec_of(optimizer)
        self._lr = float(spec.groups[0]["lr"])
        self._shard = Shard(model.layout, Span(0, model.layout.nbytes), spec, self.memory)
        self._sum = torch.zeros_like(self.memory)
        self._places = [view(self._sum, tensor) for tensor in model.layout.tensors]
        self._ready: dict[Key, list[torch.Tensor | None]] = {}
        """Gradients that were computed because the rule wanted their loss."""
        self._version: Version = 0

    def loss(self, push: Handed) -> float | None:
        if push.version != self._version:
            return None  # no rule looks at the loss of what comes too late for the next fold
        gradient, loss = self._compute(push)
        self._ready[push.worker, push.incarnation, push.clock] = gradient
        return loss

    def settled(self, effect: Settle) -> None:
        self._ready.pop((effect.worker, effect.incarnation, effect.clock), None)
        super().settled(effect)

    def fold(self, effect: Fold) -> Folded:
        factor = self.factor(effect.version, self.pushes(effect)) * effect.scale
        self._sum.zero_()
        squares: dict[int, float] = {}
        order = sorted(range(len(effect.parts)), key=lambda i: effect.parts[i].staleness)  # so that each version is loaded once
        for i in order:
            part = effect.parts[i]
            key = part.worker, part.incarnation, part.clock
            gradient = self._ready.pop(key, None) or self._compute(self._handed[key])[0]
            squares[i] = self._add(gradient, part.weight)
        norms = self._shard.fold([(self._sum, 1.0)], scale=factor, measures=self.policy.measures)
        self._version = effect.version
        lr = self._lr * factor
        if norms is None:
            return Folded(effect.version, (), 0.0, lr)
        return Folded(effect.version, tuple(squares[i] for i in range(len(effect.parts))), norms.total, lr, norms.difference)

    def _compute(self, push: Handed) -> tuple[list[torch.Tensor | None], float]:
        assert len(push.steps) == 1, "a gradient is of one iteration"
        self.model.load(self._snapshots[push.version])
        self.computed += 1
        return self.model.gradient(push.worker, push.steps[0])

    def _add(self, gradient: Sequence[torch.Tensor | None], weight: float) -> float:
        """Into the sum; the gradient's squared norm, if it is asked for."""
        square = 0.0
        for place, part in zip(self._places, gradient, strict=True):
            if part is not None:
                place.add_(part, alpha=weight)
                if self.policy.measures != "nothing":
                    flat = part.reshape(-1)
                    square += float(torch.dot(flat, flat))
        return square
