"""A worker that speaks the wire protocol of ``runtime/__init__.py`` from a thread that it does not own, on a clock that it does not read.

What it says and when is after ``runtime/worker.py``, ``worker_link.py`` and ``worker_samples.py``: a generator stands where the real worker
has its script, and yields what that would wait for: a time (it computes until then), or something to become true of what has been heard.
Its model has two parameters; its gradients are real and known, so that a test can follow what the servers make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import isinf
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tests.sim.stepped_network import SteppedHub
from torch import nn

from offbeat.policies import rule
from offbeat.protocol.policy import Plan
from offbeat.runtime.block_pulls import BlockPulls
from offbeat.runtime.local_work import LocalWork
from offbeat.session import Progress
from offbeat.sim.laws import stretched
from offbeat.sim.process import BEATS
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import hyperparameters, spec_of
from offbeat.transport.base import Closed, Message
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.types import Epoch, Incarnation, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from tests.sim.stepped import SteppedJob

Waits: TypeAlias = Generator["Seconds | Callable[[], bool]", None, None]

LR = 0.25


class StubWorker:
    """One process of a worker.

    Args:
        job: where it takes part.
        number: the worker's.
        iteration: the number of its next iteration; a restarted worker goes on with its predecessor's.
    """

    def __init__(self, job: SteppedJob, number: WorkerId, iteration: int) -> None:
        self.job, self.number, self.iteration = job, number, iteration
        self.gone = False
        self.hub = SteppedHub(job.network, self.turn, number)
        self._servers = [self.hub.connect(address) for address in job.addresses]
        self._policy = rule(job.script.sync)
        self._by_shard = self._policy.scope == "shard"
        self._windows = job.script.cluster.script.windows(number)
        self._late = job.network.shares_memory and any(isinf(factor) for _, _, factor in self._windows)
        """Once it has been frozen, what it reads may be newer than what it was told: the others have gone on, in the same memory."""
        self._make_model()
        self._blocks = BlockPulls(self._policy, self._spans, self._pull_block.view, lambda: job.now) if self._by_shard else None
        self._stirred = False
        """Whether anything has come since the last push was sent: messages take no time, so that cannot be left behind unread."""
        self._life = self._live()
        self._waits_for: Callable[[], bool] | None = None
        self._alarm = 0
        """The entry of the agenda at which it goes on; 0: none."""
        self._mail: dict[str, dict[str, Any]] = {}
        self._memory: Any = ()
        self._serials: dict[int, int] = {}
        self._release = 0
        """The serial number of the release that it goes on with."""
        self._incarnation: Incarnation = 0
        self._left_behind: Incarnation = 0
        self._fenced = False
        self._version: Version = 0
        self._plan = Plan()
        self._overtaken: dict[str, Any] | None = None
        """The interrupt that says so."""
        self._work = LocalWork()
        self._compute_s: Seconds = 0.0
        self._steps = 0
        self._told_hyper: Any = None
        self._progress = Progress()

    def _make_model(self) -> None:
        model = nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(-1.0)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self._layout, self._spec = Layout.of(model, self._optimizer), spec_of(self._optimizer)
        self._spans = self._layout.spans(len(self._servers), self._spec.elementwise)
        kind = MemoryBlock if self.job.network.shares_memory else PrivateBlock
        self._push_block, self._pull_block = (kind.allocate(self._layout.nbytes, f"{what} of a stub") for what in ("push", "pull"))
        self._flat = FlatModel(self._layout, model, self._push_block.view, self._pull_block.view)
        self._flat.attach()
        self._model = model

    # What drives it.

    def start(self) -> None:
        self._go_on()
        if self.job.script.cluster.silence_s is not None:
            self._beat()

    def turn(self) -> None:
        """Something has come, or may be due. A frozen process sees it when it thaws."""
        self._stirred = True
        if self.gone:
            self.hub.poll(0.0)
            return
        thaw = self._thaw()
        if thaw > self.job.now:
            self.job.at(thaw, self.turn)
            return
        for connection, item in self.hub.poll(0.0):
            assert not isinstance(item, Closed), f"worker {self.number} is cut off: {item.reason}"
            self._sort(self._servers.index(connection), item)
        if self._waits_for is not None:
            self._go_on() if self._waits_for() else self._look_again()

    def die(self, reason: str, *, seen: bool) -> None:
        """End without a word; ``seen``: the connections close."""
        if not self.gone and seen:
            self._end(reason)
        self.gone = True

    def _end(self, reason: str) -> None:
        self.gone = True
        for connection in list(self.hub.connections):
            connection.end(reason)

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

    def _look_again(self) -> None:
        """A worker of a rule of shard scope may go on after a while even if nothing comes."""
        due = self._blocks.wake_at() if self._blocks is not None else None
        if due is not None:
            self.job.at(max(due, self.job.now), self.turn)

    def _rings(self, serial: int) -> None:
        if serial == self._alarm and not self.gone:
            self._go_on()
            self.job.settle()

    def _thaw(self) -> Seconds:
        now = self.job.now
        return next((stop for start, stop, factor in self._windows if start <= now < stop and isinf(factor)), now)

    def _beat(self, serial: int = 0) -> None:
        if self.gone:
            return
        if self._incarnation and self._thaw() == self.job.now:
            self._say("heard", incarnation=self._incarnation)
        timeout_s = self.job.script.cluster.timeout_s
        self.job.agenda.at(self.job.now + timeout_s / BEATS, self._beat)
        self.job.settle()

    def _sort(self, server: int, message: Message) -> None:
        header = message.header
        match header["kind"]:
            case "parameters":
                self._serials[server] = header["serial"]
                self._incarnation, self._plan = header["incarnation"], Plan(*header["plan"])
                self._released(header["version"])
                if self._blocks is not None:
                    self._blocks.received(message, whole=True)
            case "block":
                assert self._blocks is not None
                self._servers[server].send({"kind": "got"})
                self._blocks.received(message)
                if self._blocks.overtaken:
                    self._overtaken = {"at_once": True}
                    if self._alarm:
                        self._go_on()
            case "provide":
                self._flat.offer()
                self._carry({"kind": "initial", "provided": True}, {"kind": "initial", "provided": True})
            case "interrupt":
                if header["version"] > self._version:
                    self._overtaken = header
                    if self._alarm and header["at_once"]:
                        self._alarm = self.job.agenda.at(self._thaw(), self._rings)
            case "joined":
                self._incarnation = header["incarnation"]
            case "fence":
                self._fenced = self._fenced or header["incarnation"] > self._left_behind
            case "welcome" | "attached" | "grant" | "no_more" | "epoch_ended" as kind:
                self._mail[kind] = header
                self._memory = message.memory or self._memory
            case kind:
                raise AssertionError(f"worker {self.number} was told {kind!r}: {header}")

    def _released(self, version: Version) -> None:
        """It goes on from this version, unless word has come of a newer one already."""
        self._version = version
        if self._overtaken is not None and self._overtaken.get("version", 0) <= version:
            self._overtaken = None

    def _say(self, kind: str, **fields: Any) -> None:
        self._servers[0].send({"kind": kind, **fields})

    def _carry(self, header: dict[str, Any], others: dict[str, Any]) -> None:
        """Send everybody his part of the push memory."""
        self.job.pushes += 1
        numbered = {"worker": self.number, "number": self.job.pushes}
        for server in self._servers[1:]:
            server.send({**others, **numbered}, carry="push")
        self._servers[0].send({**header, **numbered}, carry="push")

    # Its script.

    def _live(self) -> Waits:
        yield from self._join()
        work = self.job.script.work
        if work.samples is None:
            while True:
                yield from self._step()
        epoch = 0
        while epoch != work.epochs:
            yield from self._epoch(epoch)
            epoch += 1
        self._say("left", incarnation=self._incarnation)
        self._end("end of stream")

    def _join(self) -> Waits:
        memory = (self._push_block, self._pull_block) if self.job.network.shares_memory else ()
        self._bind()
        hello = {"layout": self._layout.to_wire(), "optimizer": self._spec.to_wire(), "sync": self.job.script.sync}
        self._servers[0].send({"kind": "hello", "worker": self.number, "pid": 0, "local_only": None, **hello}, memory=memory)
        yield lambda: "welcome" in self._mail
        in_place, common = self._mail.pop("welcome")["in_place"], self._memory
        for server in self._servers[1:]:
            server.send({"kind": "attach", "worker": self.number, "in_place": in_place}, memory=memory)
            yield lambda: self._mail.pop("attached", None) is not None
        self._say("ready")
        yield from self._admitted()
        if in_place:
            self._pull_block = common[0]
            self._flat.repoint(self._pull_block.view)
            self._bind()

    def _bind(self) -> None:
        for server, (start, stop) in zip(self._servers, self._spans, strict=True):
            server.bind("push", self._push_block.view[start:stop])
            server.bind("pull", self._pull_block.view[start:stop])

    def _step(self) -> Waits:
        """Compute and hand in, where samples are not dealt out."""
        yield from self._compute(self._plan.steps, self._plan.batch or self.job.script.work.batch, ())
        yield from self._hand_in()

    def _epoch(self, epoch: Epoch) -> Waits:
        self._progress = Progress()
        over = False
        while not over:
            answer = yield from self._ask("samples", epoch, batch=self._plan.batch or self.job.script.work.batch)
            if answer["kind"] == "grant":
                samples = answer["stop"] - answer["start"]
                self._progress.deal(answer["parts"], samples, self._plan.batch or self.job.script.work.batch)
                self._progress.done += 1
                yield from self._compute(1, samples, (answer["lease"],))
                if self._overtaken is not None or self._plan.due(self._work.steps, self._progress.done, self._progress.batches or 0):
                    yield from self._hand_in()
            elif answer["report"] is not None and answer["epoch"] >= epoch:
                over = True
            elif answer["kind"] == "no_more":
                if self._work.steps:
                    yield from self._hand_in()
                yield from self._ask("epoch", epoch)
                over = True

    def _ask(self, kind: str, epoch: Epoch, **fields: int) -> Generator[Seconds | Callable[[], bool], None, dict[str, Any]]:
        """A question about samples; an epoch's end brings the newest parameters, a fence means joining, then asking again."""
        kinds = ("grant", "no_more", "epoch_ended")
        while True:
            if (thaw := self._thaw()) > self.job.now:
                yield thaw
            want = {"incarnation": self._incarnation, "pool": 0, "epoch": epoch, "size": self.job.script.work.samples, **fields}
            self._say(kind, want=want)
            yield lambda: self._fenced or any(kind in self._mail for kind in kinds)
            if self._fenced:
                yield from self._admitted()
                continue
            answer = next(self._mail.pop(kind) for kind in kinds if kind in self._mail)
            if answer["kind"] == "epoch_ended" or answer["refreshed"]:
                yield from self._admitted()
            return answer

    def _compute(self, steps: int, samples: int, leases: tuple[int, ...]) -> Waits:
        """Some iterations, unless they are broken off."""
        job, begun = self.job, self.job.now
        finish, first = begun, self.iteration
        for iteration in range(first, first + steps):
            seconds = job.compute.draw(self.number, iteration, finish) + samples * job.per_sample.draw(self.number, iteration, finish)
            finish += stretched(seconds, finish, self._windows)
        self.iteration += steps
        yield self._thaw() if self._overtaken is not None and self._overtaken["at_once"] else finish
        self._compute_s += job.now - begun
        for iteration in range(first, first + steps):
            self._steps += 1
            self._work.add(leases, samples, job.script.loss(self.number, iteration))
            sign = -1.0 if iteration % 2 else 1.0
            self._model.weight.grad, self._model.bias.grad = torch.tensor([[self.number + 1.0]]), torch.tensor([0.5 * sign])
            if self._policy.averaging is not None:
                self._optimizer.step()

    def _hand_in(self) -> Waits:
        """Push what has been computed, or give it up, and wait until it may go on."""
        work, self._work = self._work, LocalWork()
        blocks, averaging = self._blocks, self._policy.averaging is not None
        version = self._version if blocks is None else blocks.t
        fields = {"incarnation": self._incarnation, "version": version, "compute_s": self._compute_s, "leases": work.leases}
        if self._overtaken is not None:
            self._stirred = True
            self._say("abandoned", work=fields)
        else:
            self._flat.offer() if averaging else self._flat.collect()
            self.job.offered.setdefault((self.number, self._incarnation), []).append(self._vector(gradient=not averaging))
            push = {**fields, "samples": work.samples, "nonfinite": None, "loss": work.loss, "steps": work.steps if averaging else 1}
            hyper = hyperparameters(self._optimizer)
            changed = {"hyper": hyper} if hyper != self._told_hyper else {}
            self._told_hyper = hyper
            self._push({"kind": "push", "steps": self._steps, "push": push, **changed})
        if blocks is not None:
            yield lambda: self._stirred and (blocks.ready() or self._due)
            if not self._due:
                self._load(blocks)
                return
        yield from self._admitted()

    def _push(self, header: dict[str, Any]) -> None:
        blocks = self._blocks
        if blocks is None:
            self._carry(header, {"kind": "push"})
            return
        self._stirred = False
        self.job.pushes += 1
        push = {**header["push"], "held": blocks.used}
        blocks.push(self._servers, {**header, "worker": self.number, "number": self.job.pushes, "push": push}, self._push_block.view)
        self.job.network.later(self.turn)

    def _admitted(self) -> Waits:
        """Wait for the parameters of the next release from every server, joining again where it was thought dead."""
        while True:
            yield lambda: self._due
            self._compute_s = 0.0
            if not self._fenced:
                break
            self._fenced, self._left_behind, self._release = False, self._incarnation, self._serials.get(0, self._release)
            self._told_hyper, self._work = None, LocalWork()
            self._mail.clear()
            if self._blocks is not None:
                self._blocks.reset()
            self._say("ready")
        self._release = self._serials[0]
        if self._blocks is not None:
            self._blocks.released()
            self._load(self._blocks)
            return
        self._flat.pulled()
        if not self._late:
            self.job.seen.setdefault((None, self._version), []).append(self._vector(gradient=False))

    def _load(self, blocks: BlockPulls) -> None:
        """Begin an iteration with the blocks that are there."""
        blocks.load()
        self._flat.pulled()
        self._overtaken, self._compute_s = None, 0.0
        for shard, (version, block) in enumerate(zip(blocks.used, self._vector(gradient=False).chunk(len(self._spans)), strict=True)):
            self.job.seen.setdefault((shard, version), []).append(block)

    @property
    def _due(self) -> bool:
        """Whether it is fenced, or every server has delivered one more release."""
        newest = self._serials.get(0, 0)
        complete = newest > self._release and all(self._serials.get(server, 0) >= newest for server in range(len(self._servers)))
        return self._fenced or complete

    def _vector(self, *, gradient: bool) -> torch.Tensor:
        parameters = list(self._model.parameters())
        return torch.cat([(p.grad if gradient and p.grad is not None else p.detach()).flatten() for p in parameters]).clone()
