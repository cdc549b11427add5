"""The leader's shadow: a model of plain parameters, one for each piece of the worker's parameters, on which the session works.

A session makes parameters and gradients views of its own memory, and has an optimizer that it may step. DDP and FSDP2 own those of the
script. So the leader copies gradients to the shadow before a step, and parameters back after it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import nn

from offbeat.errors import ConfigurationError
from offbeat.runtime.group.values import REPLICATED, Own, Piece, is_sharded, local


class Shadow:
    """A worker's parameters, its gradients and its optimizer, for the session of its leader.

    Args:
        model, optimizer: the script's, in the leader.
        parameters: that the optimizer trains, by name.
        pieces: of all processes.
        values, gradients: the memory that the processes share; ``values`` has the other processes' shards already.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: dict[str, nn.Parameter],
        pieces: Sequence[Piece],
        values: memoryview,
        gradients: memoryview,
    ) -> None:
        self.sharded = any(piece.rank != REPLICATED for piece in pieces)
        if self.sharded and optimizer.state:
            raise ConfigurationError(
                "this optimizer has a state of sharded parameters (FSDP2), which cannot be handed to a job: begin without"
            )
        self._own = Own(0, parameters, pieces, values, gradients)
        self._own.give_shards()
        self._script_optimizer = optimizer
        self._values = [piece.within(values) for piece in pieces]
        self._gradients = [None if piece.rank == REPLICATED else piece.within(gradients) for piece in pieces]
        self._sources = [parameters[piece.name] for piece in pieces]
        self.module = nn.Module()
        self._shadows: list[nn.Parameter] = []
        by_parameter: defaultdict[int, list[nn.Parameter]] = defaultdict(list)
        for piece, source, value in zip(pieces, self._sources, self._values, strict=True):
            shadow = nn.Parameter((local(source) if piece.rank == REPLICATED else value).clone())
            name = piece.name.replace(".", "/") + ("" if piece.rank == REPLICATED else f"/{piece.rank}")
            self.module.register_parameter(name, shadow)
            self._shadows.append(shadow)
            by_parameter[id(source)].append(shadow)
        for name, buffer in model.named_buffers():
            self.module.register_buffer(name.replace(".", "/"), buffer)
        self.optimizer = copy.copy(optimizer)
        self.optimizer.param_groups = [
            {**group, "params": [shadow for parameter in group["params"] for shadow in by_parameter[id(parameter)]]}
            for group in optimizer.param_groups
        ]
        self.optimizer.state = defaultdict(dict)
        for parameter, state in optimizer.state.items():
            for shadow in by_parameter[id(parameter)]:
                self.optimizer.state[shadow] = dict(state)
        self._smallest = min(self._shadows, key=torch.Tensor.numel)
        self._passes = [0] * len(self._sources)
        for number, source in enumerate(self._sources):
            if not is_sharded(source):
                source.register_post_accumulate_grad_hook(lambda _, number=number: self._count(number))

    def _count(self, number: int) -> None:
        self._passes[number] += 1

    def read(self) -> None:
        """Copy the script's parameters to the shadow; the other processes have written their shards."""
        self._own.give_shards()
        with torch.no_grad():
            for shadow, source, value in zip(self._shadows, self._sources, self._values, strict=True):
                shadow.copy_(value if is_sharded(source) else local(source))

    def accumulate(self, batches: int) -> None:
        """Copy gradients to the shadow, as backward passes do, and the optimizer's hyperparameters.

        Args:
            batches: how many the script has; each shard's pass counts as one over each. Passes of replicated parameters are counted.
        """
        for group, ours in zip(self._script_optimizer.param_groups, self.optimizer.param_groups, strict=True):
            ours.update({key: value for key, value in group.items() if key != "params"})
        self._own.give_gradients()
        for shadow, source, shard in zip(self._shadows, self._sources, self._gradients, strict=True):
            shadow.grad = None
            gradient = shard if shard is not None else source.grad
            if gradient is not None:
                shadow.backward(gradient.detach())
        passes, self._passes = max(batches if self.sharded else 1, *self._passes), [0] * len(self._sources)
        for _ in range(passes - 1):
            self._smallest.backward(torch.zeros_like(self._smallest))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the shadow's parameters to the memory for all processes, and to the script's."""
        for shadow, value in zip(self._shadows, self._values, strict=True):
            value.copy_(shadow)
        self._own.take()

    def loaded(self) -> None:
        """Copy the hyperparameters of a state that the session has loaded to the script's optimizer."""
        for group, ours in zip(self._script_optimizer.param_groups, self.optimizer.param_groups, strict=True):
            group.update({key: value for key, value in ours.items() if key != "params"})
