"""Everybody connected with everybody: the sockets of one process of a job across hosts, and the thread that reads them.

Peers are numbered: ranks, and `SEAT` for a process that decides and is no rank. Of two peers the higher number connects to the lower, and
a peer that comes later connects to all. What comes is handed to one function, in the thread, under the lock that the owner gave; anybody
may send. A connection that has ended is a peer that is gone: who comes back does so with a new mesh.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

from offbeat.errors import JobError, ProtocolError
from offbeat.transport.base import Address, Closed, Connection, Message, SharedMemory
from offbeat.transport.hub import SocketHub
from offbeat.types import WorkerId

SEAT: Final = -1
"""The number of a peer that decides without being a rank."""
TURN_S = 1.0
Heard: TypeAlias = Callable[[WorkerId, Message | None], None]
"""Called with what a peer has sent; None: it is gone."""


class Mesh:
    """One process's connections.

    Args:
        peer: this process's number.
        token: the job's secret.
        host: the name of this host; peers with equal names share memory. None: see `offbeat.transport.shm.host_identity`.
        lock: held while ``heard`` is called.
        heard: takes what comes.
    """

    def __init__(self, peer: WorkerId, token: str, host: str | None, lock: threading.Condition, heard: Heard) -> None:
        self.peer = peer
        self.hub = SocketHub(token, host=host)
        self._lock, self._heard = lock, heard
        self._peers: dict[WorkerId, Connection] = {}
        self._names: dict[Connection, WorkerId] = {}
        self._unheard: list[tuple[WorkerId, Message | None]] = []
        self._closing: list[Connection] = []
        self.ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"offbeat-across-{peer}", daemon=True)

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Let others connect from now on; what is returned is for them."""
        return self.hub.listen(host, port)

    def connect(self, addresses: Mapping[WorkerId, Address], timeout_s: float = 30.0, *, later: bool = False) -> None:
        """Connect with all of these, and begin to listen to them.

        Args:
            addresses: of the others; one's own is ignored.
            timeout_s: how long they may take to answer, all together.
            later: the others are under way already, so this one connects to each of them.

        Raises:
            JobError: one of them is not there, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        others = {peer for peer in addresses if peer != self.peer}
        for peer in sorted(others):
            if later or peer < self.peer:
                connection = self.hub.connect(addresses[peer])
                connection.send({"k": "hello", "peer": self.peer})
        while missing := others - self._peers.keys():
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise JobError(f"peers {sorted(missing)} did not answer {self.peer} within {timeout_s:g} s: are they running?")
            self._poll(left_s)
        for peer, message in self._unheard:
            with self._lock:
                self._heard(peer, message)
        self._unheard.clear()
        self._thread.start()

    def send(
        self, peer: WorkerId, header: Mapping[str, Any], content: torch.Tensor | None = None, memory: tuple[SharedMemory, ...] = ()
    ) -> None:
        """Send to a peer; nothing happens if it is gone. ``content`` may be changed as soon as this returns."""
        connection = self._peers.get(peer)
        if connection is not None:
            connection.send(header, payload=() if content is None else (_bytes(content),), memory=memory)

    def mates(self) -> set[WorkerId]:
        """The peers with which memory can be shared."""
        return {peer for peer, connection in self._peers.items() if connection.shares_memory}

    def knows(self, peer: WorkerId) -> bool:
        """Whether this peer is connected."""
        return peer in self._peers

    def drop(self, peer: WorkerId) -> None:
        """End the connection with a peer, after what has been sent."""
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
                self._take(connection, what)
            while self._closing:
                self._closing.pop().close()

    def _take(self, connection: Connection, what: Message | Closed) -> None:
        if isinstance(what, Closed):
            peer = self._names.pop(connection, None)
            if peer is not None and self._peers.get(peer) is connection:
                del self._peers[peer]
                self._hear(peer, None)
            return
        kind = what.header.get("k")
        if kind in ("hello", "welcome"):
            peer = what.header.get("peer")
            if not isinstance(peer, int):
                raise ProtocolError(f"{connection.peer} says hello without its number")
            if kind == "hello":
                connection.send({"k": "welcome", "peer": self.peer})
            if peer in self._peers:
                # Its predecessor is gone, and the end of that connection has not come yet.
                self.drop(peer)
                self._hear(peer, None)
            self._peers[peer] = connection
            self._names[connection] = peer
            return
        peer = self._names.get(connection)
        if peer is not None:
            self._hear(peer, what)

    def _hear(self, peer: WorkerId, what: Message | None) -> None:
        if self._thread.ident is None:
            # Not all are connected yet, and what is heard may have to be answered.
            self._unheard.append((peer, what))
        else:
            self._heard(peer, what)


def _bytes(content: torch.Tensor) -> memoryview:
    return content.numpy().data.cast("B")
