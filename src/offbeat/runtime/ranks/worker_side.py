"""A rank's shell, where there are no servers: its own replica, its own optimizer, and its place among the other ranks.

A step tells the coordinator what its gradient was computed from and over, then takes part in a round (``member.py``). Everything that
changes the replica happens in the script's main thread, inside the library's calls. The replica is in ``replica.py``; connections,
heartbeat and samples are those of any worker.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeAlias, Unpack

import torch

from offbeat.core.effects import Release
from offbeat.core.events import Pushed
from offbeat.core.phases import Phase
from offbeat.core.policy import Policy
from offbeat.core.rank_log import Fenced
from offbeat.core.worker_messages import Advanced, Stepped
from offbeat.errors import JobError, OffbeatError, warn
from offbeat.policies import rule
from offbeat.runtime.coordination.buffers import ModelBuffers
from offbeat.runtime.coordination.fault_injection import lateness
from offbeat.runtime.job.loading import too_late
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.ranks.member import RankMember
from offbeat.runtime.ranks.replica import Replica
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.runtime.worker.job_checkpoints import LOOK_S, PARTS_S
from offbeat.runtime.worker.job_session import JobSession, SessionOptions, pushed_fields
from offbeat.runtime.worker.library_calls import library_call
from offbeat.session import LeasedRange, Snapshot
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec, load_settings
from offbeat.transport.base import Message, SharedMemory
from offbeat.types import Epoch, LeaseId, Version, WorkerId

PartOf: TypeAlias = Callable[
    [Policy, Message, WorkerId, Replica, Callable[[], None], Callable[[Version], None], WorkerConnection], RankMember
]
"""See `runtime.members.part_of`."""


class RankSession(JobSession):
    """One rank's part in a job without servers, from `join` on. The owner of its process calls `follow_process` before that.

    Args:
        grouped: see `Replica`.
        part_of: which part the rank takes, by the rule of the job that has welcomed it.
        options: see `SessionOptions`.

    Raises:
        JobError: the coordinator cannot be reached.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        layout: Layout,
        spec: OptimizerSpec,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        grouped: bool = False,
        part_of: PartOf,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(
            settings,
            layout,
            model,
            optimizer,
            servers=settings.servers[:1],
            spans=[],
            at_once={
                "provide": self._on_provide,
                "donate": self._on_donate,
                "meet": self._on_meet,
                "chief": self._on_chief,
                "buffers": lambda message: self._buffers.write(message.header["layout"], message.payload),
            },
            anywhere=True,
            own_state=lambda: False,
            **options,
        )
        self._terms = {"layout": layout.to_wire(), "optimizer": spec.to_wire()}
        self._replica = Replica(layout, model, optimizer, self.worker, self.workers, grouped=grouped)
        self._buffers = ModelBuffers(model)
        self._numbers = itertools.count(time.time_ns())
        self._part_of = part_of
        self._part: RankMember | None = None
        self._given: tuple[Any, memoryview, Version] | None = None
        """The replica that another rank has sent for this one to begin with, and the replica's version."""
        self._enters = True
        """This rank has joined, for the first time or again, and has not begun with a replica yet."""
        self._may_load = True
        """No result of a round can have changed the replica yet."""
        self._goal: Version = 0
        """The newest version that the coordinator has named: this rank can wait for its results."""
        self._fenced = False
        """This rank is outside the rounds: a fence is on its way to it, or the parameters with which it comes back."""
        self._parted = False
        """This rank has taken leave: no other rank needs its memory any more."""
        self._postponed: list[Message] | None = None
        """Requests for this rank's replica that came while it was taking leave; None: it is not."""
        self._stale: set[LeaseId] = set()
        """Leases of an earlier incarnation: the coordinator has dealt their samples to other workers."""

    @property
    def flat(self) -> FlatModel:
        return self._replica.flat

    @property
    def unwritten(self) -> str | None:
        if self._part is None or self._part.mixes_parameters:
            return None
        return "the replicas of the other ranks do not have what was written, and differ from now on"

    @property
    def shares_model(self) -> bool:
        return not self._mine.mixes_parameters

    @property
    def memory(self) -> tuple[SharedMemory, SharedMemory]:
        return self._replica.memory

    @property
    def _mine(self) -> RankMember:
        """Return this rank's part in the job; there is one from the welcome until `close`."""
        self.link.check_open()
        assert self._part is not None, "this rank is not in a job"
        return self._part

    # Joining and leaving.

    @library_call
    def join(self, sync: str) -> None:
        replica = self._replica
        replica.sums = self.reduction == "sum"
        vector = {"numel": replica.numel, "dtype": str(replica.dtype).removeprefix("torch."), "size": replica.size}
        welcome = self.link.greet({**self._hello(sync), **self._terms, "vector": vector})
        self.checkpoints.begin()
        chosen = rule(self.link.sync)
        self._part = self._part_of(chosen, welcome, self.worker, replica, self._hear, self._voided, self.link)
        self.link.ready(self._mine.contact)
        self._settle()
        self.flat.watch = self.watch
        self.flat.remember()
        self._joined = self.tended = True
        self._siblings.tend_while_waiting()

    def follow_process(self) -> None:
        super().follow_process()
        self._replica.phases = self.phases

    def _detach(self) -> None:
        self._replica.detach()
        part, self._part = self._part, None
        if part is not None:
            part.close()

    @library_call
    def close(self) -> None:
        self._leave()
        self._detach()
        self.closed = True

    def _leave(self, *, exits: bool = False) -> None:
        if self.link.incarnation and not self.link.failed and not self.link.closed.is_set():
            self.tended = False
            if not self._enters:
                self.idle()
            with suppress(Fenced, JobError):
                self._take_leave()
            # Another rank may want a copy of the replica before it is gone. Where the coordinator is gone, no request can come.
            with suppress(JobError):
                self._coordinator.send({"kind": "leaving", "exits": exits})
                self.link.answer("farewell")
            with suppress(Fenced, JobError):
                self._take_leave()
        super()._leave(exits=exits)

    def _take_leave(self) -> None:
        """Wait until no other rank needs this one any more, nor any rank that joins with a copy of its replica meanwhile."""
        while not (self._parted or self._enters or self._fenced):
            self._parted, self._postponed = True, []
            try:
                self._mine.part()
            finally:
                postponed, self._postponed = self._postponed, None
                self.version = self._mine.version
            for message in postponed:
                self._on_donate(message)

    def _admitted(self) -> None:
        """Wait for the coordinator's `parameters` message, and bring the replica at least to the version in it.

        A rank that was declared dead joins again first.
        """
        while True:
            if not self.link.released():
                self._fenced_off()
                continue
            try:
                self._go_on()
            except Fenced as error:
                self._fall_out(error)
            else:
                self._resume()
                return

    def _resume(self) -> None:
        """Compute from the replica as it is."""
        self._tell(Release(self.worker, self.link.incarnation, self.version, 0, "", self._plan))

    def _fall_out(self, why: Fenced) -> None:
        """Note that the rounds go on without this rank, and tell the coordinator where the ranks have decided so among themselves."""
        self._fenced = True
        if self._mine.others_decide:
            self._coordinator.send({"kind": "outside", "incarnation": self.link.incarnation, "reason": str(why)})

    @contextmanager
    def _back_if_fenced(self) -> Iterator[None]:
        """Come back to the rounds if the body of the ``with`` finds that they go on without this rank."""
        try:
            yield
        except Fenced as error:
            self._fall_out(error)
            self._admitted()

    def _rejoin(self) -> None:
        # What was stale before and is not outstanding any more has been pushed, or lost with the round in which it was used.
        self._stale = {grant.lease for grant in self._outstanding}
        # From its admission on, other ranks send it results; these do not fit the replica that it still has.
        self._fenced = True
        self._mine.attach()
        self._buffers.forget()
        self.link.rejoin(self._mine.contact)

    def _go_on(self) -> None:
        if self._enters:
            given, self._given = self._given, None
            self._enters = self._fenced = False
            self._mine.begin(given, self._goal, first=self.resumes)
        else:
            self._mine.catch_up(self._goal, exactly=True)
        self.version = self._mine.version
        self._mine.resume()

    # What the coordinator says.

    def _on_parameters(self, message: Message) -> None:
        super()._on_parameters(message)
        header = message.header
        self._goal = header["version"]
        if header["enters"]:
            self._enters = True
            self._mine.meet(header)
            self._given = (header["replica"], message.payload, header["from"]) if header["replica"] is not None else None

    def _on_provide(self, message: Message) -> None:
        replica, payload = self._replica.give()
        header = {"kind": "initial", "number": next(self._numbers), "provided": True, "replica": replica, "from": self.version}
        self._coordinator.send(header, payload=payload)

    def _on_donate(self, message: Message) -> None:
        """Send another rank a copy of this rank's replica, and make sure that it gets the results of later rounds."""
        if self._postponed is not None:
            self._postponed.append(message)
            return
        to, header = message.header["to"], {"kind": "donation", "to": message.header["to"], "number": message.header["number"]}
        self._parted = self._parted and to is None
        try:
            replica, payload = self._mine.give_to(to, message.header["ticket"])
        except OffbeatError as error:
            self._coordinator.send({**header, "failed": str(error)})
        else:
            self._coordinator.send({**header, "failed": None, "replica": replica, "from": self._mine.version}, payload=payload)

    def _on_meet(self, message: Message) -> None:
        self._mine.come_to(message.header)
        self._coordinator.send({"kind": "met"})

    def _on_chief(self, message: Message) -> None:
        self.chief = message.header["chief"] == self.worker

    def _hear(self) -> None:
        self.link.glance()
        self.link.heed_notice()
        self._siblings.tend_others(self)

    def refresh(self) -> None:
        if not self._enters:
            self.link.glance()
            self.idle()

    # Rounds.

    def _start(self) -> None:
        """The script has loaded what it wants to load: from now on results of rounds change the replica."""
        self._end_loading()
        self._mine.start()

    def _end_loading(self) -> None:
        if self._may_load and self.resumes and self.group is None and self._loads():
            self._loaded = self._replica.checksum()
        self._may_load = False

    @library_call
    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        self._mine.restore(again=True)
        with self._back_if_fenced():
            self._start()
        return super().take(pool, epoch, size, batch)

    def _voided(self, number: Version) -> None:
        """The mean of a round is not finite, though each gradient in it is. All ranks see the same bits, and none makes a step."""
        reason = (
            f"round {number}: the mean of the ranks' gradients is beyond the range of {str(self._replica.dtype).removeprefix('torch.')}, "
            "though each of them is finite"
        )
        if self._stop_on_nonfinite:
            self._coordinator.send({"kind": "abort", "reason": reason})
            raise FloatingPointError(reason)
        warn(f"{reason}: this step is left out on every rank; lower the learning rate, or clip gradients")
        self._coordinator.send({"kind": "voided", "number": number})

    def _step(self, samples: int | None) -> None:
        self._settle()
        nonfinite = self._finite(self._replica.collect())
        with self.phases.within(Phase.OWN):
            self.link.linger(lateness(self._settings, self.before + self.steps, self.version), unless=lambda: False)
        self.link.glance()
        self._siblings.tend_others(self)  # a rank that comes back may need their replicas, and this rank may wait for nobody
        leases, counted, loss = self._use_gradient(samples, nonfinite)
        self._mine.restore()
        with self._back_if_fenced():
            self._start()
            self._tell(Advanced(self.version))
            try:
                self._tell(Stepped(leases, counted, loss, nonfinite))
            finally:  # also where Ctrl-C has ended the round for this rank
                self._resume()
        self.link.heed_notice()

    def _push(self, push: Pushed) -> None:
        """Say what the gradient is of, and take part in a round with it."""
        usable = push.nonfinite is None and not self._stale.intersection(push.leases)
        fields = pushed_fields(push)
        if usable:
            self._replica.sign(self.steps)
            self._buffers.send(self._coordinator)
        self._coordinator.send({"kind": "push", "number": next(self._numbers), "steps": self.steps, **self._news(), "push": fields})
        # The coordinator follows the rounds, and so knows which ranks wait; a rank that waits for neighbours reports it.
        before = self.phases.wait()  # an exchange among ranks, and the wait for them, are one
        with self._standing() if self._mine.mixes_parameters else nullcontext():
            self._mine.contribute(usable, 0 if push.sums else push.samples)
        self.phases.waited(before)
        self.version = self._mine.version

    def idle(self) -> None:
        """While this rank waits for the coordinator: a gradient that is being accumulated stays one of one version."""
        if not self._fenced and not self._replica.flat.accumulating:
            try:
                self._mine.catch_up()
            except Fenced as error:
                self._fall_out(error)
            self.version = self._mine.version
            self.left()

    @library_call
    def pull(self) -> None:
        """Take the results that there are; if an epoch has no more samples for this rank, wait for its end first."""
        self._mine.restore()
        self._end_loading()
        if not self._samples.finish():
            self._hear()
            with self._back_if_fenced():
                self._start()
                self._mine.pull()
                self.version = self._mine.version

    # State.

    @library_call
    def snapshot(self) -> Snapshot:
        """Return the replica's state, once it and the coordinator know of the same results, as far as they come to in `PARTS_S` seconds.

        The coordinator hears of a round's gradients by messages, the last of which may still be on its way when the round has closed.
        """
        until = time.monotonic() + PARTS_S
        while True:
            answer = self._places(pull=False)
            if answer.header["version"] >= self.version or time.monotonic() > until:
                break
            time.sleep(LOOK_S)
        if not self._may_load and not self._fenced:
            with self._back_if_fenced():
                self._mine.catch_up(answer.header["version"])
                self.version = self._mine.version
        return Snapshot(self.version, self.state_dict(), dict(answer.header["places"]), self._parts_of_others())

    @library_call
    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    @library_call
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.steps or not self._may_load:
            what = f"this worker's first step (it has made {self.steps})" if self.steps else "this worker's first batch or pull()"
            raise too_late(what)
        if self.resumes:
            self._optimizer.load_state_dict(state)
            self._loaded = self._replica.checksum()
        else:
            load_settings(self._optimizer, state["param_groups"], but=self._replica.lasting)
            self._mine.restore(again=True)
