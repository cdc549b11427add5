"""Base class of real training under virtual time: a contribution is kept until its fate is known, and its gradient is computed only if it
is folded, from the parameters that its worker had."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from offbeat.core.effects import Fold, Settle
from offbeat.core.events import Folded
from offbeat.sim.training.model import Model, Snapshots
from offbeat.sim.training.workload import Exchanged, Handed, Workload
from offbeat.types import Clock, Incarnation, Version, WorkerId

Key: TypeAlias = tuple[WorkerId, Incarnation, Clock]
Schedule: TypeAlias = Callable[[Version, float], float]
"""Returns the factor of the learning rates, given the version being made and the number of passes over the data set so far."""


class Engine(Workload):
    """Contributions of rules of job scope.

    Args:
        model: computes the gradients.
        schedule: None: the learning rates are constant.
        memory: the newest parameters, bytes in the order of the layout.
        uses_loss: whether the rule uses the losses of contributions.
    """

    empty = False

    def __init__(self, model: Model, schedule: Schedule | None, memory: torch.Tensor, *, uses_loss: bool = False) -> None:
        self.model, self.memory = model, memory
        self.computed = 0
        """The number of gradients computed."""
        self._schedule = schedule
        self._uses_loss = uses_loss
        self._snapshots: Snapshots[Version] = Snapshots(memory)
        self._held: dict[WorkerId, Version] = {}
        self._handed: dict[Key, Handed] = {}
        self._samples = 0.0

    def released(self, worker: WorkerId, version: Version) -> None:
        self._snapshots.hold(version)
        self._drop(worker)
        self._held[worker] = version

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

    def factor(self, version: Version, pushes: Iterable[Handed], share: float = 1.0) -> float:
        """Return the schedule's factor of the learning rates for this fold, and count its samples, or a shard's ``share`` of them."""
        epochs = self._samples / self.model.size
        self._samples += share * sum(step.samples for push in pushes for step in push.steps)
        return 1.0 if self._schedule is None else self._schedule(version, epochs)
