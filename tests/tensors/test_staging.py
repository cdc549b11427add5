"""Copies between the host and a GPU are right, whether CUDA has locked the memory or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout, view
from offbeat.tensors.staging import Staging, each_finite
from offbeat.transport.shm import MemoryBlock, PrivateBlock

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
BIG = 1 << 20


@on_a_gpu
@pytest.mark.parametrize("kind", [MemoryBlock, PrivateBlock])
def test_memory_that_processes_share_is_locked_until_it_is_unlocked(kind: type[MemoryBlock] | type[PrivateBlock]) -> None:
    torch.cuda.init()
    block, staging = kind.allocate(4 * BIG, "test"), Staging()
    memory = torch.frombuffer(block.view, dtype=torch.uint8)
    assert not memory.is_pinned()
    staging.lock(block.view)
    staging.lock(block.view)
    assert memory.is_pinned()
    staging.unlock()
    assert not memory.is_pinned()


@on_a_gpu
def test_what_cuda_refuses_to_lock_is_copied_all_the_same() -> None:
    torch.cuda.init()
    block, staging, other = MemoryBlock.allocate(4 * BIG, "test"), Staging(), Staging()
    memory = torch.frombuffer(block.view, dtype=torch.float32)
    staging.lock(block.view)
    other.lock(block.view)  # it is locked already, of which CUDA tells with an error
    there = torch.arange(BIG, dtype=torch.float32, device="cuda")
    other.copy(memory, there)
    other.wait()
    assert torch.equal(memory, torch.arange(BIG, dtype=torch.float32))
    other.unlock()
    assert memory.is_pinned(), "that was the other's"
    staging.unlock()


@on_a_gpu
def test_parts_of_a_memory_are_copied_whatever_is_locked() -> None:
    """CUDA copies nothing of which only some pages are locked."""
    torch.cuda.init()
    block, staging = MemoryBlock.allocate(4 * BIG + 100, "test"), Staging()
    memory = torch.frombuffer(block.view, dtype=torch.uint8)
    for part in (memory[: 2 * BIG + 64], block.view[: 2 * BIG + 64]):
        staging.lock(part)
        for place in (memory[: 2 * BIG + 64], memory[2 * BIG + 64 :]):
            there = torch.randint(0, 255, (place.numel(),), dtype=torch.uint8, device="cuda")
            staging.copy(place, there)
            staging.wait()
            assert torch.equal(place, there.cpu())
    assert memory[-1:].is_pinned()
    staging.unlock(block.view)
    assert not memory.is_pinned()


@on_a_gpu
def test_gradients_and_parameters_in_any_memory_format_go_there_and_back() -> None:
    """Big enough to be locked, of several dtypes, and one gradient with other strides than its parameter."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(64, 256, 3), nn.Conv2d(256, 256, 3)
    model = nn.Sequential(first, last, nn.Linear(900, 800).half()).cuda()
    last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout = Layout.of(model, optimizer)
    push, pull = (MemoryBlock.allocate(layout.nbytes, name) for name in ("push", "pull"))
    flat = FlatModel(layout, model, push.view, pull.view)
    flat.attach()
    parameters = dict(model.named_parameters())
    for spec in layout.tensors:
        assert torch.equal(view(pull.view, spec), parameters[spec.name].cpu())
    for number in range(3):
        for parameter in parameters.values():
            parameter.grad = torch.randn_like(parameter)
        first.weight.grad = torch.randn_like(first.weight).to(memory_format=torch.channels_last)
        if number == 1:
            assert last.bias is not None
            last.bias.grad = torch.full_like(last.bias, float("inf"))
        assert flat.collect() == ("1.bias" if number == 1 else None)
        for spec in layout.tensors:
            grad = parameters[spec.name].grad
            assert grad is not None and torch.equal(view(push.view, spec), grad.cpu()), spec.name
            view(pull.view, spec).normal_()
        flat.pulled()
        for spec in layout.tensors:
            assert torch.equal(parameters[spec.name].cpu(), view(pull.view, spec)), spec.name
    flat.detach()


def test_a_sum_that_is_not_finite_is_told_of_each_tensor() -> None:
    big = torch.full((4,), 3e38)
    tensors = [torch.ones(3), torch.tensor([1.0, torch.nan]), big, big.double(), torch.ones(2).half(), torch.empty(0)]
    assert each_finite(tensors) == [True, False, False, True, True, True]
