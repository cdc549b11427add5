"""Carry pushes to the simulated servers, which handle arrivals one by one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from offbeat.core.events import Event
from offbeat.sim.event_queue import EventQueue
from offbeat.sim.process import SimulatedProcess
from offbeat.sim.servers import Servers
from offbeat.types import RecordId, Seconds


class Uplink:
    """Delivers the workers' pushes.

    Args:
        queue: the event queue of the run.
        servers: compute when pushes arrive and are handled.
    """

    def __init__(self, queue: EventQueue, servers: Servers) -> None:
        self._queue, self._servers = queue, servers
        self._simple = servers.pushes_immediate and (servers.never_busy or servers.count == 1)
        """Whether pushes arrive at all servers at once. `CoordinatorInbox` makes them wait for server 0."""

    def push(self, worker: SimulatedProcess, event: Event, cause: RecordId) -> None:
        """Send a worker's push to every server; call ``worker.arrived`` when all of them have it."""
        if self._simple:
            worker.arrived(event, cause)
            return
        missing = self._servers.count

        def count(serial: int) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0:
                worker.arrived(event, cause)

        transfers = self._servers.transfers
        for server in range(self._servers.count):
            if transfers is None:
                self.at_server(server, self._servers.push(server, worker.number, self._queue.now), count)
            else:
                transfers.push(server, worker.number, partial(self._landed, server, count))

    def _landed(self, server: int, action: Callable[[int], None]) -> None:
        self.at_server(server, self._queue.now, action)

    def at_server(self, server: int, arrival: Seconds, action: Callable[[int], None]) -> None:
        """Call ``action`` when the server handles a message that arrives at ``arrival``."""

        def look(serial: int) -> None:
            now = self._queue.now
            free = now if server == 0 else self._servers.free(server, now)
            if free > now:
                self._queue.at(free, action)
            else:
                action(serial)

        if arrival > self._queue.now:
            self._queue.at(arrival, look)
        else:
            look(0)
