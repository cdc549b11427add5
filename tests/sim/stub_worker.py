"""A worker that speaks the wire protocol of ``runtime/__init__.py``: what the real one does in ``worker.py`` and ``worker_samples.py``.

Its script goes through batches, or through epochs of them where samples are dealt out. Its gradients are real, and depend on nothing but
its number and that of the iteration, so that a test can follow what the servers make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from math import isinf
from typing import TYPE_CHECKING, Any

import torch
from tests.sim.stub_process import LR, StubProcess, Waits

from offbeat.runtime.parameter_server.per_shard_pulls import BlockPulls
from offbeat.runtime.worker.local_work import LocalWork
from offbeat.session import SplitProgress
from offbeat.sim.latency.registry import stretched
from offbeat.tensors.optimizers import hyperparameters
from offbeat.types import Epoch, LeaseId, Seconds, WorkerId

if TYPE_CHECKING:
    from tests.sim.stepped import SteppedJob

__all__ = ["LR", "StubWorker"]


class StubWorker(StubProcess):
    """One process of a worker.

    Args:
        job: where it takes part.
        number: the worker's.
        iteration: the number of its next iteration; a restarted worker goes on with its predecessor's.
    """

    def __init__(self, job: SteppedJob, number: WorkerId, iteration: int) -> None:
        super().__init__(job, number)
        self.iteration = iteration
        self._release = 0
        """The serial number of the release that it goes on with."""
        self._work = LocalWork()
        self._compute_s: Seconds = 0.0
        self._steps = 0
        self._told_hyper: Any = None
        self._progress = SplitProgress()
        self._late = job.network.shares_memory and any(isinf(factor) for _, _, factor in self.windows)
        """Once it has been frozen, what it reads may be newer than what it was told: the others have gone on, in the same memory."""

    def live(self) -> Waits:
        yield from self._join()
        work = self.job.script.work
        if work.samples is None:
            while True:
                yield from self._compute(self.plan.steps, self.plan.batch or work.batch, ())
                yield from self._hand_in()
        epoch = 0
        while epoch != work.epochs:
            yield from self._epoch(epoch)
            epoch += 1
        self.say("left", incarnation=self.incarnation, noticed=False)
        self.end("end of stream")

    def _join(self) -> Waits:
        memory = (self.push_block, self.pull_block) if self.job.network.shares_memory else ()
        self.bind()
        hello = {"layout": self.layout.to_wire(), "optimizer": self.spec.to_wire(), "sync": self.job.script.sync, "local_only": None}
        self.servers[0].send({"kind": "hello", "worker": self.number, "pid": 0, **hello}, memory=memory)
        yield lambda: "welcome" in self.mail
        in_place, common = self.mail.pop("welcome")["in_place"], self.memory
        for server in self.servers[1:]:
            server.send({"kind": "attach", "worker": self.number, "in_place": in_place}, memory=memory)
            yield lambda: self.mail.pop("attached", None) is not None
        self.say("ready")
        yield from self._admitted()
        if in_place:
            self.pull_block = common[0]
            self.flat.repoint(self.pull_block.view)
            self.bind()

    def _epoch(self, epoch: Epoch) -> Waits:
        self._progress = SplitProgress()
        over = False
        while not over:
            batch = self.plan.batch or self.job.script.work.batch
            answer = yield from self._ask(epoch, batch)
            if answer["kind"] == "grant":
                samples = answer["stop"] - answer["start"]
                self._progress.deal(answer["parts"], samples, batch)
                self._progress.done += 1
                yield from self._compute(1, samples, (answer["lease"],))
                if self.overtaken is not None or self.plan.due(self._work.steps, self._progress.done, self._progress.batches or 0):
                    yield from self._hand_in()
            elif answer["report"] is not None and answer["epoch"] >= epoch:
                over = True
            elif answer["kind"] == "no_more":
                over = not self._work.steps
                if self._work.steps:
                    yield from self._hand_in()

    def _ask(self, epoch: Epoch, batch: int) -> Generator[Seconds | Callable[[], bool], None, dict[str, Any]]:
        """Asks for samples; an epoch's end brings the newest parameters, a fence means joining, then asking again."""
        kinds = ("grant", "no_more", "epoch_ended")
        while True:
            if (thaw := self.thaw()) > self.job.now:
                yield thaw
            want = {"incarnation": self.incarnation, "pool": 0, "epoch": epoch, "size": self.job.script.work.samples, "batch": batch}
            self.say("samples", want=want)
            yield lambda: self.fenced or any(kind in self.mail for kind in kinds)
            if self.fenced:
                yield from self._admitted()
                continue
            answer = next(self.mail.pop(kind) for kind in kinds if kind in self.mail)
            if answer["kind"] == "epoch_ended" or answer["refreshed"]:
                yield from self._admitted()
            return answer

    def _compute(self, steps: int, samples: int, leases: tuple[LeaseId, ...]) -> Waits:
        """Some iterations, unless they are broken off."""
        job, begun = self.job, self.job.now
        finish, first = begun, self.iteration
        for iteration in range(first, first + steps):
            seconds = job.compute.draw(self.number, iteration, finish) + samples * job.per_sample.draw(self.number, iteration, finish)
            finish += stretched(seconds, finish, self.windows)
        self.iteration += steps
        yield self.thaw() if self.overtaken is not None and self.overtaken["at_once"] else finish
        self._compute_s += job.now - begun
        for iteration in range(first, first + steps):
            self._steps += 1
            self._work.add(leases, samples, job.script.loss(self.number, iteration))
            sign = -1.0 if iteration % 2 else 1.0
            self.model.weight.grad, self.model.bias.grad = torch.tensor([[self.number + 1.0]]), torch.tensor([0.5 * sign])
            if self.policy.local_optimizer:
                self.optimizer.step()

    def _hand_in(self) -> Waits:
        """Push what has been computed, or give it up, and wait until it may go on."""
        work, self._work = self._work, LocalWork()
        blocks, averaging = self.blocks, self.policy.local_optimizer
        version = self.version if blocks is None else blocks.t
        fields = {"incarnation": self.incarnation, "version": version, "compute_s": self._compute_s, "leases": work.leases}
        if self.overtaken is not None:
            self.say("abandoned", work=fields)
        else:
            self.flat.offer() if averaging else self.flat.collect()
            self.job.offered.setdefault((self.number, self.incarnation), []).append(self._vector(gradient=not averaging))
            push = {**fields, "samples": work.samples, "nonfinite": None, "loss": work.loss, "steps": work.steps if averaging else 1}
            hyper = hyperparameters(self.optimizer)
            changed = {"hyper": hyper} if hyper != self._told_hyper else {}
            self._told_hyper = hyper
            self._push({"kind": "push", "steps": self._steps, "push": push, **changed})
        if blocks is not None:
            self.wants_blocks = True
            yield lambda: self.stirred and (blocks.ready() or self._due)
            self.wants_blocks = False
            if not self._due:
                self._load(blocks)
                return
        yield from self._admitted()

    def _push(self, header: dict[str, Any]) -> None:
        blocks = self.blocks
        if blocks is None:
            self.carry(header, {"kind": "push"})
            return
        self.stirred = False
        self.job.pushes += 1
        push = {**header["push"], "held": blocks.used}
        blocks.push(self.servers, {**header, "worker": self.number, "number": self.job.pushes, "push": push}, self.push_block.view)
        self.job.network.later(self.turn)

    def _admitted(self) -> Waits:
        """Wait for the parameters of the next release from every server, joining again where it was thought dead."""
        while True:
            yield lambda: self._due
            self._compute_s = 0.0
            if not self.fenced:
                break
            self.fenced, self.left_behind, self._release = False, self.incarnation, self.serials.get(0, self._release)
            self._told_hyper, self._work = None, LocalWork()
            self.mail.clear()
            if self.blocks is not None:
                self.blocks.reset()
            self.say("ready")
        self._release = self.serials[0]
        if self.blocks is not None:
            self.blocks.released()
            self._load(self.blocks)
            return
        self.flat.pulled()
        if not self._late:
            self.job.seen.setdefault((None, self.version), []).append(self._vector(gradient=False))

    def _load(self, blocks: BlockPulls) -> None:
        """Begin an iteration with the blocks that are there."""
        blocks.load()
        self.flat.pulled()
        self.overtaken, self._compute_s = None, 0.0
        for shard, (version, block) in enumerate(zip(blocks.used, self._vector(gradient=False).chunk(len(self.spans)), strict=True)):
            self.job.seen.setdefault((shard, version), []).append(block)

    @property
    def _due(self) -> bool:
        """Whether it is fenced, or every server has delivered one more release."""
        newest = self.serials.get(0, 0)
        complete = newest > self._release and all(self.serials.get(server, 0) >= newest for server in range(len(self.servers)))
        return self.fenced or complete

    def _vector(self, *, gradient: bool) -> torch.Tensor:
        parameters = list(self.model.parameters())
        return torch.cat([(p.grad if gradient and p.grad is not None else p.detach()).flatten() for p in parameters]).clone()
