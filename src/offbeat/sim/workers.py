"""A simulated worker of a rule of job scope: it is admitted, computes, pushes, and waits to be admitted again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from offbeat.core.effects import Interrupt, Publish, Release
from offbeat.core.events import Abandoned, Event, Pushed
from offbeat.sim.process import Doing, SimulatedProcess
from offbeat.sim.training.workload import Handed
from offbeat.types import Clock, Incarnation, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation


class JobWorker(SimulatedProcess):
    """See `SimulatedProcess`."""

    def __init__(self, world: Simulation, number: WorkerId, iteration: int = 0) -> None:
        super().__init__(world, number, iteration)
        self._clock: Clock = 0
        self._since = 0
        """Local steps since the last push."""
        self._obsolete: Interrupt | None = None
        """What it computes, or is about to, has been overtaken."""

    def joined(self, incarnation: Incarnation) -> None:
        super().joined(incarnation)
        self._obsolete = None

    def released(self, effect: Release) -> None:
        self.version, self._clock, self.plan = effect.version, effect.clock, effect.plan
        self.doing = Doing.RECEIVING
        servers, now = self.world.servers, self.agenda.now
        if not servers.immediate and (arrival := servers.parameters(self.number, now)) > now:
            self.due = self.agenda.at(arrival, self._begin)
        else:
            self.due = 0
            self._begin(0)

    def published(self, effect: Publish) -> None:
        raise AssertionError(f"blocks are for rules of shard scope: {effect}")

    def interrupted(self, effect: Interrupt) -> None:
        if self.doing in (Doing.WAITING, Doing.PAUSED, Doing.PUSHING) or effect.version <= self.version:
            return
        self._obsolete = effect
        if self.doing is Doing.COMPUTING and effect.at_once:
            self.due = self.agenda.at(self.thaw(), self._break_off)

    def _begin(self, serial: int) -> None:
        """The parameters are here."""
        if serial != self.due:
            return
        if self.windows and (thaw := self.thaw()) > self.agenda.now:
            self.due = self.agenda.at(thaw, self._begin)
            return
        self._since = 0
        self.clean()
        if self._obsolete is not None and self._obsolete.version <= self.version:
            self._obsolete = None
        if self.grant is not None or self.world.work.samples is None:
            self.compute()
        else:
            self.ask()

    def compute(self) -> None:
        self.doing = Doing.COMPUTING
        self.begun_at = finish = self.agenda.now
        for _ in range(self.plan.steps if self.world.work.samples is None else 1):  # nobody needs to know of the moments between
            self._since += 1
            finish = self.iterate(finish)
        self.due = self.agenda.at(finish, self._finished)
        if self._obsolete is not None and self._obsolete.at_once:
            self.due = self.agenda.at(self.thaw(), self._break_off)

    def _finished(self, serial: int) -> None:
        if serial != self.due:
            return
        self.compute_s += self.agenda.now - self.begun_at
        if self._obsolete is not None:
            self._abandon()
        elif self.world.work.samples is None or self.plan.due(self._since, self.progress.done, self.progress.batches or 0):
            self.push()
        else:
            self.ask()

    def push(self) -> None:
        world = self.world
        self.doing = Doing.PUSHING
        loss = None
        if not world.content.empty:
            loss = world.content.handed_in(Handed(self.number, self.incarnation, self._clock + 1, self.version, (), self.steps))
        number, incarnation = self.number, self.incarnation
        world.post.push(self, Pushed(number, incarnation, self.version, self.samples, self.compute_s, self.leases, None, loss, self._since))

    def arrived(self, event: Event) -> None:
        if self.doing is Doing.GONE:
            return
        self.doing = Doing.WAITING
        self.world.send(event)
        if self.fenced_off:
            self.rejoin()

    def _break_off(self, serial: int) -> None:
        """In the middle of a computation."""
        if serial == self.due:
            self.compute_s += self.agenda.now - self.begun_at
            self._abandon()

    def _abandon(self) -> None:
        self.doing, self.due, self._obsolete = Doing.WAITING, 0, None
        self.world.send(Abandoned(self.number, self.incarnation, self.version, self.compute_s, self.leases))
        if self.fenced_off:
            self.rejoin()
