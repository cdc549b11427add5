"""Lay a model's trainable parameters out in one flat memory; every process of a job uses the same layout.

Gradients ("push" memory) and parameters ("pull" memory) have the same layout, so a server's share of the job is one contiguous range of
bytes. This file computes offsets, sizes and views; it never holds memory itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import torch
from torch import nn

from offbeat.cuda_memory import ordinal_of
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.tensors import gpu

ALIGNMENT = 64
"""Every tensor begins at a multiple of this many bytes: a cache line, and a whole number of elements of every dtype."""

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NBYTES_MAX = 1 << 50
_BALANCE = 0.05

Memory: TypeAlias = memoryview | torch.Tensor
Buffer: TypeAlias = bytes | bytearray | memoryview


class Span(NamedTuple):
    """The bytes ``start`` to ``stop`` of a layout, both multiples of `ALIGNMENT`: one server's share."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class TensorSpec(NamedTuple):
    """One trainable parameter and its place."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements. Dense: the elements fill ``numel`` places, in any order (channels_last)."""
    dtype: str
    group: int
    """The optimizer's parameter group."""
    slot: int
    """The parameter's number in the optimizer's ``state_dict``."""
    offset: int
    """In bytes, a multiple of `ALIGNMENT`."""
    numel: int

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def stop(self) -> int:
        """The byte after the last, padding included."""
        return aligned(self.offset + self.nbytes)


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a model, in model order, and their size in bytes.

    In memory, tensors are sorted by dtype, then by parameter group, then by model order, so that long runs can be treated alike.

    >>> model = nn.Linear(3, 2)
    >>> layout = Layout.of(model, torch.optim.SGD(model.parameters()))
    >>> [(t.name, t.shape, t.offset) for t in layout.tensors], layout.nbytes
    ([('weight', (2, 3), 0), ('bias', (2,), 64)], 128)
    """

    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @classmethod
    def of(cls, model: nn.Module, optimizer: torch.optim.Optimizer) -> Layout:
        """Return the layout of the parameters that ``optimizer`` trains, without frozen parameters.

        Raises:
            ConfigurationError: no parameter is left; the optimizer holds one that is not the model's, or one twice; or one cannot be laid
                out (sparse, complex, not initialised, on the meta device).
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        places = _places(optimizer, names)
        specs = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) in places:
                group, slot = places[id(parameter)]
                dtype = _dtype_name(name, parameter)
                shape = tuple(parameter.shape)
                specs.append(TensorSpec(name, shape, _dense_stride(parameter), dtype, group, slot, 0, parameter.numel()))
        if not specs:
            raise ConfigurationError(
                f"{type(model).__name__} has no trainable parameter in the optimizer: pass it model.parameters(), with requires_grad=True"
            )
        return cls(*_placed(specs))

    @cached_property
    def in_memory_order(self) -> tuple[int, ...]:
        """Return the indices of `tensors`, by ascending offset."""
        return tuple(sorted(range(len(self.tensors)), key=lambda i: (self.tensors[i].offset, self.tensors[i].stop, i)))

    def to_wire(self) -> dict[str, Any]:
        """Return the layout as plain data that msgpack can carry."""
        return {"nbytes": self.nbytes, "tensors": [[list(x) if isinstance(x, tuple) else x for x in tensor] for tensor in self.tensors]}

    @classmethod
    def from_wire(cls, data: Any) -> Layout:
        """Return the layout that `to_wire` has written, from data that a peer sent.

        Raises:
            ProtocolError: the data are not what `to_wire` writes, down to each offset.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("tensors"), Sequence) or isinstance(data["tensors"], str | bytes):
            raise ProtocolError(f"a layout must be a map with 'tensors' and 'nbytes', not {type(data).__name__}")
        specs = [_read_spec(i, row) for i, row in enumerate(data["tensors"])]
        if not specs or len({spec.name for spec in specs}) < len(specs) or len({spec.slot for spec in specs}) < len(specs):
            raise ProtocolError(f"a layout has {len(specs)} tensors (expected at least one, each with its own name and slot)")
        placed, nbytes = _placed(specs)
        for spec, expected in zip(specs, placed, strict=True):
            if spec.offset != expected.offset:
                raise ProtocolError(f"{spec.name!r} is at byte {spec.offset} of the layout (expected {expected.offset})")
        if data.get("nbytes") != nbytes or nbytes > _NBYTES_MAX:
            raise ProtocolError(f"a layout has nbytes = {data.get('nbytes')!r} (expected {nbytes}, at most {_NBYTES_MAX})")
        return cls(placed, nbytes)

    def difference(self, other: Layout) -> str | None:
        """Return a sentence about the first tensor, in this model's order, that differs in ``other``; None if none does."""
        theirs = {tensor.name: tensor for tensor in other.tensors}
        for mine in self.tensors:
            if mine.name not in theirs:
                return f"{mine.name} {mine.shape} is missing in the other model"
            if (how := _differs(mine, theirs.pop(mine.name))) is not None:
                return f"{mine.name} {how}"
        if theirs:
            extra = next(iter(theirs.values()))
            return f"{extra.name} {extra.shape} is only in the other model"
        if [t.offset for t in self.tensors] != [t.offset for t in other.tensors]:
            return "the same tensors come in another order in the other model"
        return None

    def spans(self, count: int, splittable: bool) -> tuple[Span, ...]:
        """Return ``count`` contiguous spans of about equal size; some may be empty.

        A cut is at a tensor's edge if there is one within 5 % of a share from the balanced place, or if tensors must stay whole
        (``splittable=False``, then at the nearest edge); otherwise at the balanced place, inside a tensor, at a multiple of `ALIGNMENT`.
        """
        assert count >= 1, count
        edges = [0, *(self.tensors[i].stop for i in self.in_memory_order)]
        share = self.nbytes / count
        cuts = [0]
        for k in range(1, count):
            target = share * k
            at = bisect_left(edges, target)
            edge = min(edges[max(at - 1, 0) : at + 1], key=lambda edge: abs(edge - target))
            near = not splittable or abs(edge - target) <= _BALANCE * share
            cut = edge if near else round(target / ALIGNMENT) * ALIGNMENT
            cuts.append(min(max(cut, cuts[-1]), self.nbytes))
        return tuple(Span(a, b) for a, b in zip(cuts, [*cuts[1:], self.nbytes], strict=True))


def view(memory: Memory, spec: TensorSpec) -> torch.Tensor:
    """Return the tensor of ``spec`` in a memory that holds the whole layout. Nothing is copied.

    From a memoryview each tensor gets a storage of exactly its own bytes, so that saving one does not save its neighbours.
    """
    flat = elements(memory, spec.offset, spec.numel, DTYPES[spec.dtype])
    return torch.as_strided(flat, spec.shape, spec.stride)


def elements(memory: Memory, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the ``numel`` elements from byte ``start`` of a memory, as a flat tensor. Nothing is copied."""
    nbytes = numel * dtype.itemsize
    assert start >= 0 and start + nbytes <= memory.nbytes, (start, nbytes, memory.nbytes)
    if isinstance(memory, torch.Tensor):
        return memory[start : start + nbytes].view(dtype)
    if ordinal_of(memory) is not None:
        at = int(np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]) + start
        return gpu.tensor_of(memory[start : start + nbytes], at).view(dtype)
    if numel == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    return torch.frombuffer(memory[start : start + nbytes], dtype=dtype)


def copy(to: bytearray | memoryview, source: Buffer) -> None:
    """Copy all bytes of a memory to one of the same size, each on the host or on a GPU. A copy within a GPU may be under way afterwards."""
    if ordinal_of(to) is None and ordinal_of(source) is None:
        memoryview(to)[:] = source
    else:
        _bytes_of(to).copy_(_bytes_of(source))


@overload
def on_host(memory: memoryview) -> memoryview: ...
@overload
def on_host(memory: Memory) -> Memory: ...
def on_host(memory: Memory) -> Memory:
    """Return these bytes where the host can read them: the memory itself, or a copy of what is on a GPU."""
    if isinstance(memory, torch.Tensor) or ordinal_of(memory) is None:
        return memory
    here = memoryview(bytearray(memory.nbytes))
    copy(here, memory)
    return here


def _bytes_of(memory: Buffer) -> torch.Tensor:
    view = memoryview(memory)
    if view.readonly and ordinal_of(view) is None:  # torch would warn
        view = memoryview(bytearray(view))
    return elements(view, 0, view.nbytes, torch.uint8)


def aligned(nbytes: int) -> int:
    """Return the least multiple of `ALIGNMENT` that is not smaller."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _placed(specs: Iterable[TensorSpec]) -> tuple[tuple[TensorSpec, ...], int]:
    placed, offset = list(specs), 0
    for i in sorted(range(len(placed)), key=lambda i: (placed[i].dtype, placed[i].group, i)):
        placed[i] = placed[i]._replace(offset=offset)
        offset = placed[i].stop
    return tuple(placed), offset


def _places(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[int, tuple[int, int]]:
    """Return parameter id -> (group, slot). Raises `ConfigurationError` unless each is the model's and held once."""
    places: dict[int, tuple[int, int]] = {}
    for group, entry in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(entry["params"]):
            if id(parameter) not in names:
                raise ConfigurationError(
                    f"parameter {position} of the optimizer's group {group}, of shape {tuple(parameter.shape)}, is not the model's: "
                    "build the optimizer from the parameters of the model that is passed beside it; for several models pass "
                    "torch.nn.ModuleList([a, b])"
                )
            if id(parameter) in places:
                raise ConfigurationError(f"the optimizer holds {names[id(parameter)]} twice; give each parameter to one group, once")
            places[id(parameter)] = (group, len(places))
    return places


def _dtype_name(name: str, parameter: torch.Tensor) -> str:
    if isinstance(parameter, nn.UninitializedParameter):
        raise ConfigurationError(f"{name} has no shape yet: run one batch through the model before its optimizer is made")
    if parameter.layout is not torch.strided:
        raise ConfigurationError(f"{name} is a {parameter.layout} tensor; only dense parameters can be trained here")
    if parameter.device.type == "meta":
        raise ConfigurationError(f"{name} is on the meta device and has no values: call model.to_empty(...) and initialise it first")
    if parameter.dtype not in _NAMES:
        way_out = "; keep torch.view_as_real(w), and compute with torch.view_as_complex of it" if parameter.is_complex() else ""
        raise ConfigurationError(f"{name} is {parameter.dtype}; trainable parameters must be one of {', '.join(DTYPES)}{way_out}")
    return _NAMES[parameter.dtype]


def _dense_stride(parameter: torch.Tensor) -> tuple[int, ...]:
    stride, shape = tuple(parameter.stride()), tuple(parameter.shape)
    if prod(shape) != 1 and _is_dense(shape, stride):  # of a single element any stride is dense, also one that no view as bytes can have
        return stride
    return tuple(torch.empty(shape, device="meta").stride())


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if the elements fill exactly prod(shape) places. Strides of axes with one element are unused, but not negative."""
    if prod(shape) == 0:
        return all(s >= 0 for s in stride)
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= size
    return all(0 <= s <= _NBYTES_MAX for s in stride)


def _read_spec(index: int, row: Any) -> TensorSpec:
    def whole(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _NBYTES_MAX

    def wholes(value: Any) -> bool:
        return isinstance(value, list | tuple) and len(value) <= 64 and all(map(whole, value))

    if not isinstance(row, list | tuple) or len(row) != len(TensorSpec._fields):
        raise ProtocolError(f"tensor {index} of a layout must be a list of {', '.join(TensorSpec._fields)}")
    name, shape, stride, dtype, group, slot, offset, numel = row
    if not isinstance(name, str) or not name or not wholes(shape) or not wholes(stride) or len(shape) != len(stride):
        raise ProtocolError(f"tensor {index} of a layout: {name!r} with shape {shape!r} and stride {stride!r} is not valid")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ProtocolError(f"{name!r} of a layout has dtype {dtype!r} (expected one of {', '.join(DTYPES)})")
    if not all(map(whole, (group, slot, offset, numel))) or prod(shape) != numel or not _is_dense(shape, stride):
        raise ProtocolError(f"{name!r} of a layout: shape {shape!r}, stride {stride!r}, {numel!r} elements, at {offset!r} do not fit")
    return TensorSpec(name, tuple(shape), tuple(stride), dtype, group, slot, offset, numel)


def _differs(mine: TensorSpec, theirs: TensorSpec) -> str | None:
    if mine.shape != theirs.shape:
        return f"has shape {mine.shape}, in the other model {theirs.shape}"
    if mine.dtype != theirs.dtype:
        return f"is {mine.dtype}, in the other model {theirs.dtype}"
    if mine.group != theirs.group:
        return f"is in the optimizer's group {mine.group}, in the other's {theirs.group}"
    if mine.slot != theirs.slot:
        return f"is parameter {mine.slot} of the optimizer, of the other's {theirs.slot}"
    if any(a != b for a, b, n in zip(mine.stride, theirs.stride, mine.shape, strict=True) if n > 1):
        return f"has strides {mine.stride}, in the other model {theirs.stride} (another memory format)"
    return None
