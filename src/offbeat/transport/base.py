"""The one interface of all transports: ordered messages, and named regions of memory that travel with them.

A **message** is a small header (a dict that msgpack can carry) and, rarely, payload bytes. Gradients and parameters do not travel as
payload: both ends *bind* a region of memory under the same name, and ``send(header, carry=name)`` promises that the peer's region holds
the bytes of ours by the time it is handed the header. Where both ends share the memory (one host) nothing is sent; over TCP the bytes
follow the header and are received straight into the peer's region. Nothing is ever unpickled.

A region that is being carried must stay unchanged until the peer's next message, and the peer must expect it: both follow from the
protocol of push and pull, in which the owner of a region waits for the other end.

Nothing here blocks but `Hub.poll`. Sending queues what the operating system does not take at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class SharedMemory(ABC):
    """A block of memory that several processes of one host can map. The kernel frees it when the last of them is gone."""

    nbytes: int

    @property
    @abstractmethod
    def view(self) -> memoryview:
        """The bytes, writable, format ``B``. Valid until `close`."""

    @abstractmethod
    def duplicate(self) -> SharedMemory:
        """Another handle on the same memory, closed on its own."""

    @abstractmethod
    def close(self) -> None:
        """Let go of this process's mapping, as far as nobody uses a view of it any more."""


class Address(NamedTuple):
    """Where a hub listens. Plain data, so that it can be written into an environment variable or a header."""

    host: str
    """The identity of the machine (see `shm.host_identity`), not a name to resolve: peers on equal hosts share memory."""
    tcp: tuple[str, int]
    """Network name or number, and port."""
    local: str
    """The name of the local (Unix, abstract) socket; empty where there is none."""


class Message(NamedTuple):
    """One message as it arrives."""

    header: dict[str, Any]
    payload: memoryview
    """Bytes that came with it; empty for most. What was carried into a region is not here."""
    memory: tuple[SharedMemory, ...]
    """Blocks of memory handed over with it (only between ends that share memory)."""


class Closed(NamedTuple):
    """The connection is over; nothing more will come of it."""

    reason: str
    """In words: end of stream, reset, refused for a wrong token, or what rule of the wire the peer broke."""


class Connection(ABC):
    """One end of an ordered, reliable stream of messages between two processes."""

    peer: str
    """Who is at the other end, in words, for error messages."""
    shares_memory: bool
    """Whether both ends can map the same memory, so that carrying a region costs nothing."""
    interface: str
    """The number of this end in the network between them; empty where the ends share memory."""
    bytes_received: int
    """Counts every byte as it comes in, also of unfinished messages: a sign of life."""

    @abstractmethod
    def bind(self, name: str, region: memoryview) -> None:
        """Name the memory that ``carry=name`` refers to at this end, in both directions. Binding again replaces it.

        Bind before the peer can carry: a message that carries a region which is not bound here, in exactly this size, when its header is
        read ends the connection. So a peer that must be told of a region first has to wait for the answer before it sends one.
        Where the ends share memory, the caller has seen to it that both bind the same bytes.
        """

    @abstractmethod
    def send(
        self, header: Mapping[str, Any], *, carry: str | None = None, payload: Sequence[Buffer] = (), memory: Sequence[SharedMemory] = ()
    ) -> None:
        """Send a message. May be called from any thread, never blocks; on a closed connection it does nothing, `Hub.poll` tells.

        Args:
            header: what msgpack can carry; keys starting with ``_`` are the transport's own.
            carry: the name of a bound region whose bytes the peer shall have.
            payload: other bytes, received into fresh memory and handed over as `Message.payload`. Not together with ``carry``.
                May be changed as soon as this returns: what the operating system does not take at once is copied.
            memory: blocks to hand over; only where `shares_memory`.
        """

    @abstractmethod
    def close(self) -> None:
        """End the connection after what is already queued has been offered to the operating system once. `Hub.poll` does not report it."""


Arrivals: TypeAlias = list[tuple[Connection, Message | Closed]]
"""What `Hub.poll` returns: what came over which connection, in order of arrival."""


class Hub(ABC):
    """All connections of one process: it listens, connects, and waits for what comes."""

    host: str
    """The identity of this machine."""
    address: Address | None = None
    """What `listen` gave."""

    @abstractmethod
    def another(self) -> Hub:
        """A hub for another thread of this process, which knows the same token and listens nowhere yet."""

    @abstractmethod
    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Accept peers from now on; port 0 is chosen by the system.

        Raises:
            ConfigurationError: the port is taken, or the address is not of this machine.
        """

    @abstractmethod
    def connect(self, address: Address) -> Connection:
        """Open a connection to a listening hub: shared memory if both are on one host, TCP otherwise.

        Raises:
            JobError: nobody listens there.
        """

    @abstractmethod
    def poll(self, timeout_s: float | None) -> Arrivals:
        """Wait until something has come, at most ``timeout_s`` seconds (None: for ever), and return all of it in order of arrival.

        A peer is heard only after it has proved that it knows the job's token. Accepted connections show by their first message. Each
        connection yields at most one `Closed`, as its last; messages that came before the end of stream are delivered before it.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a `poll` in another thread, or the next one, return at once. May be called from any thread or signal handler."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening and close every connection."""
