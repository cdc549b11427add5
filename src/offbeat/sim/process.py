"""A worker's process, as far as every kind of rule is concerned: its states, its iterations and samples, and what befalls it.

How it comes to compute and what it does with the result is in ``workers.py`` for rules of job scope and in ``shard_workers.py`` for
those of shard scope. Messages go out and come in as in `runtime.parameter_server.worker_side`, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from math import isinf
from typing import TYPE_CHECKING, Final

from offbeat.core.effects import EpochEnded, Fence, Grant, Interrupt, NoMore, Paused, Publish, Release
from offbeat.core.events import Event, Heard, Joined, LeaseWanted, Left, Lost
from offbeat.core.policy import Plan
from offbeat.session import SplitProgress
from offbeat.sim.latency.registry import stretched
from offbeat.sim.training.workload import Step
from offbeat.types import Epoch, Incarnation, LeaseId, Seconds, Version, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation

BEATS: Final = 10
"""Heartbeats in a timeout, as live."""


class Doing(IntEnum):
    """What a worker's process does."""

    WAITING = 0
    """To be admitted, or for blocks."""
    PAUSED = 1
    """Told to wait for an epoch's end, or for samples."""
    RECEIVING = 2
    """Admitted, and the parameters are on their way."""
    ASKING = 3
    """For samples."""
    COMPUTING = 4
    PUSHING = 5
    """The push is on its way, and nothing can take it back."""
    GONE = 6


class SimulatedProcess(ABC):
    """One process of a worker. A restarted worker is a new object, which goes on with its predecessor's numbers of iterations.

    Args:
        world: where it lives.
        number: the worker's.
        iteration: the number of its next iteration.
    """

    def __init__(self, world: Simulation, number: WorkerId, iteration: int = 0) -> None:
        self.world, self.number, self.iteration = world, number, iteration
        self.agenda = world.agenda
        self.incarnation: Incarnation = 0
        self.doing = Doing.WAITING
        self.windows = world.cluster.script.windows(number)
        self.fenced_off = False
        """It has been thought dead, and does not know yet."""
        self.due = 0
        """The serial number of the entry that goes on with this process; others are out of date."""
        self.version: Version = 0
        """That it computes from."""
        self.plan = Plan()
        self.begun_at: Seconds = 0.0
        self.compute_s: Seconds = 0.0
        """Of the iterations that make up its next push."""
        self.leases: tuple[LeaseId, ...] = ()
        self.samples = 0
        self.steps: tuple[Step, ...] = ()
        self.grant: Grant | None = None
        """Samples that it has got and not begun with."""
        self.progress = SplitProgress()
        self._epoch: Epoch = 0

    # Told by the coordinator.

    def joined(self, incarnation: Incarnation) -> None:
        """It takes part from now on, under this incarnation."""
        self.incarnation = incarnation
        self.doing, self.fenced_off, self.due = Doing.WAITING, False, 0
        self.grant = None  # but a loop over an epoch that has come to its end does not begin again

    @abstractmethod
    def released(self, effect: Release) -> None:
        """The servers send their parameters, with which it goes on."""

    @abstractmethod
    def published(self, effect: Publish) -> None:
        """A server sends its new block."""

    @abstractmethod
    def interrupted(self, effect: Interrupt) -> None:
        """What it computes is of no more use, unless it has been handed in already."""

    def granted(self, effect: Grant) -> None:
        """Samples. To one that has been idle they come with the newest parameters, and it begins with those."""
        self.grant = effect
        if not effect.refreshed:
            self.compute()

    def paused(self, effect: Paused) -> None:
        """It waits for the end of an epoch, or for samples that come back."""
        self.doing = Doing.PAUSED

    def no_more(self, effect: NoMore) -> None:
        """Nothing of its epoch is left but what it holds: it hands that in and asks again. Or it has come after the epoch's end."""
        if self.leases and not effect.refreshed:
            self.push()
            return
        self._end_epoch(effect.epoch)
        if effect.refreshed:
            self.doing = Doing.PAUSED
        else:
            self.ask()

    def epoch_ended(self, effect: EpochEnded) -> None:
        """The newest parameters come after this."""
        if effect.epoch >= self._epoch:
            self._end_epoch(effect.epoch)

    def fenced(self, effect: Fence) -> None:
        """It was thought dead. It learns that when it next waits for something; what it hands in until then is rejected."""
        if self.doing in (Doing.WAITING, Doing.PAUSED, Doing.ASKING):
            self.rejoin()
        else:
            self.fenced_off = True

    def rejoin(self) -> None:
        """Join again, as the next incarnation."""
        self.doing, self.due, self.fenced_off = Doing.WAITING, 0, False
        self.world.send(Joined(self.number))

    # What befalls it.

    def end(self, why: str, *, seen: bool) -> None:
        """Its process ends; ``seen``: its connection closes with it."""
        self.doing, self.due = Doing.GONE, 0
        if seen:
            self.world.send(Lost(self.number, why, self.incarnation or None))

    def beat(self, serial: int = 0) -> None:
        """A sign of life now and then, as long as its process is not frozen."""
        if self.doing is Doing.GONE:
            return
        if self.incarnation and self.thaw() == self.agenda.now:
            self.world.send(Heard(self.number, self.incarnation))
        self.world.desk.beat(self.beat)

    def thaw(self) -> Seconds:
        """When its process can do something: now, unless it is frozen."""
        now = self.agenda.now
        return next((stop for start, stop, factor in self.windows if start <= now < stop and isinf(factor)), now)

    # What it does.

    @abstractmethod
    def compute(self) -> None:
        """Begin an iteration, with the samples that it has got if they are dealt out."""

    @abstractmethod
    def push(self) -> None:
        """Hand in what it has computed."""

    @abstractmethod
    def arrived(self, event: Event) -> None:
        """Its push is with the servers. What was under way when its process ended is lost."""

    def ask(self, serial: int = 0) -> None:
        """For the samples of the next iteration; it computes at once where they are not dealt out."""
        world, work = self.world, self.world.work
        if serial not in (0, self.due):
            return
        if work.samples is None:
            self.compute()
            return
        self.doing = Doing.ASKING
        if self.windows and (thaw := self.thaw()) > self.agenda.now:
            self.due = self.agenda.at(thaw, self.ask)
        elif self.fenced_off:
            self.rejoin()
        elif self._epoch == work.epochs:
            self.end("", seen=False)
            world.send(Left(self.number, self.incarnation))
            if world.cluster.silence_s is not None:  # one that is thought dead is not listened to, but its connection closes
                world.send(Lost(self.number, "end of stream", self.incarnation))
        else:
            world.send(LeaseWanted(self.number, self.incarnation, 0, self._epoch, work.samples, self.plan.batch or work.batch))

    def clean(self) -> None:
        """What it has computed is handed in, or given up."""
        self.compute_s, self.leases, self.samples, self.steps = 0.0, (), 0, ()

    def iterate(self, begin: Seconds) -> Seconds:
        """One iteration that begins at this time; when it ends. What goes into the next push is noted."""
        world, iteration, grant = self.world, self.iteration, self.grant
        self.iteration = iteration + 1
        if grant is None:
            samples = self.plan.batch or world.work.batch
        else:
            samples, self.grant = grant.stop - grant.start, None
            self.leases += (grant.lease,)
            self.progress.deal(grant.parts, samples, self.plan.batch or world.work.batch)
            self.progress.done += 1
        self.samples += samples
        if not world.content.empty:
            place = () if grant is None else (grant.epoch, grant.start, grant.stop, grant.parts)
            step = Step(iteration, samples, *place)
            self.steps += (step,)
        seconds = world.compute.draw(self.number, iteration, begin)
        if world.per_sample is not None:
            seconds += samples * world.per_sample.draw(self.number, iteration, begin)
        return begin + (stretched(seconds, begin, self.windows) if self.windows else seconds)

    def _end_epoch(self, epoch: Epoch) -> None:
        self._epoch, self.progress = epoch + 1, SplitProgress()
