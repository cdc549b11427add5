"""Jobs whose ranks are on several hosts, so that the process that dies holds the sequencer of their rounds as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from tests.sim.dying_servers import DyingCoordinator
from tests.sim.replicated import ReplicatedServers
from tests.sim.stepped_network import SteppedHub
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.stub_across import Ring, StubAcross
from tests.sim.with_fleet import LinkedHub, WithFleet
from tests.support.memory_network import MemoryConnection

from offbeat.runtime.serving import Service
from offbeat.transport.base import Address, Connection
from offbeat.types import WorkerId


class FarHub(LinkedHub):
    """The hub of a rank that does not share memory with the server."""

    def plain(self, address: Address) -> Connection:
        connection = super().plain(address)
        assert isinstance(connection, MemoryConnection)
        for end in (connection, connection.other):
            assert end is not None
            end.shares_memory, end.interface = False, "127.0.0.1"
        return connection


class AcrossHosts(WithFleet, SteppedRanks):
    """One live run, with each rank on a host of its own. Arguments are those of the class that is extended as well.

    Args:
        ring_first: True: ranks hear of each other before anything else happens; False: after that.
    """

    addresses: list[Address]
    """Of the servers, by now."""

    def __init__(self, *arguments: Any, ring_first: bool = True) -> None:
        super().__init__(*arguments)
        self.ring, self._ring_first = Ring(), ring_first

    def make(self, number: WorkerId, iteration: int) -> StubAcross:
        return StubAcross(self, number, iteration)

    def deliver(self) -> bool:
        if self._ring_first:
            return self._look() or self.ring.deliver() or super().deliver()
        return super().deliver() or self.ring.deliver()

    def sequencing(self) -> Service:
        """What the process of server 0 does, by now."""
        return cast(Service, self.process_of(0).server.service)


class DyingSequencer(AcrossHosts, DyingCoordinator):
    """Another process of server 0 goes on where one has died."""

    def hub(self, turn: Callable[[], None], worker: WorkerId) -> SteppedHub:
        return FarHub(self.network, turn, worker)


class ReplicatedSequencer(AcrossHosts, ReplicatedServers):
    """The standby of server 0 goes on where the leader has died."""
