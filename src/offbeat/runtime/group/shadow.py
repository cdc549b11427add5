"""Give the session of a group's leader a model to work on: the shadow, with one plain parameter for each piece of the worker's parameters.

A session makes parameters and gradients views of its own memory, and steps its own optimizer. DDP and FSDP2 own the script's parameters.
So each process copies the gradients of its pieces into the session's memory before a step, and the parameters from there after it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offbeat.gradient_watch import GradientWatch
from offbeat.runtime.group import state
from offbeat.runtime.group.state import Entries, ScriptState
from offbeat.runtime.group.values import REPLICATED, Own, Piece, is_sharded, placed
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import DTYPES, Layout
from offbeat.tensors.optimizers import load_settings


class Shadow:
    """Hold shadows of a worker's parameters and of its optimizer, for the session of the group's leader.

    Args:
        model, optimizer: the script's, in the leader.
        parameters: parameters that the optimizer trains, by name.
        pieces: pieces of all processes; the attribute ``pieces`` has them with their offsets in memory.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], pieces: Sequence[Piece]
    ) -> None:
        self.sharded = any(piece.rank != REPLICATED for piece in pieces)
        self._script_parameters, self._script_optimizer = parameters, optimizer
        self.module = nn.Module()
        by_parameter: defaultdict[int, list[nn.Parameter]] = defaultdict(list)
        for piece in pieces:
            # One element expanded to the shape, so that no memory of this size is allocated: the values go to the session's memory.
            shadow = nn.Parameter(torch.zeros((), dtype=DTYPES[piece.dtype], device="cpu").expand(piece.shape))
            name = piece.name.replace(".", "/") + ("" if piece.rank == REPLICATED else f"/{piece.rank}")
            self.module.register_parameter(name, shadow)
            by_parameter[id(parameters[piece.name])].append(shadow)
        for name, buffer in model.named_buffers():
            self.module.register_buffer(name.replace(".", "/"), buffer)
        self.optimizer = copy.copy(optimizer)
        self.optimizer.param_groups = [
            {**group, "params": [shadow for parameter in group["params"] for shadow in by_parameter[id(parameter)]]}
            for group in optimizer.param_groups
        ]
        self.optimizer.state = defaultdict(dict)
        self._state = ScriptState(optimizer, parameters)
        self._by_slot = dict(enumerate(shadow for group in self.optimizer.param_groups for shadow in group["params"]))
        self.layout = Layout.of(self.module, self.optimizer)
        self.pieces = placed(pieces, self.layout)

    def enter(self, flat: FlatModel, gradients: memoryview, values: memoryview) -> None:
        """Write the leader's parameters to the session's memory, of which ``flat`` has views. The followers write theirs themselves."""
        self._flat = flat
        self.own = Own(0, self._script_parameters, self.pieces, gradients, values)
        """Copies between the parameters of the leader's script and the session's memory."""
        self.own.give()

    def begin_with(self, theirs: Sequence[Entries]) -> None:
        """Build the shadow's optimizer state from the leader's and the followers' parts. The script's optimizer is emptied."""
        mine = self._state.entries(self._script_optimizer.state_dict())
        for slot, entry in state.joined(self.pieces, self.layout, [mine, *theirs]).items():
            self.optimizer.state[self._by_slot[slot]] = entry
        self._script_optimizer.state.clear()

    def to_load(self, saved: Mapping[str, Any], theirs: Sequence[Entries]) -> dict[str, Any]:
        """Return the ``state_dict`` for the session to load, from the leader's saved part and the followers' parts.

        Raises:
            ConfigurationError: the state was saved from an optimizer with other parameter groups.
        """
        entries = state.joined(self.pieces, self.layout, [self._state.entries(saved), *theirs])
        groups = zip(self.optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True)
        return {"state": entries, "param_groups": [{**given, "params": group["params"]} for group, given in groups]}

    def entries(self, rank: int, state_dict: Mapping[str, Any]) -> Entries:
        """Return one process's part of the session's ``state_dict``."""
        return state.of_rank(rank, self.pieces, self.layout, state_dict["state"])

    def script_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the ``state_dict`` for the leader's script, from the session's."""
        return self._state.state_dict(self.entries(0, state_dict))

    def watch(self, watch: GradientWatch) -> None:
        """Watch backward passes over the script's replicated parameters. Those over sharded parameters are noticed at the step."""
        watch.follow(parameter for parameter in self._script_parameters.values() if not is_sharded(parameter))

    def give_gradients(self, nonfinite: Collection[int]) -> None:
        """Write the leader's gradients to memory, mark filled pieces, and copy the script's hyperparameters to the shadow's optimizer.

        Args:
            nonfinite: numbers of the pieces whose gradients followers have found not to be finite.
        """
        load_settings(self.optimizer, self._script_optimizer.param_groups)
        given = self.own.give_gradients()
        given |= {number: number not in nonfinite for number, piece in enumerate(self.pieces) if piece.rank > 0}
        for number, finite in given.items():
            self._flat.filled(number, finite=finite)

    def loaded(self) -> None:
        """Copy the hyperparameters that the session has loaded to the script's optimizer."""
        load_settings(self._script_optimizer, self.optimizer.param_groups)
