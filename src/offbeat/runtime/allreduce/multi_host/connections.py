"""Everybody connected with everybody: the sockets of one process of a job across hosts, and the thread that reads them.

Peers are numbered: ranks, and `SEAT` for a process that decides and is no rank. Of two peers the higher number connects to the lower, and
a peer that comes later connects to all. Nobody waits for anybody: what is sent to a peer that is to come, and has not, goes out when it
does. What comes is handed to one function, in the thread, under the lock that the owner gave; whoever sends holds that lock. A connection
that has ended is a peer that is gone: who comes back does so with a new mesh.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeAlias

import torch

from offbeat.errors import JobError, OffbeatError, ProtocolError
from offbeat.transport.base import Address, Closed, Connection, Hub, Message, SharedMemory
from offbeat.types import WorkerId

log = logging.getLogger(__name__)

SEAT: Final = -1
"""The number of a peer that decides without being a rank."""
TURN_S = 1.0
Heard: TypeAlias = Callable[[WorkerId, Message | None], None]
"""Called with what a peer has sent; None: it is gone."""
Cut: TypeAlias = Callable[[WorkerId, str], None]
"""Called with a peer that has broken the protocol, and how: its connection has been ended here."""


class PeerConnections:
    """One process's connections.

    Args:
        peer: this process's number.
        hub: of these connections alone; closed with them.
        lock: held while ``heard``, ``met`` and ``cut`` are called.
        heard: takes what comes.
        met: called with a peer that has connected to this one.
        cut: called with a peer whose connection this process has ended, after ``heard`` with None.
    """

    def __init__(
        self, peer: WorkerId, hub: Hub, lock: threading.Condition, heard: Heard, met: Callable[[WorkerId], None], cut: Cut
    ) -> None:
        self.peer, self.hub = peer, hub
        self._lock, self._heard, self._met, self._cut = lock, heard, met, cut
        self._peers: dict[WorkerId, Connection] = {}
        self._names: dict[Connection, WorkerId] = {}
        self._kept: dict[WorkerId, list[tuple[dict[str, Any], torch.Tensor | None]]] = {}
        """What has been sent to peers that are expected."""
        self._closing: list[Connection] = []
        self.ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"offbeat-across-{peer}", daemon=True)

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Let others connect from now on; what is returned is for them."""
        return self.hub.listen(host, port)

    def connect(self, addresses: Mapping[WorkerId, Address], needed: WorkerId, *, later: bool = False) -> None:
        """Connect to those of these to whom it is on this one to connect, and begin to listen to all.

        Args:
            addresses: of the others; one's own is ignored.
            needed: without this one there is no use in going on. Another may have ended already, as the others will hear.
            later: the others are under way already, so this one connects to each of them.

        Raises:
            JobError: the one who is needed is not there.
        """
        for peer in sorted(addresses.keys() - {self.peer}):
            if later or peer < self.peer:
                try:
                    connection = self.hub.connect(addresses[peer])
                except JobError:
                    if peer == needed:
                        raise
                    continue
                connection.send({"k": "hello", "peer": self.peer})
                self._enter(peer, connection)
        self.expect(addresses.keys())
        self._thread.start()

    def expect(self, peers: Collection[WorkerId]) -> None:
        """These will connect, if they have not: from now on keep for them what is sent to them, and nothing for any others."""
        self._kept = {peer: self._kept.get(peer, []) for peer in peers if peer not in self._peers and peer != self.peer}

    @property
    def expected(self) -> Collection[WorkerId]:
        """Who is to connect, and has not."""
        return self._kept.keys()

    def send(
        self, peer: WorkerId, header: Mapping[str, Any], content: torch.Tensor | None = None, memory: tuple[SharedMemory, ...] = ()
    ) -> None:
        """Send to a peer; nothing happens if it is gone. ``content`` may be changed as soon as this returns."""
        connection = self._peers.get(peer)
        if connection is not None:
            connection.send(header, payload=() if content is None else (_bytes(content),), memory=memory)
        elif peer in self._kept:
            assert not memory, f"peer {peer} is to get memory, and has not asked"
            self._kept[peer].append((dict(header), None if content is None else content.clone()))

    def mates(self) -> set[WorkerId]:
        """The peers with which memory can be shared."""
        return {peer for peer, connection in self._peers.items() if connection.shares_memory}

    def knows(self, peer: WorkerId) -> bool:
        """Whether this peer is connected."""
        return peer in self._peers

    def drop(self, peer: WorkerId) -> None:
        """End the connection with a peer, after what has been sent."""
        self._kept.pop(peer, None)
        connection = self._peers.pop(peer, None)
        if connection is not None:
            self._names.pop(connection, None)
            self._closing.append(connection)
            self.hub.wake()

    def close(self) -> None:
        """End all of them."""
        self.ended = True
        self.hub.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(10.0)
        elif not self._thread.is_alive():
            self.hub.close()

    def _run(self) -> None:
        try:
            while not self.ended:
                self._poll(TURN_S)
        except BaseException as error:
            self.failure = error
            with self._lock:
                self._lock.notify_all()
        finally:
            self.hub.close()

    def _poll(self, timeout_s: float) -> None:
        arrived = self.hub.poll(timeout_s)
        with self._lock:
            for connection, what in arrived:
                try:
                    self._take(connection, what)
                except ProtocolError as error:
                    self._cut_off(connection, str(error))
                except OffbeatError:
                    raise
                except Exception:
                    # What a peer sends must not end this process's part, whatever is wrong with it; this is a mistake of ours, and shown.
                    log.exception("peer %s of process %d: its message could not be handled", connection.peer, self.peer)
                    self._cut_off(connection, "its message could not be handled")
            while self._closing:
                self._closing.pop().close()

    def _cut_off(self, connection: Connection, reason: str) -> None:
        """End the connection of a peer that has broken the protocol: to this process it is gone."""
        log.warning("process %d ends the connection of %s: %s", self.peer, connection.peer, reason)
        peer = self._names.get(connection)
        if peer is None:
            self._closing.append(connection)
        else:
            self.drop(peer)
            self._heard(peer, None)
            self._cut(peer, reason)

    def _take(self, connection: Connection, what: Message | Closed) -> None:
        peer = self._names.get(connection)
        if isinstance(what, Closed):
            if peer is not None:
                del self._names[connection], self._peers[peer]
                self._heard(peer, None)
        elif peer is not None:
            self._heard(peer, what)
        elif what.header.get("k") == "hello":
            peer = what.header.get("peer")
            if type(peer) is not int or peer < 0 or peer == self.peer:
                raise ProtocolError(f"{connection.peer} sent 'hello' without the number of another rank in peer")
            if peer in self._peers:
                # Its predecessor is gone, and the end of that connection has not come yet.
                self.drop(peer)
                self._heard(peer, None)
            self._enter(peer, connection)
            self._met(peer)
        else:
            raise ProtocolError(f"{connection.peer} sent a message before 'hello'")

    def _enter(self, peer: WorkerId, connection: Connection) -> None:
        self._peers[peer] = connection
        self._names[connection] = peer
        for header, content in self._kept.pop(peer, ()):
            self.send(peer, header, content)


def _bytes(content: torch.Tensor) -> memoryview:
    return content.numpy().data.cast("B")
