"""One model that computes for all simulated workers, each with the parameters of its version, and the versions that are still needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import nn

from offbeat.errors import ConfigurationError
from offbeat.sim.latency.registry import derived
from offbeat.sim.training.batches import Batches
from offbeat.sim.training.workload import Step
from offbeat.tensors.layout import Layout, view
from offbeat.types import WorkerId

K = TypeVar("K")

Loss: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the model's output and the targets of a batch; returns the mean over the batch."""


class Model:
    """One model, computing for all workers in turn.

    Its parameters become views of one flat memory, into which the parameters of any version are copied. All workers share one set of
    buffers, such as BatchNorm's running statistics, which each computation updates. Dropout is seeded by (worker, iteration).

    Args:
        module: its parameters keep their values but move to the flat memory.
        loss: see `Loss`.
        data: tensors with a row for each sample: the module's inputs, and last the targets.
        optimizer: holds the parameters to train.

    Raises:
        ConfigurationError: the tensors have different numbers of rows, or the optimizer's parameters cannot be laid out.
    """

    def __init__(self, module: nn.Module, loss: Loss, data: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
        rows = [len(tensor) for tensor in data]
        if len(rows) < 2 or len(set(rows)) > 1 or not rows[0]:
            raise ConfigurationError(f"data with {rows} rows: pass inputs and targets, tensors with a row for each sample")
        self.module, self.size = module, rows[0]
        self.layout = Layout.of(module, optimizer)
        self.memory = torch.zeros(self.layout.nbytes, dtype=torch.uint8)
        self._loss, self._data = loss, tuple(data)
        self._loaded: torch.Tensor | None = None
        self._seed = 0
        self._batches = Batches(self.size, 0)
        parameters = dict(module.named_parameters())
        self.parameters = [parameters[spec.name] for spec in self.layout.tensors]
        with torch.no_grad():
            for parameter, spec in zip(self.parameters, self.layout.tensors, strict=True):
                place = view(self.memory, spec)
                place.copy_(parameter)
                parameter.data = place

    def start(self, seed: int) -> None:
        """Begin a run with this seed."""
        self._seed, self._batches = seed, Batches(self.size, seed)

    def load(self, parameters: torch.Tensor) -> None:
        """Copy these parameters, bytes in the order of the layout, into the model. The tensor must not change as long as it is loaded."""
        if self._loaded is not parameters:
            self.memory.copy_(parameters)
            self._loaded = parameters

    def stale(self) -> None:
        """Note that the model's parameters were changed in place, so that the next `load` copies."""
        self._loaded = None

    def gradient(self, worker: WorkerId, step: Step) -> tuple[list[torch.Tensor | None], float]:
        """Return the gradient of each parameter over an iteration's batch, None where the loss does not depend on it; and the loss."""
        indices = self._batches.of(worker, step)
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which takes milliseconds: it records a traceback for each kind of device.
            torch.default_generator.manual_seed(derived(self._seed, f"model {worker} {step.number}") % 2**63)
            self.module.train()
            output = self.module(*(tensor[indices] for tensor in self._data[:-1]))
            loss = self._loss(output, self._data[-1][indices])
            gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return list(gradients), float(loss.detach())


class Snapshots(Generic[K]):
    """Reference-counted copies of a memory, each taken when its key is first held.

    >>> memory = torch.tensor([1.0])
    >>> snapshots: Snapshots[int] = Snapshots(memory)
    >>> snapshots.hold(0)
    >>> memory += 1.0
    >>> snapshots.hold(1), snapshots.hold(0), snapshots[0], snapshots[1]
    (None, None, tensor([1.]), tensor([2.]))
    >>> snapshots.drop(0), snapshots.drop(0), len(snapshots)
    (None, None, 1)
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._copies: dict[K, torch.Tensor] = {}
        self._holders: Counter[K] = Counter()

    def __len__(self) -> int:
        return len(self._copies)

    def __getitem__(self, key: K) -> torch.Tensor:
        return self._copies[key]

    def hold(self, key: K) -> None:
        """Add a reference to this key's copy. If there is none, copy the memory, which must then hold what the key stands for."""
        if key not in self._copies:
            self._copies[key] = self._memory.clone()
        self._holders[key] += 1

    def drop(self, key: K) -> None:
        """Remove a reference to this key's copy, which is deleted with the last one."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key], self._copies[key]
