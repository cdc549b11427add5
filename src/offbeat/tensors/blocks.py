"""Cut a span into the blocks that are stepped one after another, and distribute optimizer state to them.

An elementwise optimizer does not depend on where tensors begin: neighbours of equal dtype, group and state form a run, including the
padding (which is never read), and runs are cut into blocks that fit the cache. Other optimizers get each tensor as a block of its true
shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from offbeat.cuda_memory import ordinal_of
from offbeat.errors import ProtocolError
from offbeat.tensors.absent import sign_at
from offbeat.tensors.layout import DTYPES, Layout, Memory, Span, TensorSpec, elements
from offbeat.tensors.pieces import StatePiece

BLOCK_NUMEL = 1 << 19
"""Elements of one block: its parameters, sum and optimizer state stay in the cache, and the 30 microseconds of Python for a step are small
against the rest. 2**17 measured 30 % slower, 2**18 8 %.
"""
GPU_BLOCK_NUMEL = 1 << 24
"""The same on a GPU, where a step is bound by its memory only if its kernels take longer than Python takes to launch them."""


class Owned(NamedTuple):
    """The part of one tensor that lies in a span."""

    tensor: int
    """Its index in `Layout.tensors`."""
    spec: TensorSpec
    start: int
    """Elements ``start`` to ``stop``, in the order of memory."""
    stop: int
    at: int
    """Where the part begins, in bytes from the start of the span."""
    end: int
    """The byte after it, padding included."""


class BlockPart(NamedTuple):
    """Elements ``start`` to ``stop`` of a tensor, which lie at element ``at`` of a block."""

    own: Owned
    start: int
    stop: int
    at: int


class Block(NamedTuple):
    """The elements of one step of the optimizer."""

    parameter: torch.Tensor
    first: int
    """Its place, in elements of its dtype from the start of the span."""
    numel: int
    group: int
    whole: bool
    """True if the parameter is one tensor in its true shape; otherwise it is flat."""
    parts: tuple[BlockPart, ...]

    @property
    def at(self) -> int:
        """Return its place in bytes from the start of the span."""
        return self.first * self.parameter.itemsize


OwnState: TypeAlias = dict[int, dict[str, torch.Tensor]]
"""Tensor index -> state key -> the owned elements, flat; or the whole value if it does not have the parameter's shape."""


def block_numel(memory: Memory) -> int:
    """Return how many elements a block in this memory has."""
    return BLOCK_NUMEL if ordinal_of(memory) is None else GPU_BLOCK_NUMEL


def owned(layout: Layout, span: Span) -> list[Owned]:
    """Return the parts of tensors in a span, by ascending place."""
    parts = []
    for index in layout.in_memory_order:
        spec = layout.tensors[index]
        low, high = max(spec.offset, span.start), min(spec.stop, span.stop)
        start, stop = ((min(byte - spec.offset, spec.nbytes) // spec.itemsize) for byte in (low, high))
        if start < stop:
            parts.append(Owned(index, spec, start, stop, low - span.start, high - span.start))
    return parts


def runs_of(parts: list[Owned], state: OwnState) -> list[int]:
    """Return for each part the number of the run that it belongs to: neighbours that may be stepped together."""
    runs = groupby(parts, key=lambda own: (own.spec.dtype, own.spec.group, *_signature(state.get(own.tensor, {}))))
    return [number for number, (_, run) in enumerate(runs) for _ in run]


def blocks_of(parts: list[Owned], memory: Memory, runs: list[int], *, whole: bool) -> list[Block]:
    """Return the blocks of the parts of a span whose parameters are in ``memory``; for ``runs`` see `runs_of`."""
    if whole:
        return [_whole_block(own, memory) for own in parts]
    blocks = []
    for _, run in groupby(zip(runs, parts, strict=True), key=lambda one: one[0]):
        blocks += _cut([own for _, own in run], memory)
    return blocks


def signs_of(block: Block) -> np.ndarray:
    """Return where in the sum of this block the parts of tensors have the signs of their first elements: see `absent.candidates`."""
    itemsize = block.parameter.itemsize
    return np.array([sign_at(part.at * itemsize, itemsize) for part in block.parts])


def divided(block: Block, cuts: Collection[int]) -> list[Block]:
    """Return the blocks into which a flat one is cut at those of these bytes of the span at which a part of it begins."""
    itemsize = block.parameter.itemsize
    starts = [0, *(n for n, part in enumerate(block.parts) if n and block.at + part.at * itemsize in cuts)]
    lows = [0, *(block.parts[n].at for n in starts[1:]), block.numel]
    blocks = []
    for low, high, start, stop in zip(lows, lows[1:], starts, [*starts[1:], None], strict=False):
        parts = tuple(part._replace(at=part.at - low) for part in block.parts[start:stop])
        blocks.append(block._replace(parameter=block.parameter[low:high], first=block.first + low, numel=high - low, parts=parts))
    return blocks if len(blocks) > 1 else [block]


def _whole_block(own: Owned, memory: Memory) -> Block:
    spec = own.spec
    flat = elements(memory, own.at, spec.numel, DTYPES[spec.dtype])
    parameter = torch.as_strided(flat, spec.shape, spec.stride)
    return Block(parameter, own.at // spec.itemsize, spec.numel, spec.group, True, (BlockPart(own, 0, spec.numel, 0),))


def _cut(run: list[Owned], memory: Memory) -> list[Block]:
    spec = run[0].spec
    last = run[-1]
    run_stop = last.at + (last.stop - last.start) * spec.itemsize
    blocks, next_own, block_nbytes = [], 0, block_numel(memory) * spec.itemsize
    for low in range(run[0].at, run_stop, block_nbytes):
        high = min(low + block_nbytes, run_stop)
        parts = []
        while next_own < len(run) and run[next_own].at < high:
            own = run[next_own]
            start = own.start + max(low - own.at, 0) // spec.itemsize
            stop = min(own.stop, own.start + (high - own.at) // spec.itemsize)
            if start < stop:
                parts.append(BlockPart(own, start, stop, (own.at - low) // spec.itemsize + start - own.start))
            if own.end > high:
                break
            next_own += 1
        numel = (high - low) // spec.itemsize
        parameter = elements(memory, low, numel, DTYPES[spec.dtype])
        blocks.append(Block(parameter, low // spec.itemsize, numel, spec.group, False, tuple(parts)))
    return blocks


def _signature(state: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Return a key that is equal for tensors that may be stepped together: state of the same kinds, with the same numbers."""
    return tuple((key, value.dtype, value.item() if value.dim() == 0 else None) for key, value in state.items())


def owned_state(parts: list[Owned], pieces: Iterable[StatePiece], *, elementwise: bool) -> OwnState:
    """Return the state of the owned tensors that ``pieces`` contain.

    Raises:
        ProtocolError: a state tensor is only partly there, or has an impossible shape.
    """
    own = {part.tensor: part for part in parts}
    state: OwnState = {}
    seen: dict[tuple[int, str], int] = {}
    for piece in pieces:
        if piece.tensor not in own:
            continue
        part, entry = own[piece.tensor], state.setdefault(piece.tensor, {})
        if piece.shape is not None:
            if elementwise and piece.shape:
                raise ProtocolError(
                    f"{piece.key} of {part.spec.name} has shape {piece.shape}; it must be a number or have the parameter's shape"
                )
            entry[piece.key] = piece.values().reshape(piece.shape)
            continue
        start, stop = max(piece.start, part.start), min(piece.stop, part.stop)
        if start < stop:
            values = piece.values()
            flat = entry.setdefault(piece.key, torch.empty(part.stop - part.start, dtype=values.dtype, device="cpu"))
            flat[start - part.start : stop - part.start] = values[start - piece.start : stop - piece.start]
            seen[piece.tensor, piece.key] = seen.get((piece.tensor, piece.key), 0) + stop - start
    for (index, key), count in seen.items():
        if count != (wanted := own[index].stop - own[index].start):
            raise ProtocolError(
                f"optimizer state has {count} elements of {key} of {own[index].spec.name} (expected {wanted}): a shard's are missing"
            )
    return state


def spread(block: Block, state: OwnState) -> dict[str, torch.Tensor]:
    """Return a block's state in the optimizer's form. All parts of a block have the same keys and numbers: see `_signature`."""
    first, device = block.parts[0].own, block.parameter.device
    values: dict[str, torch.Tensor] = {}
    for key, value in state.get(first.tensor, {}).items():
        if block.whole or value.dim() == 0:
            values[key] = value.to(device, copy=True)
            continue
        values[key] = torch.zeros(block.numel, dtype=value.dtype, device=device)
        for part in block.parts:
            source = state[part.own.tensor][key]
            values[key][part.at : part.at + part.stop - part.start] = source[part.start - part.own.start : part.stop - part.own.start]
    return values
