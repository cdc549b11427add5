"""Copy between the flat memories of this process and parameters that are on a GPU.

All copies of a step are begun one after the other and waited for once. The flat memories are page-locked, so that the GPU reads and writes
them itself; where CUDA refuses, the copies are right all the same and take longer.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

from offbeat.tensors.layout import Memory

SMALLEST_NBYTES = 1 << 20
"""Memories below this are not page-locked: a copy of theirs takes microseconds."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: locked for all GPUs of this process."""


class Staging:
    """Copy between host and GPUs. Nothing that it was given may be used before `wait`."""

    def __init__(self) -> None:
        self._begun: set[torch.device] = set()
        """Devices with copies under way."""
        self._locked: dict[int, bool] = {}
        """By address of a mapping: whether it is locked, or CUDA has refused it."""
        self._last: Memory | None = None
        """What `lock` was given last: it is asked for each tensor."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to copy a tensor to another, one of which is not on the CPU."""
        there = source.device if to.device.type == "cpu" else to.device
        # With other strides or dtypes torch copies in two parts, and does not wait for the first before it begins the second.
        alone = there.type == "cuda" and to.dtype == source.dtype and to.stride() == source.stride()
        to.copy_(source, non_blocking=alone)
        if alone:
            self._begun.add(there)

    def wait(self) -> None:
        """Wait for all copies that were begun."""
        for device in self._begun:
            torch.cuda.current_stream(device).synchronize()
        self._begun.clear()

    def lock(self, memory: Memory) -> None:
        """Page-lock the mapping that a memory of the host is in, once. It must stay until `unlock`.

        Other memory is left as it is: it shares pages with what others copy, and CUDA copies nothing that is locked in part.
        """
        if memory is self._last or not torch.cuda.is_initialized():
            return
        self._last = memory
        mapping = _mapping(memory)
        if mapping is not None and mapping[0] not in self._locked:
            self._locked[mapping[0]] = _registered(*mapping)

    def unlock(self, memory: Memory | None = None) -> None:
        """Undo `lock` of one memory, or of all."""
        self._last = None
        mapping = _mapping(memory) if memory is not None and self._locked else None
        for address in list(self._locked) if memory is None else [mapping[0]] if mapping is not None else []:
            if self._locked.pop(address, False):
                torch.cuda.cudart().cudaHostUnregister(address)


def each_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor, on whatever device, True if its sum is finite: then all its elements are. Waits once for each device."""
    found = [False] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        sums = [tensors[number].sum(dtype=torch.float32 if tensors[number].itemsize < 4 else None).double() for number in numbers]
        for number, finite in zip(numbers, torch.stack(sums).isfinite().tolist(), strict=True):
            found[number] = finite
    return found


def _registered(start: int, nbytes: int) -> bool:
    """Page-lock memory. Returns False if CUDA refuses it."""
    if int(torch.cuda.cudart().cudaHostRegister(start, nbytes, PORTABLE)) == 0:
        return True
    # CUDA keeps the error for the next kernel, whose launch would raise it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
    return False


def _mapping(memory: Memory) -> tuple[int, int] | None:
    """Return address and length, in whole pages, of the mapping that a memory is in; None: it is in none, or in a small one."""
    mapping = memory.obj if isinstance(memory, memoryview) else None
    if not isinstance(mapping, mmap.mmap) or len(mapping) < SMALLEST_NBYTES:
        return None
    return torch.frombuffer(mapping, dtype=torch.uint8).data_ptr(), -(-len(mapping) // mmap.PAGESIZE) * mmap.PAGESIZE
