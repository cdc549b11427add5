"""Train a real model under virtual time: gradients are computed only for contributions that are folded.

`Training` is passed to a simulation as its content. The rule decides which engine trains: see ``engines.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.core.policy import Policy
from offbeat.core.settings import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.training.engine import Engine, Schedule
from offbeat.sim.training.engines import engine_of
from offbeat.sim.training.model import Loss, Model
from offbeat.sim.training.workload import Exchanged, Handed, Workload
from offbeat.types import Seconds, Version, WorkerId


class Training(Workload):
    """A model, its data and its optimizer, for one simulated run.

    Folds and optimizer steps are those of a live job's shards. A contribution's gradient is computed when it is folded, from the
    parameters of the version that its worker had; dropped contributions cost nothing. `Work.batch` or the rule's plan sets the batch
    size. Gradients are not checked for infinity and NaN.

    Args:
        model: trained in place; it ends with the newest parameters.
        loss: takes output and targets, returns the mean over the batch.
        data: inputs and targets, tensors with a row for each sample. `Work.samples`, if given, must be the number of rows.
        optimizer: over the model's parameters.
        schedule: returns the factor of the learning rates at a fold, given the version that it makes and the number of passes over the
            data set so far.
        evaluate: takes the model with the newest parameters, in evaluation mode and without gradients, and returns numbers for the
            journal and the result's curve.
        every: evaluate the first version and each version that is a multiple of this.
        until: takes these numbers and returns whether the run is to end.

    Raises:
        ConfigurationError: model, data and optimizer do not fit together.

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
        """The engine that the rule has chosen; set when the run starts."""
        assert self._engine is not None
        return self._engine

    def start(self, policy: Policy, workers: int, servers: int, seed: int) -> None:
        if self._engine is not None:
            raise ConfigurationError("this Training has been run already; make a new one, with a new model, for each run")
        self.model.start(seed)
        self._engine = engine_of(policy, self.model, self._schedule, self._optimizer, servers)

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
        # Also after the run: the caller's model must end with the newest parameters.
        self.model.memory.copy_(self.engine.newest())
        self.model.stale()
