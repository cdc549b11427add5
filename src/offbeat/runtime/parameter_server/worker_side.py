"""A worker's shell: joins the job, pushes, pulls, hands over its state, and leaves.

Everything happens in the script's main thread, and only inside the library's calls; between them the process computes, and the servers
never touch what it reads. Its connections and the heartbeat are in ``runtime/worker/connection.py``, what it exchanges with the shards in
``exchange.py``, its dealings about samples in ``runtime/worker/samples.py``, and how it learns that its process ends in
``runtime/worker/process_end.py``.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Unpack

import torch

from offbeat.core.effects import Interrupt, Release
from offbeat.core.events import Event, Pushed
from offbeat.core.phases import Phase
from offbeat.core.worker import State, Worker
from offbeat.core.worker_messages import PullAsked, Stepped, Woken
from offbeat.errors import ConfigurationError
from offbeat.runtime.coordination.fault_injection import lateness
from offbeat.runtime.job.loading import checksum, too_late
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.parameter_server.exchange import Exchange
from offbeat.runtime.parameter_server.interrupts import Interrupts
from offbeat.runtime.worker.job_session import JobSession, SessionOptions, pushed_fields
from offbeat.runtime.worker.library_calls import library_call
from offbeat.session import LeasedRange, Snapshot
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.transport.base import Message, SharedMemory
from offbeat.types import Epoch, Version, WireFormat


class WorkerSession(JobSession):
    """One worker's part in a job of the server family, from `join` on. The owner of its process calls `follow_process` before that.

    Args:
        wire, grouped: see `Exchange`.
        options: see `SessionOptions`. With ``local_only`` only a rule that exchanges parameters will do.

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
        wire: WireFormat = "float32",
        grouped: bool = False,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(
            settings,
            layout,
            model,
            optimizer,
            servers=settings.servers,
            spans=layout.spans(len(settings.servers), spec.elementwise),
            at_once={
                "block": self._on_block,
                "provide": lambda _: self._exchange.provide(),
                "buffers": lambda message: self._exchange.buffers.write(message.header["layout"], message.payload),
                "interrupt": self._on_interrupt,
                "unused": lambda message: self._exchange.unused(message.header["incarnation"], message.header.get("number", 0)),
            },
            anywhere=False,
            own_state=lambda: self._exchange.averaging is not None,
            **options,
        )
        self._exchange = Exchange(self.link, f"worker {self.worker}", layout, spec, model, optimizer, wire, settings.plane, grouped)
        self.flat.watch = self.watch
        self._interrupts = Interrupts(self.link, model, lambda: self._machine.overtaken and self._machine.at_once, self.contents)
        self._released: Version = 0
        """The version of the newest parameters that have come."""
        self._unshared: SharedMemory | None = None
        """The job's own memory, until this worker's script begins to train; None: the worker uses it, or has memory of its own."""
        self._in_place = False
        """True once the worker reads the job's own memory: what a server folds is seen here at once."""

    @property
    def servers_step(self) -> bool:  # type: ignore[override]
        return self._exchange.averaging is None

    @property
    def flat(self) -> FlatModel:
        return self._exchange.flat

    @property
    def unwritten(self) -> str | None:
        if self._exchange.averaging is not None:
            return None
        if self._in_place and not self._exchange.apart:
            return "a later step replaces what was written, and workers that read the same memory (bsp on one host) get it before that"
        return "a later step replaces what was written"

    @property
    def keeps_writes(self) -> bool:
        return not self._in_place or self._exchange.apart

    @property
    def may_change(self) -> bool:
        return self._in_place and (self._samples.dealt_out or len(self._siblings) > 1)

    @property
    def memory(self) -> tuple[SharedMemory, SharedMemory]:
        return self._exchange.memory

    # Joining and leaving.

    @library_call
    def join(self, sync: str) -> None:
        common = self._exchange.introduce(self._hello(sync))
        self.checkpoints.begin()
        policy = self._exchange.policy
        assert policy is not None
        self.overlap = policy.split_overlap
        self.plans_batches = policy.spelling if policy.plans_batches else None
        if policy.scope == "shard":
            self._machine = Worker(self.worker, partial(policy.blocks, len(self.link.servers)))
            self._exchange.keep_blocks(self._machine)
        self.link.ready()
        self._settle()
        self._exchange.begin()
        self._unshared = common
        self._exchange.flat.remember()
        if self._exchange.grouped and self.resumes:  # what these processes load is not looked for
            self._share()
        self._joined = True

    def _share(self) -> None:
        """Read the parameters in the job's own memory from now on. What the script loads comes before this, see `_heed_writes`."""
        if self._unshared is not None:
            common, self._unshared = self._unshared, None
            self._exchange.share(common)
            self._in_place = True
            self._exchange.keep_writes_apart()
            self._exchange.flat.remember()

    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        self._heed_writes()
        self._share()
        return super().take(pool, epoch, size, batch)

    @library_call
    def _heed_writes(self) -> None:
        """Have the job begin with the parameters that the script has written since it joined: those of a file, for example.

        A script that comes to a running job may have loaded an old checkpoint into its model: there the job's parameters go before.
        """
        if self.steps or self._in_place or self._exchange.grouped or not self._loads():
            return
        if self.resumes:
            # The optimizer's state stays as it is at the servers. It does not count: other workers may have made steps by now.
            self._loaded = checksum(self._exchange.flat.parameters, {"state": {}})
            self._exchange.initialise(None, provided=False)
        self._refresh_parameters()

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
        self._settle()
        if not self.steps:
            self._heed_writes()
            self._share()
        nonfinite = self._machine.work.nonfinite
        if not self._interrupts.now():
            nonfinite = self._finite(self._exchange.flat.collect()) or nonfinite
            with self.phases.within(Phase.OWN):
                self.link.linger(lateness(self._settings, self.before + self.steps, self.version), unless=self._interrupts.now)
        done = self.progress.done
        leases, counted, loss = self._use_gradient(samples, nonfinite)
        if self._exchange.averaging is None:
            self._glance_for_interrupts()
        else:
            if nonfinite is None:
                with self.phases.within(Phase.UPDATE):
                    self._optimizer.step()
            self._check_split()
        progress, held = self.progress, len(self._outstanding)
        taken = progress.done - done
        if self._machine.blocks is not None and self._exchange.averaging is not None:
            self.link.glance()  # what has come meanwhile, and what still waits to be sent
        self._tell(Stepped(leases, counted, loss, nonfinite, 1, progress.done, progress.batches or 0, taken, held))
        self._settle()
        self.link.heed_notice()

    def _glance_for_interrupts(self) -> None:
        """See whether the gradient is of no more use; only some rules say so."""
        policy = self._exchange.policy
        if policy is not None and policy.obsolete_work != "push_and_wait":
            self.link.glance()

    def _check_split(self) -> None:
        """A plan that counts fractions of an epoch needs to know how long that is."""
        last = self._machine.work.ending and not self._outstanding
        if self._plan.per_epoch and self.progress.batches is None and not last:
            raise ConfigurationError(
                f"{self.link.sync} pushes at fractions of an epoch, and this script takes no samples from optimizer.batch_sampler: "
                "use it, or say steps= instead of per_epoch="
            )

    def _send(self, event: Event) -> None:
        self._exchange.settle()
        super()._send(event)

    def _push(self, push: Pushed) -> None:
        fields = pushed_fields(push)
        averaging = self._exchange.averaging
        self._exchange.push(self.steps, fields, self._news())
        if averaging is not None and averaging.momentum == "reset":
            self._optimizer.state.clear()

    def _rejoin(self) -> None:
        """Ask for the next incarnation.

        Grants that a loader has fetched ahead stay: their samples are somebody else's by now, and pushes over them are rejected.
        """
        self._exchange.forget()
        self.link.rejoin()

    def _admitted(self) -> None:
        machine, blocks = self._machine, self._machine.blocks
        if blocks is not None and machine.state is State.WAITING and not machine.needs_release:
            with self._standing():
                self.link.wait(lambda: blocks.ready(time.monotonic()) or self.link.due, machine.wake_at)
            if not self.link.due:
                self._tell(Woken())
                self._begin()
                return
        while not self.link.released():
            self._fenced_off()
        self._tell(Release(self.worker, self.link.incarnation, self._released, 0, "", self._plan))
        self._begin()

    def _begin(self) -> None:
        """Compute from the parameters that have come."""
        self._exchange.pulled()
        # What has come is not what the script has written. But before this worker has loaded, it may be what another one has, and
        # then the script's own load of the same file would change nothing: both count as loaded.
        may_load = self._joined and self.resumes and self.version == 0 and not self._loaded
        if not self.steps and not may_load:
            self._exchange.flat.remember()
        if self._machine.blocks is not None:
            self.version = min(self._machine.blocks.used)

    def _on_parameters(self, message: Message) -> None:
        super()._on_parameters(message)
        self.version = self._released = message.header["version"]
        self._exchange.half = message.header.get("half", 0)
        if self._exchange.blocks is not None:
            self._exchange.blocks.received(message, time.monotonic(), whole=True)

    def _on_block(self, message: Message) -> None:
        """Only rules of shard scope send blocks without being asked. Parameters change at the end of the iteration, not now."""
        blocks = self._exchange.blocks
        assert blocks is not None, f"a block came under {self.link.sync}"
        blocks.received(message, time.monotonic())
        if message.header["chief"] is not None:
            self.chief = message.header["chief"] == self.worker
        if self._machine.state is State.COMPUTING:
            self._tell(Woken())

    def _on_interrupt(self, message: Message) -> None:
        self._tell(Interrupt(self.worker, self.link.incarnation, message.header["version"], message.header["at_once"], ""))

    @library_call
    def pull(self) -> None:
        """Take the newest parameters; if an epoch has no more samples for this worker, wait for its end first."""
        self._settle()
        self._hand_in()
        self._heed_writes()
        if not self._samples.finish():
            self._refresh_parameters()

    def _refresh_parameters(self) -> None:
        self._settle()
        self._tell(PullAsked())
        self._settle()
        self.refreshed()

    def refreshed(self) -> None:
        if self._unshared is not None and self.version:  # of version 0 the server has written a copy
            self._exchange.copy(self._unshared)
            self._exchange.flat.remember()

    def refresh(self) -> None:
        if self._exchange.averaging is None and not self._exchange.flat.accumulating and not self._samples.any_open:
            self._settle()
            self._tell(PullAsked())
            self._settle()
            self.left()

    # State.

    @library_call
    def snapshot(self) -> Snapshot:
        self._exchange.settle()
        answer = self._places(pull=self._exchange.averaging is None)
        if answer.header["released"]:
            self._admitted()
            state = self._exchange.assembled()
        else:
            state = self.state_dict()
        return Snapshot(self.version, state, dict(answer.header["places"]), self._parts_of_others())

    @library_call
    def state_dict(self) -> dict[str, Any]:
        return self.checkpoints.with_settings(self._exchange.state_dict())

    @library_call
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.steps:
            raise too_late(f"this worker's first step (it has made {self.steps})")
        loaded = self._exchange.load_state_dict(state, begins=self.resumes)
        self._loaded = loaded
        self._exchange.flat.remember()
        self.pull()
