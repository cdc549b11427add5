"""A worker's process for a thread that it does not own and a clock that it does not read: its connections, its model, what wakes it.

It stands where ``runtime/worker/connection.py`` stands, and sorts what comes as that does. A generator stands where the real process has
its script (``stub_worker.py``), and yields what that would wait for: a time, until which it computes, or something to become true.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import partial
from math import isinf
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from offbeat.core.effects import Interrupt
from offbeat.core.policy import Plan, ServerRule
from offbeat.core.worker import State, Worker
from offbeat.core.worker_messages import Woken
from offbeat.policies import rule
from offbeat.runtime.parameter_server.encoding import INITIAL, FragmentEncoding, WorkerEncoding
from offbeat.runtime.parameter_server.per_shard_pulls import BlockPulls
from offbeat.sim.process import BEATS
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import spec_of
from offbeat.tensors.wire_formats import Encoded
from offbeat.transport.base import Closed, Message, SharedMemory
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.types import NOT_JOINED, Incarnation, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from tests.sim.stepped import SteppedJob

Waits: TypeAlias = Generator["Seconds | Callable[[], bool]", None, None]

LR: Final = 0.25


class StubProcess(ABC):
    """See above.

    Args:
        job: where it takes part.
        number: the worker's.
    """

    def __init__(self, job: SteppedJob, number: WorkerId) -> None:
        self.job, self.number = job, number
        job.stubs.append(self)
        self.gone = False
        self.hub = job.hub(self.turn, number)
        self.servers = [self.hub.connect(address) for address in job.addresses]
        self.policy = rule(job.script.sync)
        self.windows = job.script.cluster.script.windows(number)
        self._make_model()
        self.machine, self.blocks = Worker(number), None
        if isinstance(self.policy, ServerRule) and self.policy.scope == "shard":
            self.machine = Worker(number, partial(self.policy.blocks, len(self.spans)))
            wire, encodings = job.script.wire, {}
            if wire != "float32":
                encodings = {n: FragmentEncoding(self.layout, span, wire, pushes=True) for n, span in enumerate(self.spans)}
            self.blocks = BlockPulls(self.machine, self.layout, self.spans, self.pull_block.view, encodings)
        self.encodings: list[WorkerEncoding] = []
        """By server; none in float32."""
        self.mail: dict[str, dict[str, Any]] = {}
        self.memory: Any = ()
        self.common: SharedMemory | None = None
        """In which all workers read the parameters; None: each reads memory of its own."""
        self.half = 0
        """Which half of it has the newest version."""
        self.serials: dict[int, int] = {}
        self.incarnation: Incarnation = NOT_JOINED
        self.left_behind: Incarnation = NOT_JOINED
        self.fenced = False
        self.version: Version = 0
        self.plan = Plan()
        self.stirred = False
        """Whether anything has come since the last push was sent, or will not. What takes no time cannot have been left unread."""
        self._life = self.live()
        self._waits_for: Callable[[], bool] | None = None
        self._alarm = 0
        """The entry of the agenda at which it goes on; 0: none."""

    def let_go(self) -> None:
        """Close the files of its memory after the job. No collection of garbage does: hooks of the model refer to tensors in it."""
        self.flat.detach()
        for block in (self.push_block, self.pull_block, *([] if self.common is None else [self.common])):
            block.close()

    def _make_model(self) -> None:
        self.model = nn.Linear(1, 1)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
            self.model.bias.fill_(-1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.layout, self.spec = Layout.of(self.model, self.optimizer), spec_of(self.optimizer)
        self.spans = self.layout.spans(len(self.servers), self.spec.elementwise)
        kind = MemoryBlock if self.job.network.shares_memory else PrivateBlock
        self.push_block, self.pull_block = (kind.allocate(self.layout.nbytes, f"{what} of a stub") for what in ("push", "pull"))
        self.flat = FlatModel(self.layout, self.model, self.push_block.view, self.pull_block.view)
        self.flat.attach()

    @abstractmethod
    def live(self) -> Waits:
        """The script."""

    # What drives it.

    def start(self) -> None:
        self._go_on()
        if self.job.script.cluster.silence_s is not None:
            self._beat()

    def turn(self) -> None:
        """Something has come, or may be due. A frozen process sees it when it thaws."""
        if self.gone:
            self.hub.poll(0.0)
            return
        if self.thaw() > self.job.now:
            self.job.at(self.thaw(), self.turn)
            return
        self.stirred = True
        for connection, item in self.hub.poll(0.0):
            assert not isinstance(item, Closed), f"worker {self.number} is cut off: {item.reason}"
            self._sort(self.servers.index(connection), item)
        if self._waits_for is not None:
            if self._waits_for():
                self._go_on()
            else:
                self._look_again()

    def die(self, reason: str, *, seen: bool) -> None:
        """End without a word; ``seen``: the connections close."""
        if not self.gone and seen:
            self.end(reason)
        self.gone = True

    def end(self, reason: str) -> None:
        self.gone = True
        for connection in list(self.hub.connections):
            connection.end(reason)

    def thaw(self) -> Seconds:
        """When it can do something: now, unless it is frozen."""
        now = self.job.now
        return next((stop for start, stop, factor in self.windows if start <= now < stop and isinf(factor)), now)

    def _go_on(self) -> None:
        self._alarm, self._waits_for = 0, None
        for wish in self._life:
            if not callable(wish):
                self._alarm = self.job.agenda.at(wish, self._rings)
                return
            if not wish():
                self._waits_for = wish
                self._look_again()
                return

    def _rings(self, serial: int) -> None:
        if serial == self._alarm and not self.gone:
            self._go_on()
            self.job.settle()

    def _look_again(self) -> None:
        """One that waits for blocks may go on after a while even if nothing comes."""
        due = self.machine.wake_at() if self.stirred else None
        if due is not None:
            self.job.at(max(due, self.job.now), self.turn)

    def _beat(self, serial: int = 0) -> None:
        if self.gone:
            return
        if self.incarnation and self.thaw() == self.job.now:
            self.say("heard", incarnation=self.incarnation, stuck_s=0.0)
        self.job.agenda.at(self.job.now + self.job.script.cluster.timeout_s / BEATS, self._beat)
        self.job.settle()

    # What comes and goes.

    def say(self, kind: str, **fields: Any) -> None:
        """To the coordinator."""
        self.servers[0].send({"kind": kind, **fields})

    def carry(self, header: dict[str, Any], others: dict[str, Any]) -> None:
        """Send every server its part of the push memory."""
        self.job.pushes += 1
        numbered = {"worker": self.number, "number": self.job.pushes}
        region = "push"
        if header["kind"] == "push":
            for encoding in self.encodings:
                encoding.encode_all()
                encoding.pushed(self.incarnation)
        elif self.encodings:
            region = INITIAL
        for server in self.servers[1:]:
            server.send({**others, **numbered}, carry=region)
        self.servers[0].send({**header, **numbered}, carry=region)

    def bind(self) -> None:
        for server, (start, stop) in zip(self.servers, self.spans, strict=True):
            server.bind("push", self.push_block.view[start:stop])
            server.bind("pull", self.pull_block.view[start:stop])
        if self.job.script.wire != "float32" and self.blocks is None:
            self._encode(self.job.script.wire)

    def _encode(self, wire: Encoded) -> None:
        for server, span in zip(self.servers, self.spans, strict=True):
            push, pull = (block.view[span.start : span.stop] for block in (self.push_block, self.pull_block))
            self.encodings.append(WorkerEncoding(server, self.layout, span, wire, push, pull))

    def _sort(self, server: int, message: Message) -> None:
        header = message.header
        match header["kind"]:
            case "parameters":
                self.half = header.get("half", 0)
                self.serials[server] = header["serial"]
                self.incarnation, self.plan = header["incarnation"], Plan(*header["plan"])
                self.version = header["version"]
                if self.encodings:
                    self.encodings[server].decode(exact=header["exact"])
                if self.blocks is not None:
                    self.blocks.received(message, self.job.now, whole=True)
            case "block":
                self.servers[server].send({"kind": "got"})
                self._take(message)
            case "provide":
                self.flat.offer()
                self.carry({"kind": "initial", "provided": True}, {"kind": "initial", "provided": True})
            case "interrupt":
                news = header["version"] > self.machine.version
                self.machine.on(Interrupt(self.number, self.incarnation, header["version"], header["at_once"], ""), self.job.now)
                if news and self._alarm and header["at_once"]:
                    self._alarm = self.job.agenda.at(self.thaw(), self._rings)
            case "unused":
                for encoding in self.encodings:
                    encoding.give_back(header["incarnation"])
                if self.blocks is not None:
                    self.blocks.unused(header["number"])
            case "joined":
                self.incarnation = header["incarnation"]
            case "fence":
                self.fenced = self.fenced or header["incarnation"] > self.left_behind
            case "welcome" | "attached" | "grant" | "no_more" | "epoch_ended" | "goes_on" as kind:
                self.mail[kind] = header
                self.memory = message.memory or self.memory
            case kind:
                raise AssertionError(f"worker {self.number} was told {kind!r}: {header}")

    def _take(self, message: Message) -> None:
        """A block has come, perhaps in the middle of a computation."""
        assert self.blocks is not None
        self.blocks.received(message, self.job.now)
        if self.machine.state is State.COMPUTING and self._alarm:
            self.machine.on(Woken(), self.job.now)
            if self.machine.overtaken:
                self._go_on()
