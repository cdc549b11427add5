"""BatchNorm's running statistics and other buffers, which are no parameters and get no gradient.

During an epoch each worker keeps its own. They travel with each push, and when an epoch ends its waiting workers all receive the mean of
the living workers' last ones: float buffers are averaged, integer buffers (step counters) take the greatest. Where parameters are
exchanged, the mean comes with every fold, and the state of the workers' own optimizers may come with the buffers, to be averaged too.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Final

import numpy as np
import torch

from offbeat.errors import ProtocolError
from offbeat.transport.base import Buffer
from offbeat.transport.schema import Unfit, many, one_of, row, whole
from offbeat.types import WorkerId

_NUMPY = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "int64": np.int64, "int32": np.int32}


class ModelBuffers:
    """A worker's end: the buffers of its model that the job shares.

    Args:
        model: whose buffers.
        optimizer: whose state is shared too, once it has any; None: it is this worker's own.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._own = [b for b in model.buffers() if _kind(b) in _NUMPY]
        self._optimizer = optimizer

    @property
    def layout(self) -> list[Any]:
        """Kind and shape of each; empty where there are none."""
        return [[_kind(b), list(b.shape)] for b in self._all()]

    def read(self) -> list[bytes]:
        """The bytes of all buffers, in the layout's order."""
        return [b.detach().cpu().contiguous().numpy().tobytes() for b in self._all()]

    def write(self, layout: list[Any], payload: memoryview) -> None:
        """Set all buffers from such bytes, and the optimizer's state if it has any yet."""
        for buffer, array in zip(self._all(), _arrays(layout, payload), strict=False):
            buffer.copy_(torch.from_numpy(array.copy()))

    def _all(self) -> list[torch.Tensor]:
        if self._optimizer is None:
            return self._own
        states = (self._optimizer.state.get(p, {}) for group in self._optimizer.param_groups for p in group["params"])
        return self._own + [s[key] for s in states for key in sorted(s) if isinstance(s[key], torch.Tensor) and _kind(s[key]) in _NUMPY]


class BufferBook:
    """The coordinator's end: the last buffers of each worker."""

    def __init__(self) -> None:
        self.layout: list[Any] | None = None
        self._last: dict[WorkerId, list[np.ndarray[Any, Any]]] = {}

    def put(self, worker: WorkerId, layout: list[Any], payload: Buffer) -> None:
        """Note what a worker has sent.

        Raises:
            ProtocolError: the layout differs from that of the workers before it, or from the payload's size.
        """
        if self.layout is not None and layout != self.layout:
            raise ProtocolError(f"worker {worker} has other buffers than the workers before it")
        if self.layout is None:
            _check_layout(layout)
        self._last[worker] = [array.copy() for array in _arrays(layout, payload)]
        self.layout = layout

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone."""
        if len(self._last) > 1:
            self._last.pop(worker, None)

    def mean(self, of: Iterable[WorkerId] | None = None) -> bytes | None:
        """The job's buffers: the mean of these workers' last ones, or of everybody's. None: there are none."""
        chosen = [self._last[worker] for worker in (self._last if of is None else of) if worker in self._last]
        if not chosen:
            return None
        columns: Iterable[tuple[np.ndarray[Any, Any], ...]] = zip(*chosen, strict=True)
        return b"".join(_combine(column).tobytes() for column in columns)


_LAYOUT: Final = many(row(one_of(*_NUMPY), many(whole(0, 1 << 40), 64)), 1 << 17)


def _check_layout(layout: Any) -> None:
    try:
        _LAYOUT(layout)
    except Unfit as unfit:
        raise ProtocolError(f"a layout of buffers has {'.'.join(unfit.path)} = {unfit.seen} (expected {unfit.expected})") from None


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _combine(column: tuple[np.ndarray[Any, Any], ...]) -> np.ndarray[Any, Any]:
    stacked = np.stack(column)
    if np.issubdtype(stacked.dtype, np.integer):
        return np.asarray(stacked.max(axis=0))
    return np.asarray(stacked.mean(axis=0, dtype=np.float64)).astype(stacked.dtype)


def _arrays(layout: list[Any], payload: Buffer) -> list[np.ndarray[Any, Any]]:
    sizes = [prod(shape) * np.dtype(_NUMPY[kind]).itemsize for kind, shape in layout]
    if sum(sizes) != len(payload):
        raise ProtocolError(f"{len(payload)} bytes of buffers where the layout says {sum(sizes)}")
    arrays, start = [], 0
    for (kind, shape), size in zip(layout, sizes, strict=True):
        arrays.append(np.frombuffer(payload[start : start + size], dtype=_NUMPY[kind]).reshape(shape))
        start += size
    return arrays
