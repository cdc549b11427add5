"""Hold what is decided in server 0 for ranks of several hosts: their connections, the orders that wait for them, and their tickets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.core.rank_log import RankLog
from offbeat.transport.base import Connection, Message
from offbeat.transport.schema import Kinds
from offbeat.types import Seconds, Version, WorkerId


class RankCalls(ABC):
    """What the ranks of one job call server 0 for: rounds of one kind, or gossip. A snapshot of the server contains it.

    Args:
        ranks: the greatest number of ranks.
        slots: how many vectors are kept for ranks that are behind.
        now: the job's clock, by which the log's entries are dated.
    """

    def __init__(self, ranks: int, slots: int, now: Callable[[], Seconds]) -> None:
        self.slots = slots
        self.log = RankLog(now)
        self._ranks = ranks
        self._hosts: dict[WorkerId, str] = {}
        """The host of each rank that another rank may admit."""
        self._tickets: dict[WorkerId, int] = {}
        """The ticket that authorises admitting the rank's current process."""
        self._ticket_count = 0
        self._connections: dict[WorkerId, Connection] = {}
        self._queued: dict[WorkerId, list[dict[str, Any]]] = {}
        """Orders for ranks that are expected and have not called yet."""

    @property
    @abstractmethod
    def _requests(self) -> Kinds:
        """Return the kinds of messages that a rank may send."""

    # What the coordinator decides.

    def begin(self, hosts: Mapping[WorkerId, str]) -> None:
        """Enter the ranks that the job begins with; by rank: the identity of its host."""
        self._queued = {rank: [] for rank in hosts}

    @abstractmethod
    def enter(self, rank: WorkerId, version: Version | None) -> None:
        """Let a rank take part with the parameters of ``version``, None: the newest. Raises `TooOld` if it needs results that are gone."""

    @abstractmethod
    def order(self, rank: WorkerId, kind: str) -> None:
        """Remove, pause or resume a rank."""

    @abstractmethod
    def cut(self, rank: WorkerId, why: str) -> None:
        """Exclude a rank that has broken the protocol: others would wait for it for ever."""

    def expect(self, rank: WorkerId, host: str) -> None:
        """Let a new process of this rank call, from this host, and drop the connection of an earlier one."""
        self._drop(rank)
        self._queued[rank] = []
        self._hosts[rank] = host

    def ticket(self, rank: WorkerId) -> int:
        """Return a number that authorises another rank to admit `rank`'s current process. It voids the one before."""
        self._ticket_count += 1
        self._tickets[rank] = self._ticket_count
        return self._ticket_count

    def admitted(self, rank: WorkerId) -> bool:
        """Return True if the rank's last ticket was used, or withdrawn."""
        return rank not in self._tickets

    def forget(self, rank: WorkerId) -> None:
        """Withdraw the ticket of a rank whose process is gone."""
        self._tickets.pop(rank, None)

    # What the coordinator sees.

    @abstractmethod
    def present(self, rank: WorkerId) -> bool:
        """Return True if a rank takes part."""

    # Connections of ranks.

    def connect(self, rank: WorkerId, connection: Connection) -> None:
        """Take the connection of a rank's process, and send what has waited for it."""
        former = self._connections.pop(rank, None)
        if former is not None:
            former.close()  # an earlier process of this rank is gone, and the end of its connection has not been read yet
        self._connections[rank] = connection
        for header in self._queued.pop(rank, ()):
            connection.send(header)

    def has(self, rank: WorkerId, connection: Connection) -> bool:
        """Return True if this is the connection of the rank's present process."""
        return self._connections.get(rank) is connection

    def on_message(self, rank: WorkerId, message: Message) -> None:
        """Handle a message of a rank. Raises `ProtocolError` if the rank may not send it now; nothing has changed then."""
        kind = self._requests.check(message.header, f"rank {rank}", len(message.payload), len(message.memory))
        self._check_now(rank, kind, message.header)
        self._on_request(rank, message.header)

    @abstractmethod
    def _check_now(self, rank: WorkerId, kind: str, header: Mapping[str, Any]) -> None:
        """Check that a rank may send this message now. Changes nothing.

        Raises:
            ProtocolError: it may not.
        """

    @abstractmethod
    def _on_request(self, rank: WorkerId, header: Mapping[str, Any]) -> None:
        """Process a rank's message."""

    def closed(self, rank: WorkerId, connection: Connection) -> None:
        """Note the end of a rank's connection. The rank takes part until the coordinator removes it."""
        if self.has(rank, connection):
            del self._connections[rank]

    def _send(self, rank: WorkerId, header: dict[str, Any]) -> None:
        connection = self._connections.get(rank)
        if connection is not None:
            connection.send(header)
        elif rank in self._queued:
            self._queued[rank].append(header)

    def _fence(self, rank: WorkerId, why: str) -> None:
        """Tell a rank that it takes part no more, and end its connection."""
        self._send(rank, {"k": "fence", "why": why})
        self._drop(rank)

    def _drop(self, rank: WorkerId) -> None:
        self._queued.pop(rank, None)
        connection = self._connections.pop(rank, None)
        if connection is not None:
            connection.close()
