"""Hold what a rank's process has wherever it works with ranks of other hosts, in rounds or in gossip: its connections, and their end."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from offbeat.core.rank_log import Fenced
from offbeat.errors import JobError
from offbeat.runtime.allreduce.multi_host.connections import PeerConnections, SequencerCall
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.transport.base import Address, Hub, Message
from offbeat.types import Seconds, WorkerId


class SequencerLost(Fenced, JobError):
    """The connection between a rank and the sequencer has ended: one of the two is dead or is taken for dead."""


class ConnectedRank(ABC):
    """Take part as one rank of a job on several hosts, after `listen` and `connect`.

    A second thread receives messages. One lock protects all state that the two threads share.

    Args:
        rank: this process's rank.
        hub: for the connections to the other processes only; closed with this object.
        call: how to reach the sequencer, or the table of gossip, in server 0.
    """

    def __init__(self, rank: WorkerId, hub: Hub, call: SequencerCall) -> None:
        self._call = call
        self._lock = threading.Condition()
        self._connections = PeerConnections(rank, hub, self._lock, self._on_message, self._on_connected, self._on_cut, self._place)
        self._fenced: str | None = None
        """Why this rank does not take part any more."""

    def listen(self, host: str | None = None, port: int = 0) -> Address:
        """Accept connections of the other processes. Returns the address for them."""
        return self._connections.listen(host, port)

    def connect(self, addresses: Mapping[WorkerId, Address], timeout_s: Seconds | None = None, *, later: bool = False) -> None:
        """Connect to server 0 and to the other ranks. Unless ``later``, the job begins, with the ranks in ``addresses``.

        Raises:
            JobError: server 0 cannot be reached.
        """
        with self._lock:
            self._connections.connect(addresses, self._call, later=later)

    def close(self) -> None:
        """Close all connections: to the other processes this one is gone."""
        self._connections.close()
        with self._lock:
            self._lock.notify_all()

    def _check(self) -> None:
        """Raise an error if this rank does not take part any more."""
        connections = self._connections
        if connections.failure is not None:
            raise JobError(f"the communication thread of rank {connections.peer} has failed") from connections.failure
        if connections.ended:
            raise JobError(f"rank {connections.peer} has closed its connections and does not take part any more")
        if self._fenced is not None:
            raise Fenced(self._fenced)
        if not connections.is_connected(SEQUENCER):
            raise SequencerLost(f"rank {connections.peer} has lost its connection to the sequencer in server 0")

    def _fence(self, why: str) -> None:
        """Take no part any more. Server 0 closes the connection too, and it must not be made anew."""
        self._fenced = why
        self._connections.drop(SEQUENCER)

    # Called in the second thread, under the lock but for `_place`.

    @abstractmethod
    def _on_message(self, peer: WorkerId, message: Message | None) -> None:
        """Handle a peer's message; None: its connection has ended."""

    @abstractmethod
    def _on_connected(self, peer: WorkerId) -> None:
        """Note that a peer has connected to this process."""

    @abstractmethod
    def _on_cut(self, peer: WorkerId, reason: str) -> None:
        """Note that this process has closed the connection of a peer that broke the protocol."""

    def _place(self, peer: WorkerId, header: Mapping[str, Any], nbytes: int) -> memoryview | None:
        """Return where to receive the content of a peer's message; None: anywhere."""
        return None
