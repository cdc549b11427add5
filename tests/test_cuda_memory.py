"""Memory of a GPU that processes share: made, mapped and given back, and refused in words. With the fake GPU of ``tests/support``."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.support.fake_cuda import FakeDriver, Result, fake_gpu

from offbeat import cuda_memory
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.tensors.layout import copy, elements, on_host
from offbeat.transport import wire
from offbeat.transport.device_memory import DeviceBlock

NBYTES = 4096


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with fake_gpu() as driver:
        yield driver


def made(uuid: str | None = None) -> DeviceBlock:
    return DeviceBlock.allocate_on(uuid or cuda_memory.uuid_of(0), NBYTES, "gradients of worker 1")


def floats(block: DeviceBlock) -> torch.Tensor:
    return elements(block.view, 0, NBYTES // 4, torch.float32)


def test_whoever_has_the_descriptor_has_the_bytes(driver: FakeDriver) -> None:
    block = made()
    assert floats(block).isnan().all(), "new memory has any bytes"
    floats(block)[:3] = torch.tensor([1.0, 2.0, 3.0])
    held = DeviceBlock.receive_on(block.uuid, os.dup(block.descriptor), NBYTES, mapped=False)  # as the supervisor does, without CUDA
    del block
    gc.collect()
    assert not driver.mapped
    again = DeviceBlock.receive_on(held.uuid, os.dup(held.descriptor), NBYTES)
    assert floats(again)[:3].tolist() == [1.0, 2.0, 3.0]


def test_what_the_host_must_read_is_copied(driver: FakeDriver) -> None:
    """A look at the memory itself would end this process."""
    block = made()
    copy(block.view[64:72], b"12345678")
    assert bytes(on_host(block.view[66:70])) == b"3456"
    here = bytearray(8)
    copy(here, block.view[64:72].toreadonly())
    assert here == b"12345678"
    other = made()
    copy(other.view, block.view)
    assert bytes(on_host(other.view[64:72])) == b"12345678"


def test_the_mapping_ends_with_the_last_view(driver: FakeDriver) -> None:
    block = made()
    part = block.view[8:16]
    block.close()
    del block
    gc.collect()
    assert driver.mapped
    del part
    gc.collect()
    assert not driver.mapped and not driver.reserved and not driver.handles


CALLS = [
    *("cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid", "cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"),
    *("cuDevicePrimaryCtxRetain", "cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"),
]


@pytest.mark.parametrize("call", CALLS)
def test_whatever_call_fails_is_named_and_nothing_is_left(driver: FakeDriver, call: str) -> None:
    uuid, before = cuda_memory.uuid_of(0), len(os.listdir("/proc/self/fd"))
    driver.failing[call] = Result.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ConfigurationError, match=f"{call} says CUDA_ERROR_INVALID_VALUE; use --plane host"):
        made(uuid)
    gc.collect()
    assert not driver.mapped and not driver.reserved and not driver.handles
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_little_memory_is_said_with_the_bytes(driver: FakeDriver) -> None:
    driver.limit_nbytes = 1000
    with pytest.raises(
        ConfigurationError, match=r"65,536 bytes of the GPU's memory for 'gradients of worker 1'.*OUT_OF_MEMORY.*fewer workers"
    ):
        made()


def test_a_gpu_that_this_process_does_not_see_is_said(driver: FakeDriver) -> None:
    block = made()
    driver.gpus = 0
    other = DeviceBlock.receive_on(block.uuid, os.dup(block.descriptor), NBYTES)
    assert other.unusable is not None and "sees 0 GPUs" in other.unusable and "CUDA_VISIBLE_DEVICES" in other.unusable


def test_a_size_that_the_memory_has_not_is_not_mapped(driver: FakeDriver) -> None:
    block = made()
    other = DeviceBlock.receive_on(block.uuid, os.dup(block.descriptor), 1 << 30)
    assert other.unusable is not None and "cuMemMap" in other.unusable and not other.view


def test_without_the_package_the_error_names_it(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, cuda_memory.PACKAGE, None)
    with pytest.raises(ConfigurationError, match="cuda-bindings"):
        cuda_memory.uuid_of(0)


WRONG = [7, [], [None, None], ["x"], [["x"]], [[1, 2]], [["x", -1]], [["x", True]], [["x" * 65, 1]], [["x", 1 << 51]]]


@pytest.mark.parametrize("places", WRONG)
def test_a_message_about_such_memory_is_checked(places: object) -> None:
    with pytest.raises(ProtocolError, match="_gpu"):
        wire.gpu_memory(places, 1)
