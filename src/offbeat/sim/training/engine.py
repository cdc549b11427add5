"""What all kinds of real training under virtual time have in common: contributions are remembered until their fate is known, and computed
only once they are folded, from the parameters that their worker had."""

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
"""The factor of the learning rates, given the version that is being made and how often the data set has been gone through."""


class Engine(Workload):
    """Contributions of rules of job scope.

    Args:
        model: computes.
        schedule: None: the learning rates stay as they are.
        memory: the newest parameters, bytes in the order of the layout.
        uses_loss: whether the rule of the run looks at the losses of contributions.
    """

    empty = False

    def __init__(self, model: Model, schedule: Schedule | None, memory: torch.Tensor, *, uses_loss: bool = False) -> None:
        self.model, self.memory = model, memory
        self.computed = 0
        """Iterations for which a gradient has been computed."""
        self._schedule = schedule
        self._uses_loss = uses_loss
        self._snapshots: Snapshots[Version] = Snapshots(memory)
        self._held: dict[WorkerId, Version] = {}
        self._handed: dict[Key, Handed] = {}
        self._samples = 0.0

    def released(self, worker: WorkerId, version: Version) -> None:
        self._snapshots.hold(version)
        self._let_go(worker)
        self._held[worker] = version

    def gone(self, worker: WorkerId) -> None:
        self._let_go(worker)

    def _let_go(self, worker: WorkerId) -> None:
        if worker in self._held:
            self._snapshots.drop(self._held.pop(worker))

    def handed_in(self, push: Handed) -> float | None:
        if push.worker not in self._held:
            return None  # it is thought dead: what it hands in will be rejected, and its version may be gone
        self._handed[push.worker, push.incarnation, push.clock] = push
        self._snapshots.hold(push.version)
        return self.loss(push) if self._uses_loss else None

    def loss(self, push: Handed) -> float | None:
        """The loss of a contribution that has just been handed in, for a rule that looks at it; None: nobody will."""
        return None

    def settled(self, effect: Settle) -> None:
        push = self._handed.pop((effect.worker, effect.incarnation, effect.clock), None)
        if push is not None:
            self._snapshots.drop(push.version)

    def exchanged(self, effect: Exchanged) -> None:
        """Ranks of the gossip family mix their parameters."""
        raise AssertionError(f"only the gossip family exchanges parameters like this: {effect}")

    def newest(self) -> torch.Tensor:
        """The newest parameters, bytes in the order of the layout."""
        return self.memory

    @abstractmethod
    def fold(self, effect: Fold) -> Folded:
        """Compute what is folded, and make the new version in `memory`."""

    def pushes(self, effect: Fold) -> list[Handed]:
        """The contributions of a fold, in the order of its parts."""
        return [self._handed[part.worker, part.incarnation, part.clock] for part in effect.parts]

    def factor(self, version: Version, pushes: Iterable[Handed], share: float = 1.0) -> float:
        """The schedule's factor of the learning rates at the fold of these; it counts their samples, or a shard's ``share`` of them."""
        epochs = self._samples / self.model.size
        self._samples += share * sum(step.samples for push in pushes for step in push.steps)
        return 1.0 if self._schedule is None else self._schedule(version, epochs)
