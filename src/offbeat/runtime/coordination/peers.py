"""Know which connection belongs to which worker, and which workers are not connected any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from offbeat.errors import OffbeatError
from offbeat.transport.base import Connection
from offbeat.types import NOT_JOINED, Incarnation, Seconds, WorkerId


@dataclass(slots=True)
class Peer:
    """A worker's process, as long as its connection lasts."""

    worker: WorkerId
    connection: Connection
    pid: int = 0
    """The process number in its hello."""
    former_pid: int = 0
    """That of the worker's process before; 0: this is the first."""
    incarnation: Incarnation = NOT_JOINED
    dead: bool = False
    """True once it has ended; its connection may be open for longer, in the processes of its DataLoader."""
    serial: int = 0
    """Number of its releases so far; every shard's ``parameters`` message carries it."""
    bytes_received: int = 0
    welcomed: bool = False
    """True once the job has accepted it; ranks are accepted together."""
    keeps_feedback: bool = False
    """True if it must know which of its pushes are not used: it adds the rounding errors of the others to its next push."""
    exits: bool = False
    """True once it has left because its process ends; a script that calls `close` may go on."""
    over: bool = False
    """True if it has left because the job has ended before its script."""
    early: bool = False
    """True if it has left because its script has seen the order to leave, and may have ended for that."""
    stood_still_s: Seconds = 0.0
    """For how long the coordinator has stood still since the worker's last push."""
    last_words: str | None = None
    """The error for which its script has failed; its process is about to end."""

    def computed(self, compute_s: Seconds) -> Seconds:
        """Return how long the worker has computed, by its own clock, without the time for which it stood still with the coordinator."""
        stood_still_s, self.stood_still_s = self.stood_still_s, 0.0
        return compute_s - stood_still_s if compute_s >= stood_still_s else compute_s  # less: it did not compute all that time

    def stirred(self) -> bool:
        """Return True if bytes have come since the last call, even of an unfinished message."""
        before, self.bytes_received = self.bytes_received, self.connection.bytes_received
        return self.takes_part and self.bytes_received != before

    @property
    def takes_part(self) -> bool:
        """Return True if it has joined, and has not ended since: what an ended process has sent before is no sign of life."""
        return self.incarnation > 0 and not self.dead


REASON_MAX: Final = 500
"""Most characters of a reason, since it may contain names that a peer has chosen."""


def refuse(connection: Connection, error: Exception) -> str:
    """Close the connection of a peer that has broken the protocol. Returns the reason, which is sent to the peer first.

    For an error that is no `OffbeatError` the reason names only its type, since the text may repeat what the peer has sent.
    """
    text = str(error) if isinstance(error, OffbeatError) else f"{connection.peer} sent a message that caused {type(error).__name__}"
    reason = text if len(text) <= REASON_MAX else f"{text[:REASON_MAX]} ..."
    connection.send({"kind": "refused", "reason": reason})
    connection.close()
    return reason


class Peers:
    """Hold the workers' processes. A worker's newest process is its current one, even after its connection has closed."""

    def __init__(self) -> None:
        self._speaking: dict[Connection, Peer] = {}
        self._current: dict[WorkerId, Peer] = {}
        self.gone: set[WorkerId] = set()
        """Workers whose current process is no longer connected and whose memory is still kept."""
        self.missing: dict[WorkerId, str] = {}
        """Workers whose process ended before any worker said hello, with the reason; they are not waited for."""

    def __getitem__(self, worker: WorkerId) -> Peer:
        return self._current[worker]

    def __iter__(self) -> Iterator[Peer]:
        """Iterate over the connected processes."""
        return iter(self._speaking.values())

    def at(self, connection: Connection) -> Peer | None:
        """Return the peer on this connection; None before its hello."""
        return self._speaking.get(connection)

    def knows(self, worker: WorkerId) -> bool:
        """Return True if a process has ever said hello as this worker."""
        return worker in self._current

    def enter(self, worker: WorkerId, connection: Connection, pid: int = 0) -> None:
        """Make this connection that of the worker's current process."""
        former_pid = self._current[worker].pid if worker in self._current else 0
        self._speaking[connection] = self._current[worker] = Peer(worker, connection, pid, former_pid)
        self.gone.discard(worker)

    def has_replaced(self, worker: WorkerId, pid: int) -> bool:
        """Return True if the worker's current process came after the one of this number. (0 is the number of none.)"""
        return pid > 0 and worker in self._current and self._current[worker].former_pid == pid != self._current[worker].pid

    def fails(self, worker: WorkerId, reason: str) -> None:
        """Keep the error for which the script of the worker's current process has failed."""
        if worker in self._current:
            self._current[worker].last_words = reason

    def predecessor(self, worker: WorkerId) -> Connection | None:
        """Return the open connection of this worker's current process; None if it has none."""
        peer = self._current.get(worker)
        return peer.connection if peer is not None and peer.connection in self._speaking else None

    def close(self, connection: Connection) -> Peer | None:
        """Remove a connection that has ended. Returns the peer if it was its worker's current process, else None."""
        peer = self._speaking.pop(connection, None)
        if peer is None or self._current[peer.worker] is not peer:
            return None
        self.gone.add(peer.worker)
        return peer
