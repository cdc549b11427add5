"""Convert a worker's optimizer state: the leader's session keeps it by pieces, each process's script by its own parameters.

An entry is the optimizer's state of one parameter; for a shard, the process's part of each tensor. Entries travel between processes in
shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn

from offbeat.errors import ConfigurationError
from offbeat.runtime.group.values import REPLICATED, Piece, is_sharded, local
from offbeat.runtime.job.packing import pack, unpack
from offbeat.tensors.layout import Layout
from offbeat.transport.shm import MemoryBlock

Entries: TypeAlias = dict[str, dict[str, Any]]
"""Entries by the name of their parameter."""


class ScriptState:
    """Convert between entries and the ``state_dict`` of one process's optimizer.

    Args:
        optimizer: the script's optimizer.
        parameters: parameters that it trains, by name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        names = {id(parameter): name for name, parameter in parameters.items()}
        held = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        self._slots = {names[id(parameter)]: slot for slot, parameter in enumerate(held) if id(parameter) in names}

    def entries(self, state_dict: Mapping[str, Any]) -> Entries:
        """Return the entries of a ``state_dict``, with this process's part of each tensor.

        Raises:
            ConfigurationError: it was saved from an optimizer with other parameter groups.
        """
        saved, present = (
            [len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], self._optimizer.param_groups)
        )
        if saved != present:
            raise ConfigurationError(
                f"the saved optimizer's groups have {saved} parameters, this {type(self._optimizer).__name__}'s {present}: load it where "
                "it was saved from"
            )
        found = {name: state_dict["state"].get(slot) for name, slot in self._slots.items()}
        return {
            name: {key: local(value) if isinstance(value, torch.Tensor) else value for key, value in entry.items()}
            for name, entry in found.items()
            if entry
        }

    def state_dict(self, entries: Entries) -> dict[str, Any]:
        """Return a ``state_dict`` of these entries and the optimizer's present settings; tensors of sharded parameters become DTensors."""
        state = {
            self._slots[name]: {key: _of(self._parameters[name], value) for key, value in entry.items()} for name, entry in entries.items()
        }
        return {"state": dict(sorted(state.items())), "param_groups": self._optimizer.state_dict()["param_groups"]}


def _of(parameter: nn.Parameter, value: Any) -> Any:
    """Return a value of a parameter's entry in the form in which the optimizer keeps it."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not is_sharded(parameter):
        return value
    mine = local(parameter)
    if not mine.numel():  # the received tensor is a placeholder, which only has the right dtype
        value = mine.to(value.dtype)
    if value.shape != mine.shape:
        return value
    from torch.distributed.tensor import DTensor  # only a script that has a DTensor needs it

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return DTensor.from_local(value.to(mine.device), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def of_rank(rank: int, pieces: Sequence[Piece], layout: Layout, state: Mapping[int, Mapping[str, Any]]) -> Entries:
    """Return one process's entries of the shadow's state.

    Args:
        rank: rank of the process.
        pieces: pieces of all processes.
        layout: layout of the shadow, in the order of the pieces.
        state: the shadow's state, by slot.
    """
    found: Entries = {}
    for piece, spec in zip(pieces, layout.tensors, strict=True):
        entry = state.get(spec.slot)
        if entry and piece.rank in (rank, REPLICATED):
            found[piece.name] = dict(entry)
        elif entry and piece.name not in found:  # kept if this process's shard is empty, and so has no piece
            found[piece.name] = {key: value.new_empty(0) if _is_long(value) else value for key, value in entry.items()}
    return found


def joined(pieces: Sequence[Piece], layout: Layout, by_rank: Sequence[Entries]) -> dict[int, dict[str, Any]]:
    """Return the shadow's state, by slot, from the entries of each process, by rank."""
    found = {}
    for piece, spec in zip(pieces, layout.tensors, strict=True):
        entry = by_rank[max(piece.rank, 0)].get(piece.name)
        if entry:
            found[spec.slot] = entry
    return found


def _is_long(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def to_memory(entries: Entries) -> tuple[Any, MemoryBlock]:
    """Return entries as plain data and a block of memory with their tensors.

    Raises:
        ConfigurationError: an entry has a value that is neither a tensor nor plain.
    """
    plain, payload = pack(entries, "the optimizer's state")
    block, at = MemoryBlock.allocate(sum(map(len, payload)), "optimizer's state"), 0
    for data in payload:
        block.view[at : at + len(data)] = data
        at += len(data)
    return plain, block


def from_memory(plain: Any, block: MemoryBlock) -> Entries:
    """Return the entries from what `to_memory` has made. Raises `ProtocolError` if data and memory do not fit each other."""
    entries: Entries = unpack(plain, block.view)
    return entries
