"""Copy a worker's parameters and gradients, piece by piece, between its processes and the memory of its session.

Under DDP each process has all parameters, and a replicated parameter is one piece; under FSDP2 a parameter is a DTensor, and each process's
shard of it is a piece. A process reads and writes its own pieces only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offbeat.errors import JobError
from offbeat.tensors.absent import ABSENT, distinguish
from offbeat.tensors.flat import all_finite
from offbeat.tensors.layout import DTYPES, Layout, elements

REPLICATED = -1
"""Rank of a piece that is a whole parameter, which all processes have."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Piece(NamedTuple):
    """A parameter, or one process's shard of it."""

    name: str
    rank: int
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())

    def within(self, memory: memoryview) -> torch.Tensor:
        """Return the piece as a view of memory that is laid out for all pieces."""
        return elements(memory, self.offset, self.numel, DTYPES[self.dtype]).view(self.shape)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return True if a parameter is a DTensor, so that each process has a shard of it."""
    return hasattr(parameter, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor, detached: its shard of a DTensor, or the whole tensor."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer trains, by name."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) in held}


def own_pieces(rank: int, parameters: dict[str, nn.Parameter]) -> list[Piece]:
    """Return a process's pieces, in the order of the parameters, with offset 0."""
    found = []
    for name, parameter in parameters.items():
        mine = local(parameter)
        found.append(Piece(name, rank if is_sharded(parameter) else REPLICATED, tuple(mine.shape), _NAMES[mine.dtype]))
    return found


def joined(by_rank: Sequence[Sequence[Piece]]) -> tuple[Piece, ...]:
    """Return all pieces of a worker, in the order of the parameters, without empty shards.

    Raises:
        JobError: the processes have different models.
    """
    found: list[Piece] = []
    if len({len(pieces) for pieces in by_rank}) > 1:
        raise JobError(f"the processes of this worker train {[len(pieces) for pieces in by_rank]} parameters: the model must be the same")
    for same in zip(*by_rank, strict=True):
        first = same[0]
        if any(piece.name != first.name or (piece.rank == REPLICATED) != (first.rank == REPLICATED) for piece in same):
            raise JobError(f"the processes of this worker have different models: {[piece.name for piece in same]} have the same place")
        if first.rank == REPLICATED and any(piece != first for piece in same):
            raise JobError(f"{first.name!r} differs between the processes of this worker: {[piece[2:4] for piece in same]}")
        found += [piece for piece in (same[:1] if first.rank == REPLICATED else same) if piece.numel]
    return tuple(found)


def placed(pieces: Sequence[Piece], layout: Layout) -> tuple[Piece, ...]:
    """Return the pieces, in the same order, each with its offset in the layout of a model that has one parameter for each piece."""
    return tuple(piece._replace(offset=spec.offset) for piece, spec in zip(pieces, layout.tensors, strict=True))


def from_wire(rows: Iterable[Any]) -> list[Piece]:
    """Return the pieces that a message has brought: msgpack makes lists of tuples."""
    return [Piece(name, rank, tuple(shape), dtype, offset) for name, rank, shape, dtype, offset in rows]


class Own:
    """Copy between one process's parameters and gradients and their pieces in the session's memory.

    All processes read replicated parameters, and rank 0 writes them. Each process reads and writes its own shards.

    Args:
        rank: rank of this process.
        parameters: parameters that this process trains, by name.
        pieces: pieces of all processes.
        gradients, values: memory to which gradients are written, and from which parameters are read.
    """

    def __init__(
        self, rank: int, parameters: dict[str, nn.Parameter], pieces: Sequence[Piece], gradients: memoryview, values: memoryview
    ) -> None:
        self._mine = [(number, parameters[piece.name], piece) for number, piece in enumerate(pieces) if piece.rank in (rank, REPLICATED)]
        self._gives = [entry for entry in self._mine if entry[2].rank == rank or rank == 0]
        self._gradients = [piece.within(gradients) for _, _, piece in self._gives]
        self.read_from(values)

    def read_from(self, values: memoryview) -> None:
        """Read parameters from another memory from now on."""
        self._values = {number: piece.within(values) for number, _, piece in self._mine}

    @torch.no_grad()
    def give(self) -> None:
        """Write the parameters that this process writes to memory."""
        for number, parameter, _ in self._gives:
            self._values[number].copy_(local(parameter))

    @torch.no_grad()
    def give_gradients(self) -> dict[int, bool]:
        """Write the gradients that this process writes to memory, and mark shards without a gradient: see `tensors.absent`.

        Returns:
            For each written piece, by its number: True if the gradient is finite.
        """
        found = {}
        for (number, parameter, piece), place in zip(self._gives, self._gradients, strict=True):
            if parameter.grad is not None:
                place.copy_(local(parameter.grad))
                distinguish([place.view(-1)[:1]])
                found[number] = all_finite(place)
            elif piece.rank != REPLICATED:
                place.fill_(ABSENT)
                found[number] = True
        return found

    @torch.no_grad()
    def take(self) -> None:
        """Load all of this process's parameters from memory."""
        for number, parameter, _ in self._mine:
            local(parameter).copy_(self._values[number])
