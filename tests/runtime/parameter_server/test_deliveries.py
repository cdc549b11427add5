"""Parameters leave bucket by bucket while the fold goes on, and a worker gets what one message with all of them would bring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.memory_network import MemoryHub, MemoryNetwork
from torch import Tensor, nn

from offbeat.core.policy import ServerRule
from offbeat.policies import rule_of
from offbeat.runtime.parameter_server.encoding import EXACT, WorkerEncoding
from offbeat.runtime.parameter_server.shard import LiveShard, half_nbytes
from offbeat.tensors.layout import Layout, Span
from offbeat.tensors.optimizers import spec_of
from offbeat.transport.base import Connection, Message
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.wire import EMPTY
from offbeat.types import WireFormat, WorkerId

NUMEL = 1000
BUCKET_NBYTES = 256
NUMBER_OF_BUCKETS = -(-(4 * NUMEL) // BUCKET_NBYTES) - 1
"""The last bucket has what is left over."""


class Watched:
    """A connection from a shard to a worker, which notes what the shard's parameters were when a bucket left."""

    def __init__(self, beneath: Connection, shard: LiveShard) -> None:
        self._beneath, self._shard = beneath, shard
        self.left_at: list[tuple[int, bool]] = []
        """Of each bucket: its first byte in the region, and whether the shard's last parameter was new by then."""
        self._first = bytes(shard._memory[-4:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)

    def begin(self) -> None:
        self._first = bytes(self._shard._memory[4 * NUMEL - 4 : 4 * NUMEL])
        self.left_at.clear()

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        self.left_at.append((start, bytes(self._shard._memory[4 * NUMEL - 4 : 4 * NUMEL]) != self._first))
        self._beneath.send_ahead(name, start, stop)


class Line:
    """A shard of ``sync`` and a worker that does not share its memory."""

    def __init__(self, sync: str, wire: WireFormat, *, halves: bool = False) -> None:
        network = MemoryNetwork(shares_memory=False)
        self.server, self.worker = MemoryHub(network, "secret"), MemoryHub(network, "secret")
        self.up = self.worker.connect(self.server.listen())
        self.up.send({"kind": "hello"})
        [(down, _)] = self.server.poll(None)
        model = nn.ParameterList([torch.zeros(NUMEL)])
        sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        layout = Layout.of(model, sgd)
        span = Span(0, layout.nbytes)
        memory = MemoryBlock.allocate(half_nbytes(layout) + layout.nbytes, "two halves") if halves else None
        self.shard = LiveShard(0, layout, span, spec_of(sgd), rule_of(ServerRule, sync), memory=memory)
        self.down = Watched(down, self.shard)
        self.push, self.pull = (memoryview(bytearray(layout.nbytes)) for _ in range(2))
        self.encoding: WorkerEncoding | None = None
        if wire == "float32":
            self.up.bind("push", self.push)
            self.up.bind("pull", self.pull)
        else:
            self.encoding = WorkerEncoding(self.up, layout, span, wire, self.push, self.pull)
        header = {"kind": "attach", "worker": 0, "wire": wire}
        self.shard.attach(WorkerId(0), self.down, Message(header, EMPTY, ()), in_place=False)
        self.shard.apply([{"do": "enter", "worker": 0}])

    def fold(self, gradient: Tensor) -> None:
        """One version of this gradient, which the worker is released to."""
        torch.frombuffer(self.shard._slots[WorkerId(0)].push, dtype=torch.float32)[:NUMEL].copy_(gradient)
        self.down.begin()
        fold = {"do": "fold", "version": 1, "parts": [(0, 1.0)], "sums": [], "hyper": None, "scale": 1.0}
        self.shard.apply([fold, self.release(exact=False)])

    def release(self, *, exact: bool, anew: bool = False) -> dict[str, Any]:
        return {"do": "release", "worker": 0, "incarnation": 1, "serial": 1, "version": 1, "exact": exact, "anew": anew}

    def receive(self) -> Tensor:
        """Return the parameters that the worker has once its release has come."""
        [(_, message)] = self.worker.poll(None)
        assert isinstance(message, Message)
        if self.encoding is not None:
            self.encoding.decode(exact=message.header["exact"])
        return torch.frombuffer(self.pull, dtype=torch.float32)[:NUMEL].clone()

    def parameters(self) -> Tensor:
        return torch.frombuffer(self.shard._memory, dtype=torch.float32)[:NUMEL].clone()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.tensors.buckets.BUCKET_NBYTES", BUCKET_NBYTES)
    monkeypatch.setattr("offbeat.tensors.blocks.BLOCK_NUMEL", 64)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize(("wire", "most"), [("float32", 0.0), ("bf16", 2**-8), ("int8", 2 / 254)])
def test_buckets_leave_while_the_fold_goes_on(sync: str, wire: WireFormat, most: float) -> None:
    line, noise = Line(sync, wire), torch.Generator().manual_seed(0)
    for _ in range(3):
        line.fold(torch.randn(NUMEL, generator=noise))
        places = [place for place, _ in line.down.left_at]
        assert len(places) == NUMBER_OF_BUCKETS
        assert places == sorted(set(places)), "each bucket once, by ascending place"
        early = [place for place, is_last_new in line.down.left_at if not is_last_new]
        assert len(early) > NUMBER_OF_BUCKETS // 2, "while the shard computes the rest"
        error = (line.receive() - line.parameters()).abs().max()
        assert error <= most * line.parameters().abs().max()


@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("wire", ["float32", "bf16"])
def test_buckets_are_those_of_the_half_that_is_written(sync: str, wire: WireFormat) -> None:
    line, whole = Line(sync, wire, halves=True), Line(sync, wire)
    for turn in range(3):
        for one in (line, whole):
            one.fold(torch.full((NUMEL,), 2.0 + turn))
        assert len(line.down.left_at) == NUMBER_OF_BUCKETS
        received = line.receive()
        assert torch.equal(line.parameters(), whole.parameters()) and torch.equal(received, whole.receive())
        line.shard.apply([line.release(exact=True, anew=True)])
        assert torch.equal(line.receive(), line.parameters())


def test_a_release_without_a_fold_travels_in_buckets_too() -> None:
    line = Line("asp", "bf16")
    line.shard.apply([line.release(exact=False)])
    assert len(line.down.left_at) == NUMBER_OF_BUCKETS
    assert torch.equal(line.receive(), line.parameters())


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_parameters_that_a_worker_has_travel_again_only_if_they_must(sync: str) -> None:
    line = Line(sync, "float32")
    line.fold(torch.ones(NUMEL))
    line.receive()
    for anew, buckets in ((False, 0), (True, NUMBER_OF_BUCKETS), (False, 0)):
        line.down.begin()
        line.shard.apply([line.release(exact=True, anew=anew)])
        assert len(line.down.left_at) == buckets
        assert torch.equal(line.receive(), line.parameters())
    line.fold(torch.ones(NUMEL))
    assert torch.equal(line.receive(), line.parameters()), "and after a fold all of them"


@pytest.mark.parametrize("wire", ["bf16", "int8"])
def test_exact_parameters_travel_in_one_region_and_later_changes_are_to_them(wire: WireFormat) -> None:
    line, noise = Line("bsp", wire), torch.Generator().manual_seed(0)
    line.fold(torch.randn(NUMEL, generator=noise))
    line.receive()
    line.down.begin()
    assert EXACT in line.up._regions  # type: ignore[attr-defined]
    line.shard.apply([line.release(exact=True)])
    assert not line.down.left_at
    assert torch.equal(line.receive(), line.parameters())
    line.fold(1e-3 * torch.randn(NUMEL, generator=noise))
    error = (line.receive() - line.parameters()).abs().max()
    assert error <= (2**-8 * line.parameters().abs().max() if wire == "bf16" else 5e-3 / 254)


def test_a_gradient_is_decoded_as_it_arrives() -> None:
    """And once more if it has changed; what does not arrive as a bucket is decoded at the push."""
    line = Line("bsp", "bf16")
    assert line.encoding is not None
    values = torch.frombuffer(line.push, dtype=torch.float32)[:NUMEL]
    came = torch.frombuffer(line.shard._slots[WorkerId(0)].push, dtype=torch.float32)[:NUMEL]
    values.fill_(1.0)
    for value in (1.0, 2.0):
        values.fill_(value)
        line.up.send_ahead("push", *line.encoding.encode(0))
        line.server.poll(None)
        assert bool((came[: BUCKET_NBYTES // 4] == value).all())
        assert not came[BUCKET_NBYTES // 4 :].any(), "the other buckets have not arrived"
    for number in range(1, NUMBER_OF_BUCKETS):
        line.encoding.encode(number)
    line.up.send_ahead("push", line.encoding.encode(1)[0], len(line.encoding._encoded_push))  # no bucket, but the rest
    line.server.poll(None)
    line.shard.decode(line.down)
    assert torch.equal(came, values)
