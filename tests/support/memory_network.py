"""Provide a transport within one process, for tests and to drive the live runtime step by step. No socket, no thread, no clock.

Hubs on one `MemoryNetwork` can connect to each other. The receiver's `poll` delivers everything, in the order of sending, so a single
thread that polls the hubs in turn gets the same run every time. Headers go through msgpack, and regions are checked as on a wire, so that a
program that works here also works there.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]

from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.transport import wire
from offbeat.transport.base import Address, Arrivals, Buffer, Closed, Connection, Hub, Message, PartArrived, SharedMemory
from offbeat.transport.handshake import WRONG_TOKEN
from offbeat.transport.shm import MemoryBlock, PrivateBlock


class MemoryNetwork:
    """Connect the hubs of one test.

    Args:
        shares_memory: True: carrying a region copies nothing, as on one host; False: it copies, as over TCP.
        blocking: True: `Hub.poll` waits for other threads; False: it returns at once.
    """

    def __init__(self, *, shares_memory: bool = True, blocking: bool = False) -> None:
        self.shares_memory = shares_memory
        self.blocking = blocking
        # Condition's lock is reentrant, so a signal handler may wake the thread that it interrupted.
        self.changed = threading.Condition()
        self.listening: dict[int, MemoryHub] = {}
        self.ports = itertools.count(1)
        self.names = itertools.count()


def duplicate(block: SharedMemory) -> SharedMemory:
    """Return another handle on a block, which is closed separately, as the process has to which the block is handed over."""
    if isinstance(block, MemoryBlock):
        return MemoryBlock(os.dup(block.descriptor), block.nbytes, block.name)
    return PrivateBlock(block.view, "duplicate")


class _Sent(NamedTuple):
    """A message that was sent and not received yet."""

    kind: str
    packed: bytes
    carry: str | None
    carry_nbytes: int
    data: bytes
    """The bytes of the region if memory is not shared, or the payload."""
    memory: tuple[SharedMemory, ...]


class _SentAhead(NamedTuple):
    """A part of a region that was sent ahead and not received yet."""

    name: str
    start: int
    data: bytes


class MemoryConnection(Connection):
    """One end of a connection within this process."""

    def __init__(self, hub: MemoryHub, peer: str) -> None:
        self.peer = peer
        self.shares_memory = hub.network.shares_memory
        self.interface = "" if self.shares_memory else "127.0.0.1"
        self.bytes_received = 0
        self.hub = hub
        self.other: MemoryConnection | None = None
        """The other end; None once either is closed."""
        self.closed = False
        self._regions: dict[str, memoryview] = {}
        self._part_arrived: dict[str, PartArrived | None] = {}

    def __repr__(self) -> str:
        return f"<connection to {self.peer}>"

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        self._regions[name] = region.cast("B")
        self._part_arrived[name] = arrived

    def send(
        self,
        header: Mapping[str, Any],
        *,
        carry: str | None = None,
        payload: Sequence[Buffer] = (),
        memory: Sequence[SharedMemory] = (),
        lent: bool = False,
    ) -> None:
        assert not any(key.startswith("_") for key in header), f"header keys that start with '_' are the transport's own: {sorted(header)}"
        assert not (carry is not None and payload), "a message carries a region or a payload, not both"
        assert self.shares_memory or not memory, f"memory cannot be handed over to {self.peer}: the ends do not share memory"
        assert carry is None or carry in self._regions, f"region {carry!r} is not bound; bound are {sorted(self._regions)}"
        region = memoryview(b"") if carry is None else self._regions[carry]
        data = b"".join(payload) if carry is None or self.shares_memory else bytes(region)
        with self.hub.network.changed:
            if self.other is not None:
                blocks = tuple(map(duplicate, memory))
                self.other.deliver(_Sent(header.get("kind", ""), msgpack.packb(header), carry, len(region), data, blocks))

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        assert not self.shares_memory, f"nothing is sent ahead to {self.peer}: the ends share memory"
        with self.hub.network.changed:
            if self.other is not None:
                self.other.deliver(_SentAhead(name, start, bytes(self._regions[name][start:stop])))

    def deliver(self, item: _Sent | _SentAhead | Closed) -> None:
        """Put an item into the inbox of this end's hub. Called with the network's lock held."""
        self.hub.inbox.append((self, item))
        self.hub.network.changed.notify_all()

    def receive(self, sent: _Sent) -> Message:
        """Return the message that was sent.

        Raises:
            ProtocolError: its region is not bound here, or has another size.
        """
        self.bytes_received += len(sent.packed) + len(sent.data)
        header = wire.decode_header(sent.packed)
        if sent.carry is None:
            return Message(header, memoryview(bytearray(sent.data)), sent.memory)
        bound = self._regions.get(sent.carry)
        if bound is None:
            raise ProtocolError(
                f"region {sent.carry!r} of {sent.carry_nbytes} bytes came, but it is not bound here; bound are {sorted(self._regions)}"
            )
        if len(bound) != sent.carry_nbytes:
            raise ProtocolError(f"region {sent.carry!r} came with {sent.carry_nbytes} bytes, but {len(bound)} bytes are bound here")
        if not self.shares_memory and sent.data:
            if bound.readonly:
                raise ProtocolError(f"region {sent.carry!r} of {sent.carry_nbytes} bytes came, but what is bound here cannot be written")
            bound[:] = sent.data
        return Message(header, wire.EMPTY, sent.memory)

    def receive_ahead(self, sent: _SentAhead) -> None:
        """Keep a part of a region that was sent ahead.

        Raises:
            ProtocolError: the region is not bound here, or cannot be written, or ends before the part.
        """
        self.bytes_received += len(sent.data)
        stop = sent.start + len(sent.data)
        wire.part(self._regions, sent.name, sent.start, stop)[:] = sent.data
        if (arrived := self._part_arrived.get(sent.name)) is not None:
            arrived(sent.start, stop)

    def close(self) -> None:
        self.end("end of stream")

    def has_ended(self) -> bool:
        return self.other is None

    def end(self, reason: str) -> None:
        """Close this end, and report the reason to the other."""
        with self.hub.network.changed:
            self.closed = True
            other, self.other = self.other, None
            self.hub.connections.pop(self, None)
            if other is not None:
                other.other = None
                other.deliver(Closed(reason))


_Inbox: TypeAlias = deque[tuple[MemoryConnection, _Sent | _SentAhead | Closed]]


class MemoryHub(Hub):
    """The hub of one simulated process.

    Args:
        network: the hubs that it can reach.
        token: the job's secret, compared when a connection is made.

    >>> network = MemoryNetwork()
    >>> server, worker = MemoryHub(network, "secret"), MemoryHub(network, "secret")
    >>> connection = worker.connect(server.listen())
    >>> connection.send({"kind": "join"})
    >>> [(_, message)] = server.poll(None)
    >>> message.header
    {'kind': 'join'}
    """

    def __init__(self, network: MemoryNetwork, token: str) -> None:
        self.host = "memory"
        self.network = network
        self.token = token
        self.name = f"memory-{next(network.names)}"
        self.inbox: _Inbox = deque()
        self.connections: dict[MemoryConnection, None] = {}
        """Connections in the order of making, so that closing them is deterministic."""
        self._port: int | None = None
        self._woken = False

    def listen(self, host: str | None = "127.0.0.1", port: int = 0) -> Address:
        assert self._port is None, "this hub listens already"
        with self.network.changed:
            if not port:
                port = next(free for free in self.network.ports if free not in self.network.listening)
            if port in self.network.listening:
                raise ConfigurationError(f"port {port} of {host} is taken by another hub: choose another, or 0 to let the network choose")
            self._port = port
            self.network.listening[port] = self
        self.address = Address(self.host, (str(host), port), "")
        return self.address

    def another(self) -> MemoryHub:
        return MemoryHub(self.network, self.token)

    def connect(self, address: Address) -> Connection:
        with self.network.changed:
            server = self.network.listening.get(address.tcp[1])
            if server is None:
                raise JobError(f"nobody listens at {address.tcp[0]}, port {address.tcp[1]}: is the server running, and the address right?")
            ours, theirs = MemoryConnection(self, server.name), MemoryConnection(server, self.name)
            self.connections[ours] = None
            if server.token != self.token:
                ours.deliver(Closed(f"refused: {WRONG_TOKEN}"))
                return ours
            server.connections[theirs] = None
            ours.other, theirs.other = theirs, ours
            return ours

    def poll(self, timeout_s: float | None) -> Arrivals:
        with self.network.changed:
            if self.network.blocking:
                self.network.changed.wait_for(lambda: self.inbox or self._woken, timeout_s)
            self._woken = False
            arrived: Arrivals = []
            while self.inbox:
                connection, item = self.inbox.popleft()
                if not connection.closed and (taken := self._take(connection, item)) is not None:
                    arrived.append((connection, taken))
            return arrived

    def _take(self, connection: MemoryConnection, item: _Sent | _SentAhead | Closed) -> Message | Closed | None:
        if isinstance(item, Closed):
            connection.end(item.reason)
            return item
        try:
            if isinstance(item, _SentAhead):
                connection.receive_ahead(item)
                return None
            return connection.receive(item)
        except ProtocolError as error:
            connection.end(f"refused: {error}")
            return Closed(str(error))

    def wake(self) -> None:
        with self.network.changed:
            self._woken = True
            self.network.changed.notify_all()

    def close(self) -> None:
        with self.network.changed:
            if self._port is not None:
                self.network.listening.pop(self._port, None)
                self._port = None
            for connection in list(self.connections):
                connection.close()
            self.inbox.clear()
