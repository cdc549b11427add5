"""A worker's shell: joins the job, pushes, pulls, hands over its state, and leaves.

Everything happens in the script's main thread, and only inside the library's calls; between them the process computes, and the servers
never touch what it reads. Its connections and the heartbeat are in ``worker_link.py``, its dealings about samples in
``worker_samples.py``, and how it learns that its process ends in ``process_end.py``.
"""

from __future__ import annotations

import copy
import itertools
import os
import time
from contextlib import AbstractContextManager
from typing import Any

import torch

from offbeat.errors import ConfigurationError
from offbeat.policies import rule
from offbeat.protocol.policy import Averaging, Plan, Policy
from offbeat.runtime import last_words, process_end
from offbeat.runtime.block_pulls import BlockPulls
from offbeat.runtime.buffers import ModelBuffers
from offbeat.runtime.interrupts import Interrupts
from offbeat.runtime.local_work import LocalWork
from offbeat.runtime.rehearsal import lateness
from offbeat.runtime.settings import WorkerSettings
from offbeat.runtime.worker_link import WorkerLink
from offbeat.runtime.worker_samples import WorkerSamples
from offbeat.session import Grant, Session
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec, hyperparameters
from offbeat.tensors.state import assemble_state_dict, split_state_dict
from offbeat.transport.base import Hub, Message, SharedMemory
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.types import Epoch


class WorkerSession(Session):
    """One worker's part in a job of the server family, from `join` on. The owner of its process calls `follow_process` before that.

    Args:
        local_only: why this optimizer cannot step on servers, if so: then only a rule that exchanges parameters will do.
        hub: the connections of this worker; None: a hub of its own.

    Raises:
        JobError: a server cannot be reached.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        layout: Layout,
        spec: OptimizerSpec,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        stop_on_nonfinite: bool = False,
        local_only: str | None = None,
        hub: Hub | None = None,
    ) -> None:
        super().__init__()
        self.worker, self.workers, self.seed = settings.worker, settings.workers, settings.seed
        self._settings, self._layout, self._spec, self._optimizer = settings, layout, spec, optimizer
        self._stop_on_nonfinite, self._local_only = stop_on_nonfinite, local_only
        self._numbers = itertools.count(time.time_ns())
        self._steps = 0
        self._sent_hyper: Any = None
        self._spans = layout.spans(len(settings.servers), spec.elementwise)
        self._link = WorkerLink(
            hub if hub is not None else SocketHub(settings.token),
            settings.servers,
            self._spans,
            {
                "parameters": self._on_parameters,
                "block": self._on_block,
                "provide": lambda _: self._initialise(provided=True),
                "buffers": lambda message: self._buffers.write(message.header["layout"], message.payload),
                "interrupt": self._on_interrupt,
            },
        )
        self._servers, self._coordinator = self._link.servers, self._link.coordinator
        self._samples = WorkerSamples(self._link, admitted=self._admitted, drop=self.drop, reports=self.reports)
        self._push_block = self._allocate("gradients")
        self._pull_block = self._allocate("parameters")
        self._flat = FlatModel(layout, model, self._push_block.view, self._pull_block.view)
        self._buffers = ModelBuffers(model)
        self._interrupts = Interrupts(self._link, model)
        self._model = model
        self._policy: Policy | None = None
        self._plan = Plan()
        self._work = LocalWork()
        self._blocks: BlockPulls | None = None
        """In rules of shard scope: what this worker waits for, instead of being admitted."""
        self._flat.attach()
        self._since = time.monotonic()

    # Joining and leaving.

    def _allocate(self, what: str) -> SharedMemory:
        kind = MemoryBlock if any(server.shares_memory for server in self._servers) else PrivateBlock
        return kind.allocate(self._layout.nbytes, f"{what} of worker {self.worker}")

    def join(self, sync: str) -> None:
        """Introduce this worker to the job and wait for the first parameters. ``sync`` is the script's rule, spelled.

        Raises:
            RefusedError: the job does not take this worker.
            JobError: a server is gone.
        """
        hello = {
            "kind": "hello",
            "worker": self.worker,
            "pid": os.getpid(),
            "layout": self._layout.to_wire(),
            "optimizer": self._spec.to_wire(),
            "sync": sync,
            "local_only": self._local_only,
        }
        common = self._link.introduce(hello, self._push_block, self._pull_block)
        self._policy = rule(self._link.sync)
        self.overlap = self._policy.overlap
        if self._policy.scope == "shard":
            self._blocks = BlockPulls(self._policy, self._spans, self._pull_block.view)
        if self._averaging is not None and self._averaging.momentum == "average":
            self._buffers = ModelBuffers(self._model, self._optimizer)
        self._link.ready()
        self._link.keep_beating(self._settings.timeout_s / 10)
        self._admitted()
        if common is not None:
            self._flat.repoint(common.view)
            self._link.bind(self._push_block, common)
            self._pull_block = common
        self._since = time.monotonic()

    @property
    def _averaging(self) -> Averaging | None:
        """How parameters are exchanged; None: gradients are, and the servers step."""
        return self._policy.averaging if self._policy is not None else None

    def follow_process(self) -> None:
        """Leave the job when this process ends: an exception that ends the script is a death, SIGTERM a notice to leave after the step."""
        process_end.follow(leave=self._at_exit, fail=self._tell_why, notice=self._link.notice)

    def _tell_why(self, error: BaseException) -> None:
        self._link.fail(last_words.failing(self.worker, error, pushed=self._steps > 0))

    def _at_exit(self) -> None:
        if not self._link.failed:
            self._hand_in()
            self._leave()

    def close(self) -> None:
        """Leave the job with private parameters."""
        if not self._link.closed.is_set():
            self._hand_in()
        self._flat.detach()
        self._interrupts.detach()
        self._leave()

    def _leave(self) -> None:
        if not self._link.closed.is_set():
            if self._loss is not None:  # no push has taken it along
                self._coordinator.send({"kind": "metrics", "values": {"loss": self._loss}})
            self._coordinator.send({"kind": "left", "incarnation": self._link.incarnation})
            self.vanish()

    def vanish(self) -> None:
        """Close the connections without a word: to the job, this worker is dead."""
        self._link.close()

    # Push and pull.

    def interruptible(self) -> AbstractContextManager[None]:
        return self._interrupts.watch()

    def step(self, samples: int | None) -> None:
        if not self._interrupts.now():
            self._work.nonfinite = self._collect() or self._work.nonfinite
            self._link.linger(lateness(self._settings, self._steps, self.version), unless=self._interrupts.now)
        leases, counted = self.consume(max(self._flat.made(), self._interrupts.entries))
        self._work.add(leases, samples if samples is not None else counted, self._loss)
        self._loss = None
        self._steps += 1
        if self._averaging is None:
            self._abandon() if self._overtaken() else self._push()
        else:
            if self._work.nonfinite is None:
                self._optimizer.step()
            if self._due():
                self._push()
        self._link.heed_notice()

    def _collect(self) -> str | None:
        """The tensor in which this step's gradient is not finite, if there is one."""
        nonfinite = self._flat.collect()
        if nonfinite is not None and self._stop_on_nonfinite:
            reason = f"the gradient of {nonfinite} is not finite"
            self._coordinator.send({"kind": "abort", "reason": reason})
            raise FloatingPointError(reason)
        return nonfinite

    def _overtaken(self) -> bool:
        """Whether the gradient is of no more use; only some rules say so."""
        if self._policy is not None and self._policy.obsolete_work != "push_and_wait":
            self._link.glance()
        return self._interrupts.overtaken

    def _due(self) -> bool:
        """Whether what the local steps have come to is to be pushed now: when the plan says so, or the epoch has no more for us."""
        if self._work.ending and not self._outstanding:
            return True
        if self._plan.per_epoch and self.progress.batches is None:
            raise ConfigurationError(
                f"{self._link.sync} pushes at fractions of an epoch, and this script takes no samples from optimizer.batch_sampler: "
                "use it, or say steps= instead of per_epoch="
            )
        return self._plan.due(self._work.steps, self.progress.done, self.progress.batches or 0)

    def _abandon(self) -> None:
        """Give up a gradient that nobody wants, and take the newest parameters."""
        work, self._work = self._work, LocalWork()
        version = self.version if self._blocks is None else self._blocks.t
        fields = {"incarnation": self._link.incarnation, "version": version, "compute_s": time.monotonic() - self._since}
        self._coordinator.send({"kind": "abandoned", "work": {**fields, "leases": work.leases}})
        self._go_on()
        self._since = time.monotonic()

    def _hand_in(self) -> None:
        """Push what the last local steps have come to, where parameters are exchanged and there were any."""
        if self._work.steps and self._averaging is not None:
            self._push()

    def _push(self) -> None:
        """Push the gradient, or the parameters, wait to be admitted, and go on with the newest."""
        work, self._work = self._work, LocalWork()
        if layout := self._buffers.layout:
            self._coordinator.send({"kind": "buffers", "layout": layout}, payload=self._buffers.read())
        push = {
            "incarnation": self._link.incarnation,
            "version": self.version,
            "samples": work.samples,
            "compute_s": time.monotonic() - self._since,
            "leases": work.leases,
            "nonfinite": work.nonfinite,
            "loss": work.loss,
            "steps": work.steps if self._averaging is not None else 1,
        }
        if self._averaging is not None:
            self._flat.offer()
        self._send_push({"kind": "push", "number": next(self._numbers), "steps": self._steps}, push)
        self._go_on()
        if self._averaging is not None and self._averaging.momentum == "reset":
            self._optimizer.state.clear()
        self._since = time.monotonic()

    def _send_push(self, header: dict[str, Any], push: dict[str, Any]) -> None:
        hyper = hyperparameters(self._optimizer)
        changed = {"hyper": hyper} if hyper != self._sent_hyper else {}
        self._sent_hyper = hyper
        if self._blocks is not None:
            push = {**push, "version": self._blocks.t, "held": self._blocks.used}
            self._blocks.push(self._servers, {**header, **changed, "worker": self.worker, "push": push}, self._push_block.view)
            return
        for server in self._servers[1:]:
            server.send({"kind": "push", "worker": self.worker, "number": header["number"]}, carry="push")
        self._coordinator.send({**header, **changed, "push": push}, carry="push")

    def _admitted(self) -> None:
        """Wait for the parameters of the next release, joining again if we were thought dead.

        Grants that a loader has fetched ahead stay then: their samples are somebody else's, and pushes over them are rejected.
        """
        while not self._link.released():
            self._sent_hyper = None
            self._work = LocalWork()  # the samples in it are somebody else's by now
            if self._blocks is not None:
                self._blocks.reset()
            self._link.rejoin()
        if self._blocks is not None:
            self._blocks.released()
            self._load(self._blocks)
        self._flat.pulled()

    def _go_on(self) -> None:
        """Wait until this worker may compute again: to be admitted, or, in rules of shard scope, for enough blocks."""
        blocks = self._blocks
        if blocks is not None:
            self._link.wait(lambda: blocks.ready() or self._link.due, blocks.wake_at)
            if not self._link.due:
                self._load(blocks)
                self._flat.pulled()
                return
        self._admitted()

    def _load(self, blocks: BlockPulls) -> None:
        blocks.load()
        self.version = min(blocks.used)
        self._interrupts.released(self.version)

    def _on_parameters(self, message: Message) -> None:
        self.version = message.header["version"]
        self.chief = message.header["chief"] == self.worker
        self._plan = Plan(*message.header["plan"])
        self.batch = self._plan.batch
        self._interrupts.released(self.version)
        if self._blocks is not None:
            self._blocks.received(message, whole=True)

    def _on_block(self, message: Message) -> None:
        """Only rules of shard scope send blocks without being asked. Parameters change at the end of the iteration, not now."""
        assert self._blocks is not None, f"a block came under {self._link.sync}"
        self._blocks.received(message)
        if message.header["chief"] is not None:
            self.chief = message.header["chief"] == self.worker
        if self._blocks.overtaken:
            self._interrupts.overtake(at_once=True)

    def _on_interrupt(self, message: Message) -> None:
        self._interrupts.heard(message)

    def pull(self) -> None:
        """Take the newest parameters; if this worker has left an epoch before its end, wait for that."""
        self._hand_in()
        began = time.monotonic()
        if self._samples.finish():
            self._since += time.monotonic() - began
            return
        self._coordinator.send({"kind": "pull", "incarnation": self._link.incarnation})
        self._admitted()

    def _initialise(self, *, provided: bool) -> None:
        """Hand every shard the parameters that this worker's model has: ``provided`` when asked for, or loaded."""
        number = next(self._numbers)
        self._flat.offer()
        for server in self._servers:
            server.send({"kind": "initial", "worker": self.worker, "number": number, "provided": provided}, carry="push")

    def take(self, pool: int, epoch: Epoch, size: int, batch: int) -> Grant | None:
        if self._samples.leaves(pool, epoch):
            self._hand_in()
        began = time.monotonic()
        grant = self._samples.take(pool, epoch, size, lambda: self.batch or batch)
        self._since += time.monotonic() - began
        if grant is not None:
            self._outstanding.append(grant)
        elif self._outstanding:
            self._work.ending = True
        else:
            self._hand_in()
        return grant

    # State and metrics.

    def log(self, values: dict[str, float]) -> None:
        super().log(values)
        rest = {name: value for name, value in values.items() if name != "loss"}
        if rest and not self._link.closed.is_set():
            self._coordinator.send({"kind": "metrics", "values": rest})

    def state_dict(self) -> dict[str, Any]:
        if self._averaging is not None:
            return self._optimizer.state_dict()
        answers = self._link.exchange_states([({"kind": "state", "do": "get"}, [])] * len(self._servers))
        pieces = [(answer.header["pieces"], answer.payload) for answer in answers]
        return assemble_state_dict(self._layout, self._spec, pieces, self._optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The servers take the state and this model's parameters only before their first fold; then the job's go before."""
        if self._averaging is not None:
            self._optimizer.load_state_dict(state)
            if self.version == 0:
                self._initialise(provided=False)
            self.pull()
            return
        parts = split_state_dict(self._layout, self._spec, state, self._optimizer, self._spans)
        for group, saved in zip(self._optimizer.param_groups, state["param_groups"], strict=True):
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})
        if self.version == 0:
            self._initialise(provided=False)
        self._link.exchange_states([({"kind": "state", "do": "load", "pieces": pieces}, payload) for pieces, payload in parts])
        self.pull()
