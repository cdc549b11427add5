"""A simulated process of a worker: its script, the time that everything takes, and the faults that befall it.

What the worker does and when is decided by `core.worker.Worker`, the machine that live workers run too. This file is its shell: it carries
out the machine's instructions in virtual time, and runs a script that goes through batches, or through epochs of them where samples are
dealt out. How parameters come and pushes go is in ``workers.py`` for rules of job scope and in ``shard_workers.py`` for those of shard
scope.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import isinf
from typing import TYPE_CHECKING, Final

from offbeat.core.block_cache import Blocks
from offbeat.core.effects import EpochEnded, Fence, Grant, Interrupt, NoMore, Publish, Release
from offbeat.core.events import Abandoned, Event, Heard, Joined, Lost, Pushed
from offbeat.core.worker import State, Worker
from offbeat.core.worker_messages import Compute, Finished, Instruction, SamplesWanted, Send, Stepped
from offbeat.session import SplitProgress
from offbeat.sim.latency.registry import stretched
from offbeat.sim.training.workload import Handed, Step
from offbeat.types import Epoch, Incarnation, LeaseId, RecordId, Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation

BEATS: Final = 10
"""Heartbeats in a timeout, as live."""


class SimulatedProcess(ABC):
    """One process of a worker. A restarted worker is a new object, which goes on with its predecessor's numbers of iterations.

    Args:
        simulation: the run that this process is part of.
        number: the worker's.
        iteration: the number of its next iteration.
        blocks: see `core.worker.Worker`.
    """

    def __init__(self, simulation: Simulation, number: WorkerId, iteration: int, blocks: Callable[[], Blocks] | None = None) -> None:
        self.simulation, self.number, self.iteration = simulation, number, iteration
        self.queue = simulation.queue
        self.machine = Worker(number, blocks)
        self.incarnation: Incarnation = 0
        self.gone = False
        self.windows = simulation.cluster.script.windows(number)
        self.due = 0
        """The serial number of the entry that goes on with this process; others are out of date."""
        self.computing = False
        """A computation is under way; its end is `due`."""
        self.in_transit = False
        """Parameters are on their way to this process, or its push to the servers: what it is told meanwhile it reads afterwards."""
        self._fence: tuple[Fence, RecordId] | None = None
        """What it has still to read."""
        self._ends = False
        """Its script has come to its end, and the process is about to leave."""
        self._leases: tuple[LeaseId, ...] = ()
        self._samples = 0
        self._steps: tuple[Step, ...] = ()
        """Of the iterations that make up its next push."""
        self._progress = SplitProgress()
        self._epoch: Epoch = 0
        self._question = self._ask_of(0)

    # Told by the coordinator.

    def joined(self, incarnation: Incarnation) -> None:
        """Take part from now on, under this incarnation."""
        self.incarnation = incarnation
        self._stop()
        self._steps = ()

    @abstractmethod
    def released(self, effect: Release, cause: RecordId) -> None:
        """Go on with the parameters that the servers send now."""

    @abstractmethod
    def published(self, effect: Publish, cause: RecordId) -> None:
        """Take note of the new block that a server sends now."""

    def answered(self, effect: Grant | NoMore | EpochEnded, cause: RecordId) -> None:
        """Go on with samples, or without."""
        self.do(self.machine.on(effect, self.queue.now, cause))

    def interrupted(self, effect: Interrupt, cause: RecordId) -> None:
        """Give up what is being computed, now or at its end."""
        news = effect.version > self.machine.version
        self.machine.on(effect, self.queue.now, cause)
        if news and self.computing and effect.at_once:
            self.due = self.queue.at(self.thaw(), self.finished)

    def fenced(self, effect: Fence, cause: RecordId) -> None:
        """Join again, as soon as this process waits for something; what it hands in until then is rejected."""
        if self.in_transit:
            self._fence = effect, cause
            return
        self.do(self.machine.on(effect, self.queue.now, cause))
        if self._ends:
            self._finish()

    # What befalls it.

    def end(self, why: str, *, seen: bool) -> None:
        """End this process; ``seen``: its connection closes with it."""
        self.gone, self.due = True, 0
        if seen:
            self.simulation.send(Lost(self.number, why, self.incarnation or None))

    def beat(self, serial: int = 0) -> None:
        """Give a sign of life now and then, as long as this process is not frozen."""
        if self.gone:
            return
        if self.incarnation and self.thaw() == self.queue.now:
            self.simulation.send(Heard(self.number, self.incarnation))
        self.simulation.inbox.beat(self.beat)

    def thaw(self) -> Seconds:
        """Return when this process can do something: now, unless it is frozen."""
        now = self.queue.now
        return next((stop for start, stop, factor in self.windows if start <= now < stop and isinf(factor)), now)

    # What it does.

    def do(self, instructions: Sequence[Instruction]) -> None:
        """Carry out what the machine says."""
        for at, instruction in enumerate(instructions):
            if type(instruction) is Compute:
                self._go_on(instruction)
                continue
            assert type(instruction) is Send
            event, cause = instruction
            if type(event) is Pushed:
                push = event if self.simulation.content.empty else event._replace(loss=self._handed_in(event))
                self.push(push, cause, instructions[at + 1 :])
                return
            if type(event) is Joined:
                self._stop()
            if type(event) is Joined or type(event) is Abandoned:
                self._steps = ()
            self.simulation.send(event, cause)

    @abstractmethod
    def push(self, push: Pushed, cause: RecordId, then: Sequence[Instruction]) -> None:
        """Send the servers a push; what is to be done ``then`` waits until it has left."""

    @abstractmethod
    def arrived(self, event: Event, cause: RecordId) -> None:
        """Hand the servers a push that has reached them. What was under way when its process ended is lost."""

    def received(self, instructions: Sequence[Instruction]) -> None:
        """Do what follows from parameters that have come, after reading what has come behind them."""
        self.in_transit = False
        if self._fence is not None:
            (fence, cause), self._fence = self._fence, None
            instructions = [*instructions, *self.machine.on(fence, self.queue.now, cause)]
        self.do(instructions)

    def ask_at(self) -> Seconds:
        """Return when this process can ask for samples."""
        return self.thaw() if self.windows else self.queue.now

    def ask(self) -> None:
        """Ask for the samples of the next iteration, or end after the last epoch."""
        work = self.simulation.work
        self._ends = self._epoch == work.epochs
        if self._ends:
            self._when_it_can(self._finish)
            return
        question = self.machine.on(self._question, self.queue.now)
        if self.ask_at() == self.queue.now:
            self.do(question)
        else:
            self._when_it_can(partial(self.do, question))

    def _ask_of(self, epoch: Epoch) -> SamplesWanted:
        """The question for samples of one epoch; made once for all its batches."""
        work = self.simulation.work
        return SamplesWanted(0, epoch, work.samples, work.batch)

    def _when_it_can(self, action: Callable[[], None], serial: int = 0) -> None:
        if serial not in (0, self.due):
            return
        at = self.ask_at()
        if at > self.queue.now:
            self.due = self.queue.at(at, partial(self._when_it_can, action))
        else:
            action()

    def _finish(self) -> None:
        """End; a process that was thought dead joins again first, and ends then."""
        self._ends = False
        instructions = self.machine.on(Finished(), self.queue.now)
        if self.machine.state is State.LEFT:
            self.end("", seen=False)
        self.do(instructions)
        # One that is thought dead is not listened to, but its connection closes.
        if self.gone and self.simulation.cluster.silence_s is not None:
            self.simulation.send(Lost(self.number, "end of stream", self.incarnation))

    def _go_on(self, turn: Compute) -> None:
        """The script has control."""
        if turn.over:
            self._epoch, self._progress = self._epoch + 1, SplitProgress()
            self._question = self._ask_of(self._epoch)
        if turn.grant is None and self.simulation.work.samples is not None:
            self.ask()
            return
        self.computing = True
        finish = self.queue.now
        self._leases, self._samples = (), 0
        for _ in range(self.machine.plan.steps if turn.grant is None else 1):  # nobody needs to know of the moments between
            finish = self._iterate(finish, turn.grant)
        self.due = self.queue.at(finish, self.finished)
        if self.machine.at_once:
            self.due = self.queue.at(self.thaw(), self.finished)

    def finished(self, serial: int = 0) -> None:
        """End a computation, or break it off."""
        if serial not in (0, self.due):
            return
        self.computing, self.due = False, 0
        progress, dealt = self._progress, self.simulation.work.samples is not None
        steps = 1 if dealt else self.machine.plan.steps
        stepped = Stepped(self._leases, self._samples, None, None, steps, progress.done, progress.batches or 0)
        instructions = self.machine.on(stepped, self.queue.now)
        if instructions:
            self.do(instructions)
        else:
            self.ask()

    def _iterate(self, begin: Seconds, grant: Grant | None) -> Seconds:
        """Begin one iteration at this time; when it ends. What goes into the next push is noted."""
        simulation, iteration, batch = self.simulation, self.iteration, self.machine.plan.batch or self.simulation.work.batch
        self.iteration = iteration + 1
        if grant is None:
            samples = batch
        else:
            samples = grant.stop - grant.start
            self._leases += (grant.lease,)
            self._progress.deal(grant.parts, samples, batch)
            self._progress.done += 1
        self._samples += samples
        if not simulation.content.empty:
            place = () if grant is None else (grant.epoch, grant.start, grant.stop, grant.parts)
            self._steps += (Step(iteration, samples, *place),)
        seconds = simulation.compute.draw(self.number, iteration, begin)
        if simulation.per_sample is not None:
            seconds += samples * simulation.per_sample.draw(self.number, iteration, begin)
        return begin + (stretched(seconds, begin, self.windows) if self.windows else seconds)

    def _handed_in(self, push: Pushed) -> float | None:
        """The loss of a push that leaves this worker."""
        steps, self._steps = self._steps, ()
        return self.simulation.content.handed_in(Handed(self.number, self.incarnation, self.machine.clock, push.version, push.held, steps))

    def _stop(self) -> None:
        """Nothing that this process had begun goes on."""
        self.due, self.computing, self.in_transit, self._ends, self._fence = 0, False, False, False, None
