"""Pack tensors in lists and maps as plain data and bytes, to copy a replica to another rank. Nothing is pickled.

msgpack can carry the plain data, in which each tensor is a reference to a range of the payload. Maps become lists of pairs, since an
optimizer's state has numbers as keys. A value of another type is refused by name.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from offbeat.errors import ConfigurationError, ProtocolError

_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex128", "complex64")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*_FLOATS, *_INTEGERS)}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(value: Any, where: str = "") -> tuple[Any, list[memoryview]]:
    """Return a value as plain data, and the bytes of its tensors, in order; ``where`` is its name for error messages.

    Raises:
        ConfigurationError: it contains something other than tensors, numbers, strings, None, and lists, tuples or maps of these.

    >>> plain, payload = pack({0: {"step": torch.tensor(3.0), "lr": (0.5, None)}})
    >>> unpack(plain, memoryview(b"".join(payload)))
    {0: {'step': tensor(3.), 'lr': (0.5, None)}}
    """
    packer = _Packer()
    return packer.pack(value, where), packer.payload


def packs(value: torch.Tensor) -> bool:
    """Return True for a tensor that `pack` accepts: a dense one of `DTYPES`, and not one that is made of others, as quantized ones are."""
    return value.dtype in _NAMES and value.layout is torch.strided and not hasattr(value, "__tensor_flatten__")


class _Packer:
    def __init__(self) -> None:
        self.payload: list[memoryview] = []
        self._nbytes = 0

    def pack(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [self.pack(item, f"{where}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, dict):
            return {"map": [[self.pack(key, where), self.pack(item, f"{where}[{key!r}]")] for key, item in value.items()]}
        raise ConfigurationError(
            f"{where or 'a value'} is a {type(value).__name__}: it cannot be copied to a rank that comes back; "
            "keep tensors and plain numbers in the optimizer's state"
        )

    def _tensor(self, value: torch.Tensor, where: str) -> Any:
        if not packs(value):
            kind = f"{type(value).__name__} of {value.dtype}, {value.layout}"
            raise ConfigurationError(f"{where} is a {kind} (expected a dense tensor of {', '.join(DTYPES)})")
        dense = value.detach().to("cpu").resolve_conj().contiguous()
        data: memoryview = dense.reshape(-1).view(torch.uint8).numpy().data if dense.numel() else memoryview(b"")
        self.payload.append(data)
        start, self._nbytes = self._nbytes, self._nbytes + len(data)
        return {"tensor": [_NAMES[value.dtype], list(value.shape), start]}


def unpack(plain: Any, payload: memoryview) -> Any:
    """Return the value that `pack` has packed. Its tensors own their memory.

    Raises:
        ProtocolError: plain data and payload do not fit each other.
    """
    if not isinstance(plain, dict):
        return plain
    (kind, content), *more = plain.items()
    if more or kind not in ("tensor", "list", "tuple", "map"):
        raise ProtocolError(f"packed data has the keys {sorted(plain)} (expected one of tensor, list, tuple, map)")
    if kind == "list":
        return [unpack(item, payload) for item in content]
    if kind == "tuple":
        return tuple(unpack(item, payload) for item in content)
    if kind == "map":
        return {unpack(key, payload): unpack(item, payload) for key, item in content}
    name, shape, start = content
    if name not in DTYPES:
        raise ProtocolError(f"packed data has a tensor of {name!r} (expected one of {', '.join(DTYPES)})")
    dtype = DTYPES[name]
    stop = start + prod(shape) * dtype.itemsize
    if not 0 <= start <= stop <= len(payload):
        raise ProtocolError(f"packed data has a tensor at bytes {start} to {stop} (expected within 0 to {len(payload)})")
    data = bytearray(payload[start:stop])
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")).reshape(shape)
