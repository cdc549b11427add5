"""Convert between the parameters of a whole model, by name, and the memory of servers: what checkpoints contain, and what a shard holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offbeat.errors import ConfigurationError
from offbeat.tensors.blocks import owned
from offbeat.tensors.layout import DTYPES, Layout, Memory, Span, elements, view
from offbeat.tensors.pieces import Headers


@dataclass(frozen=True)
class ShardCopy:
    """A copy of what a shard holds, all of one version."""

    span: Span
    parameters: bytearray
    """``span.nbytes`` bytes."""
    headers: Headers
    """Of the optimizer's state; see `pieces.pack`."""
    state: bytes | bytearray
    """The bytes of the pieces, joined."""


def parameters_of(layout: Layout, copies: Sequence[ShardCopy]) -> dict[str, torch.Tensor]:
    """Return all parameters by name, from the copies of all shards. They share one new memory.

    >>> model = torch.nn.Linear(2, 1)
    >>> layout = Layout.of(model, torch.optim.SGD(model.parameters()))
    >>> copy = ShardCopy(Span(0, layout.nbytes), bytearray(layout.nbytes), [], b"")
    >>> parameters_of(layout, [copy])["weight"]
    tensor([[0., 0.]])
    """
    memory = bytearray(layout.nbytes) if len(copies) != 1 else copies[0].parameters
    if len(copies) != 1:
        for copy in copies:
            memory[copy.span.start : copy.span.stop] = copy.parameters
    return {tensor.name: view(memoryview(memory), tensor) for tensor in layout.tensors}


def write_parameters(layout: Layout, span: Span, parameters: Mapping[str, torch.Tensor], memory: Memory) -> None:
    """Write a span's share of these parameters into its memory of ``span.nbytes`` bytes.

    Raises:
        ConfigurationError: a parameter is missing, or has another shape or dtype.
    """
    for own in owned(layout, span):
        spec, found = own.spec, parameters.get(own.spec.name)
        if found is None or tuple(found.shape) != spec.shape or found.dtype != DTYPES[spec.dtype]:
            seen = "missing" if found is None else f"{found.dtype} of shape {tuple(found.shape)}"
            raise ConfigurationError(f"{spec.name} is {seen} in the checkpoint, and {spec.dtype} of shape {spec.shape} in this model")
        dense = found
        if tuple(found.stride()) != spec.stride:
            dense = torch.empty_strided(spec.shape, spec.stride, dtype=found.dtype).copy_(found)
        flat = torch.as_strided(dense, (spec.numel,), (1,))
        elements(memory, own.at, own.stop - own.start, found.dtype).copy_(flat[own.start : own.stop])
