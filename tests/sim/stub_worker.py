"""A worker that speaks the wire protocol of ``runtime/__init__.py``, a stand-in for ``runtime/worker/job_session.py`` and ``samples.py``.

Its script goes through batches, or through epochs of them where samples are dealt out. Its gradients are real, and depend on nothing but
its number and that of the iteration, so that a test can follow what the servers make of them.
"""

from __future__ import annotations

from math import isinf
from typing import TYPE_CHECKING, Any

import torch
from tests.sim.stub_process import LR, StubProcess, Waits

from offbeat.core.effects import EpochEnded, Fence, Grant, NoMore, Release
from offbeat.core.events import Abandoned, Joined, LeaseWanted, Pushed
from offbeat.core.policy import ServerRule
from offbeat.core.worker import State
from offbeat.core.worker_messages import Compute, SamplesWanted, Stepped, Stimulus, Woken
from offbeat.runtime.parameter_server.shard import half_nbytes
from offbeat.runtime.worker.job_session import pushed_fields
from offbeat.session import SplitProgress
from offbeat.sim.latency.registry import stretched
from offbeat.tensors.optimizers import hyperparameters
from offbeat.types import NO_CAUSE, LeaseId, WorkerId

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
        self._turn = Compute(None, False, NO_CAUSE)
        self._steps = 0
        self._told_hyper: Any = None
        self._progress = SplitProgress()
        self._late = job.network.shares_memory and any(isinf(factor) for _, _, factor in self.windows)
        """Once it has been frozen, what it reads may be newer than what it was told: the others have gone on, in the same memory."""

    def live(self) -> Waits:
        yield from self._join()
        yield from self._work_through()
        self.say("left", incarnation=self.incarnation, noticed=False)
        self.end("end of stream")

    def _work_through(self) -> Waits:
        """The script: batches for ever, or all epochs."""
        work, epoch = self.job.script.work, 0
        if work.samples is None:
            while True:
                yield from self._compute(self.machine.leg, self.plan.batch or work.batch, ())
        while epoch != work.epochs:
            batch = self.plan.batch or work.batch
            yield from self._tell(SamplesWanted(0, epoch, work.samples, work.batch))
            yield from self._settle()
            grant = self._turn.grant
            if grant is not None:
                samples = grant.stop - grant.start
                self._progress.deal(grant.parts, samples, batch)
                self._progress.done += 1
                yield from self._compute(1, samples, (grant.lease,))
            elif self._turn.over:
                epoch, self._progress = epoch + 1, SplitProgress()

    def _join(self) -> Waits:
        memory = (self.push_block, self.pull_block) if self.job.network.shares_memory else ()
        self.bind()
        hello = {"layout": self.layout.to_wire(), "optimizer": self.spec.to_wire(), "sync": self.job.script.sync, "local_only": None}
        wire = {"wire": self.job.script.wire} if self.job.script.wire != "float32" else {}
        self.servers[0].send({"kind": "hello", "worker": self.number, "pid": 0, **hello, **wire}, memory=memory)
        yield lambda: "welcome" in self.mail
        in_place, common = self.mail.pop("welcome")["in_place"], self.memory
        for server in self.servers[1:]:
            server.send({"kind": "attach", "worker": self.number, "in_place": in_place, **wire}, memory=memory)
            yield lambda: self.mail.pop("attached", None) is not None
        self.say("ready")
        yield from self._settle()
        if in_place:
            self.common = common[0]

    # Its state machine.

    def _tell(self, stimulus: Stimulus) -> Waits:
        for instruction in self.machine.on(stimulus, self.job.now):
            if isinstance(instruction, Compute):
                self._turn = instruction
                continue
            match instruction.event:
                case Pushed() as push:
                    yield from self._push(push)
                case Abandoned(_, incarnation, version, compute_s, leases):
                    work = {"incarnation": incarnation, "version": version, "compute_s": compute_s, "leases": leases}
                    self.say("abandoned", work=work)
                case LeaseWanted(_, incarnation, pool, epoch, size, batch, _):
                    if (thaw := self.thaw()) > self.job.now:
                        yield thaw
                    self.say("samples", want={"incarnation": incarnation, "pool": pool, "epoch": epoch, "size": size, "batch": batch})
                case Joined():
                    self._rejoin()

    def _settle(self) -> Waits:
        """Wait until the script has control."""
        while self.machine.state is not State.COMPUTING:
            if self.machine.state is State.ASKING:
                yield from self._hear_answer()
            else:
                yield from self._admitted()

    def _hear_answer(self) -> Waits:
        kinds = ("grant", "no_more", "epoch_ended")
        yield lambda: self.fenced or any(kind in self.mail for kind in kinds)
        if self.fenced:
            yield from self._tell(Fence(self.number, self.incarnation, ""))
            return
        answer = next(self.mail.pop(kind) for kind in kinds if kind in self.mail)
        me, epoch = (self.number, self.incarnation, 0), answer["epoch"]
        match answer["kind"]:
            case "grant":
                place = answer["lease"], answer["start"], answer["stop"], answer["refreshed"], answer["parts"]
                yield from self._tell(Grant(*me, epoch, *place))
            case "no_more":
                yield from self._tell(NoMore(*me, epoch, answer["refreshed"], ""))
            case "epoch_ended":
                yield from self._tell(EpochEnded(0, epoch, {}, (self.number,)))

    def _admitted(self) -> Waits:
        """Wait for blocks, or for the parameters of the next release from every server, joining again where it was thought dead."""
        blocks = self.machine.blocks
        if blocks is not None and not self.machine.needs_release:
            yield lambda: self.stirred and (blocks.ready(self.job.now) or self._due)
            if not self._due:
                yield from self._tell(Woken())
                self._begin()
                return
        yield lambda: self._due
        if self.fenced:
            yield from self._tell(Fence(self.number, self.incarnation, ""))
            return
        self._release = self.serials[0]
        yield from self._tell(Release(self.number, self.incarnation, self.version, 0, "", self.plan))
        self._begin()

    def _rejoin(self) -> None:
        self.fenced, self.left_behind, self._release = False, self.incarnation, self.serials.get(0, self._release)
        self._told_hyper = None
        self.mail.clear()
        if self.blocks is not None:
            self.blocks.forget()
        self.say("ready")

    # What it computes.

    def _compute(self, steps: int, samples: int, leases: tuple[LeaseId, ...]) -> Waits:
        """Some iterations, unless they are broken off, and what follows from them."""
        job, finish, first = self.job, self.job.now, self.iteration
        for iteration in range(first, first + steps):
            seconds = job.compute.draw(self.number, iteration, finish) + samples * job.per_sample.draw(self.number, iteration, finish)
            finish += stretched(seconds, finish, self.windows)
        self.iteration += steps
        yield self.thaw() if self.machine.at_once else finish
        for iteration in range(first, first + steps):
            self._steps += 1
            sign = -1.0 if iteration % 2 else 1.0
            # Where they are encoded, numbers that need more bits than they get.
            weight, bias = (1.37 + 0.1 * (iteration % 3), 0.29) if job.script.wire != "float32" else (1.0, 1.0)
            self.model.weight.grad = torch.tensor([[(self.number + 1.0) * weight]])
            self.model.bias.grad = torch.tensor([0.5 * sign * bias])
            if isinstance(self.policy, ServerRule) and self.policy.averaging is not None:
                self.optimizer.step()
            done, batches = self._progress.done, self._progress.batches or 0
            yield from self._tell(Stepped(leases, samples, job.script.loss(self.number, iteration), done=done, batches=batches))
        yield from self._settle()

    def _push(self, push: Pushed) -> Waits:
        blocks = self.blocks
        averaging = isinstance(self.policy, ServerRule) and self.policy.averaging is not None
        self.flat.offer() if averaging else self.flat.collect()
        self.job.offered.setdefault((self.number, self.incarnation), []).append(self._vector(gradient=not averaging))
        hyper = hyperparameters(self.optimizer)
        changed = {"hyper": hyper} if hyper != self._told_hyper else {}
        self._told_hyper = hyper
        fields = pushed_fields(push)
        header = {"kind": "push", "steps": self._steps, "push": fields, **changed}
        if blocks is None:
            self.carry(header, {"kind": "push"})
        else:
            self.stirred = False
            self.job.pushes += 1
            fields["held"] = blocks.used
            blocks.push(self.servers, {**header, "worker": self.number, "number": self.job.pushes}, self.push_block.view)
            self.job.network.later(self.turn)
        yield from ()

    def _begin(self) -> None:
        """Begin to compute from the parameters that have come."""
        if self.blocks is None:
            if self.common is not None:
                start = self.half * half_nbytes(self.layout)
                self.flat.repoint(self.common.view[start : start + self.layout.nbytes])
            self.flat.pulled()
            if not self._late:
                self.job.seen.setdefault((None, self.version), []).append(self._vector(gradient=False))
            return
        assert isinstance(self.policy, ServerRule)
        shards = range(len(self.spans)) if self.policy.averaging is None else self.blocks.news  # else it has steps of its own in them
        kept, own = [self.blocks.kept(shard) for shard in range(len(self.spans))], self._vector(gradient=False).chunk(len(self.spans))
        self.blocks.load()
        self.flat.pulled()
        blocks = self._vector(gradient=False).chunk(len(self.spans))
        for shard in shards:
            block = (blocks[shard] - kept[shard] * own[shard]) / (1.0 - kept[shard])
            self.job.seen.setdefault((shard, self.blocks.used[shard]), []).append(block)

    @property
    def _due(self) -> bool:
        """Whether it is fenced, or every server has delivered one more release."""
        newest = self.serials.get(0, 0)
        complete = newest > self._release and all(self.serials.get(server, 0) >= newest for server in range(len(self.servers)))
        return self.fenced or complete

    def _vector(self, *, gradient: bool) -> torch.Tensor:
        parameters = list(self.model.parameters())
        return torch.cat([(p.grad if gradient and p.grad is not None else p.detach()).flatten() for p in parameters]).clone()
