"""`DyingCoordinator` whose ranks are on several hosts, so that the process that dies holds the sequencer of their rounds as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.sim.dying_servers import DyingCoordinator, LinkedHub
from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub
from tests.sim.stub_across import Ring, StubAcross

from offbeat.transport.base import Address, Connection
from offbeat.transport.memory import MemoryConnection
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


class DyingSequencer(DyingCoordinator):
    """One live run; arguments as for `DyingCoordinator`.

    Args:
        ring_first: True: ranks hear of each other before anything else happens; False: after that.
    """

    def __init__(
        self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]], records: int = 20, *, ring_first: bool = True
    ) -> None:
        super().__init__(script, journal, deaths, records)
        self.ring, self._ring_first = Ring(), ring_first

    def hub(self, turn: Callable[[], None], worker: WorkerId) -> SteppedHub:
        return FarHub(self.network, turn, worker)

    def make(self, number: WorkerId, iteration: int) -> StubAcross:
        return StubAcross(self, number, iteration)

    def deliver(self) -> bool:
        if self._ring_first:
            return self._look() or self.ring.deliver() or super().deliver()
        return super().deliver() or self.ring.deliver()
