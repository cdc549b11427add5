"""A frozen worker thaws: what it says then comes too late for the job, and what waits for it comes too late for the worker.

Played with real shells and hand-carried messages, since real processes freeze at the worst moment only now and then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from offbeat.runtime.coordinator_host import CoordinatorHost
from offbeat.runtime.settings import JobSettings, WorkerSettings
from offbeat.runtime.worker import WorkerSession
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import hyperparameters, spec_of
from offbeat.transport.base import Address, Arrivals, Buffer, Connection, Hub, Message, SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds

EMPTY = memoryview(b"")


class Line(Connection):
    """Notes what is sent over it."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.shares_memory = True
        self.interface = ""
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
        wire = {"layout": self.layout.to_wire(), "optimizer": spec_of(self.optimizer).to_wire(), "sync": "asp", "local_only": None}
        self.say("hello", now, worker=self.number, pid=0, memory=(self.push_block, self.pull_block), **wire)
        self.say("ready", now)

    def fill(self, value: float) -> None:
        torch.frombuffer(self.push_block.view, dtype=torch.float32)[:4] = value

    def provide(self, now: Seconds) -> None:
        self.fill(self.value)
        self.say("initial", now, worker=self.number, number=self.number, provided=True)

    def parameters(self) -> list[float]:
        """Those that the last release has brought."""
        return [float(value) for value in torch.frombuffer(self.pull_block.view, dtype=torch.float32)[:4]]

    def push(self, now: Seconds) -> None:
        self.fill(1.0)
        push = {"incarnation": 1, "version": 0, "samples": 1, "compute_s": 0.1, "leases": (), "nonfinite": None, "loss": None}
        self.say("push", now, number=100, steps=1, hyper=hyperparameters(self.optimizer), push=push)


@pytest.mark.parametrize("when", ["before anybody has trained", "after a fold"])
def test_parameters_that_come_too_late(when: str) -> None:
    settings = JobSettings(workers=2, timeout_s=1.0)
    host = CoordinatorHost(settings, {}, Line("supervisor"), Mailbox(), MemoryBlock.allocate, "", lambda: 0.0)
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
    second.say("pull", 1.6, incarnation=1)
    assert second.parameters() == [expected] * 4
    assert not first.line.got("parameters")
    host.close(True, "enough", 2.0)


class Mailbox(Hub):
    """Delivers what a test has put in, one bundle for each poll."""

    def __init__(self) -> None:
        self.line = Line("server 0")
        self.bundles: list[list[dict[str, Any]]] = []

    def another(self) -> Hub:
        raise AssertionError("these rules need one hub")

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        raise AssertionError("a worker does not listen")

    def connect(self, address: Address) -> Connection:
        return self.line

    def poll(self, timeout_s: float | None) -> Arrivals:
        assert self.bundles, "the worker waits for something that never comes"
        return [(self.line, Message(header, EMPTY, ())) for header in self.bundles.pop(0)]

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing to close."""


def released(serial: int, incarnation: int, version: int) -> dict[str, Any]:
    return {"kind": "parameters", "serial": serial, "incarnation": incarnation, "version": version, "chief": 0, "plan": [1, 0, None]}


def test_a_release_from_before_the_fence_does_not_count() -> None:
    """It waits beside the fence when a worker thaws; who goes on with it asks for samples as a dead incarnation, and is never answered."""
    hub = Mailbox()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = WorkerSettings(worker=0, workers=2, token="x", servers=(Address("", ("", 0), ""),))
    session = WorkerSession(settings, Layout.of(model, optimizer), spec_of(optimizer), model, optimizer, hub=hub)
    fence = {"kind": "fence", "incarnation": 1, "reason": "incarnation 1 was declared dead"}
    hub.bundles = [[{"kind": "welcome", "in_place": False, "sync": "bsp"}], [{"kind": "joined", "incarnation": 1}, released(1, 1, 0)]]
    session.join("bsp")
    hub.bundles = [
        [released(2, 1, 1), fence],
        [fence],  # frozen again before it could answer
        [{"kind": "joined", "incarnation": 2}, released(3, 2, 9)],
    ]
    model(torch.ones(1, 4)).sum().backward()
    session.step(1)
    assert session.version == 9
    assert len(hub.line.got("ready")) == 2
    hub.bundles = [[released(4, 2, 10)]]
    session.step(1)
    assert [header["push"]["incarnation"] for header in hub.line.got("push")] == [1, 2]
    session.vanish()
