"""Base class of real training under virtual time: a contribution is kept until its fate is known, and its gradient is computed only if it
is folded, from the parameters that its worker had."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from typing import Any, TypeAlias

import torch

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.sim.training.model import Model, Snapshots
from offbeat.sim.training.workload import Exchanged, Handed
from offbeat.types import Clock, Incarnation, Version, WorkerId

Key: TypeAlias = tuple[WorkerId, Incarnation, Clock]
State: TypeAlias = defaultdict[torch.Tensor, Any]
"""The state of one worker's optimizer, by parameter."""
Schedule: TypeAlias = Callable[[Version, float], float]
"""Returns the factor of the learning rates, given the version being made and the number of passes over the data set so far."""


class Engine(ABC):
    """Contributions of rules of job scope.

    Args:
        model: computes the gradients.
        schedule: None: the learning rates are constant.
        optimizer: gives the class and the settings of all optimizers of the run.
        uses_loss: whether the rule uses the losses of contributions.
    """

    def __init__(self, model: Model, schedule: Schedule | None, optimizer: torch.optim.Optimizer, *, uses_loss: bool = False) -> None:
        self.model = model
        self.memory = model.memory.clone()
        """The newest parameters, bytes in the order of the layout."""
        self.computed = 0
        """The number of gradients computed."""
        self._schedule, self._optimizer = schedule, optimizer
        self._lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._uses_loss = uses_loss
        self._snapshots: Snapshots[Version] = Snapshots(self.memory)
        self._held: dict[WorkerId, Version] = {}
        self._handed: dict[Key, Handed] = {}
        self._samples = 0.0

    def released(self, worker: WorkerId, version: Version) -> None:
        self._snapshots.hold(version)
        self._drop(worker)
        self._held[worker] = version

    def published(self, shard: int, version: Version, workers: tuple[WorkerId, ...]) -> None:  # noqa: B027 - only under rules of shard scope
        """Note that a server sends these workers its present block."""

    def gone(self, worker: WorkerId) -> None:
        self._drop(worker)

    def _drop(self, worker: WorkerId) -> None:
        if worker in self._held:
            self._snapshots.drop(self._held.pop(worker))

    def handed_in(self, push: Handed) -> float | None:
        if push.worker not in self._held:
            return None  # the coordinator takes the worker for dead and will reject the push; its version's parameters may be gone
        self._handed[push.worker, push.incarnation, push.clock] = push
        self._snapshots.hold(push.version)
        return self.loss(push) if self._uses_loss else None

    def loss(self, push: Handed) -> float | None:
        """Return the loss of a contribution that has just been handed in; None if no rule will use it."""
        return None

    def settled(self, effect: Settle) -> None:
        push = self._handed.pop((effect.worker, effect.incarnation, effect.clock), None)
        if push is not None:
            self._snapshots.drop(push.version)

    def exchanged(self, effect: Exchanged) -> None:
        """Fail: only engines of the gossip family exchange parameters."""
        raise AssertionError(f"only the gossip family exchanges parameters like this: {effect}")

    def newest(self) -> torch.Tensor:
        """Return the newest parameters, bytes in the order of the layout."""
        return self.memory

    @abstractmethod
    def fold(self, effect: Fold) -> Folded:
        """Compute the gradients that are folded, and write the new version to `memory`."""

    def pushes(self, effect: Fold) -> list[Handed]:
        """Return the contributions of a fold, in the order of its parts."""
        return [self._handed[part.worker, part.incarnation, part.clock] for part in effect.parts]

    def gradient(self, push: Handed, parameters: torch.Tensor) -> tuple[list[torch.Tensor | None], float]:
        """Compute a contribution of one iteration from these parameters; return its gradient and its loss."""
        assert len(push.steps) == 1, f"a gradient covers one iteration, not {len(push.steps)}"
        self.model.load(parameters)
        self.computed += 1
        return self.model.gradient(push.worker, push.steps[0])

    def set_rates(self, factor: float) -> None:
        """Set the learning rates of the optimizer to the script's times a factor."""
        for group, lr in zip(self._optimizer.param_groups, self._lrs, strict=True):
            group["lr"] = lr * factor

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Make a step of the optimizer, with its present state and rates, from the parameters that the model has."""
        for parameter, gradient in zip(self.model.parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()

    def factor(self, version: Version, pushes: Iterable[Handed], share: float = 1.0) -> float:
        """Return the schedule's factor of the learning rates for this fold, and count its samples, or a shard's ``share`` of them."""
        epochs = self._samples / self.model.size
        self._samples += share * sum(step.samples for push in pushes for step in push.steps)
        return 1.0 if self._schedule is None else self._schedule(version, epochs)


def copied(state: State) -> State:
    """Return a copy of an optimizer's state for another worker."""
    return defaultdict(dict, {parameter: deepcopy(values) for parameter, values in state.items()})


def average(states: Sequence[State]) -> None:
    """Replace every floating point tensor of the states, in place, by its mean over the workers that have one."""
    for parameter in {parameter for state in states for parameter in state}:
        values = [state[parameter] for state in states if parameter in state]
        for name in values[0]:
            tensors = [value[name] for value in values if isinstance(value.get(name), torch.Tensor)]
            if tensors and tensors[0].is_floating_point():
                mean = torch.stack(tensors).mean(dim=0)
                for tensor in tensors:
                    tensor.copy_(mean)
