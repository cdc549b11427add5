"""A GPU for machines without one: CUDA's driver, as far as ``offbeat/cuda_memory.py`` calls it, over memory of the host.

As with a GPU, descriptors are all that processes share, new memory has any bytes, and **the host cannot touch mapped memory**: the pages at
a mapping's address are there for nobody, and a process that reads them is killed. Tensors see the same bytes at another address.

What it does not have: kernels that run while the host goes on, and contexts that a fault ruins.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from offbeat import cuda_memory
from offbeat.tensors import gpu

UUID = bytes(range(16))
GRANULARITY = 1 << 16
NAN_NBYTES = 1 << 20
"""How much of new memory is filled with bytes that are NaN in every dtype."""
_PROT_NONE, _SHARED_FIXED, _NOWHERE = 0, mmap.MAP_SHARED | 0x10, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Result(IntEnum):
    """The errors of `cuda.bindings.driver.CUresult` that tests ask for."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class FakeDriver(ModuleType):
    """Stands for the module ``cuda.bindings.driver``."""

    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)

    def __init__(self, gpus: int = 1) -> None:
        super().__init__(cuda_memory.PACKAGE)
        self.gpus = gpus
        self.calls: Counter[str] = Counter()
        self.failing: dict[str, Result] = {}
        """By function: what it says in place of doing its work."""
        self.limit_nbytes: int | None = None
        """Most bytes of one allocation; None: no limit."""
        self.handles: dict[int, int] = {}
        """By handle: the descriptor of the memory."""
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, mmap.mmap]] = {}
        """By address: the size of a mapping, and the memory as tensors see it."""
        self._lock = threading.RLock()
        """Of the thread that calls: the garbage collector may end a mapping in the middle of a call."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu") or not callable(found):
            return found

        def called(*arguments: Any) -> Any:
            with self._lock:
                self.calls[name] += 1
                return (self.failing[name], None) if name in self.failing else found(*arguments)

        return called

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuInit(self, flags: int) -> Any:
        return (Result.CUDA_SUCCESS,)

    def cuGetErrorName(self, error: Result) -> Any:
        return Result.CUDA_SUCCESS, Result(error).name.encode()

    def cuDeviceGetCount(self) -> Any:
        return Result.CUDA_SUCCESS, self.gpus

    def cuDeviceGet(self, ordinal: int) -> Any:
        return Result.CUDA_SUCCESS, ordinal

    def cuDeviceGetUuid(self, device: int) -> Any:
        return Result.CUDA_SUCCESS, SimpleNamespace(bytes=bytes([UUID[0] + device, *UUID[1:]]))

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return Result.CUDA_SUCCESS, device

    def cuMemGetAllocationGranularity(self, properties: Any, flags: int) -> Any:
        return Result.CUDA_SUCCESS, GRANULARITY

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        if self.limit_nbytes is not None and size > self.limit_nbytes:
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        descriptor = os.memfd_create("fake GPU", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            return Result.CUDA_ERROR_OUT_OF_MEMORY, None
        os.pwrite(descriptor, b"\xff" * min(size, NAN_NBYTES), 0)
        self.handles[descriptor] = descriptor
        return Result.CUDA_SUCCESS, descriptor

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> Any:
        return Result.CUDA_SUCCESS, os.dup(self.handles[handle])

    def cuMemImportFromShareableHandle(self, descriptor: int, kind: int) -> Any:
        handle = os.dup(descriptor)
        self.handles[handle] = handle
        return Result.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle: int) -> Any:
        os.close(self.handles.pop(handle))
        return (Result.CUDA_SUCCESS,)

    def cuMemAddressReserve(self, size: int, alignment: int, at: int, flags: int) -> Any:
        address = _libc.mmap(None, size, _PROT_NONE, _NOWHERE, -1, 0)
        self.reserved[address] = size
        return Result.CUDA_SUCCESS, address

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        assert self.reserved.pop(address) == size
        _libc.munmap(address, size)
        return (Result.CUDA_SUCCESS,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        if size > os.fstat(self.handles[handle]).st_size:
            return Result.CUDA_ERROR_INVALID_VALUE, None
        self.mapped[address] = size, mmap.mmap(self.handles[handle], size)
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> Any:
        assert self.mapped[address][0] == size
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        del self.mapped[address]
        return (Result.CUDA_SUCCESS,)

    def tensor_of(self, memory: memoryview, address: int) -> torch.Tensor:
        if not memory.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with self._lock:
            start = max(first for first in list(self.mapped) if first <= address)
            size, seen = self.mapped[start]
        assert address + memory.nbytes <= start + size, "a tensor of memory that is not mapped"
        return torch.frombuffer(memoryview(seen)[address - start : address - start + memory.nbytes], dtype=torch.uint8)


def home_of(parameters: Iterable[torch.Tensor]) -> str | None:
    """Models are on the GPU that their parameters name (``fake_gpu``), or on the first."""
    homes = {getattr(parameter, "fake_gpu", 0) for parameter in parameters}
    return cuda_memory.uuid_of(homes.pop()) if len(homes) == 1 else None


def install(gpus: int = 1) -> FakeDriver:
    """Let this process have a GPU from now on."""
    driver = FakeDriver(gpus)
    sys.modules[cuda_memory.PACKAGE] = driver
    for known in (cuda_memory._driver, cuda_memory._context):
        known.cache_clear()
    gpu.on_cpu, gpu.home_of, gpu.tensor_of, gpu.synchronize = lambda parameters: False, home_of, driver.tensor_of, lambda ordinal: None
    return driver


@contextmanager
def fake_gpu(gpus: int = 1) -> Iterator[FakeDriver]:
    """Let this process have a GPU in the block."""
    before = gpu.on_cpu, gpu.home_of, gpu.tensor_of, gpu.synchronize, sys.modules.get(cuda_memory.PACKAGE)
    try:
        yield install(gpus)
    finally:
        gpu.on_cpu, gpu.home_of, gpu.tensor_of, gpu.synchronize, module = before
        sys.modules.pop(cuda_memory.PACKAGE)
        if module is not None:
            sys.modules[cuda_memory.PACKAGE] = module
        for known in (cuda_memory._driver, cuda_memory._context):
            known.cache_clear()
