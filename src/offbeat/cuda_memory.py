"""Make and map memory of a GPU that several processes share, through CUDA's driver. No torch, and no context unless memory is mapped.

CUDA's virtual memory management gives memory a file descriptor. A process that holds the descriptor keeps the bytes, even if this process
never uses CUDA and the ones that have written the bytes are dead; the driver frees the memory with the last descriptor and mapping.

Mapped memory is a memoryview: an address and a length, of which slices can be taken and named. **The host cannot read or write it**: a
process that tries is killed. ``tensors/gpu.py`` makes tensors of it.

Source: CUDA driver API, virtual memory management, as the package ``cuda.bindings`` offers it, which CUDA builds of torch bring along.
"""

from __future__ import annotations

import ctypes
import importlib
import weakref
from functools import cache
from typing import Any, Final

from offbeat.errors import ConfigurationError

PACKAGE: Final = "cuda.bindings.driver"
_OUT_OF_MEMORY: Final = 2
"""``CUDA_ERROR_OUT_OF_MEMORY``."""


class OnDevice:
    """What is behind the memoryview of a GPU's memory (its ``obj``)."""

    ordinal: int
    """The GPU's number in this process, which ``CUDA_VISIBLE_DEVICES`` decides."""


def ordinal_of(memory: object) -> int | None:
    """Return the number of the GPU that a memory is on; None: the host can read it.

    >>> ordinal_of(memoryview(b"12345678")[2:4])
    """
    place: object = memory.obj if isinstance(memory, memoryview) else None
    return place.ordinal if isinstance(place, OnDevice) else None


def seen_as(uuid: str) -> int:
    """Return the number that the GPU of this UUID has in this process. Raises `ConfigurationError` if the process does not see it."""
    count = int(_call("cuDeviceGetCount"))
    for ordinal in range(count):
        if uuid_of(ordinal) == uuid:
            return ordinal
    raise ConfigurationError(
        f"this process sees {count} GPUs, and the GPU {uuid}, which a worker uses, is none of them: start all processes of the job with "
        "the same CUDA_VISIBLE_DEVICES, or use --plane host"
    )


def uuid_of(ordinal: int) -> str:
    """Return the UUID of the GPU with this number, in hexadecimal digits. Raises `ConfigurationError` if CUDA cannot be used."""
    return bytes(_call("cuDeviceGetUuid", _call("cuDeviceGet", ordinal)).bytes).hex()


def create(uuid: str, nbytes: int, name: str) -> int:
    """Return the descriptor of new memory on a GPU, whose bytes may be anything.

    Raises:
        ConfigurationError: CUDA refuses it, mostly because there is not so much; the message has ``name``.
    """
    ordinal = seen_as(uuid)
    size = _rounded(nbytes, ordinal)
    handle = _call("cuMemCreate", size, _properties(ordinal), 0, wanted=f"have {size:,} bytes of the GPU's memory for {name!r}")
    try:
        return int(_call("cuMemExportToShareableHandle", handle, _kind_of_descriptor(), 0))
    finally:
        _call("cuMemRelease", handle)  # the descriptor keeps the memory


def mapped(uuid: str, descriptor: int, nbytes: int) -> memoryview:
    """Map memory for this process, until the last view of it is gone. The descriptor stays the caller's.

    Raises:
        ConfigurationError: this process does not see the GPU, or CUDA refuses it.
    """
    if not nbytes:
        return memoryview(bytearray())
    ordinal = seen_as(uuid)
    _context(ordinal)
    handle = _call("cuMemImportFromShareableHandle", descriptor, _kind_of_descriptor())
    try:
        address = _map(handle, _rounded(nbytes, ordinal), ordinal)
    finally:
        _call("cuMemRelease", handle)
    kind: Any = type("DeviceBytes", (OnDevice, ctypes.c_ubyte * nbytes), {"ordinal": ordinal})
    place = kind.from_address(address)
    end = weakref.finalize(place, _unmap, _driver(), address, _rounded(nbytes, ordinal))
    end.atexit = False  # what is in use then ends with the process
    return memoryview(place).cast("B")


def _map(handle: Any, size: int, ordinal: int) -> int:
    driver = _driver()
    address = int(_call("cuMemAddressReserve", size, 0, 0, 0))
    try:
        _call("cuMemMap", address, size, 0, handle, 0)
    except ConfigurationError:
        driver.cuMemAddressFree(address, size)
        raise
    try:
        access = _at(ordinal, driver.CUmemAccessDesc())
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _call("cuMemSetAccess", address, size, [access], 1)
    except ConfigurationError:
        _unmap(driver, address, size)
        raise
    return address


def _unmap(driver: Any, address: int, size: int) -> None:
    driver.cuMemUnmap(address, size)
    driver.cuMemAddressFree(address, size)


@cache
def _driver() -> Any:
    try:
        driver = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise ConfigurationError(
            f"processes share a GPU's memory by way of the package cuda-bindings, which cannot be imported ({error}): install it, or use "
            "--plane host"
        ) from None
    (failed,) = driver.cuInit(0)
    if int(failed):
        raise ConfigurationError(f"CUDA cannot be used in this process (cuInit: error {int(failed)}): use --plane host")
    return driver


def _call(name: str, *arguments: Any, wanted: str = "share a GPU's memory") -> Any:
    """Call a function of the driver. Returns its result, if it has one; raises `ConfigurationError` if it fails."""
    driver = _driver()
    error, *results = getattr(driver, name)(*arguments)
    if int(error):
        called = driver.cuGetErrorName(error)[1]
        what = called.decode() if isinstance(called, bytes) else f"error {int(error)}"
        remedy = "use a smaller model, fewer workers on this GPU, or" if int(error) == _OUT_OF_MEMORY else "use"
        raise ConfigurationError(f"cannot {wanted}: {name} says {what}; {remedy} --plane host")
    return results[0] if results else None


@cache
def _context(ordinal: int) -> Any:
    """Return the context of a GPU in this process, which torch uses, too. It stays until the process ends."""
    return _call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", ordinal))


def _kind_of_descriptor() -> Any:
    return _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _at(ordinal: int, what: Any) -> Any:
    what.location.type = _driver().CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    what.location.id = ordinal
    return what


def _properties(ordinal: int) -> Any:
    driver = _driver()
    properties = _at(ordinal, driver.CUmemAllocationProp())
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _kind_of_descriptor()
    return properties


def _rounded(nbytes: int, ordinal: int) -> int:
    """Return the size of the allocation that has so many bytes."""
    smallest = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    unit = int(_call("cuMemGetAllocationGranularity", _properties(ordinal), smallest))
    return max(1, -(-nbytes // unit)) * unit
