"""A worker that freezes just when it is asked for the initial parameters must not hand them in when others have trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from offbeat.runtime.coordinator_host import CoordinatorHost
from offbeat.runtime.settings import JobSettings
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import hyperparameters, spec_of
from offbeat.transport.base import Buffer, Connection, Message, SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds

EMPTY = memoryview(b"")


class Line(Connection):
    """Notes what is sent over it."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.shares_memory = True
        self.bytes_received = 0
        self.sent: list[dict[str, Any]] = []

    def bind(self, name: str, region: memoryview) -> None:
        """Nothing is carried."""

    def send(
        self, header: Mapping[str, Any], *, carry: str | None = None, payload: Sequence[Buffer] = (), memory: Sequence[SharedMemory] = ()
    ) -> None:
        self.sent.append(dict(header))

    def close(self) -> None:
        """Nothing to close."""

    def got(self, kind: str) -> list[dict[str, Any]]:
        return [header for header in self.sent if header["kind"] == kind]


class Worker:
    """One worker's end, spoken by hand; its parameters are all ``value``."""

    def __init__(self, host: CoordinatorHost, number: int, value: float) -> None:
        self.host, self.number = host, number
        self.line = Line(f"worker {number}")
        model = torch.nn.Linear(4, 1, bias=False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.layout = Layout.of(model, self.optimizer)
        self.value = value
        self.push_block = MemoryBlock.allocate(self.layout.nbytes, "gradients")
        self.pull_block = MemoryBlock.allocate(self.layout.nbytes, "parameters")

    def say(self, kind: str, now: Seconds, *, memory: tuple[SharedMemory, ...] = (), **fields: Any) -> None:
        self.host.on_message(self.line, Message({"kind": kind, **fields}, EMPTY, memory), now)

    def join(self, now: Seconds) -> None:
        wire = {"layout": self.layout.to_wire(), "optimizer": spec_of(self.optimizer).to_wire(), "sync": "asp"}
        self.say("hello", now, worker=self.number, pid=0, memory=(self.push_block, self.pull_block), **wire)
        self.say("ready", now)

    def fill(self, value: float) -> None:
        torch.frombuffer(self.push_block.view, dtype=torch.float32)[:4] = value

    def provide(self, now: Seconds) -> None:
        self.fill(self.value)
        self.say("initial", now, worker=self.number, number=self.number, provided=True)

    def push(self, now: Seconds) -> None:
        self.fill(1.0)
        push = {"incarnation": 1, "version": 0, "samples": 1, "compute_s": 0.1, "leases": (), "nonfinite": None, "loss": None}
        self.say("push", now, number=100, steps=1, hyper=hyperparameters(self.optimizer), push=push)


@pytest.mark.parametrize("when", ["before anybody has trained", "after a fold"])
def test_parameters_that_come_too_late(when: str) -> None:
    settings = JobSettings(workers=2, timeout_s=1.0)
    host = CoordinatorHost(settings, {}, Line("supervisor"), MemoryBlock.allocate, "", lambda: 0.0)
    first, second = Worker(host, 0, 5.0), Worker(host, 1, 7.0)
    first.join(0.0)
    second.join(0.5)
    assert first.line.got("provide") and not second.line.got("provide")
    host.tick(1.2)  # the first has been silent for too long, the second has not
    assert second.line.got("provide")
    second.provide(1.3)
    assert [header["version"] for header in second.line.got("parameters")] == [0]
    if when == "after a fold":
        second.push(1.4)
    first.provide(1.5)
    expected = 6.0 if when == "after a fold" else 7.0  # the second's parameters, less a gradient of 1
    assert _parameters(host) == [expected] * 4
    assert not first.line.got("parameters")
    host.close(True, "enough", 2.0)


def _parameters(host: CoordinatorHost) -> list[float]:
    tensor = torch.frombuffer(host.host._memory, dtype=torch.float32)
    return [float(value) for value in tensor[:4]]
