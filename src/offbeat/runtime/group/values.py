"""The parameters of one worker in memory that all of its processes share, in pieces: a replicated parameter once, a sharded one by rank.

Under DDP each process has all parameters; under FSDP2 a parameter is a DTensor, of which each process has a shard. A process reads and
writes its own pieces only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from offbeat.errors import JobError
from offbeat.tensors.layout import ALIGNMENT, DTYPES, elements

REPLICATED = -1
"""In place of a rank: the piece is a whole parameter, which all processes have."""
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

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    def within(self, memory: memoryview) -> torch.Tensor:
        """Return the piece as a view of a memory that holds all pieces."""
        return elements(memory, self.offset, self.numel, DTYPES[self.dtype]).view(self.shape)


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return True for a DTensor."""
    return hasattr(parameter, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process has of a tensor."""
    return tensor.to_local().detach() if is_sharded(tensor) else tensor.detach()  # type: ignore[attr-defined]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the parameters that the optimizer trains, by name."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) in held}


def own_pieces(rank: int, parameters: dict[str, nn.Parameter]) -> list[Piece]:
    """Return the pieces that a process has, without their places in memory."""
    found = []
    for name, parameter in parameters.items():
        mine = local(parameter)
        found.append(Piece(name, rank if is_sharded(parameter) else REPLICATED, tuple(mine.shape), _NAMES[mine.dtype]))
    return found


def joined(by_rank: Sequence[Sequence[Piece]]) -> tuple[Piece, ...]:
    """Return all pieces of a worker with their places, in the order of the parameters; empty shards are left out.

    Raises:
        JobError: the processes have different models.
    """
    found: list[Piece] = []
    offset = 0
    if len({len(pieces) for pieces in by_rank}) > 1:
        raise JobError(f"the processes of this worker train {[len(pieces) for pieces in by_rank]} parameters: the model must be the same")
    for same in zip(*by_rank, strict=True):
        first = same[0]
        if any(piece.name != first.name or (piece.rank == REPLICATED) != (first.rank == REPLICATED) for piece in same):
            raise JobError(f"the processes of this worker have different models: {[piece.name for piece in same]} have the same place")
        if first.rank == REPLICATED and any(piece != first for piece in same):
            raise JobError(f"{first.name!r} differs between the processes of this worker: {[piece[2:4] for piece in same]}")
        for piece in same[:1] if first.rank == REPLICATED else same:
            if piece.numel:
                found.append(piece._replace(offset=offset))
                offset += -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(found)


def size_of(pieces: Sequence[Piece]) -> int:
    """Return the bytes of a memory for all pieces."""
    return max((piece.offset + -(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in pieces), default=0)


def to_wire(pieces: Iterable[Piece]) -> list[Any]:
    """Return the pieces as plain data."""
    return [list(piece) for piece in pieces]


def from_wire(rows: Iterable[Any]) -> list[Piece]:
    """Return the pieces of which `to_wire` has made these data."""
    return [Piece(name, rank, tuple(shape), dtype, offset) for name, rank, shape, dtype, offset in rows]


class Own:
    """One process's parameters and gradients, and their pieces in shared memory.

    Args:
        rank: of the process.
        parameters: that it trains, by name.
        pieces: of all processes.
        values: memory for parameters.
        gradients: memory for gradients of shards; empty if there are none.
    """

    def __init__(
        self, rank: int, parameters: dict[str, nn.Parameter], pieces: Sequence[Piece], values: memoryview, gradients: memoryview
    ) -> None:
        mine = [piece for piece in pieces if piece.rank in (rank, REPLICATED)]
        self._all = [(parameters[piece.name], piece.within(values)) for piece in mine]
        self._shards = [(parameters[piece.name], piece.within(values), piece.within(gradients)) for piece in mine if piece.rank == rank]

    @torch.no_grad()
    def give_shards(self) -> None:
        """Write the shards to memory."""
        for parameter, value, _ in self._shards:
            value.copy_(local(parameter))

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Write the gradients of the shards to memory; zeros where there is none."""
        for parameter, _, gradient in self._shards:
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(local(parameter.grad))

    @torch.no_grad()
    def take(self) -> None:
        """Load all parameters from memory."""
        for parameter, value in self._all:
            local(parameter).copy_(value)
