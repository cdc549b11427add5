"""Tensors in lists and maps, as plain data and bytes: how one rank hands another its replica. Nothing is pickled.

A value becomes something msgpack can carry, in which each tensor is a reference to a range of the payload; maps become lists of pairs,
since an optimizer's state has numbers for keys. What cannot be taken apart like this is refused by name.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from offbeat.errors import ConfigurationError, ProtocolError

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Packer:
    """Takes values apart; `payload` are the bytes of their tensors, in order.

    >>> packer = Packer()
    >>> plain = packer.pack({0: {"step": torch.tensor(3.0), "lr": (0.5, None)}})
    >>> unpack(plain, memoryview(b"".join(packer.payload)))
    {0: {'step': tensor(3.), 'lr': (0.5, None)}}
    """

    def __init__(self) -> None:
        self.payload: list[memoryview] = []
        self._nbytes = 0

    def pack(self, value: Any, where: str = "") -> Any:
        """One value as plain data; ``where`` is its name, for error messages.

        Raises:
            ConfigurationError: something in it is neither a tensor, nor a number, a word, None, or a list, tuple or map of these.
        """
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
            f"{where or 'a value'} is a {type(value).__name__}: a rank that comes back cannot be given it; "
            "keep tensors and plain numbers in the optimizer's state"
        )

    def _tensor(self, value: torch.Tensor, where: str) -> Any:
        if value.dtype not in _NAMES or value.layout is not torch.strided:
            raise ConfigurationError(f"{where} is a tensor of {value.dtype}, {value.layout}: known are dense ones of {', '.join(DTYPES)}")
        dense = value.detach().to("cpu").contiguous()
        data: memoryview = dense.reshape(-1).view(torch.uint8).numpy().data if dense.numel() else memoryview(b"")
        self.payload.append(data)
        start, self._nbytes = self._nbytes, self._nbytes + len(data)
        return {"tensor": [_NAMES[value.dtype], list(value.shape), start]}


def unpack(plain: Any, payload: memoryview) -> Any:
    """The value that `Packer.pack` has taken apart; its tensors have memory of their own.

    Raises:
        ProtocolError: the bytes are not those that the plain data speaks of.
    """
    if not isinstance(plain, dict):
        return plain
    (kind, content), *more = plain.items()
    if more or kind not in ("tensor", "list", "tuple", "map"):
        raise ProtocolError(f"packed data has keys {sorted(plain)}")
    if kind == "list":
        return [unpack(item, payload) for item in content]
    if kind == "tuple":
        return tuple(unpack(item, payload) for item in content)
    if kind == "map":
        return {unpack(key, payload): unpack(item, payload) for key, item in content}
    name, shape, start = content
    if name not in DTYPES:
        raise ProtocolError(f"packed data has a tensor of {name!r}; known are {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    stop = start + prod(shape) * dtype.itemsize
    if not 0 <= start <= stop <= len(payload):
        raise ProtocolError(f"packed data has a tensor at bytes {start} to {stop} of {len(payload)}")
    data = bytearray(payload[start:stop])
    return (torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)
