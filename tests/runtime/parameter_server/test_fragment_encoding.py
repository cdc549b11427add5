"""Fragments that travel as changes: what is small beside its neighbours is not lost, whatever becomes of single pushes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offbeat.errors import ProtocolError
from offbeat.runtime.parameter_server.encoding import REMEMBERED, FragmentEncoding
from offbeat.tensors.layout import Layout, Span
from offbeat.tensors.wire_formats import Encoded

NUMEL, LARGE, SMALL, ROUNDS = 512, 1.0, 1e-3, 200
WIRES: list[Encoded] = ["bf16", "int8"]


def values(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.float32)


class Pair:
    """Both ends of one worker's connection, and its parameters."""

    def __init__(self, wire: Encoded) -> None:
        model = nn.ParameterList([torch.zeros(NUMEL)])
        layout = Layout.of(model, torch.optim.SGD(model.parameters()))
        span = Span(0, layout.nbytes)
        self.worker, self.shard = FragmentEncoding(layout, span, wire, pushes=True), FragmentEncoding(layout, span, wire)
        self.memory = memoryview(bytearray(span.nbytes))
        self.own = values(self.memory)

    def released(self, block: torch.Tensor) -> None:
        self.own.copy_(block)
        for end in (self.worker, self.shard):
            end.released(self.memory)

    def pushes(self, number: int) -> torch.Tensor:
        """Make local steps, push; return what the shard has of it."""
        self.own[0] += LARGE  # the first value of each block of 256 decides how coarse the others are
        self.own[256] -= LARGE
        self.own[1:256] += SMALL
        self.own[257:] -= SMALL
        return values(self.shard.decode_push(0, self.worker.encode_push(number, self.memory)))

    def takes(self, block: torch.Tensor) -> None:
        message = self.shard.encode_version(memoryview(bytearray(block.numpy().tobytes())))
        self.own.copy_(values(self.worker.decode_version(0, message)))


def moved(newest: torch.Tensor, each: float) -> float:
    """How far the small values are from where they should be."""
    return float(torch.cat([newest[1:256] - each, newest[257:] + each]).abs().max())


@pytest.mark.parametrize("wire", WIRES)
def test_small_steps_add_up_beside_large_ones(wire: Encoded) -> None:
    pairs, newest = [Pair(wire), Pair(wire)], torch.full((NUMEL,), 5.0)
    for pair in pairs:
        pair.released(newest)
    for number in range(ROUNDS):
        newest = torch.stack([pair.pushes(number) for pair in pairs]).mean(0)
        for pair in pairs:
            pair.takes(newest)
    assert moved(newest - 5.0, ROUNDS * SMALL) < 2 * LARGE / 254, "one rounding error"


@pytest.mark.parametrize("wire", WIRES)
def test_a_push_that_is_not_used_gives_its_feedback_back_though_another_was_made_since(wire: Encoded) -> None:
    pair, newest = Pair(wire), torch.zeros(NUMEL)
    pair.released(newest)
    for number in range(0, 2 * ROUNDS, 2):
        pair.pushes(number)
        newest = pair.pushes(number + 1)  # has the steps of the one before
        for unused in (number, number, -7):  # nothing is given back twice, and nothing of another process
            pair.worker.give_back(unused)
        pair.takes(newest)
    assert moved(newest, 2 * ROUNDS * SMALL) < 4 * LARGE / 254
    assert len(pair.worker._owed) <= REMEMBERED


def test_a_message_of_another_size_or_too_early_is_refused() -> None:
    pair = Pair("int8")
    with pytest.raises(ProtocolError, match=r"worker 0 sent a change of 1 bytes \(expected none before its first parameters\)"):
        pair.shard.decode_push(0, memoryview(b"1"))
    pair.released(torch.zeros(NUMEL))
    for read in (pair.shard.decode_push, pair.worker.decode_version):
        with pytest.raises(ProtocolError, match=r"sent a change of 1 bytes \(expected \d+\)"):
            read(0, memoryview(b"1"))
