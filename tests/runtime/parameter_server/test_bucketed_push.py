"""Buckets leave when the backward pass has computed them, and again if the script has changed them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.support.memory_network import MemoryHub, MemoryNetwork
from torch import Tensor, nn

from offbeat.runtime.parameter_server.bucketed_push import LONGEST_PAUSE, BucketedPush, EarlyPushes
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout, Span
from offbeat.transport.base import Message

DEPTH = 3


class Line:
    """A worker with a model of `DEPTH` layers, a bucket each, and the memory of a server at the other end of a connection."""

    def __init__(self) -> None:
        network = MemoryNetwork(shares_memory=False)
        self.server, worker = MemoryHub(network, "secret"), MemoryHub(network, "secret")
        self.up = worker.connect(self.server.listen())
        self.up.send({"kind": "hello"})
        [(down, _)] = self.server.poll(None)
        self.model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(DEPTH)))
        self.layout = Layout.of(self.model, torch.optim.SGD(self.model.parameters()))
        self.push, self.came = (bytearray(self.layout.nbytes) for _ in range(2))
        self.up.bind("push", memoryview(self.push))
        down.bind("push", memoryview(self.came))
        self.flat = FlatModel(self.layout, self.model, memoryview(self.push), memoryview(bytearray(self.layout.nbytes)))
        self.flat.attach()
        span = Span(0, self.layout.nbytes)
        self.early = EarlyPushes([BucketedPush(self.up, self.layout, span, memoryview(self.push), None)])
        self.early.allowed = True
        self.flat.computed = self.early.computed
        self.early.begin()

    def backward(self) -> None:
        self.model.zero_grad()
        self.model(torch.randn(4, 16)).square().mean().backward()

    def arrived(self) -> list[int]:
        """The layers whose gradient the server has."""
        self.server.poll(None)
        n = self.layout.nbytes // DEPTH
        return [k for k in range(DEPTH) if any(self.came[k * n : (k + 1) * n])]

    def step(self) -> tuple[int, int]:
        """Complete a push. Returns how many bytes were sent since the last call, and before this one."""
        before = self._came()
        self.early.complete()
        self.up.send({"kind": "push"})
        after = self._came()
        assert self.came == self.push
        self.early.begin()
        return before, after

    def _came(self) -> int:
        [connection] = self.server.connections
        seen = connection.bytes_received
        for _, message in self.server.poll(None):
            assert isinstance(message, Message)
        return (connection.bytes_received - seen) // (self.layout.nbytes // DEPTH)


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr("offbeat.tensors.buckets.BUCKET_NBYTES", 64)
    monkeypatch.setattr("offbeat.tensors.flat.GATHERED_NBYTES", 64)
    torch.manual_seed(0)
    return Line()


def test_a_bucket_leaves_while_the_backward_pass_goes_on(line: Line) -> None:
    seen: list[list[int]] = []
    hidden = torch.randn(4, 16)
    for number, layer in enumerate(line.model):
        hidden = layer(hidden)
        if number < DEPTH - 1:
            hidden.register_hook(lambda _: seen.append(line.arrived()))
    hidden.square().mean().backward()
    assert seen == [[2], [1, 2]], "the hook of a layer's input runs after the gradients of the layers behind it"
    assert line.step() == (1, 0), "only the first layer's gradient was missing, and it came before the step"


def test_a_bucket_that_the_script_has_changed_is_sent_again(line: Line) -> None:
    line.backward()
    [_, second, _] = line.model.parameters()
    assert isinstance(second.grad, Tensor)
    second.grad.data.mul_(0.5)
    assert line.step() == (DEPTH, 1)


def test_a_second_backward_pass_sends_all_again(line: Line) -> None:
    line.backward()
    line.model(torch.randn(4, 16)).square().mean().backward()
    assert line.step() == (DEPTH, DEPTH)


def test_parameters_without_a_gradient_are_sent_at_the_step(line: Line) -> None:
    line.model[1:](torch.randn(4, 16)).square().mean().backward()
    assert line.step() == (DEPTH - 1, 1)


def test_a_rule_may_forbid_to_send_early(line: Line) -> None:
    line.early.allowed = False
    line.backward()
    assert line.step() == (0, DEPTH)


def test_a_script_that_changes_its_gradients_sends_them_twice_ever_more_rarely(line: Line) -> None:
    """And a script that stops it sends early again after the pause, at each step."""

    def step(clips: bool) -> bool:
        line.backward()
        if clips:
            nn.utils.clip_grad_norm_(line.model.parameters(), 1e-3)
        return line.step()[0] > 0

    early = [step(clips=True) for _ in range(2 * LONGEST_PAUSE + 20)]
    places = [number for number, is_early in enumerate(early) if is_early]
    assert [b - a - 1 for a, b in pairwise(places)] == [1, 2, 4, 8, 16, 32, 64]
    later = [step(clips=False) for _ in range(2 * LONGEST_PAUSE)]
    assert all(later[LONGEST_PAUSE:])
