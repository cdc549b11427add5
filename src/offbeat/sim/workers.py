"""Simulate a worker of a rule of job scope: parameters arrive when all servers' parts have, and a push when all servers have it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from offbeat.core.effects import Publish, Release
from offbeat.core.events import Event, Pushed
from offbeat.core.worker_messages import Instruction
from offbeat.sim.event_queue import Action
from offbeat.sim.process import SimulatedProcess
from offbeat.types import RecordId, Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.sim.simulation import Simulation


class JobWorker(SimulatedProcess):
    """A worker's process under a rule of job scope."""

    def __init__(self, simulation: Simulation, number: WorkerId, iteration: int = 0) -> None:
        super().__init__(simulation, number, iteration)
        self._then: Sequence[Instruction] = ()
        """The instructions to carry out once the push in transit has arrived."""
        self._sent_at: Seconds = 0.0

    def released(self, effect: Release, cause: RecordId) -> None:
        self.in_transit = True
        servers, now = self.simulation.servers, self.queue.now
        if servers.immediate:
            arrival = now
        elif servers.transfers is None:
            arrival = servers.parameters(self.number, now)
        else:
            self.due = servers.transfers.pull(self.number, partial(self._has, effect, cause, now))
            return
        if arrival > now:
            if self._account is not None:
                self._account.pull_s += arrival - now
            self.due = self.queue.at(arrival, partial(self._begin, effect, cause))
        else:
            self.due = 0
            self._begin(effect, cause, 0)

    def published(self, effect: Publish, cause: RecordId) -> None:
        raise AssertionError(f"blocks are for rules of shard scope: {effect}")

    def _has(self, effect: Release, cause: RecordId, sent_at: Seconds, pull: int) -> None:
        """Read the parameters that have come over a shared link, unless this process has rejoined since they were sent."""
        if pull != self.due:
            return
        if self._account is not None:
            self._account.pull_s += self.queue.now - sent_at
        self._begin(effect, cause, pull)

    def _begin(self, effect: Release, cause: RecordId, serial: int) -> None:
        """Read the parameters, which have arrived, once the process is not frozen."""
        if serial != self.due:
            return
        if self.windows and (thaw := self.thaw()) > self.queue.now:
            self.due = self.queue.at(thaw, partial(self._begin, effect, cause))
            return
        self.received(self.machine.on(effect, self.queue.now, cause))

    def push(self, push: Pushed, cause: RecordId, then: Sequence[Instruction]) -> None:
        self.in_transit, self._then, self._sent_at = True, then, self.queue.now
        servers = self.simulation.servers
        if servers.pushes_immediate and (servers.never_busy or servers.count == 1):
            self.arrived(push, cause)
            return
        missing = servers.count

        def count(serial: int) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                self.arrived(push, cause)

        for server in range(servers.count):
            if servers.transfers is None:
                self.at_server(server, servers.push(server, self.number, self.queue.now), count)
            else:
                servers.transfers.push(server, self.number, partial(self._landed, server, count))

    def _landed(self, server: int, action: Action) -> None:
        self.at_server(server, self.queue.now, action)

    def arrived(self, event: Event, cause: RecordId) -> None:
        if self.gone:
            return
        if self._account is not None:
            self._account.push_s += self.queue.now - self._sent_at
        then, self._then = self._then, ()
        self.in_transit = False
        self.simulation.send(event, cause)
        self.received(then)
