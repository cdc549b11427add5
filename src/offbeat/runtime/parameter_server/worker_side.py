"""A worker's shell: joins the job, pushes, pulls, hands over its state, and leaves.

Everything happens in the script's main thread, and only inside the library's calls; between them the process computes, and the servers
never touch what it reads. Its connections and the heartbeat are in ``runtime/worker/connection.py``, what it exchanges with the shards in
``exchange.py``, its dealings about samples in ``runtime/worker/samples.py``, and how it learns that its process ends in
``runtime/worker/process_end.py``.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offbeat.core.policy import Plan
from offbeat.errors import ConfigurationError
from offbeat.runtime.coordination.fault_injection import lateness
from offbeat.runtime.job.loading import too_late
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.parameter_server.exchange import Exchange
from offbeat.runtime.parameter_server.interrupts import Interrupts
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.runtime.worker.job_session import JobSession
from offbeat.runtime.worker.library_calls import library_call
from offbeat.runtime.worker.local_work import LocalWork
from offbeat.session import LeasedRange, Snapshot
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.transport.base import Hub, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import Epoch


class WorkerSession(JobSession):
    """One worker's part in a job of the server family, from `join` on. The owner of its process calls `follow_process` before that.

    Args:
        local_only: why this optimizer cannot step on servers, if so: then only a rule that exchanges parameters will do.
        siblings: see `JobSession`.
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
        siblings: list[JobSession] | None = None,
        hub: Hub | None = None,
    ) -> None:
        link = WorkerConnection(
            hub if hub is not None else SocketHub(settings.token),
            settings.worker,
            settings.servers,
            layout.spans(len(settings.servers), spec.elementwise),
            {
                "parameters": self._on_parameters,
                "block": self._on_block,
                "provide": lambda _: self._exchange.provide(),
                "buffers": lambda message: self._exchange.buffers.write(message.header["layout"], message.payload),
                "interrupt": self._on_interrupt,
            },
            settings.timeout_s / 10,
        )
        super().__init__(settings, link, stop_on_nonfinite=stop_on_nonfinite, local_only=local_only, siblings=siblings)
        self._optimizer = optimizer
        self._exchange = Exchange(self._link, f"worker {self.worker}", layout, spec, model, optimizer, self._forget_work)
        self._interrupts = Interrupts(self._link, model)
        self._plan = Plan()
        self._written = 0
        """See `FlatModel.writes`, when this worker joined."""

    # Joining and leaving.

    @library_call
    def join(self, sync: str) -> None:
        common = self._exchange.introduce(self._hello(sync))
        assert self._exchange.policy is not None
        self.overlap = self._exchange.policy.split_overlap
        self._link.ready()
        self._admitted()
        self._exchange.begin()
        if common is not None:
            self._exchange.share(common)
        self._written = self._exchange.flat.writes()
        self._since = time.monotonic()

    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        # A script that comes to a running job may have loaded an old checkpoint into its model: the job's parameters go before.
        if not self.resumes and not self._steps and self._exchange.flat.writes() != self._written:
            self._refresh_parameters()
        return super().take(pool, epoch, size, batch)

    def _detach(self) -> None:
        self._exchange.flat.detach()
        self._interrupts.detach()

    # Push and pull.

    def interruptible(self) -> AbstractContextManager[None]:
        policy = self._exchange.policy
        if policy is None or policy.obsolete_work != "push_and_interrupt":
            return nullcontext()  # to look for word between any two modules has its price
        return self._interrupts.watch()

    def _step(self, samples: int | None) -> None:
        if not self._interrupts.now():
            self._work.nonfinite = self._finite(self._exchange.flat.collect()) or self._work.nonfinite
            self._link.linger(lateness(self._settings, self._steps, self.version), unless=self._interrupts.now)
        done = self.progress.done
        leases, counted = self.consume(max(self._exchange.flat.made(), self._interrupts.watched()))
        counted = self._weight(samples, counted)
        self._work.add(leases, counted, self._loss)
        self._loss = None
        self._stepped(self._exchange.flat, leases, counted, self._work.nonfinite)
        if self._exchange.averaging is None:
            self._abandon() if self._overtaken() else self._push()
        else:
            if self._work.nonfinite is None:
                self._optimizer.step()
            if self._due(self.progress.done - done):
                self._push()
        self._link.heed_notice()

    def _overtaken(self) -> bool:
        """Whether the gradient is of no more use; only some rules say so."""
        policy = self._exchange.policy
        if policy is not None and policy.obsolete_work != "push_and_wait":
            self._link.glance()
        return self._interrupts.overtaken

    def _due(self, taken: int) -> bool:
        """Whether what the local steps have come to is to be pushed now: when the plan says so, or the epoch has no more for us.

        ``taken``: how many batches the last step was over.
        """
        if self._work.ending and not self._outstanding:
            return True
        if self._plan.per_epoch and self.progress.batches is None:
            raise ConfigurationError(
                f"{self._link.sync} pushes at fractions of an epoch, and this script takes no samples from optimizer.batch_sampler: "
                "use it, or say steps= instead of per_epoch="
            )
        return self._plan.due(self._work.steps, self.progress.done, self.progress.batches or 0, taken)

    def _abandon(self) -> None:
        """Give up a gradient that nobody wants, and take the newest parameters."""
        work, self._work = self._work, LocalWork()
        blocks = self._exchange.blocks
        version = self.version if blocks is None else blocks.t
        fields = {"incarnation": self._link.incarnation, "version": version, "compute_s": time.monotonic() - self._since}
        self._coordinator.send({"kind": "abandoned", "work": {**fields, "leases": work.leases}})
        self._go_on()
        self._since = time.monotonic()

    def _hand_in(self) -> bool:
        # What the last local steps have come to, where parameters are exchanged and there were any.
        local = self._work.steps > 0 and self._exchange.averaging is not None
        if local:
            self._push()
        return local

    def _push(self) -> None:
        """Push the gradient, or the parameters, wait to be admitted, and go on with the newest."""
        work, self._work = self._work, LocalWork()
        averaging = self._exchange.averaging
        push = {
            "incarnation": self._link.incarnation,
            "version": self.version,
            "samples": work.samples,
            "compute_s": time.monotonic() - self._since,
            "leases": work.leases,
            "nonfinite": work.nonfinite,
            "loss": work.loss,
            "steps": work.steps if averaging is not None else 1,
        }
        self._exchange.push(self._steps, push, {**self._first.header(), **self._loaded_news()})
        self._go_on()
        if averaging is not None and averaging.momentum == "reset":
            self._optimizer.state.clear()
        self._since = time.monotonic()

    def _admitted(self) -> None:
        """Wait for the newest parameters.

        Grants that a loader has fetched ahead stay if this worker joins again: their samples are somebody else's, and pushes over them
        are rejected.
        """
        self._exchange.admitted()
        self._block_versions()

    def _go_on(self) -> None:
        """Wait until this worker may compute again."""
        with self._standing() if self._exchange.blocks is not None else nullcontext():
            self._exchange.go_on()
        self._block_versions()

    def _block_versions(self) -> None:
        if self._exchange.blocks is not None:
            self.version = min(self._exchange.blocks.used)
            self._interrupts.released(self.version)

    def _forget_work(self) -> None:
        """This worker was thought dead: the samples of its local steps are somebody else's by now."""
        self._work = LocalWork()

    def _on_parameters(self, message: Message) -> None:
        self.version = message.header["version"]
        self.chief = message.header["chief"] == self.worker
        self.resumes = message.header["begins"]
        self._plan = Plan(*message.header["plan"])
        self.batch = self._plan.batch
        self._interrupts.released(self.version)
        if self._exchange.blocks is not None:
            self._exchange.blocks.received(message, whole=True)

    def _on_block(self, message: Message) -> None:
        """Only rules of shard scope send blocks without being asked. Parameters change at the end of the iteration, not now."""
        blocks = self._exchange.blocks
        assert blocks is not None, f"a block came under {self._link.sync}"
        blocks.received(message)
        if message.header["chief"] is not None:
            self.chief = message.header["chief"] == self.worker
        if blocks.overtaken:
            self._interrupts.overtake(at_once=True)

    def _on_interrupt(self, message: Message) -> None:
        self._interrupts.heard(message)

    @library_call
    def pull(self) -> None:
        """Take the newest parameters; if this worker has left an epoch before its end, wait for that."""
        self._hand_in()
        began = time.monotonic()
        if self._samples.finish():
            self._since += time.monotonic() - began
            return
        self._refresh_parameters()

    def _refresh_parameters(self) -> None:
        self._coordinator.send({"kind": "pull", "incarnation": self._link.incarnation})
        self._admitted()
        self._written = self._exchange.flat.writes()

    def _refresh(self) -> None:
        if self._exchange.averaging is None and not self._exchange.flat.accumulating and not self._samples.any_open:
            self._coordinator.send({"kind": "pull", "incarnation": self._link.incarnation})
            self._admitted()

    # State.

    @library_call
    def snapshot(self) -> Snapshot:
        pull = self._exchange.averaging is None
        while True:
            self._link.expect_states()
            self._coordinator.send({"kind": "place", "incarnation": self._link.incarnation, "pull": pull})
            answer = self._link.answer("place")
            if answer is not None:
                break
            self._admitted()
        if answer.header["released"]:
            self._admitted()
            state = self._exchange.assembled()
        else:
            state = self.state_dict()
        return Snapshot(self.version, state, dict(answer.header["places"]), self._others())

    @library_call
    def state_dict(self) -> dict[str, Any]:
        return self._exchange.state_dict()

    @library_call
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._steps:
            raise too_late(f"this worker's first step (it has made {self._steps})")
        loaded = self._exchange.load_state_dict(state, begins=self.resumes)
        self._loaded = loaded
        self.pull()
