"""Average BatchNorm's running statistics and other buffers, which are no parameters and get no gradient.

During an epoch each worker keeps its own buffers, and sends with each push those that have changed. When the epoch ends, the waiting
workers receive the mean of the living workers' last ones: float buffers are averaged, in float64; whole numbers (step counters) and flags
take the maximum. If a rule exchanges parameters, the mean comes with every fold, and the state of the workers' own optimizers may be
averaged in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Final

import torch

from offbeat.errors import ProtocolError
from offbeat.runtime.job.messages import BUFFERS_MAX
from offbeat.transport.base import Buffer, Connection
from offbeat.transport.schema import Unfit, many, one_of, row, whole
from offbeat.types import WorkerId

_KINDS: Final = ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "int8", "int16", "int32", "int64")
_DTYPES: Final[dict[str, torch.dtype]] = {kind: getattr(torch, kind) for kind in _KINDS}


class ModelBuffers:
    """Read and write the buffers of one worker's model that the job shares.

    Args:
        model: owns the buffers.
        optimizer: its state is shared too, once it has any; None: the state stays this worker's own.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._own = [b for b in model.buffers() if _kind(b) in _DTYPES]
        self._optimizer = optimizer
        self._sent: list[torch.Tensor] = []
        """Copies of what the job has got."""

    def send(self, coordinator: Connection) -> None:
        """Send the buffers that have changed since they were sent: tables and masks, which never change, are sent once.

        The contents are compared, since BatchNorm's kernels change its statistics without a new ``_version``.
        """
        buffers = self._all()
        layout = [[_kind(b), list(b.shape)] for b in buffers]
        if layout != [[_kind(b), list(b.shape)] for b in self._sent]:
            changed, self._sent = list(range(len(buffers))), [b.detach().clone() for b in buffers]
        else:
            changed = [at for at, differs in enumerate(_differ(buffers, self._sent)) if differs]
            for at in changed:
                self._sent[at].copy_(buffers[at].detach())
        if changed:
            payload = [_bytes(self._sent[at]) for at in changed]
            coordinator.send({"kind": "buffers", "layout": layout, "changed": changed}, payload=payload)

    def forget(self) -> None:
        """Forget what the job has got: this worker joins again."""
        self._sent = []

    def write(self, layout: list[Any], payload: memoryview) -> None:
        """Set all buffers, and the optimizer's state if it has any yet, from bytes of this layout."""
        for buffer, value in zip(self._all(), _tensors(layout, payload), strict=False):
            buffer.copy_(value)

    def _all(self) -> list[torch.Tensor]:
        if self._optimizer is None:
            return self._own
        states = (self._optimizer.state.get(p, {}) for group in self._optimizer.param_groups for p in group["params"])
        return self._own + [s[key] for s in states for key in sorted(s) if isinstance(s[key], torch.Tensor) and _kind(s[key]) in _DTYPES]


class BufferBook:
    """Keep the last buffers of each worker, at the coordinator."""

    def __init__(self) -> None:
        self.layout: list[Any] | None = None
        self._last: dict[WorkerId, list[torch.Tensor]] = {}

    def put(self, worker: WorkerId, layout: list[Any], changed: list[int], payload: Buffer) -> None:
        """Keep a worker's buffers, of which those at ``changed`` are new.

        Without the others, which have been forgotten with the worker's death, they are of no use: the worker will join again, with all.

        Raises:
            ProtocolError: the layout differs from the earlier workers', or does not have the places ``changed``, or these do not fit the
                payload's size.
        """
        if self.layout is not None and layout != self.layout:
            raise ProtocolError(f"worker {worker} has other buffers than the workers before it; use the same model in every worker")
        if self.layout is None:
            _check_layout(layout)
        if max(changed) >= len(layout):
            raise ProtocolError(f"worker {worker} has changed its buffer {max(changed)} (expected a number below {len(layout)})")
        last = dict(enumerate(self._last.get(worker, [])))
        last.update(zip(changed, _tensors([layout[at] for at in changed], payload), strict=True))
        if len(last) == len(layout):
            self._last[worker] = [last[at] for at in range(len(layout))]
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
        return b"".join(_bytes(_combine(column)) for column in zip(*chosen, strict=True))


_LAYOUT: Final = many(row(one_of(*_DTYPES), many(whole(0, 1 << 40), 64)), BUFFERS_MAX)


def _check_layout(layout: Any) -> None:
    try:
        _LAYOUT(layout)
    except Unfit as unfit:
        raise ProtocolError(f"a layout of buffers has {'.'.join(unfit.path)} = {unfit.seen} (expected {unfit.expected})") from None


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _differ(now: list[torch.Tensor], before: list[torch.Tensor]) -> list[bool]:
    """Return of each tensor whether it differs from the one before."""
    pairs = list(zip(now, before, strict=True))
    if all(tensor.device.type == "cpu" for tensor in now):
        return [not torch.equal(new, old) for new, old in pairs]
    flags: list[bool] = torch.stack([(new != old).any().to(now[0].device) for new, old in pairs]).tolist()  # one wait for a GPU, not many
    return flags


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()


def _combine(column: tuple[torch.Tensor, ...]) -> torch.Tensor:
    stacked = torch.stack(column)
    return stacked.double().mean(0).to(stacked.dtype) if stacked.is_floating_point() else stacked.amax(0)


def _tensors(layout: list[Any], payload: Buffer) -> list[torch.Tensor]:
    """Return the tensors whose bytes these are, in memory of their own."""
    sizes = [prod(shape) * _DTYPES[kind].itemsize for kind, shape in layout]
    if sum(sizes) != len(payload):
        raise ProtocolError(f"buffers of {len(payload)} bytes do not fit their layout (expected {sum(sizes)} bytes)")
    tensors, start = [], 0
    for (kind, shape), size in zip(layout, sizes, strict=True):
        tensor = torch.empty(shape, dtype=_DTYPES[kind])
        tensor.reshape(-1).view(torch.uint8).numpy().data[:] = payload[start : start + size]
        tensors.append(tensor)
        start += size
    return tensors
