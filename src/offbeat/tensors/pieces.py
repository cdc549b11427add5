"""Send optimizer state: pieces of state tensors as raw bytes, with plain headers.

A shard has its state by block of memory, a checkpoint by parameter. A piece fits both: some elements, or the whole value, of one state
tensor of one parameter. A message has a list of headers and the pieces' bytes, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, NamedTuple

import torch

from offbeat.errors import ProtocolError
from offbeat.tensors.layout import DTYPES, Layout

STATE_DTYPES = {**DTYPES, "int64": torch.int64}
_NAMES = {dtype: name for name, dtype in STATE_DTYPES.items()}
SCALARS = frozenset({"step", "eta", "mu", "mu_product"})
"""State of elementwise optimizers that is one number for each parameter; other state has the parameter's shape."""

Headers = list[list[Any]]
"""See `StatePiece.header`."""


class StatePiece(NamedTuple):
    """A part of one state tensor."""

    tensor: int
    """The parameter, as an index of `Layout.tensors`."""
    key: str
    """The optimizer's name for the state tensor, such as ``exp_avg``."""
    start: int
    """The piece has elements ``start`` to ``stop``, in the order of memory."""
    stop: int
    shape: tuple[int, ...] | None
    """None: the state has the parameter's shape and strides. Otherwise its own shape; the piece is then all of it, in row-major order."""
    dtype: str
    data: bytes | memoryview

    def header(self) -> list[Any]:
        """Return everything but the data, for msgpack."""
        return [self.tensor, self.key, self.start, self.stop, None if self.shape is None else list(self.shape), self.dtype]

    def values(self) -> torch.Tensor:
        """Return the elements, flat, in new memory."""
        flat = torch.empty(self.stop - self.start, dtype=STATE_DTYPES[self.dtype], device="cpu")
        if len(self.data):
            flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(self.data), dtype=torch.uint8))
        return flat


def piece_of(tensor: int, key: str, start: int, values: torch.Tensor, shape: tuple[int, ...] | None) -> StatePiece:
    """Return flat ``values`` as a piece. Its bytes are those of the tensor if that is contiguous: send or copy them before it changes."""
    data = values.detach().contiguous().view(torch.uint8).cpu().numpy().data if values.numel() else b""
    return StatePiece(tensor, key, start, start + values.numel(), shape, _NAMES[values.dtype], data)


def pack(pieces: Iterable[StatePiece]) -> tuple[Headers, list[bytes | memoryview]]:
    """Return headers for msgpack, and the bytes that belong to them, in the same order."""
    listed = list(pieces)
    return [piece.header() for piece in listed], [piece.data for piece in listed]


def unpack(layout: Layout, headers: Any, payload: bytes | memoryview) -> list[StatePiece]:
    """Return the pieces that `pack` was given, from what a peer sent: ``payload`` is all bytes joined.

    Raises:
        ProtocolError: headers and bytes do not fit each other or the layout.
    """
    if not isinstance(headers, list | tuple):
        raise ProtocolError(f"optimizer state must come with a list of headers, not {type(headers).__name__}")
    pieces, at, view = [], 0, memoryview(payload)
    for header in headers:
        piece = _read(layout, header)
        stop = at + (piece.stop - piece.start) * STATE_DTYPES[piece.dtype].itemsize
        pieces.append(piece._replace(data=view[at:stop]))
        at = stop
    if at != len(view):
        raise ProtocolError(f"optimizer state has {len(view)} bytes (expected {at} by its headers)")
    return pieces


def _read(layout: Layout, header: Any) -> StatePiece:
    if not isinstance(header, list | tuple) or len(header) != 6:
        raise ProtocolError(f"a piece of optimizer state has a header of type {type(header).__name__} (expected a list of 6 items)")
    tensor, key, start, stop, shape, dtype = header
    known = isinstance(key, str) and isinstance(dtype, str) and dtype in STATE_DTYPES
    if not known or not _whole(tensor) or tensor >= len(layout.tensors):
        raise ProtocolError(
            f"a piece of optimizer state has key {key!r}, dtype {dtype!r}, tensor {tensor!r} (expected tensor < {len(layout.tensors)})"
        )
    own = isinstance(shape, list | tuple) and len(shape) <= 64 and all(map(_whole, shape))
    numel = prod(shape) if own else layout.tensors[tensor].numel
    fits = _whole(start) and _whole(stop) and start <= stop <= numel
    if not fits or (shape is not None and (not own or (start, stop) != (0, numel))):
        name = layout.tensors[tensor].name
        raise ProtocolError(f"elements {start!r} to {stop!r} of {key!r} of {name} (shape {shape!r}) are not {numel} or fewer in order")
    return StatePiece(tensor, key, start, stop, None if shape is None else tuple(shape), dtype, b"")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
