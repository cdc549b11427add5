"""Check state that scripts load after wrapping their optimizer: whether it comes too late, and whether all workers load the same.

With its first push each worker of a starting job sends a checksum of what it has loaded, 0 for nothing; the coordinator compares them. A
worker that joins a running job sends none: it gets the job's state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.types import WorkerId

SAMPLE: Final = 64
"""Elements of a frozen parameter that count in its checksum: pretrained models are large, and other weights differ everywhere."""


def checksum(parameters: Iterable[torch.Tensor], state: Mapping[str, Any]) -> int:
    """Return a number above 0 that differs, with a chance of 1 in 4 billion to the contrary, if a bit of the parameters or the state
    differs.

    Args:
        parameters: the model's, in an order that all workers share.
        state: an optimizer's ``state_dict``; its ``param_groups`` do not count, since schedulers may differ between workers.

    >>> state = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": []}
    >>> checksum([torch.ones(2)], state) == checksum([torch.ones(2)], state)
    True
    >>> checksum([torch.ones(2)], state) == checksum([torch.zeros(2)], state)
    False
    """
    crc = 0
    for parameter in parameters:
        crc = zlib.crc32(_bytes(parameter), crc)
    for slot in sorted(state["state"]):
        for key, value in sorted(state["state"][slot].items()):
            crc = zlib.crc32(f"{slot} {key}".encode(), crc)
            crc = zlib.crc32(_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode(), crc)
    return crc | 1 << 32


def frozen(model: torch.nn.Module, trained: Iterable[torch.Tensor]) -> int | None:
    """Return a checksum of the first elements of each parameter that is not ``trained``; None: all are.

    >>> layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    >>> frozen(layers, layers.parameters()), frozen(layers, layers[0].parameters()) == frozen(layers, layers[1].parameters())
    (None, False)
    """
    known = set(map(id, trained))
    samples = [part.reshape(-1)[:SAMPLE] for one in model.parameters() if id(one) not in known for part in _plain_parts(one.detach())]
    return checksum(samples, {"state": {}}) if samples else None


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of which one is made, such as the numbers and the scales of a quantized one; itself, if it is a plain one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in _plain_parts(getattr(tensor, name))]


def _bytes(value: torch.Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def too_late(what: str) -> ConfigurationError:
    """Return the error for a load that comes after ``what``, given in words."""
    return ConfigurationError(
        f"load_state_dict() was called after {what}, and the job trains on from what it has: load right after wrapping the optimizer, "
        "before the first batch, pull() and step(). To go back to an earlier state load the model, wrap a new optimizer, and load its state"
    )


class Loaded:
    """Compare what the workers that began the job have loaded."""

    def __init__(self) -> None:
        self._first: tuple[WorkerId, int] | None = None
        self._noted: set[WorkerId] = set()

    def note(self, worker: WorkerId, loaded: int) -> None:
        """Compare a worker's checksum with the first one.

        Raises:
            JobError: another worker has loaded something else.
            ProtocolError: this worker has sent one before; a process that comes later gets the job's state.
        """
        if worker in self._noted:
            raise ProtocolError(f"worker {worker} sent 'push' with loaded = {loaded} a second time (expected with its first push only)")
        self._noted.add(worker)
        if self._first is None:
            self._first = worker, loaded
        other, before = self._first
        if loaded == before:
            return
        if loaded and before:
            seen = (
                f"workers {other} and {worker} have loaded different states, or have set their parameters to different values, after "
                f"wrapping (checksums {before:#x} and {loaded:#x})"
            )
        else:
            having, without = (worker, other) if loaded else (other, worker)
            seen = f"worker {having} has loaded a state, or set its parameters, after wrapping its optimizer, and worker {without} has not"
        raise JobError(f"{seen}: every worker must load the same file, or each must load it before wrapping; the job cannot begin so")
