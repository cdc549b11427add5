"""Convert optimizer state between the shards' pieces and torch's own ``state_dict`` format, which checkpoints use.

What is assembled here can be loaded into the plain optimizer, and what the plain optimizer has saved can be distributed to any number of
shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from offbeat.errors import ConfigurationError
from offbeat.tensors.blocks import owned, owned_state
from offbeat.tensors.layout import Layout, Span, TensorSpec
from offbeat.tensors.pieces import SCALARS, STATE_DTYPES, Headers, pack, piece_of, unpack

if TYPE_CHECKING:
    from offbeat.tensors.optimizers import OptimizerSpec


def assemble_state_dict(
    layout: Layout, spec: OptimizerSpec, parts: Iterable[tuple[Any, bytes | memoryview]], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a ``state_dict`` of the plain optimizer, from the state of all shards.

    Args:
        layout: the pieces' indices refer to it.
        spec: the job's optimizer.
        parts: what each shard's `Shard.state` returned, its bytes joined.
        groups: the ``param_groups`` of the plain optimizer's ``state_dict``, with its present settings.

    Raises:
        ProtocolError: the parts do not fit the layout, or elements are missing, for example those of a shard.
    """
    pieces = [piece for headers, payload in parts for piece in unpack(layout, headers, payload)]
    state: dict[int, dict[str, torch.Tensor]] = {}
    for index, entry in owned_state(owned(layout, Span(0, layout.nbytes)), pieces, elementwise=spec.elementwise).items():
        tensor = layout.tensors[index]
        state[tensor.slot] = {
            key: torch.as_strided(value, tensor.shape, tensor.stride) if spec.elementwise and value.dim() else value
            for key, value in entry.items()
        }
    return {"state": {slot: state[slot] for slot in sorted(state)}, "param_groups": groups}


def by_position(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``state_dict`` whose parameters are numbered by their position in the groups, as torch's optimizers read it.

    Those of ``torch.distributed.checkpoint`` have names in place of numbers.

    >>> by_position({"state": {"weight": {"step": 3}}, "param_groups": [{"lr": 0.1, "params": ["bias", "weight"]}]})
    {'state': {1: {'step': 3}}, 'param_groups': [{'lr': 0.1, 'params': [0, 1]}]}
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    numbers = {key: number for number, key in enumerate(keys)}
    groups = [{**group, "params": [numbers[key] for key in group["params"]]} for group in state_dict["param_groups"]]
    state = {numbers.get(key, key): entry for key, entry in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def split_state_dict(
    layout: Layout,
    spec: OptimizerSpec,
    state_dict: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    spans: Sequence[Span],
) -> list[tuple[Headers, list[bytes | memoryview]]]:
    """Return what `Shard.read_state` of each span takes, from a plain optimizer's ``state_dict``. Its settings are for the worker to load.

    State of parameters that are not in the layout is left out.

    Args:
        layout, spec: the job's.
        state_dict: of the plain optimizer.
        optimizer: the plain optimizer, whose groups must be as large as the saved ones; None: they are not compared.
        spans: of the shards.

    Raises:
        ConfigurationError: it was saved from another optimizer or another model; the message names the first difference.
    """
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    present = saved if optimizer is None else [len(group["params"]) for group in optimizer.param_groups]
    if saved != present:
        raise ConfigurationError(
            f"the saved optimizer's groups have {saved} parameters, this {spec.name}'s {present}: load it where it was saved from"
        )
    state = {index: _saved(spec, tensor, state_dict["state"].get(tensor.slot, {})) for index, tensor in enumerate(layout.tensors)}
    parts = []
    for span in spans:
        pieces = []
        for own in owned(layout, span):
            for key, (values, shape) in state[own.tensor].items():
                start, stop = (own.start, own.stop) if shape is None else (0, len(values))
                pieces.append(piece_of(own.tensor, key, start, values[start:stop], shape))
        parts.append(pack(pieces))
    return parts


def _saved(spec: OptimizerSpec, tensor: TensorSpec, entry: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, tuple[int, ...] | None]]:
    """Return one parameter's saved state: flat values in memory order, and their shape if it is not the parameter's."""
    values: dict[str, tuple[torch.Tensor, tuple[int, ...] | None]] = {}
    for key, value in entry.items():
        if value is None:
            continue
        value = torch.as_tensor(value).detach().cpu()
        if value.dtype not in STATE_DTYPES.values():
            raise ConfigurationError(f"the saved {key} of {tensor.name} is {value.dtype}; it must be one of {', '.join(STATE_DTYPES)}")
        if key in SCALARS or not spec.elementwise:
            values[key] = (value.reshape(-1), tuple(value.shape))
            continue
        if tuple(value.shape) != tensor.shape:
            raise ConfigurationError(f"the saved {key} of {tensor.name} has shape {tuple(value.shape)}, the parameter has {tensor.shape}")
        dense = torch.empty_strided(tensor.shape, tensor.stride, dtype=value.dtype).copy_(value)
        values[key] = (torch.as_strided(dense, (tensor.numel,), (1,)), None)
    return values
