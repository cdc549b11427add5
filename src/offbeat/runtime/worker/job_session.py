"""Take part in a job as one process: join and leave, run the worker's state machine, report steps, and get samples.

`runtime.parameter_server.worker_side.WorkerSession` adds what a worker of a job with servers does,
`runtime.ranks.worker_side.RankSession` what a rank of a job without servers does.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final

import torch
from torch.optim.lr_scheduler import LRScheduler

from offbeat.core.batch_sizes import Deal
from offbeat.core.effects import BarrierPassed, EpochEnded, Fence, Grant, NoMore
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Event, Joined, LeaseWanted, PullWanted, Pushed
from offbeat.core.phases import Phase, slowest
from offbeat.core.policy import Plan
from offbeat.core.worker import State, Worker
from offbeat.core.worker_messages import BarrierAsked, Compute, EpochEndWanted, HandIn, Instruction, PullAsked, SamplesWanted, Stimulus
from offbeat.runtime.job import last_words
from offbeat.runtime.job.first_steps import FirstSteps
from offbeat.runtime.job.loading import frozen
from offbeat.runtime.job.messages import METRICS_MAX
from offbeat.runtime.job.packing import Packer
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.worker import process_end
from offbeat.runtime.worker.checkpoint_parts import parts_of_others
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.runtime.worker.job_checkpoints import JobCheckpoints
from offbeat.runtime.worker.library_calls import TakesPart, library_call
from offbeat.runtime.worker.phase_watch import Account, PhaseWatch
from offbeat.runtime.worker.process_state import schedulers_of, watch_schedulers
from offbeat.runtime.worker.samples import WorkerSamples
from offbeat.runtime.worker.script_writes import ScriptWrites
from offbeat.runtime.worker.siblings import Sibling, Siblings
from offbeat.session import Barrier, LeasedRange, Place, Session
from offbeat.tensors.flat import FlatModel
from offbeat.transport.base import Message, SharedMemory
from offbeat.types import NO_CAUSE, Epoch, LeaseId, Version, WorkerId

METRIC_NAME_MAX: Final = 200
"""Most characters of a metric's name that are sent."""
ANEW: Final = (
    "offbeat: worker {worker} begins its script anew, after {before} steps: its own counters begin at 0. So do learning-rate schedules, "
    "random generators and an average of the weights (EMA) that the script keeps. Count with 'for epoch in offbeat.epochs(n, loader)' or "
    "'for step in offbeat.steps(n)', and load with offbeat.load what the chief has saved: docs/restarts.md"
)
"""What a restarted worker says before its first step, unless its script has done one of the two."""


def pushed_fields(push: Pushed) -> dict[str, Any]:
    """Return what the coordinator is told of a push, beside its values."""
    return {
        "incarnation": push.incarnation,
        "version": push.version,
        "samples": push.samples,
        "compute_s": push.compute_s,
        "leases": push.leases,
        "nonfinite": push.nonfinite,
        "loss": push.loss,
        "steps": push.steps,
        **({"sums": True} if push.sums else {}),
        **({} if push.place is None else {"place": push.place}),
        **{name: value for name in ("phases", "processor", "host", "process") if (value := getattr(push, name)) not in (None, {})},
    }


class JobSession(Session):
    """Take part in a job as one process, from `join` on. The owner of its process calls `follow_process` before that.

    Args:
        link: its connections.
        checkpoints: its part in the job's checkpoints.
        siblings: the sessions of this process, one for each of its optimizers in the order in which they were made; this one is added when
            it joins.
        stop_on_nonfinite: whether a gradient that is not finite ends the job.
        local_only: why this optimizer cannot step on servers, if so.
    """

    tended = False

    def __init__(
        self,
        settings: WorkerSettings,
        link: WorkerConnection,
        checkpoints: JobCheckpoints,
        *,
        stop_on_nonfinite: bool,
        local_only: str | None,
        siblings: list[Sibling] | None,
    ) -> None:
        super().__init__()
        self.worker, self.workers, self.seed = settings.worker, settings.workers, settings.seed
        self._settings, self.link, self._coordinator, self._calls = settings, link, link.coordinator, link.calls
        self.in_step = False
        self.checkpoints = checkpoints
        self._siblings = Siblings([] if siblings is None else siblings)
        self._seen = 0
        """Number of steps over samples that another session had made at this session's last step."""
        self._stop_on_nonfinite, self._local_only = stop_on_nonfinite, local_only
        self.resumes = False  # until the job says that it begins with this process
        self._loaded: int | None = 0
        """A checksum of the state that the script has loaded since it joined, 0: none; None: the coordinator has been told."""
        self._machine = Worker(settings.worker)
        self._plan = Plan()
        """The plan that came with the newest parameters."""
        self._turn = Compute(None, False, NO_CAUSE)
        """The instruction with which the script got control last."""
        self._asked: SamplesWanted | EpochEndWanted | BarrierAsked | None = None
        """The question whose answer the script has not got yet, and the answer, if that has come."""
        self._answer: Compute | None = None
        self._barriers: int | None = None
        """The number of the next barrier; None: this process has come to none."""
        self._passed = Barrier(0, 0, (), True)
        """The last barrier that this process has passed."""
        self._last_save: tuple[Version, int] = (-1, 0)
        """The version at which the script has saved last, and how often it had before at that version."""
        self._first = FirstSteps()
        self._samples_given = False
        """Whether the script has passed the number of samples to its last step."""
        self._samples = WorkerSamples(ask=self._ask, leave=lambda pool, exhausted: self.leave_epoch(pool, exhausted=exhausted))
        self._watch: PhaseWatch | None = None
        """What tells `phases`; None: it is not measured."""
        self._joined = False
        """True once `join` has ended: the model is in flat memory."""
        self.other_accounts: Sequence[Account] = ()
        """Of this step, in a worker of several processes: those of the others."""
        self.group: TakesPart | None = None
        """The other processes of this worker, where it consists of several: they make the same calls."""

    @property
    @abstractmethod
    def flat(self) -> FlatModel:
        """Return the model in flat memory."""

    @property
    @abstractmethod
    def unwritten(self) -> str | None:
        """Return what happens to values that the script writes to the parameters; None: they are this worker's own."""

    @cached_property
    def _writes(self) -> ScriptWrites:
        return ScriptWrites(exact=not self.servers_step)

    @property
    def keeps_writes(self) -> bool:
        """Return True if what the script writes to the parameters stays in this process until the next call."""
        return True

    @property
    def may_change(self) -> bool:
        """Return True if others may change the parameters in this worker's memory while its script computes."""
        return False

    @property
    @abstractmethod
    def memory(self) -> tuple[SharedMemory, SharedMemory]:
        """Return the blocks in which `flat` has its gradients and its parameters. The second may be replaced in a call."""

    @abstractmethod
    def join(self, sync: str) -> None:
        """Introduce this process to the job and wait for the first parameters. ``sync`` is the script's rule, spelled.

        Raises:
            RefusedError: the job does not take this worker.
            JobError: a server is gone.
        """

    @abstractmethod
    def _admitted(self) -> None:
        """Wait for the newest parameters, joining again if this worker was thought dead, until the script has control."""

    @abstractmethod
    def _rejoin(self) -> None:
        """Ask for the next incarnation. Gradients and samples of the previous one are given up."""

    @abstractmethod
    def _push(self, push: Pushed) -> None:
        """Send the gradient, or the parameters after local steps."""

    @abstractmethod
    def _detach(self) -> None:
        """Give the model memory of its own."""

    @property
    def inside(self) -> bool:
        return self._calls.depth > 0

    def entered(self) -> None:
        """Look, at the beginning of a call, whether the script has written to the parameters since the last one."""
        if self._joined and self.group is None and self.keeps_writes and not self.link.closed.is_set():
            self.flat.adopt()
        if self._watches_writes:
            self._writes.look(self.flat, self.link.incarnation, self.steps)

    def left(self) -> None:
        """Remember, at the end of a call, the parameters that the script gets."""
        if self._watches_writes and (consequence := self.unwritten) is not None:
            self._writes.remember(self.flat, self.link.incarnation, self.steps, consequence, may_change=self.may_change)

    def _loads(self) -> bool:
        """Return True if parameters that the script has written since it joined are those that it loads.

        They were there when the first backward pass ended, if there was one, and are there now. A step of SAM, for example, writes after
        its first backward pass, and puts the values back before it calls `step`.
        """
        flat = self.flat
        written = flat.changed(exact=False) or (None if self.in_step else flat.touched())
        return written is not None and (flat.opening or flat.loaded is not None)

    @property
    def _watches_writes(self) -> bool:
        return self.steps > 0 and self.group is None and not self.link.closed.is_set() and self.unwritten is not None

    # The worker's state machine.

    def _tell(self, stimulus: Stimulus) -> None:
        """Tell the machine what has happened, and carry out what it says."""
        self._do(self._machine.on(stimulus, time.monotonic()))

    def _do(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Compute):
                self._turn = instruction
            else:
                self._send(instruction.event)

    def _send(self, event: Event) -> None:
        match event:
            case Pushed():
                self._push(event._replace(sums=self.reduction == "sum", place=self.iterations, **self._accounted()))
            case Abandoned(_, incarnation, version, compute_s, leases):
                work = {"incarnation": incarnation, "version": version, "compute_s": compute_s, "leases": leases}
                self._coordinator.send({"kind": "abandoned", "work": work})
            case LeaseWanted(_, incarnation, pool, epoch, size, batch, rest, deal):
                want: dict[str, Any] = {"incarnation": incarnation, "pool": pool, "epoch": epoch, "size": size, "batch": batch}
                more = {"rest": rest} if rest is not None else {}
                how = {name: value for name, value in deal._asdict().items() if value}
                self._coordinator.send({"kind": "samples", "want": {**want, **more, **how}})
            case EpochWanted(_, incarnation, pool, epoch, size, kept):
                asked = {"incarnation": incarnation, "pool": pool, "epoch": epoch, "size": size}
                self._coordinator.send({"kind": "epoch", "want": {**asked, "kept": kept} if kept else asked})
            case BarrierWanted():
                self._coordinator.send({"kind": "barrier", "incarnation": event.incarnation, "number": event.number})
            case PullWanted():
                self._coordinator.send({"kind": "pull", "incarnation": event.incarnation})
            case Joined():
                self._rejoin()
            case _:
                raise AssertionError(f"a worker's machine never says {event}")

    def _accounted(self) -> dict[str, Any]:
        """Return the fields of a push that say where the time since the last one has gone."""
        if self._watch is None:
            return {}
        accounts = [self._watch.take(), *self.other_accounts]
        process = slowest([spent for spent, _ in accounts])
        spent, host = accounts[process]
        of_group = {"process": process} if self.other_accounts else {}
        return {"host": host, **of_group, **({} if spent is None else {"phases": spent.phases, "processor": spent.processor})}

    def _settle(self) -> None:
        """Wait until the script has control. Ctrl-C may have ended such a wait before its end."""
        while self._machine.state is not State.COMPUTING:
            if self._machine.state is State.ASKING:
                self._hear_answer()
            else:
                self._admitted()
        if self._asked is not None and self._answer is None:
            self._answer = self._turn

    def _ask(self, question: SamplesWanted | EpochEndWanted | BarrierAsked) -> Compute:
        """Ask the coordinator for samples, or to pass a barrier, and wait for the answer."""
        if question != self._asked:  # else Ctrl-C has ended the wait for this very answer
            self._settle()
            self._asked, self._answer = question, None
            self._tell(question)
        self._settle()
        answer, self._asked, self._answer = self._answer, None, None
        assert answer is not None
        return answer

    def _hear_answer(self) -> None:
        message = self.link.answer("grant", "no_more", "epoch_ended", "barrier_passed")
        if message is None:
            self._fenced_off()
            return
        header, asked, me = message.header, self._asked, self.link.incarnation
        if header["kind"] == "barrier_passed":
            self._passed = Barrier(header["number"], header["version"], tuple(header["workers"]), True, header["past"])
            self._barriers = self._passed.number + 1
            self._tell(BarrierPassed(*self._passed[:3]))
            return
        assert isinstance(asked, SamplesWanted | EpochEndWanted)
        if header.get("over", False):
            self.over = "the scripts of the job's first workers have ended"
        if header.get("report") is not None:
            self.note_report({"epoch": header["epoch"], **header["report"]})
            if header["epoch"] >= asked.epoch:
                self._samples.over(asked.pool)
        match header["kind"]:
            case "grant":
                parts = tuple((start, stop) for start, stop in header["parts"])
                place = header["lease"], header["start"], header["stop"], header.get("refreshed", False), parts
                self._tell(Grant(self.worker, me, asked.pool, header["epoch"], *place))
            case "no_more":
                self._tell(NoMore(self.worker, me, asked.pool, header["epoch"], header["refreshed"], ""))
            case "epoch_ended":
                self._tell(EpochEnded(asked.pool, header["epoch"], {}, (self.worker,)))

    def _fenced_off(self) -> None:
        """Join again: this worker was thought dead."""
        self._tell(Fence(self.worker, self.link.incarnation, ""))
        if self._machine.state is State.COMPUTING:
            self._tell(PullAsked())

    def _hand_in(self) -> None:
        """Push the parameters after local steps, if there were any."""
        if self._machine.work.steps:
            self._tell(HandIn())
            self._settle()

    def _hello(self, sync: str) -> dict[str, Any]:
        number = self._siblings.add(self)
        self.checkpoints.random = number == 0
        self._calls = self.link.calls
        if number:  # an injected fault happens to a worker once, not once for each of its optimizers
            self._settings = replace(self._settings, slow=())
        hello = {"kind": "hello", "worker": self.worker, "pid": Place.of_process().worker_pid, "sync": sync, "local_only": self._local_only}
        if self.reduction != "mean":
            hello["reduction"] = self.reduction
        return {**hello, "number_of_optimizer": number} if number else hello

    # Several optimizers in one process.

    def idle(self) -> None:
        """Do what a `tended` session does while the process waits; by default nothing."""

    @abstractmethod
    def refresh(self) -> None:
        """Take the newest parameters, after this process has waited with another session for an epoch's end."""

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Report that this process waits, if other workers may wait for it with another optimizer and cannot know."""
        if len(self._siblings) < 2:
            yield
            return
        self._coordinator.send({"kind": "stands", "incarnation": self.link.incarnation, "still": True})
        yield
        if not self.link.closed.is_set():
            self._coordinator.send({"kind": "stands", "incarnation": self.link.incarnation, "still": False})

    def _weight(self, samples: int | None, counted: int) -> int:
        """Return the number of samples of a step: from the script, or this session's sampler, or the present batch of another session."""
        self._samples_given = samples is not None
        if samples is not None:
            return samples
        source = self._siblings.with_sampler()
        if source is None or source is self or self.has_sampler:
            return counted
        stepped, self._seen = source.consumed != self._seen, source.consumed
        return source.under_way(stepped)

    def _loaded_news(self) -> dict[str, Any]:
        """Return the fields that go with the first push of a worker with which the job began: all workers must have loaded the same."""
        loaded, self._loaded = self._loaded, None
        news: dict[str, Any] = {"given": True} if self._samples_given else {}
        if not self.resumes or loaded is None:
            return news
        kept = frozen(self.checkpoints.model, chain(self.flat.parameters, *(one.flat.parameters for one in self._siblings)))
        news |= {"frozen": kept} if kept is not None else {}
        return {**news, "loaded": loaded, **({"before": self.before} if self.before else {})}

    # The end.

    def follow_process(self) -> None:
        """Leave the job when this process ends: an exception that ends the script is a death, SIGTERM is reported, and the job decides."""
        all_of_us = self._siblings
        if self._settings.phases:
            self._watch = PhaseWatch.of_process()
            self._watch.follow(self.checkpoints.model)
            self.phases = self.link.phases = self._watch.clock
        process_end.follow(
            leave=self._at_exit,
            fail=self._tell_why,
            told=partial(all_of_us.told, self),
            notice=partial(all_of_us.notice, self),
            interrupt=partial(all_of_us.interrupt, self),
        )

    def _tell_why(self, error: BaseException) -> str | None:
        pushed = any(session.steps > 0 for session in self._siblings)
        why = last_words.failing(self.worker, error, pushed=pushed)
        before = self.link.fail(why)
        if before is None:
            return None
        return f"offbeat: worker {self.worker}: {why['reason']} ({why['place']}), as on worker {before} before: see the traceback there"

    @library_call
    def _at_exit(self) -> None:
        if not self.link.failed:
            self.link.leaving()
            self._samples.leave_all()
            self._hand_in()
            self._leave(exits=True)

    @library_call
    def barrier(self) -> Barrier:
        """Hand in what this worker has, wait for the others, and take the newest parameters."""
        self.pull()
        if self._barriers is None:
            self._barriers = self._first_barrier()
        while not self._ask(BarrierAsked(self._barriers)).over:
            pass
        self.refreshed()
        self._siblings.refresh_others(self)
        same = self.shares_model and self.version == self._passed.version
        return self._passed._replace(version=self.version, shared=same)

    def _first_barrier(self) -> int | None:
        """Return the number of the first barrier of this process's script; None: the next one of the job.

        A restarted script that counts with `offbeat.steps` or `offbeat.epochs` goes on where the job is; one that passes over the epochs
        that are over comes to their barriers again, which have been passed.
        """
        if self.restarted and (self.counts or not (self.has_sampler or self.barriers_before)):
            return None
        return self.barriers_before if self.restarted else 0

    @property
    def barriers(self) -> int:
        return self._barriers or 0

    @property
    def shares_model(self) -> bool:
        """Return whether workers that have the same version have the same model."""
        return True

    def refreshed(self) -> None:
        """Take parameters that have come with a release into the script's model, where they are elsewhere."""

    @library_call
    def close(self) -> None:
        """Leave the job with private parameters."""
        if not self.link.closed.is_set():
            self._hand_in()
        self._detach()
        self._leave()

    def _leave(self, *, exits: bool = False) -> None:
        if not self.link.closed.is_set():
            if self._loss is not None:  # no push has taken it along
                self._coordinator.send({"kind": "metrics", "values": {"loss": self._loss}})
            if self.steps:
                self.checkpoints.leaving(chief=self.chief)
            left = {"kind": "left", "incarnation": self.link.incarnation, "noticed": self.link.told_to_leave}
            self._coordinator.send({**left, "exits": True, "over": self.over is not None} if exits else left)
            self.vanish()

    def vanish(self) -> None:
        """Close the connections without a word: to the job, this worker is dead."""
        self.link.close()

    # Steps.

    @library_call
    def step(self, samples: int | None) -> None:
        self.in_step = True
        self.phases.turn(Phase.PUSH)
        try:
            if not self.steps and self.restarted and not self.keeps_place:
                self._say_anew()
            self.checkpoints.stepping()
            self._step(samples)
            self.checkpoints.stepped()
            self.look()
        finally:
            self.in_step = False
            self.phases.turn(Phase.OWN)

    def look(self) -> None:
        if self.restarted:  # only such a worker can find that the job has ended
            self.link.glance()

    def _on_goes_on(self, message: Message) -> None:
        self.before, self.restarted = message.header["steps"], self.restarted or message.header["restarted"]

    def _on_job_over(self, message: Message) -> None:
        self.over, self.ended = message.header["reason"], True

    def _say_anew(self) -> None:
        """Say that the script has begun from its top in a job that has not: once, before the first step."""
        self.keeps_place = True
        if self._siblings.first_is(self):
            with suppress(OSError, ValueError):
                print(ANEW.format(worker=self.worker, before=self.before), file=sys.stderr, flush=True)

    @abstractmethod
    def _step(self, samples: int | None) -> None:
        """Carry out `step`."""

    # What it tells.

    def _stepped(self, flat: FlatModel, leases: tuple[LeaseId, ...], samples: int, nonfinite: str | None) -> None:
        """Count a step whose gradient is in ``flat``, computed over this many samples (0: unknown)."""
        self.steps += 1
        if not leases and self.workers > 1:
            self._first.note(self.steps, lambda: None if nonfinite else flat.digest(), known=samples > 0 or self.has_sampler)

    def _finite(self, nonfinite: str | None) -> str | None:
        """The tensor in which this step's gradient is not finite, if there is one, and the job goes on nevertheless."""
        if nonfinite is not None and self._stop_on_nonfinite:
            reason = f"the gradient of {nonfinite} is not finite"
            self._coordinator.send({"kind": "abort", "reason": reason})
            raise FloatingPointError(reason)
        return nonfinite

    @library_call
    def log(self, values: dict[str, float]) -> None:
        super().log(values)
        rest = [(name[:METRIC_NAME_MAX], value) for name, value in values.items() if name != "loss"]
        if not self.link.closed.is_set():
            for start in range(0, len(rest), METRICS_MAX):
                self._coordinator.send({"kind": "metrics", "values": dict(rest[start : start + METRICS_MAX])})

    # Checkpoints.

    def place(self, pool: int) -> dict[str, Any] | None:
        while True:
            self._coordinator.send({"kind": "place", "incarnation": self.link.incarnation, "pull": False})
            if (answer := self.link.answer("place")) is not None:
                places = dict(answer.header["places"])
                return places.get(pool)
            self._admitted()

    @library_call
    def hand_in(self, part: dict[str, Any]) -> None:
        packer = Packer()
        plain = packer.pack(part, "this worker's part of a checkpoint")
        version, nth = self._next_save()
        self._coordinator.send({"kind": "part", "version": version, "nth": nth, "part": plain}, payload=packer.payload)

    def _parts_of_others(self) -> dict[WorkerId, dict[str, Any]]:
        """Collect the other workers' parts of the checkpoint that this one writes."""
        return parts_of_others(self.link, *self._next_save())

    def _next_save(self) -> tuple[Version, int]:
        """Return the version at which the script saves, and how often it has before at this version."""
        version, nth = self._last_save
        self._last_save = (self.version, nth + 1 if version == self.version else 0)
        return self._last_save

    def _on_checkpoint(self, message: Message) -> None:
        self.checkpoints.wanted(message)

    def _on_resume(self, message: Message) -> None:
        self.checkpoints.resume(message)

    def schedulers(self) -> list[LRScheduler]:
        watch_schedulers()  # finds those that exist
        return schedulers_of(self.checkpoints.optimizers)

    def known_as(self, optimizer: torch.optim.Optimizer) -> None:
        self.checkpoints.optimizers.append(optimizer)

    # Samples.

    def cleared(self) -> None:
        super().cleared()
        self.flat.stepped()  # nothing is being accumulated

    def _leave_out(self, leases: tuple[LeaseId, ...]) -> None:
        self._coordinator.send({"kind": "skipped", "incarnation": self.link.incarnation, "leases": leases})

    @library_call
    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        if self._samples.leaves(pool, epoch):
            self._hand_in()
        self.checkpoints.asking = not self._outstanding
        try:
            rest, deal = self.rest_of(pool, epoch), self.deals.get(pool, Deal())
            grant = self._samples.take(pool, epoch, size, batch, rest, len(self._outstanding), deal)
        finally:
            self.checkpoints.asking = False
        (self.checkpoints.passed if grant is None else self.checkpoints.dealt)()
        if grant is not None:
            self._outstanding.append(grant)
        elif not self._outstanding:
            self._samples.over(pool)
            self._siblings.refresh_others(self)
        return grant
