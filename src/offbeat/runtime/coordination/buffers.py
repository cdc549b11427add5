"""Average BatchNorm's running statistics and other buffers, which are no parameters and get no gradient.

During an epoch each worker keeps its own buffers and sends them with each push. When the epoch ends, the waiting workers receive the mean
of the living workers' last ones: float buffers are averaged, integer buffers (step counters) take the maximum. If a rule exchanges
parameters, the mean comes with every fold, and the state of the workers' own optimizers may be averaged in the same way.
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
    """Read and write the buffers of one worker's model that the job shares.

    Args:
        model: owns the buffers.
        optimizer: its state is shared too, once it has any; None: the state stays this worker's own.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._own = [b for b in model.buffers() if _kind(b) in _NUMPY]
        self._optimizer = optimizer

    @property
    def layout(self) -> list[Any]:
        """Return dtype and shape of each buffer; [] if there are none."""
        return [[_kind(b), list(b.shape)] for b in self._all()]

    def read(self) -> list[bytes]:
        """Return the bytes of all buffers, in the layout's order."""
        return [b.detach().cpu().contiguous().numpy().tobytes() for b in self._all()]

    def write(self, layout: list[Any], payload: memoryview) -> None:
        """Set all buffers, and the optimizer's state if it has any yet, from bytes of this layout."""
        for buffer, array in zip(self._all(), _arrays(layout, payload), strict=False):
            buffer.copy_(torch.from_numpy(array.copy()))

    def _all(self) -> list[torch.Tensor]:
        if self._optimizer is None:
            return self._own
        states = (self._optimizer.state.get(p, {}) for group in self._optimizer.param_groups for p in group["params"])
        return self._own + [s[key] for s in states for key in sorted(s) if isinstance(s[key], torch.Tensor) and _kind(s[key]) in _NUMPY]


class BufferBook:
    """Keep the last buffers of each worker, at the coordinator."""

    def __init__(self) -> None:
        self.layout: list[Any] | None = None
        self._last: dict[WorkerId, list[np.ndarray[Any, Any]]] = {}

    def put(self, worker: WorkerId, layout: list[Any], payload: Buffer) -> None:
        """Keep a worker's buffers.

        Raises:
            ProtocolError: the layout differs from the earlier workers', or does not fit the payload's size.
        """
        if self.layout is not None and layout != self.layout:
            raise ProtocolError(f"worker {worker} has other buffers than the workers before it; use the same model in every worker")
        if self.layout is None:
            _check_layout(layout)
        self._last[worker] = [array.copy() for array in _arrays(layout, payload)]
        self.layout = layout

    def forget(self, worker: WorkerId) -> None:
        """Forget a worker's buffers, unless they are the only ones."""
        if len(self._last) > 1:
            self._last.pop(worker, None)

    def mean(self, of: Iterable[WorkerId] | None = None) -> bytes | None:
        """Return the bytes of the mean of these workers' last buffers, by default of all; None if there are none."""
        chosen = [self._last[worker] for worker in sorted(self._last if of is None else of) if worker in self._last]
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
        raise ProtocolError(f"buffers of {len(payload)} bytes do not fit their layout (expected {sum(sizes)} bytes)")
    arrays, start = [], 0
    for (kind, shape), size in zip(layout, sizes, strict=True):
        arrays.append(np.frombuffer(payload[start : start + size], dtype=_NUMPY[kind]).reshape(shape))
        start += size
    return arrays
