"""The shells of a job with messages carried by hand, for what real processes do only now and then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offbeat.policies import rule
from offbeat.runtime.coordination.file_writer import FileWriter
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.live_job import LiveJob
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import hyperparameters, spec_of
from offbeat.transport.base import Address, Arrivals, Buffer, Connection, Hub, Message, PartArrived, SharedMemory
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

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        """Nothing is carried."""

    def send(
        self,
        header: Mapping[str, Any],
        *,
        carry: str | None = None,
        payload: Sequence[Buffer] = (),
        memory: Sequence[SharedMemory] = (),
        lent: bool = False,
    ) -> None:
        self.sent.append(dict(header))

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        raise AssertionError("these ends share memory")

    def close(self) -> None:
        """Nothing to close."""

    def got(self, kind: str) -> list[dict[str, Any]]:
        return [header for header in self.sent if header["kind"] == kind]


def coordinator(settings: JobSettings, shards: Mapping[int, Connection] | None = None, writer: FileWriter | None = None) -> LiveJob:
    """Server 0's, with nobody connected but the other servers; its clock is what it is told."""
    parts = Line("supervisor"), Mailbox(), "", lambda: 0.0
    return LiveJob(settings, shards or {}, *parts, writer=writer)


class Worker:
    """One worker's end, spoken by hand; its parameters are all ``value``."""

    def __init__(self, host: LiveJob, number: int, value: float = 0.0, sync: str = "asp", pid: int = 0) -> None:
        self.host, self.number, self.sync, self.pid = host, number, sync, pid
        self.line = Line(f"worker {number}")
        model = torch.nn.Linear(4, 1, bias=False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.layout = Layout.of(model, self.optimizer)
        self.value = value
        self.push_block = MemoryBlock.allocate(self.layout.nbytes, "gradients")
        self.pull_block = MemoryBlock.allocate(self.layout.nbytes, "parameters")

    def say(self, kind: str, now: Seconds, *, memory: tuple[SharedMemory, ...] = (), **fields: Any) -> None:
        self.host.on_message(self.line, Message({"kind": kind, **fields}, EMPTY, memory), now)

    def greet(self, now: Seconds) -> None:
        wire = {"layout": self.layout.to_wire(), "optimizer": spec_of(self.optimizer).to_wire(), "sync": self.sync, "local_only": None}
        if rule(self.sync).family != "server":
            wire["vector"] = {"dtype": "float32", "numel": 4, "size": 4}
        self.say("hello", now, worker=self.number, pid=self.pid, memory=(self.push_block, self.pull_block), **wire)

    def join(self, now: Seconds) -> None:
        self.greet(now)
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


class Mailbox(Hub):
    """Delivers what a test has put in, one bundle for each poll."""

    def __init__(self) -> None:
        self.line = Line("server 0")
        self.bundles: list[list[dict[str, Any]]] = []

    def another(self) -> Hub:
        raise AssertionError("these rules need one hub")

    def listen(self, host: str | None = None, port: int = 0) -> Address:
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
