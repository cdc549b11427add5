"""Simulate a worker's process: its training script, the time that each step takes, and its faults.

`core.worker.Worker`, the state machine that live workers run too, decides what the worker does. This file carries out the machine's
instructions in virtual time, and stands for a script that iterates over batches, or over epochs if samples are dealt out. The
subclasses receive parameters and send pushes: ``workers.py`` under rules of job scope, ``shard_workers.py`` under rules of shard scope.
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
from offbeat.sim.event_queue import Action
from offbeat.sim.latency.registry import stretched
from offbeat.sim.phase_account import PhaseAccount
from offbeat.sim.training.workload import Handed, Load, Step
from offbeat.types import NOT_JOINED, Epoch, Incarnation, LeaseId, RecordId, Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation

BEATS: Final = 10
"""Heartbeats per timeout, as in live jobs."""


class SimulatedProcess(ABC):
    """One process of a worker. A restarted worker is a new object, which continues the numbering of iterations.

    Args:
        simulation: the run that this process is part of.
        number: the worker's number.
        iteration: the number of its next iteration.
        blocks: see `core.worker.Worker`.
    """

    def __init__(self, simulation: Simulation, number: WorkerId, iteration: int, blocks: Callable[[], Blocks] | None = None) -> None:
        self.simulation, self.number, self.iteration = simulation, number, iteration
        self.queue = simulation.queue
        self.machine = Worker(number, blocks)
        self.incarnation: Incarnation = NOT_JOINED
        self.gone = False
        self.windows = simulation.cluster.script.windows(number)
        self.due = 0
        """The serial number of the queue entry that continues this process; other entries are obsolete."""
        self.computing = False
        """Whether a computation is under way; entry `due` ends it."""
        self.in_transit = False
        """Whether parameters are in transit to this process, or its push to the servers; a `Fence` is read only afterwards."""
        self._fence: tuple[Fence, RecordId] | None = None
        """A `Fence` that has arrived but is not read yet."""
        self._ends = False
        """Whether the script has ended and the process is about to leave."""
        self._leases: tuple[LeaseId, ...] = ()
        self._samples = 0
        self._steps: tuple[Step, ...] = ()
        """The iterations that make up the next push."""
        self.loads: tuple[Load, ...] = ()
        """What the worker has taken meanwhile, in rules of shard scope."""
        self._account = PhaseAccount(self.queue.now) if simulation.accounts else None
        if self._account is not None:
            self.machine.account = self._account.take
        self._progress = SplitProgress()
        self.epoch: Epoch = 0
        """The epoch that its script is in."""
        self._batch = simulation.work.batch_of(number)
        """The samples of one iteration, where the plan says nothing else."""
        self._request = self._samples_of(0)

    # Messages of the coordinator.

    def joined(self, incarnation: Incarnation) -> None:
        """Become a member of the job under this incarnation."""
        self.incarnation = incarnation
        self._stop()
        self._steps = ()

    @abstractmethod
    def released(self, effect: Release, cause: RecordId) -> None:
        """Receive the parameters that the servers send now, and continue with them."""

    @abstractmethod
    def published(self, effect: Publish, cause: RecordId) -> None:
        """Receive the new block that a server sends now."""

    def answered(self, effect: Grant | NoMore | EpochEnded, cause: RecordId) -> None:
        """Receive the answer to a request for samples, and continue."""
        self.do(self.machine.on(effect, self.queue.now, cause))

    def interrupted(self, effect: Interrupt, cause: RecordId) -> None:
        """Discard the computation under way, now or when it ends."""
        newer = effect.version > self.machine.version
        self.machine.on(effect, self.queue.now, cause)
        if newer and self.computing and effect.at_once:
            self.due = self.queue.at(self.thaw(), self.finished)

    def fenced(self, effect: Fence, cause: RecordId) -> None:
        """Rejoin as soon as this process waits for a message; what it hands in until then is rejected."""
        if self.in_transit:
            self._fence = effect, cause
            return
        self.do(self.machine.on(effect, self.queue.now, cause))
        if self._ends:
            self._finish()

    # Faults and heartbeats.

    def end(self, why: str, *, seen: bool) -> None:
        """End this process; ``seen``: its connection closes, so that the coordinator notices at once."""
        self.gone, self.due = True, 0
        if (transfers := self.simulation.servers.transfers) is not None:
            transfers.cut(self.number)
        if seen:
            self.simulation.send(Lost(self.number, why, self.incarnation or None))

    def beat(self, serial: int = 0) -> None:
        """Send a heartbeat unless this process is frozen, and schedule the next one."""
        if self.gone:
            return
        if self.incarnation and self.thaw() == self.queue.now:
            self.simulation.send(Heard(self.number, self.incarnation))
        self.simulation.inbox.beat(self.beat)

    def thaw(self) -> Seconds:
        """Return when this process can act: now, or at the end of its freeze."""
        now = self.queue.now
        return next((stop for start, stop, factor in self.windows if start <= now < stop and isinf(factor)), now)

    # The worker's script.

    def do(self, instructions: Sequence[Instruction]) -> None:
        """Carry out the machine's instructions."""
        for at, instruction in enumerate(instructions):
            if type(instruction) is Compute:
                self._run_script(instruction)
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
        """Send a push to the servers; the instructions ``then`` are carried out once the push has left."""

    @abstractmethod
    def arrived(self, event: Event, cause: RecordId) -> None:
        """Deliver a push that has reached the servers, unless its process has ended: what was in transit then is lost."""

    def at_server(self, server: int, arrival: Seconds, action: Action) -> None:
        """Call ``action`` when a server handles a message that arrives then. `CoordinatorInbox` makes messages wait for server 0."""

        def look(serial: int) -> None:
            now = self.queue.now
            free = now if server == 0 else self.simulation.servers.free(server, now)
            if free > now:
                self.queue.at(free, action)
            else:
                action(serial)

        if arrival > self.queue.now:
            self.queue.at(arrival, look)
        else:
            look(0)

    def received(self, instructions: Sequence[Instruction]) -> None:
        """Carry out the instructions that follow a completed transfer, and then those of a `Fence` that arrived during it."""
        self.in_transit = False
        if self._fence is not None:
            (fence, cause), self._fence = self._fence, None
            instructions = [*instructions, *self.machine.on(fence, self.queue.now, cause)]
        if instructions:
            self.do(instructions)

    def ask_at(self) -> Seconds:
        """Return when this process can request samples."""
        return self.thaw() if self.windows else self.queue.now

    def ask(self) -> None:
        """Request the samples of the next iteration, or end after the last epoch."""
        work = self.simulation.work
        self._ends = self.epoch == work.epochs
        if self._ends:
            self._when_it_can(self._finish)
            return
        request = self.machine.on(self._request, self.queue.now)
        if self.ask_at() == self.queue.now:
            self.do(request)
        else:
            self._when_it_can(partial(self.do, request))

    def _samples_of(self, epoch: Epoch) -> SamplesWanted:
        """Return the request for samples of one epoch; one object serves all its batches."""
        work = self.simulation.work
        return SamplesWanted(0, epoch, work.samples, self._batch, deal=work.deal)

    def _when_it_can(self, action: Callable[[], None], serial: int = 0) -> None:
        if serial not in (0, self.due):
            return
        at = self.ask_at()
        if at > self.queue.now:
            self.due = self.queue.at(at, partial(self._when_it_can, action))
        else:
            action()

    def _finish(self) -> None:
        """End the process; a process that the coordinator took for dead rejoins first."""
        self._ends = False
        instructions = self.machine.on(Finished(), self.queue.now)
        if self.machine.state is State.LEFT:
            self.end("", seen=False)
        self.do(instructions)
        # The coordinator ignores a farewell of a worker that it takes for dead, so the closed connection is reported too.
        if self.gone and self.simulation.cluster.silence_s is not None:
            self.simulation.send(Lost(self.number, "end of stream", self.incarnation))

    def _run_script(self, turn: Compute) -> None:
        """Give control to the script: it computes the iterations of its plan, or requests samples for the next one."""
        if turn.over:
            self.epoch, self._progress = self.epoch + 1, SplitProgress()
            self._request = self._samples_of(self.epoch)
        if turn.grant is None and self.simulation.work.samples is not None:
            self.ask()
            return
        self.computing = True
        finish = self.queue.now
        self._leases, self._samples = (), 0
        for _ in range(self.machine.leg if turn.grant is None else 1):  # no event happens between local steps: one queue entry
            finish = self._iterate(finish, turn.grant)
        self.due = self.queue.at(finish, self.finished)
        if self.machine.at_once:
            self.due = self.queue.at(self.thaw(), self.finished)

    def finished(self, serial: int = 0) -> None:
        """Complete or abort a computation."""
        if serial not in (0, self.due):
            return
        self.computing, self.due = False, 0
        progress, dealt = self._progress, self.simulation.work.samples is not None
        steps = 1 if dealt else self.machine.leg
        stepped = Stepped(self._leases, self._samples, None, None, steps, progress.done, progress.batches or 0)
        instructions = self.machine.on(stepped, self.queue.now)
        if instructions:
            self.do(instructions)
        elif self.machine.state is State.COMPUTING:
            self.ask()
        else:
            self.look()

    def look(self) -> None:
        """See whether a worker that waits for blocks can continue."""
        raise AssertionError("only in rules of shard scope a worker waits without having pushed")

    def _iterate(self, begin: Seconds, grant: Grant | None) -> Seconds:
        """Begin one iteration at this time, add it to the next push, and return when it ends."""
        simulation, iteration = self.simulation, self.iteration
        batch = self.machine.plan.batch or self._batch
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
        seconds = stretched(seconds, begin, self.windows) if self.windows else seconds
        if self._account is not None:
            self._account.compute(seconds, simulation.compute.shares(self.number, iteration))
        return begin + seconds

    def _handed_in(self, push: Pushed) -> float | None:
        """Pass the steps of a push that leaves this worker to the workload; return the push's loss, if the rule uses it."""
        steps, self._steps = self._steps, ()
        loads, self.loads = self.loads, ()
        handed = Handed(self.number, self.incarnation, self.machine.clock, push.version, push.held, steps, push.shard, loads)
        return self.simulation.content.handed_in(handed)

    def _stop(self) -> None:
        """Abandon the computation, transfer or exit under way."""
        self.due, self.computing, self.in_transit, self._ends, self._fence = 0, False, False, False, None
