"""A worker's process in the thread of a job that is driven one step at a time: the real session, with a script of timings for a script.

The session has a thread of its own (`Fiber`), which runs only while it has something to do. Where the real one sleeps until a message
comes, until other ranks have come as far, or until its script has computed, this one gives the turn back, and the job resumes it. Its
gradients are real, and depend on nothing but its number and that of the iteration, so that a test can follow what becomes of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from math import isinf
from typing import TYPE_CHECKING, ClassVar, Final

import torch
from tests.sim.fiber import Fiber
from tests.sim.stepped_network import SteppedHub
from tests.support.memory_network import MemoryConnection, MemoryHub
from torch import nn

from offbeat.runtime.allreduce.multi_host.connections import PeerConnections
from offbeat.runtime.worker.job_session import JobSession
from offbeat.session import SplitProgress
from offbeat.sim.latency.registry import stretched
from offbeat.sim.process import BEATS
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec, spec_of
from offbeat.transport.base import Address, Arrivals, Connection
from offbeat.types import Seconds, WorkerId

if TYPE_CHECKING:
    from tests.sim.stepped import SteppedJob

LR: Final = 0.25
MAIL, LOOK = "mail", "look"
"""Why a process is resumed: a message has come; others' memory may have changed, or its time has come."""


class Wait(Enum):
    """What a process waits for."""

    NOTHING = 0
    MESSAGE = 1
    TENDING = 2
    """For a message, and it takes meanwhile what there is for it."""
    OTHERS = 3
    """In the memory of other ranks."""
    TIME = 4


class ProcessHub(SteppedHub):
    """A hub of a worker's process."""

    def __init__(self, process: SteppedProcess) -> None:
        super().__init__(process.job.network, self.turn, process.number)
        self.process = process
        process.hubs.append(self)

    @abstractmethod
    def turn(self) -> None:
        """Something has come."""

    def connect(self, address: Address) -> Connection:
        connection = super().connect(address)
        assert isinstance(connection, MemoryConnection)
        self.process.job.connected(connection, address, self.process.number)
        return connection


class SessionHub(ProcessHub):
    """The hub of a session."""

    def turn(self) -> None:
        self.process.turn()

    def another(self) -> MemoryHub:
        return PeerHub(self.process)

    def poll(self, timeout_s: Seconds | None) -> Arrivals:
        if timeout_s != 0.0 and not self.inbox and not self.process.is_cut:
            self.process.await_message(timeout_s)
        return super().poll(0.0)


class PeerHub(ProcessHub):
    """The hub of a rank's connections to other ranks, and to the sequencer."""

    def __init__(self, process: SteppedProcess) -> None:
        super().__init__(process)
        self.host = f"host {process.number}"
        self.peers: PeerConnections | None = None
        """Who reads what comes, from the moment on at which the thread would be started."""

    def turn(self) -> None:
        """Let the rank handle what has come. A frozen process sees it when it thaws."""
        process, peers = self.process, self.peers
        if process.gone:
            SteppedHub.poll(self, 0.0)
        elif process.thaw() > process.job.now:
            process.job.at(process.thaw(), self.turn)
        elif peers is not None and not peers.ended:
            peers._poll(0.0)
            while peers._links._cut.keys() - peers._links._replicated:  # server 0 is there again, at the same instant
                peers._poll(0.0)
            assert peers.failure is None


class SteppedProcess(ABC):
    """See above.

    Args:
        job: where it takes part.
        number: the worker's.
        iteration: the number of its next iteration; a restarted worker goes on with its predecessor's.
    """

    running: ClassVar[SteppedProcess | None] = None
    """The process that does something."""
    session: JobSession

    def __init__(self, job: SteppedJob, number: WorkerId, iteration: int) -> None:
        self.job, self.number, self.iteration = job, number, iteration
        job.processes.append(self)
        self.gone = False
        self.windows = job.script.cluster.script.windows(number)
        self.hubs: list[ProcessHub] = []
        self.hub = SessionHub(self)
        self._waits = Wait.NOTHING
        self._alarm = 0
        """The entry of the agenda at which it goes on; 0: none."""
        self._fiber = Fiber(self._live)

    # Its life, in the fiber.

    def _live(self) -> None:
        job, work = self.job, self.job.script.work
        self.model = nn.Linear(1, 1)
        with torch.no_grad():
            self.model.weight.fill_(1.0)
            self.model.bias.fill_(-1.0)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        session = self.session = self._make_session(Layout.of(self.model, optimizer), spec_of(optimizer), optimizer)
        session.link._keep_beating = lambda: None  # type: ignore[method-assign]
        session.join(job.script.sync)
        self._joined()
        epoch, pool = 0, 0 if work.samples is None else session.new_pool()
        while work.samples is None:
            self._compute(session._machine.leg, session.batch or work.batch)
        while epoch != work.epochs:
            batch = session.batch or work.batch
            self._until(self.thaw())
            grant = session.take(pool, epoch, work.samples, batch)
            if grant is None:
                epoch, session.progress = epoch + 1, SplitProgress()
                continue
            samples = grant.stop - grant.start
            session.progress.deal(grant.parts, samples, batch)
            session.deliver(grant)
            self._compute(1, samples)
        session._at_exit()
        self.end("end of stream")

    @abstractmethod
    def _make_session(self, layout: Layout, spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> JobSession:
        """Return its session, which has not joined yet."""

    def _joined(self) -> None:  # noqa: B027 - a worker of servers does nothing
        """Do what a script does before its first batch."""

    def _compute(self, steps: int, samples: int) -> None:
        """Some iterations, unless they are broken off, and what follows from them."""
        job, finish, first, session = self.job, self.job.now, self.iteration, self.session
        for iteration in range(first, first + steps):
            seconds = job.compute.draw(self.number, iteration, finish) + samples * job.per_sample.draw(self.number, iteration, finish)
            finish += stretched(seconds, finish, self.windows)
        self.iteration += steps
        self._until(finish)
        for iteration in range(first, first + steps):
            sign = -1.0 if iteration % 2 else 1.0
            # Where they are encoded, numbers that need more bits than they get.
            weight, bias = (1.37 + 0.1 * (iteration % 3), 0.29) if job.script.wire != "float32" else (1.0, 1.0)
            self.model.weight.grad = torch.tensor([[(self.number + 1.0) * weight]])
            self.model.bias.grad = torch.tensor([0.5 * sign * bias])
            session.log({"loss": job.script.loss(self.number, iteration)})
            session.step(None if session.has_sampler else samples)

    def _until(self, time: Seconds) -> None:
        """Compute until then, or until the computation is broken off."""
        machine = self.session._machine
        if machine.at_once:
            time = self.thaw()
        if time > self.job.now:
            self._ring_at(time)
            while self.pause(Wait.TIME) == MAIL:
                self.read()
                if machine.overtaken and machine.blocks is not None:
                    break
                if machine.overtaken and machine.at_once:
                    self._ring_at(self.thaw())
            self._alarm = 0

    def _ring_at(self, time: Seconds) -> None:
        self._alarm = self.job.agenda.at(time, self._rings)

    def await_message(self, timeout_s: Seconds | None) -> None:
        """Wait for a message, in the fiber; at most for so long."""
        self.pause(Wait.MESSAGE if timeout_s is None else Wait.TENDING)

    def read(self) -> None:
        """Read what has come, and connect again where a server has died."""
        self.session.link.glance()
        while self.is_cut:
            self.session.link.glance()

    @property
    def is_cut(self) -> bool:
        """Whether a server that has died is there again, and not connected yet."""
        links = self.session.link._links
        return bool(links._cut.keys() - links._replicated)

    def pause(self, what: Wait) -> str:
        """Wait, in the fiber, until the job resumes it. Returns why it does."""
        self._waits = what
        word = self._fiber.wait()
        self._waits = Wait.NOTHING
        return word

    # What drives it.

    def resume(self, why: str = "") -> None:
        """Let it go on, until it waits again."""
        SteppedProcess.running = self
        self._fiber.resume(why)
        SteppedProcess.running = None

    def start(self) -> None:
        self.resume()
        if self.job.script.cluster.silence_s is not None:
            self._beat()

    def turn(self) -> None:
        """Something has come. A frozen process sees it when it thaws."""
        if self.gone:
            SteppedHub.poll(self.hub, 0.0)
        elif self.thaw() > self.job.now:
            self.job.at(self.thaw(), self.turn)
        else:
            self.resume(MAIL)

    def _rings(self, serial: int) -> None:
        if serial == self._alarm and not self.gone:
            self.resume(LOOK)
            self.job.settle()

    def die(self, reason: str, *, seen: bool) -> None:
        """End without a word; ``seen``: the connections close."""
        if not self.gone and seen:
            self.end(reason)
        self.gone = True

    def end(self, reason: str) -> None:
        self.gone = True
        for connection in [connection for hub in self.hubs for connection in hub.connections]:
            connection.end(reason)
        self.job.process_ended(self.number, reason)

    def thaw(self) -> Seconds:
        """When it can do something: now, unless it is frozen."""
        now = self.job.now
        return next((stop for start, stop, factor in self.windows if start <= now < stop and isinf(factor)), now)

    def let_go(self) -> None:
        """End its thread, after the job."""
        self.gone = True
        self._fiber.stop()

    def _beat(self, serial: int = 0) -> None:
        if self.gone:
            return
        link = self.session.link
        if link.incarnation and self.thaw() == self.job.now:
            link.coordinator.send({"kind": "heard", "incarnation": link.incarnation, "stuck_s": 0.0})
        self.job.agenda.at(self.job.now + self.job.script.cluster.timeout_s / BEATS, self._beat)
        self.job.settle()

    # What the job hears of it.

    def vector(self, *, gradient: bool = False) -> torch.Tensor:
        """Return its parameters, or its gradient."""
        return torch.cat([(p.grad if gradient and p.grad is not None else p.detach()).flatten() for p in self.model.parameters()]).clone()

    def offer(self, *, gradient: bool) -> None:
        """Note what it pushes."""
        self.job.offered.setdefault((self.number, self.session.link.incarnation), []).append(self.vector(gradient=gradient))
