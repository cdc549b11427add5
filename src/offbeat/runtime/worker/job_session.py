"""Take part in a job as one process: join and leave, run the worker's state machine, report steps, and get samples.

`runtime.parameter_server.worker_side.WorkerSession` extends it for a worker of a job with servers,
`runtime.ranks.worker_side.RankSession` for a rank of a job without servers.
"""

from __future__ import annotations

import sys
import time
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from offbeat.core.batch_sizes import Deal
from offbeat.core.effects import BarrierPassed, EpochEnded, Fence, Grant, NoMore
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Event, Joined, LeaseWanted, PullWanted, Pushed
from offbeat.core.phases import Phase, slowest
from offbeat.core.policy import Plan
from offbeat.core.worker import State, Worker
from offbeat.core.worker_messages import BarrierAsked, Compute, EpochEndWanted, HandIn, Instruction, PullAsked, SamplesWanted, Stimulus
from offbeat.errors import warn
from offbeat.runtime.job import last_words
from offbeat.runtime.job.first_steps import FirstSteps
from offbeat.runtime.job.loading import frozen
from offbeat.runtime.job.messages import METRICS_MAX
from offbeat.runtime.job.packing import pack
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.worker import process_end
from offbeat.runtime.worker.connection import BY_NOTICE, WorkerConnection
from offbeat.runtime.worker.job_checkpoints import JobCheckpoints, parts_of_others
from offbeat.runtime.worker.library_calls import TakesPart, library_call
from offbeat.runtime.worker.phase_watch import Account, PhaseWatch
from offbeat.runtime.worker.process_state import schedulers_of, watch_schedulers
from offbeat.runtime.worker.samples import WorkerSamples
from offbeat.runtime.worker.script_writes import ScriptWrites
from offbeat.runtime.worker.siblings import Siblings
from offbeat.session import Barrier, LeasedRange, Place, Session, orders
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import Layout
from offbeat.transport.base import Address, Hub, Message, SharedMemory
from offbeat.transport.hub import SocketHub
from offbeat.types import NO_CAUSE, Epoch, LeaseId, Version, WorkerId

METRIC_NAME_MAX: Final = 200
"""Most characters of a metric's name; the rest is cut off before sending."""
ANEW: Final = (
    "offbeat: worker {worker} begins its script after {before} steps of the job: its own counters begin at 0. So do learning-rate "
    "schedules, random generators and an average of the weights (EMA) that the script keeps. Count with 'for epoch in "
    "offbeat.epochs(n, loader)' or 'for step in offbeat.steps(n)', and load with offbeat.load what the chief has saved: docs/restarts.md"
)
"""The line that a worker of a running job prints before its first step or after an empty pass, unless its script uses one of the two."""


def pushed_fields(push: Pushed) -> dict[str, Any]:
    """Return the header fields that describe a push to the coordinator, without its values."""
    return {
        "incarnation": push.incarnation,
        "version": push.version,
        "samples": push.samples,
        "compute_s": push.compute_s,
        "leases": push.leases,
        "nonfinite": push.nonfinite,
        "loss": push.loss,
        "steps": push.steps,
        **({"shard": push.shard, "alone": True} if push.alone else {}),
        **({"sums": True} if push.sums else {}),
        **({} if push.place is None else {"place": push.place}),
        **{name: value for name in ("phases", "processor", "host", "process") if (value := getattr(push, name)) not in (None, {})},
    }


class SessionOptions(TypedDict, total=False):
    """What the owner of a process gives each session, whatever the rule."""

    hub: Hub
    """The connections of this worker; by default a hub of its own."""
    siblings: list[JobSession]
    """The sessions of this process, one for each of its optimizers in the order in which they were made; `JobSession.join` adds itself."""
    stop_on_nonfinite: bool
    """True: a gradient that is not finite ends the job. False by default."""
    local_only: str | None
    """The reason for which this optimizer cannot step on servers; None, by default: it can."""


class JobSession(Session):
    """Take part in a job as one process, from `join` on. The owner of the process calls `follow_process` first.

    Args:
        settings: the worker's settings, from its launcher.
        layout, model, optimizer: the parameters' layout, the model and the optimizer of this session.
        servers: addresses of the servers that it connects to.
        spans, at_once, anywhere: see `WorkerConnection`; this class has the handlers for parameters, checkpoints, and the state of the job.
        own_state: see `JobCheckpoints`.
        options: see `SessionOptions`.

    Raises:
        JobError: a server cannot be reached.
    """

    tended = False
    """True if the session has work to do while the process waits with any of its sessions; see `idle`."""

    def __init__(
        self,
        settings: WorkerSettings,
        layout: Layout,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        servers: Sequence[Address],
        spans: Sequence[tuple[int, int]],
        at_once: Mapping[str, Callable[[Message], None]],
        anywhere: bool,
        own_state: Callable[[], bool],
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__()
        self.worker, self.workers, self.seed = settings.worker, settings.workers, settings.seed
        self._optimizer = optimizer
        link = WorkerConnection(
            options["hub"] if "hub" in options else SocketHub(settings.token),
            settings.worker,
            servers,
            spans,
            {
                **at_once,
                "parameters": self._on_parameters,
                "checkpoint": self._on_checkpoint,
                "resume_part": self._on_resume,
                "goes_on": self._on_goes_on,
                "job_over": self._on_job_over,
            },
            settings.timeout_s / 10,
            servers_return=settings.servers_return,
            anywhere=anywhere,
            standbys=settings.standbys,
        )
        self._settings, self.link, self._coordinator = settings, link, link.coordinator
        self.in_step = False
        """True while the script is inside this session's `step`."""
        self.checkpoints = JobCheckpoints(link, layout, model, optimizer, own_state=own_state)
        self._siblings = Siblings(options.get("siblings", []))
        # Its `join` is a call that the others are in, too: they take results while it waits.
        self._calls = link.calls = next((sibling.link.calls for sibling in self._siblings), link.calls)
        self._seen = 0
        """Steps that the session with the sampler had made when this session made its last one."""
        self._stop_on_nonfinite, self._local_only = options.get("stop_on_nonfinite", False), options.get("local_only")
        self.resumes = False  # the first release sets it: True for a process with which the job begins
        self._loaded: int | None = 0
        """A checksum of the state that the script has loaded since it joined, 0: none; None: the coordinator has received it."""
        self._machine = Worker(settings.worker)
        self._plan = Plan()
        """The plan that came with the newest parameters."""
        self._turn = Compute(None, False, NO_CAUSE)
        """The newest instruction that returned control to the script."""
        self._asked: SamplesWanted | EpochEndWanted | BarrierAsked | None = None
        """The question that the script has asked and whose answer it has not got, and the answer once it has come."""
        self._answer: Compute | None = None
        self._barriers: int | None = None
        """The number of the next barrier; None: this process has reached none."""
        self._passed = Barrier(0, 0, (), True)
        """The last barrier that this process has passed."""
        self._last_save: tuple[Version, int] = (-1, 0)
        """The version of the script's last save, and the number of earlier saves at that version."""
        self._first = FirstSteps()
        self._samples_given = False
        """True if the script passed the number of samples to its last step."""
        self._samples = WorkerSamples(ask=self._ask, leave=lambda pool, exhausted: self.leave_epoch(pool, exhausted=exhausted))
        self._watch: PhaseWatch | None = None
        """Measures the phases of this process; None: they are not measured."""
        self._joined = False
        """True once `join` has ended: the model is in flat memory."""
        self.other_accounts: Sequence[Account] = ()
        """Accounts of this step from the worker's other processes; empty in a worker of one process."""
        self.group: TakesPart | None = None
        """The other processes of this worker, which make the same calls; None: the worker is one process."""

    @property
    @abstractmethod
    def flat(self) -> FlatModel:
        """The model in flat memory."""

    @property
    @abstractmethod
    def unwritten(self) -> str | None:
        """The fate of values that the script writes to the parameters, for a warning; None: the parameters are this worker's own."""

    @cached_property
    def _writes(self) -> ScriptWrites:
        return ScriptWrites(exact=not self.servers_step)

    @property
    def keeps_writes(self) -> bool:
        """True if values that the script writes to the parameters stay in this process until the next call."""
        return True

    @property
    def may_change(self) -> bool:
        """True if other processes may change the parameters in this worker's memory while its script computes."""
        return False

    @property
    @abstractmethod
    def memory(self) -> tuple[SharedMemory, SharedMemory]:
        """The memory blocks of the gradients and of the parameters in `flat`. A call may replace the second."""

    @abstractmethod
    def join(self, sync: str) -> None:
        """Introduce this process to the job and wait for the first parameters.

        Args:
            sync: the script's rule, as a spec.

        Raises:
            RefusedError: the job does not accept this worker.
            JobError: a server is gone.
        """

    @abstractmethod
    def _admitted(self) -> None:
        """Wait for the newest parameters until the script has control; join again if the worker had been declared dead."""

    @abstractmethod
    def _rejoin(self) -> None:
        """Give up the gradients and samples of the present incarnation, and ask for the next."""

    @abstractmethod
    def _push(self, push: Pushed) -> None:
        """Send the gradient, or the parameters after local steps."""

    @abstractmethod
    def _detach(self) -> None:
        """Move the model into private memory."""

    @property
    def inside(self) -> bool:
        return self._calls.depth > 0

    def entered(self) -> None:
        """Check, at the beginning of a call, whether the script has written to the parameters since the last one."""
        if self._joined and self.group is None and self.keeps_writes and not self.link.closed.is_set():
            self.flat.adopt()
        if self._watches_writes:
            self._writes.look(self.flat, self.link.incarnation, self.steps)

    def left(self) -> None:
        """Remember the parameters at the end of a call, for the comparison in `entered`."""
        if self._watches_writes and (consequence := self.unwritten) is not None:
            self._writes.remember(self.flat, self.link.incarnation, self.steps, consequence, may_change=self.may_change)

    def _loads(self) -> bool:
        """Return True if the script loads the parameters that it has written since it joined: they count as the job's beginning.

        They count if they were there when the first backward pass ended, or there was none, and are there now. A step of SAM, for example,
        writes only after its first backward pass, and restores the values before it calls `step`.
        """
        flat = self.flat
        written = flat.changed(exact=False) or (None if self.in_step else flat.touched())
        return written is not None and (flat.opening or flat.loaded is not None)

    @property
    def _watches_writes(self) -> bool:
        alone = self.group is None and not self.shares
        return self.steps > 0 and alone and not self.link.closed.is_set() and self.unwritten is not None

    # The worker's state machine.

    def _tell(self, stimulus: Stimulus) -> None:
        """Pass an event to the state machine, and carry out its instructions."""
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
        """Return the fields of a push that account for the time since the last push."""
        if self._watch is None:
            return {}
        accounts = [self._watch.take(), *self.other_accounts]
        process = slowest([spent for spent, _ in accounts])
        spent, host = accounts[process]
        of_group = {"process": process} if self.other_accounts else {}
        return {"host": host, **of_group, **({} if spent is None else {"phases": spent.phases, "processor": spent.processor})}

    def _settle(self) -> None:
        """Wait until the script has control. Ctrl-C may have cut off an earlier wait, which continues here."""
        while self._machine.state is not State.COMPUTING:
            if self._machine.state is State.ASKING:
                self._hear_answer()
            else:
                self._admitted()
        if self._asked is not None and self._answer is None:
            self._answer = self._turn

    def _ask(self, question: SamplesWanted | EpochEndWanted | BarrierAsked) -> Compute:
        """Send a question about samples or a barrier to the coordinator, and wait for the answer."""
        if question != self._asked:  # equal: Ctrl-C has cut off the wait for the answer to this very question
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
        """Join again: the job had declared this worker dead."""
        self._tell(Fence(self.worker, self.link.incarnation, ""))
        if self._machine.state is State.COMPUTING:
            self._tell(PullAsked())

    def _hand_in(self) -> None:
        """Push what local steps have made since the last push, if there were any, and wait until the script has control."""
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
        """Do the work of a `tended` session while the process waits. The default does nothing."""

    @abstractmethod
    def refresh(self) -> None:
        """Take the newest parameters, after this process has waited with a sibling session for an epoch's end."""

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Report that this process waits, if other workers may wait for it with another optimizer: the coordinator cannot see it."""
        if len(self._siblings) < 2:
            yield
            return
        self._coordinator.send({"kind": "stands", "incarnation": self.link.incarnation, "still": True})
        yield
        if not self.link.closed.is_set():
            self._coordinator.send({"kind": "stands", "incarnation": self.link.incarnation, "still": False})

    def _weight(self, samples: int | None, counted: int) -> int:
        """Return a step's number of samples: from the script, from this session's sampler, or from a sibling session's present batch."""
        self._samples_given = samples is not None
        if samples is not None:
            return samples
        source = self._siblings.with_sampler()
        if source is None or source is self or self.has_sampler:
            return counted
        stepped, self._seen = source.consumed != self._seen, source.consumed
        return source.under_way(stepped)

    def _news(self) -> dict[str, Any]:
        """Return the fields of a push that compare this worker's first steps with those of others.

        The first push of a worker with which the job began says what it has loaded: all must have loaded the same state.
        """
        loaded, self._loaded = self._loaded, None
        news: dict[str, Any] = {**self._first.header(), **({"given": True} if self._samples_given or self.takes_means else {})}
        if not self.resumes or loaded is None:
            return news
        kept = frozen(self.checkpoints.model, chain(self.flat.parameters, *(one.flat.parameters for one in self._siblings)))
        news |= {"frozen": kept} if kept is not None else {}
        news |= {"chosen": zlib.crc32(repr(self.chosen).encode())} if self.chosen else {}
        return {**news, "loaded": loaded, **({"before": self.before} if self.before else {})}

    # The end.

    def follow_process(self) -> None:
        """Leave the job when this process ends. An exception that ends the script counts as a death; SIGTERM is reported to the job."""
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
        over = any(session.over is not None for session in self._siblings)
        why = last_words.failing(self.worker, error, pushed=pushed, over=over)
        before = self._siblings.fail(self, why)
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

    def _leave_in_turn(self) -> None:
        """End this process if its script has seen an order to leave, and goes on."""
        if orders.had_its_turn:
            raise SystemExit(BY_NOTICE)

    @library_call
    def barrier(self) -> Barrier:
        """Push what this worker holds, wait for the other workers, and take the newest parameters."""
        self._leave_in_turn()
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
        """Return the number of the first barrier of this process's script; None: the job's next one.

        A restarted script that counts with `offbeat.steps` or `offbeat.epochs` continues where the job is. One that passes over the epochs
        that have ended reaches their barriers again too, and they let it pass.
        """
        if self.restarted and (self.counts or not (self.has_sampler or self.barriers_before)):
            return None
        return self.barriers_before if self.restarted else 0

    @property
    def barriers(self) -> int:
        return self._barriers or 0

    @property
    def shares_model(self) -> bool:
        """Return True if workers with the same version have the same model."""
        return True

    def refreshed(self) -> None:
        """Copy parameters that came with a release into the script's model, where the model has separate memory."""

    @library_call
    def close(self) -> None:
        """Leave the job; the model keeps its parameters in private memory."""
        if not self.link.closed.is_set():
            self._hand_in()
        self._detach()
        self._leave()
        self.closed = True

    def _leave(self, *, exits: bool = False) -> None:
        if not self.link.closed.is_set():
            if self._loss is not None:  # no push has taken it along
                self._coordinator.send({"kind": "metrics", "values": {"loss": self._loss}})
            if self.steps or self.resumed:  # of a training that was over in the checkpoint, nothing was left to do
                self.checkpoints.leaving(chief=self.chief)
            left = {"kind": "left", "incarnation": self.link.incarnation, "noticed": self.link.told_to_leave}
            more = {"exits": True, "over": self.over is not None, "early": orders.seen}
            self._coordinator.send({**left, **more} if exits else left)
            self.vanish()

    def vanish(self) -> None:
        """Close the connections without a message, so that the job declares this worker dead."""
        self.link.close()

    # Steps.

    @library_call
    def step(self, samples: int | None) -> None:
        self.link.check_open()
        self.in_step, orders.last_step = True, orders.had_its_turn
        self.phases.turn(Phase.PUSH)
        try:
            self._say_anew()
            self.checkpoints.stepping()
            self._step(samples)
            self.checkpoints.stepped()
            self.look()
        finally:
            self.in_step = orders.last_step = False
            orders.steps += orders.shown is not None
            self.phases.turn(Phase.OWN)

    def look(self) -> None:
        if self.restarted:  # no other worker can find that the job has ended
            self.link.glance()
        self._siblings.glance_at_others(self)

    def _on_parameters(self, message: Message) -> None:
        """Take what comes with the parameters of a release under every rule."""
        header = message.header
        self.chief, self.resumes = header["chief"] == self.worker, header["begins"]
        self._plan = Plan(*header["plan"])
        self.batch = self._plan.batch

    def _on_goes_on(self, message: Message) -> None:
        self.before, self.restarted = message.header["steps"], self.restarted or message.header["restarted"]

    def _on_job_over(self, message: Message) -> None:
        self.over, self.ended = message.header["reason"], True

    def _say_anew(self) -> None:
        """Warn that the script has begun at its top in a job that goes on. Prints once, before the first step of any session, or after the
        first pass without a batch, since the code that follows such a pass may fail for want of one.
        """
        if self.steps or not self.restarted or self.keeps_place:
            return
        said = any(session.steps or session.keeps_place for session in self._siblings)
        self.keeps_place = True
        if not said:
            with suppress(OSError, ValueError):
                print(ANEW.format(worker=self.worker, before=self.before), file=sys.stderr, flush=True)

    @abstractmethod
    def _step(self, samples: int | None) -> None:
        """Carry out `step`."""

    # Reports to the coordinator.

    def _use_gradient(self, samples: int | None, nonfinite: str | None) -> tuple[tuple[LeaseId, ...], int, float | None]:
        """Count a step with the gradient in `flat`.

        Args:
            samples: from the script; None: not given.
            nonfinite: the tensor whose gradient is not finite; None: none is.

        Returns:
            The leases of the gradient's samples, their number (0: unknown), and the loss that the script has logged.
        """
        leases, counted = self.consume()
        self.flat.stepped()
        counted = self._weight(samples, counted)
        loss, self._loss = self._loss, None
        self.steps += 1
        if not leases and self.workers > 1:
            self._first.note(self.steps, lambda: None if nonfinite else self.flat.digest(), known=counted > 0 or self.has_sampler)
        return leases, counted, loss

    def _finite(self, nonfinite: str | None) -> str | None:
        """Return the name of the tensor whose gradient is not finite, None: none. Ends the job instead where it stops on such a gradient.

        Raises:
            FloatingPointError: the job is ended.
        """
        if nonfinite is not None and self._stop_on_nonfinite:
            reason = f"the gradient of {nonfinite} is not finite"
            self._coordinator.send({"kind": "abort", "reason": reason})
            raise FloatingPointError(reason)
        return nonfinite

    @library_call
    def log(self, values: dict[str, float]) -> None:
        super().log(values)
        if self.closed:
            warn("the job does not hear of what offbeat.log() is given after close(): log it before")
        rest = [(name[:METRIC_NAME_MAX], value) for name, value in values.items() if name != "loss"]
        if not self.link.closed.is_set():
            for start in range(0, len(rest), METRICS_MAX):
                self._coordinator.send({"kind": "metrics", "values": dict(rest[start : start + METRICS_MAX])})

    # Checkpoints.

    def place(self, pool: int) -> dict[str, Any] | None:
        places: dict[int, dict[str, Any]] = dict(self._places(pull=False).header["places"])
        return places.get(pool)

    def _places(self, *, pull: bool) -> Message:
        """Return the coordinator's answer to a question for the places of all samplers; ``pull``: the servers send their states too."""
        while True:
            self.link.expect_states()
            self._coordinator.send({"kind": "place", "incarnation": self.link.incarnation, "pull": pull})
            if (answer := self.link.answer("place")) is not None:
                return answer
            self._admitted()

    @library_call
    def hand_in(self, part: dict[str, Any]) -> None:
        plain, payload = pack(part, "this worker's part of a checkpoint")
        version, nth = self._next_save()
        self._coordinator.send({"kind": "part", "version": version, "nth": nth, "part": plain}, payload=payload)

    def _parts_of_others(self) -> dict[WorkerId, dict[str, Any]]:
        """Fetch the other workers' parts of the checkpoint that this worker writes."""
        return parts_of_others(self.link, *self._next_save())

    def _next_save(self) -> tuple[Version, int]:
        """Count one more save; return the present version and the number of earlier saves at it."""
        version, nth = self._last_save
        self._last_save = (self.version, nth + 1 if version == self.version else 0)
        return self._last_save

    def _on_checkpoint(self, message: Message) -> None:
        for number, rest, untrained in message.header["others"]:
            about = {"version": message.header["version"], "random": False, "rest": rest, "frozen": untrained}
            self._siblings[number].checkpoints.wanted(about, over=True)
        self.checkpoints.wanted(message.header)

    def _on_resume(self, message: Message) -> None:
        self.resumed = True
        self.checkpoints.resume(message)

    def schedulers(self) -> list[LRScheduler]:
        watch_schedulers()  # notes schedulers that exist already
        return schedulers_of(self.checkpoints.optimizers)

    def known_as(self, optimizer: torch.optim.Optimizer) -> None:
        self.checkpoints.optimizers.append(optimizer)

    # Samples.

    def cleared(self) -> None:
        super().cleared()
        self.flat.stepped()  # no gradient is being accumulated any more

    def _leave_out(self, leases: tuple[LeaseId, ...]) -> None:
        self._coordinator.send({"kind": "skipped", "incarnation": self.link.incarnation, "leases": leases})

    @library_call
    def take(self, pool: int, epoch: Epoch, size: int | None, batch: int) -> LeasedRange | None:
        self._leave_in_turn()
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
            if self.over is None:
                self._say_anew()
        return grant
