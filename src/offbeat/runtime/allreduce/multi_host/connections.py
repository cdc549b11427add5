"""Connect every rank of a job on several hosts with every other, and with the sequencer: the sockets, and the thread that reads them.

Peers are numbered: ranks, and `SEQUENCER`. Of two ranks the one with the higher number connects to the other; a rank that comes later
connects to all. No rank waits until all are connected: messages to an expected peer are queued until it connects. Messages that arrive are
passed to one function, in the thread, under the owner's lock; senders hold that lock too. A peer whose connection has ended is gone: it can
only come back with a new `PeerConnections`.

Each rank calls the sequencer in server 0 (`SequencerCall`). This connection may outlive the server's process (`Links`):
what a rank asks while server 0 is away is answered by its next process, or by its standby.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from offbeat.core.rank_log import Fenced
from offbeat.errors import JobError, OffbeatError, ProtocolError
from offbeat.runtime.allreduce.multi_host.messages import FIRST, SEQUENCER
from offbeat.runtime.worker.links import Links
from offbeat.tensors.layout import Memory
from offbeat.transport.base import Address, Closed, Connection, Hub, Message, SharedMemory
from offbeat.types import WorkerId

log = logging.getLogger(__name__)

POLL_S = 1.0


class SequencerCall(NamedTuple):
    """How a rank reaches the sequencer of its rounds in server 0."""

    connect: Callable[[Links], Connection]
    """Connects to the process of server 0 by now; raises `JobError` if it cannot be reached."""
    number_of_optimizer: int = 0
    which: int = 0
    """Which of the rounds: 0 for gradients, 1 for parameters."""

    def hello(self, rank: WorkerId) -> dict[str, Any]:
        """Return the first message of this rank."""
        about = {"number_of_optimizer": self.number_of_optimizer} if self.number_of_optimizer else {}
        return {"kind": "rounds", "worker": rank, "index": self.which, **about}


class PeerConnections:
    """Hold one rank's connections to all others, and to the sequencer.

    Args:
        peer: this rank.
        hub: used for these connections only; closed with them.
        owner: hears what comes, under its lock.
    """

    def __init__(self, peer: WorkerId, hub: Hub, owner: ConnectedRank) -> None:
        self.peer, self.hub, self._owner, self._lock = peer, hub, owner, owner.lock
        self._links = Links(hub)
        self._peers: dict[WorkerId, Connection] = {}
        self._names: dict[Connection, WorkerId] = {}
        self._queued: dict[WorkerId, list[tuple[dict[str, Any], torch.Tensor | None]]] = {}
        """Messages to peers that are expected and not connected yet."""
        self._expected: frozenset[WorkerId] = frozenset()
        self._seated: dict[WorkerId, Connection] = {}
        """By expected peer: the connection of the process that is expected. Another one that comes meanwhile is not, yet."""
        self._former: dict[WorkerId, Connection] = {}
        """The same of peers that were not expected any more then. Rounds expect such a peer again only as a new process."""
        self._left: dict[WorkerId, Connection] = {}
        """Connections of peers that have not been expected at some time since; gossip sends nothing to one whose connection has ended."""
        self._closing: list[Connection] = []
        self.ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"offbeat-across-{peer}", daemon=True)

    def connect(self, addresses: Mapping[WorkerId, Address], call: SequencerCall, *, later: bool = False) -> None:
        """Connect to the sequencer and to those ranks that this one has to connect to, and start the thread.

        Args:
            addresses: by rank; this one's own is ignored. A rank may have ended already, which the other ranks will notice.
            call: how to reach the sequencer.
            later: True if the other ranks are running already, so that this one connects to each of them.

        Raises:
            JobError: the sequencer cannot be reached.
        """
        connection = call.connect(self._links)
        connection.send(call.hello(self.peer))
        self._enter(SEQUENCER, connection)
        for peer in sorted(addresses.keys() - {self.peer}):
            if later or peer < self.peer:
                with contextlib.suppress(JobError):
                    connection = self.hub.connect(addresses[peer])
                    connection.send({"k": "hello", "peer": self.peer})
                    self._enter(peer, connection)
        self.expect(addresses.keys())
        self._thread.start()

    def expect(self, peers: Collection[WorkerId], *, anew: bool = False) -> None:
        """Set the peers that are to connect: queue messages for them, and drop messages for all other absent peers.

        Args:
            peers: these.
            anew: True: one that has not been expected at some time comes as a new process, and over a connection of its own.
        """
        for peer in self._expected.difference(peers) & self._seated.keys():
            self._former[peer] = self._seated.pop(peer)
        self._expected = frozenset(peers)
        self._left = {peer: line for peer, line in self._peers.items() if peer not in peers or self._left.get(peer) is line}
        # In rounds a former connection is an earlier process's: its end, or the new one's hello, has not been read yet.
        here = {peer for peer in peers if peer in self._peers and not (anew and self._former.get(peer) is self._peers[peer])}
        self._queued = {peer: self._queued.get(peer, []) for peer in self._expected - here - {self.peer}}
        for peer in here:
            self._seated.setdefault(peer, self._peers[peer])

    def send(
        self,
        peer: WorkerId,
        header: Mapping[str, Any],
        content: torch.Tensor | None = None,
        memory: tuple[SharedMemory, ...] = (),
        *,
        lent: bool = False,
    ) -> None:
        """Send to a peer, or do nothing if it is gone. Memory is not sent to one that is expected: once connected, it asks for it.

        ``content`` may be overwritten as soon as this returns; lent, not before the peer has received it or `leave_memory` is called.
        """
        connection = None if peer in self._queued else self._peers.get(peer)
        if connection is not None:
            connection.send(header, payload=() if content is None else (_bytes(content),), memory=memory, lent=lent)
        elif peer in self._queued and not memory:
            self._queued[peer].append((dict(header), None if content is None else content.clone()))

    def leave_memory(self) -> None:
        """Copy all content that is lent and that the operating system has not taken yet, and receive what has a place elsewhere."""
        for connection in self._peers.values():
            connection.copy_unsent()
            connection.divert()

    def recycle(self, peer: WorkerId, content: Memory) -> None:
        """Use the memory of a message of this peer for later messages. Nobody may look at ``content`` any more."""
        connection = self._peers.get(peer)
        if connection is not None and isinstance(content, memoryview):
            connection.recycle(content)

    def local_peers(self) -> set[WorkerId]:
        """Return the connected ranks that share memory with this one."""
        return {peer for peer, connection in self._peers.items() if peer != SEQUENCER and connection.shares_memory}

    def is_connected(self, peer: WorkerId) -> bool:
        """Return True if this peer is connected."""
        return peer in self._peers

    def drop(self, peer: WorkerId) -> None:
        """Close the connection to a peer after all that was sent to it has been written."""
        self._queued.pop(peer, None)
        connection = self._peers.pop(peer, None)
        if connection is not None:
            self._names.pop(connection, None)
            connection.place_with(lambda header, nbytes: None)
            connection.copy_unsent()
            connection.divert()
            self._closing.append(connection)
            self.hub.wake()

    def close(self) -> None:
        """Close all connections and end the thread."""
        self.ended = True
        self.hub.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        elif not self._thread.is_alive():
            self.hub.close()

    def _run(self) -> None:
        try:
            while not self.ended:
                self._poll(POLL_S)
        except BaseException as error:
            self.failure = error
            with self._lock:
                self._lock.notify_all()
        finally:
            self.hub.close()

    def _poll(self, timeout_s: float) -> None:
        arrived = self._links.poll(timeout_s)
        with self._lock:
            for connection, what in arrived:
                try:
                    self._receive(connection, what)
                except ProtocolError as error:
                    self._cut_off(connection, str(error))
                except OffbeatError:
                    raise
                except Exception:
                    # No message of a peer may end this process. The error is ours, so it is logged with its traceback.
                    log.exception("peer %s of process %d: its message could not be handled", connection.peer, self.peer)
                    self._cut_off(connection, "its message could not be handled")
            while self._closing:
                self._closing.pop().close()

    def _cut_off(self, connection: Connection, reason: str) -> None:
        """Close the connection of a peer that has broken the protocol, and report the peer as gone."""
        log.warning("process %d ends the connection of %s: %s", self.peer, connection.peer, reason)
        peer = self._names.get(connection)
        if peer is None:
            self._closing.append(connection)
        else:
            self.drop(peer)
            self._owner.on_message(peer, None)
            self._owner.on_cut(peer, reason)

    def _receive(self, connection: Connection, what: Message | Closed) -> None:
        peer = self._names.get(connection)
        if isinstance(what, Closed):
            if peer is not None:
                del self._names[connection], self._peers[peer]
                if self._left.get(peer) is connection and peer in self._expected:
                    self._queued.setdefault(peer, [])
                self._owner.on_message(peer, None)
        elif peer is not None and what.header.get("kind") == "refused":  # by server 0: this is not the rank's process any more
            self.drop(peer)
            self._owner.on_message(peer, None)
        elif peer is not None:
            self._owner.on_message(peer, what)
        else:
            FIRST.check(what.header, connection.peer, len(what.payload), len(what.memory))
            peer = what.header["peer"]
            if peer == self.peer:
                raise ProtocolError(f"{connection.peer} sent 'hello' with peer = {peer} (expected the number of another rank)")
            if peer in self._peers:
                # An earlier process of this rank is gone, and the end of its connection has not been read yet.
                for_this = self._queued.get(peer)
                self.drop(peer)
                if for_this is not None:
                    self._queued[peer] = for_this
                self._owner.on_message(peer, None)
            self._enter(peer, connection)
            self._owner.on_connected(peer)

    def _enter(self, peer: WorkerId, connection: Connection) -> None:
        self._peers[peer] = connection
        self._names[connection] = peer
        if peer in self._expected:
            self._seated.setdefault(peer, connection)
        connection.place_with(partial(self._owner.place, peer))
        for header, content in self._queued.pop(peer, ()):
            self.send(peer, header, content)


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
        self.lock = threading.Condition()
        self._connections = PeerConnections(rank, hub, self)
        self._fenced: str | None = None
        """Why this rank does not take part any more."""

    def listen(self, host: str | None = None) -> Address:
        """Accept connections of the other processes from now on. Returns the address for them."""
        return self._connections.hub.listen(host)

    def connect(self, addresses: Mapping[WorkerId, Address], *, later: bool = False) -> None:
        """Connect to server 0 and to the other ranks. Unless ``later``, the job begins, with the ranks in ``addresses``.

        Raises:
            JobError: server 0 cannot be reached.
        """
        with self.lock:
            self._connections.connect(addresses, self._call, later=later)

    def close(self) -> None:
        """Close all connections: to the other processes this one is gone."""
        self._connections.close()
        with self.lock:
            self.lock.notify_all()

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

    # Called in the second thread, under the lock but for `place`.

    @abstractmethod
    def on_message(self, peer: WorkerId, message: Message | None) -> None:
        """Handle a peer's message; None: its connection has ended."""

    @abstractmethod
    def on_connected(self, peer: WorkerId) -> None:
        """Note that a peer has connected to this process."""

    @abstractmethod
    def on_cut(self, peer: WorkerId, reason: str) -> None:
        """Note that this process has closed the connection of a peer that broke the protocol, of whose end `on_message` was told."""

    def place(self, peer: WorkerId, header: Mapping[str, Any], nbytes: int) -> memoryview | None:
        """Return where to receive the content of a peer's message; None: anywhere."""
        return None


def _bytes(content: torch.Tensor) -> memoryview:
    return content.numpy().data.cast("B")
