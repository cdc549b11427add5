"""BatchNorm's running statistics and other buffers, which are no parameters and get no gradient.

During an epoch each worker keeps its own. They travel with each push, and when an epoch ends its waiting workers all receive the mean of
the living workers' last ones: float buffers are averaged, integer buffers (step counters) take the greatest.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import torch

from offbeat.errors import ProtocolError
from offbeat.transport.base import Buffer
from offbeat.types import WorkerId

_NUMPY = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "int64": np.int64, "int32": np.int32}


class ModelBuffers:
    """A worker's end: the buffers of its model that the job shares. ``layout`` is empty where there are none."""

    def __init__(self, model: torch.nn.Module) -> None:
        kept = {name: b for name, b in model.named_buffers() if str(b.dtype).removeprefix("torch.") in _NUMPY}
        self._buffers = list(kept.values())
        self.layout = [[str(b.dtype).removeprefix("torch."), list(b.shape)] for b in self._buffers]

    def read(self) -> list[bytes]:
        """The bytes of all buffers, in the layout's order."""
        return [b.detach().cpu().contiguous().numpy().tobytes() for b in self._buffers]

    def write(self, payload: memoryview) -> None:
        """Set all buffers from such bytes."""
        for buffer, array in zip(self._buffers, _arrays(self.layout, payload), strict=True):
            buffer.copy_(torch.from_numpy(array.copy()))


class BufferBook:
    """The coordinator's end: the last buffers of each worker."""

    def __init__(self) -> None:
        self._layout: list[Any] | None = None
        self._last: dict[WorkerId, list[np.ndarray[Any, Any]]] = {}

    def put(self, worker: WorkerId, layout: list[Any], payload: Buffer) -> None:
        """Note what a worker has sent.

        Raises:
            ProtocolError: the layout differs from that of the workers before it, or from the payload's size.
        """
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            raise ProtocolError(f"worker {worker} has other buffers than the workers before it")
        self._last[worker] = [array.copy() for array in _arrays(layout, payload)]

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone."""
        if len(self._last) > 1:
            self._last.pop(worker, None)

    def mean(self) -> bytes | None:
        """The job's buffers; None: no worker has any."""
        if not self._last:
            return None
        columns: Iterable[tuple[np.ndarray[Any, Any], ...]] = zip(*self._last.values(), strict=True)
        return b"".join(_combine(column).tobytes() for column in columns)


def _combine(column: tuple[np.ndarray[Any, Any], ...]) -> np.ndarray[Any, Any]:
    stacked = np.stack(column)
    if np.issubdtype(stacked.dtype, np.integer):
        return np.asarray(stacked.max(axis=0))
    return np.asarray(stacked.mean(axis=0, dtype=np.float64)).astype(stacked.dtype)


def _arrays(layout: list[Any], payload: Buffer) -> list[np.ndarray[Any, Any]]:
    if any(kind not in _NUMPY for kind, _ in layout):
        raise ProtocolError(f"buffers of kinds {sorted({kind for kind, _ in layout})}: known are {sorted(_NUMPY)}")
    sizes = [prod(shape) * np.dtype(_NUMPY[kind]).itemsize for kind, shape in layout]
    if sum(sizes) != len(payload):
        raise ProtocolError(f"{len(payload)} bytes of buffers where the layout says {sum(sizes)}")
    arrays, start = [], 0
    for (kind, shape), size in zip(layout, sizes, strict=True):
        arrays.append(np.frombuffer(payload[start : start + size], dtype=_NUMPY[kind]).reshape(shape))
        start += size
    return arrays
