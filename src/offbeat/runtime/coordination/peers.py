"""Which connection speaks for which worker, and whom nobody can hear any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from offbeat.errors import OffbeatError
from offbeat.transport.base import Connection
from offbeat.types import Incarnation, WorkerId


@dataclass(slots=True)
class Peer:
    """A worker's process, as long as its connection lasts."""

    worker: WorkerId
    connection: Connection
    pid: int = 0
    """By its hello."""
    incarnation: Incarnation = 0
    serial: int = 0
    """Counts its releases; every shard's parameters message carries it."""
    bytes_received: int = 0
    welcomed: bool = False
    """Whether the job has accepted it; ranks without servers are accepted together."""
    last_words: str | None = None
    """Why its script has failed; its process is about to end."""

    def stirred(self) -> bool:
        """Whether bytes have come since the last time, were it of an unfinished message."""
        before, self.bytes_received = self.bytes_received, self.connection.bytes_received
        return self.incarnation > 0 and self.bytes_received != before


REASON_MAX: Final = 500
"""Characters of a reason: it may have names in it that a peer has chosen."""


def refuse(connection: Connection, error: Exception) -> str:
    """End the connection of a peer that has broken the protocol. Returns the reason, which the peer is told before.

    Of an error that is not ours the type alone is told: its text may repeat what the peer has sent.
    """
    text = str(error) if isinstance(error, OffbeatError) else f"{connection.peer} sent a message that caused {type(error).__name__}"
    reason = text if len(text) <= REASON_MAX else f"{text[:REASON_MAX]} ..."
    connection.send({"kind": "refused", "reason": reason})
    connection.close()
    return reason


class Peers:
    """The workers' processes. A worker's newest process is its current one, also after its connection has closed."""

    def __init__(self) -> None:
        self._speaking: dict[Connection, Peer] = {}
        self._current: dict[WorkerId, Peer] = {}
        self.gone: set[WorkerId] = set()
        """Whose current process is no longer connected, and whose memory is still kept."""
        self.missing: dict[WorkerId, str] = {}
        """Whose process ended before anybody said hello, and how: nobody shall wait for them."""

    def __getitem__(self, worker: WorkerId) -> Peer:
        return self._current[worker]

    def __iter__(self) -> Iterator[Peer]:
        """The processes that are connected: what came last of one that is not is no sign of life."""
        return iter(self._speaking.values())

    def at(self, connection: Connection) -> Peer | None:
        """Who speaks on this connection."""
        return self._speaking.get(connection)

    def knows(self, worker: WorkerId) -> bool:
        """Whether a process has ever said hello as this worker."""
        return worker in self._current

    def enter(self, worker: WorkerId, connection: Connection, pid: int = 0) -> None:
        """A worker's new process."""
        self._speaking[connection] = self._current[worker] = Peer(worker, connection, pid)
        self.gone.discard(worker)

    def predecessor(self, worker: WorkerId) -> Connection | None:
        """The connection of this worker's process, if it has one that is still open."""
        peer = self._current.get(worker)
        return peer.connection if peer is not None and peer.connection in self._speaking else None

    def close(self, connection: Connection) -> Peer | None:
        """A connection has ended. Returns the peer if it was its worker's current process."""
        peer = self._speaking.pop(connection, None)
        if peer is None or self._current[peer.worker] is not peer:
            return None
        self.gone.add(peer.worker)
        return peer
