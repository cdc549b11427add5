"""What torch is asked about memory of a GPU that several processes share (``cuda_memory.py``).

Tests on machines without a GPU replace the functions that ask for one: `on_cpu`, `home_of`, `tensor_of` and `synchronize`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offbeat.cuda_memory import OnDevice, ordinal_of, uuid_of


def home_of(parameters: Iterable[torch.Tensor]) -> str | None:
    """Return the UUID of the GPU that all parameters are on; None: they are on none, or not all on the same one.

    Raises:
        ConfigurationError: CUDA's driver cannot be called.
    """
    first, *others = {parameter.device for parameter in parameters}
    return None if others or first.type != "cuda" else uuid_of(first.index)


def on_cpu(parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if no parameter is on a GPU."""
    return all(parameter.is_cpu for parameter in parameters)


class _Place:
    """A part of a GPU's memory in the form that CUDA libraries exchange. A tensor that is made of it keeps it, and so the mapping."""

    def __init__(self, memory: memoryview, address: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {"shape": (memory.nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def tensor_of(memory: memoryview, address: int) -> torch.Tensor:
    """Return these bytes of a GPU's memory, which are at ``address``, as a flat tensor. Nothing is copied."""
    assert isinstance(memory.obj, OnDevice)
    device = torch.device("cuda", memory.obj.ordinal)
    return torch.as_tensor(_Place(memory, address), device=device) if memory.nbytes else torch.empty(0, dtype=torch.uint8, device=device)


def is_fault(error: Exception) -> bool:
    """Return True if an error is one of CUDA, after which the process's context may be of no more use."""
    kind = getattr(torch, "AcceleratorError", None)
    return (kind is not None and isinstance(error, kind)) or (isinstance(error, RuntimeError) and "CUDA error" in str(error))


def settle(memory: object) -> None:
    """Wait until the GPU that this memory is on has done all that this process has asked of it; for the host's memory there is no wait.

    What was written is seen by other processes from then on. Nobody waits for another process's kernels: those of a dead one never end.
    """
    if (ordinal := ordinal_of(memory)) is not None:
        synchronize(ordinal)


def synchronize(ordinal: int) -> None:
    """Wait for all kernels and copies of this process on a GPU."""
    torch.cuda.synchronize(ordinal)
