"""Jobs whose ranks are on several hosts, so that the process that dies holds the sequencer of their rounds as well."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import patch

from tests.sim import stepped_peers
from tests.sim.dying_servers import DyingCoordinator
from tests.sim.replicated import ReplicatedServers
from tests.sim.stepped_network import FIRST, LAST
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.with_fleet import WithFleet
from tests.support.memory_network import MemoryConnection

from offbeat.journal.records import Record
from offbeat.runtime.allreduce import multi_host_member
from offbeat.runtime.serving import Service
from offbeat.transport.base import Address
from offbeat.types import Incarnation, WorkerId, WorkerState


class AcrossHosts(WithFleet, SteppedRanks):
    """One live run, with each rank on a host of its own. Arguments are those of the class that is extended as well.

    Args:
        ring_first: True: ranks hear of each other before anything else happens; False: after that.
    """

    addresses: list[Address]
    """Of the servers, by now."""

    def __init__(self, *arguments: Any, ring_first: bool = True) -> None:
        super().__init__(*arguments)
        self.network.between_workers = FIRST if ring_first else LAST

    def run(self) -> list[Record]:
        with stepped_peers.stepped(), patch.object(multi_host_member, "LOOK_S", 0.0):
            return super().run()

    def connected(self, connection: MemoryConnection, address: Address, number: WorkerId) -> None:
        super().connected(connection, address, number)
        for end in (connection, connection.other):
            assert end is not None
            end.shares_memory, end.interface = False, "127.0.0.1"

    def sequencing(self) -> Service:
        """What the process of server 0 does, by now."""
        return cast(Service, self.process_of(0).server.service)

    def knows(self, number: WorkerId, incarnation: Incarnation) -> bool:
        """Whether a rank takes part. One that was declared dead and does not know it may have summed a round that is another one now."""
        coordinator = self.sequencing().state.job
        if coordinator is None:
            return False  # of a process that has just begun
        member = coordinator.first.driver.core.membership[number]
        return member.state is WorkerState.ALIVE and member.incarnation == incarnation


class DyingSequencer(AcrossHosts, DyingCoordinator):
    """Another process of server 0 goes on where one has died."""


class ReplicatedSequencer(AcrossHosts, ReplicatedServers):
    """The standby of server 0 goes on where the leader has died."""
