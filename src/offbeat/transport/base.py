"""Define the interface of all transports: ordered messages, and named regions of memory that travel with them.

A **message** is a small header (a dict that msgpack can carry) and, rarely, payload bytes. Gradients and parameters do not travel as
payload: both ends *bind* a region of memory under the same name, and ``send(header, carry=name)`` promises that the peer's region has the
bytes of ours when the peer receives the header. If both ends share the memory (one host), no bytes are sent; over TCP the bytes follow the
header and are received directly into the peer's region. Nothing is ever unpickled.

A region that is being carried must not change until the peer's next message, and the peer must expect it. Both follow from the protocol of
push and pull, in which the owner of a region waits for the other end. Parts of a region may also be sent ahead of a message, while the
rest is computed.

Only `Hub.poll` and `Connection.hand_over` block. Bytes that the operating system does not take at once are queued.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
PartArrived: TypeAlias = Callable[[int, int], None]
"""Called with the first byte of a part of a region, and the byte after it, when the part has arrived."""


class SharedMemory(ABC):
    """A block of memory that several processes of one host can map. The kernel frees it when the last of them has ended."""

    nbytes: int
    view: memoryview
    """The bytes, writable, format ``B``. Valid until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Unmap the memory from this process, unless a view of it is still in use."""


class Address(NamedTuple):
    """Where a hub listens, as plain data for an environment variable or a header."""

    host: str
    """The identity of the machine (see `shm.host_identity`), not a name to resolve: peers with equal hosts share memory."""
    tcp: tuple[str, int]
    """Host name or IP address, and port."""
    local: str
    """The name of the local (Unix, abstract) socket; "" if there is none."""


class Message(NamedTuple):
    """A message that has arrived."""

    header: dict[str, Any]
    payload: memoryview
    """Bytes that came with it; empty for most messages. Bytes carried into a region are not here."""
    memory: tuple[SharedMemory, ...]
    """Blocks of memory that came with it (only between ends that share memory)."""


class Closed(NamedTuple):
    """Marks the end of a connection; no message follows."""

    reason: str
    """In words: end of stream, reset, refused for a wrong token, or the rule of the wire that the peer broke."""


class Connection(ABC):
    """One end of an ordered, reliable stream of messages between two processes. It outlives what carries it, as long as they both live."""

    peer: str
    """The other end, in words, for error messages."""
    shares_memory: bool
    """True if both ends can map the same memory, so that carrying a region copies nothing."""
    interface: str
    """The IP address of this end; "" if the ends share memory."""
    within_host: bool = False
    """True if both ends are on one machine, as far as this end can see."""
    bytes_received: int
    """Counts every byte that comes in, even of unfinished messages: a sign of life."""

    @abstractmethod
    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        """Set the memory that ``carry=name`` refers to at this end, in both directions. Binding again replaces it.

        ``arrived`` is called within `Hub.poll` for each part of the region that the peer has sent ahead. The peer chooses the parts, so
        they may overlap, or be others than expected.

        Bind before the peer can carry: if the region of an incoming message is not bound here, with exactly this size, the connection ends.
        So a peer that must first be told of a region waits for the answer before it carries one. If the ends share memory, the caller
        ensures that both bind the same bytes.
        """

    @abstractmethod
    def send(
        self,
        header: Mapping[str, Any],
        *,
        carry: str | None = None,
        payload: Sequence[Buffer] = (),
        memory: Sequence[SharedMemory] = (),
        lent: bool = False,
    ) -> None:
        """Send a message. Any thread may call it. Never blocks; on a closed connection it does nothing, and `Hub.poll` reports the end.

        Args:
            header: what msgpack can carry; keys that start with ``_`` are reserved for the transport.
            carry: name of a bound region whose bytes the peer gets.
            payload: other bytes, received into new memory as `Message.payload`. Not together with ``carry``. May be changed as soon as this
                returns: what the operating system does not take at once is copied.
            memory: blocks to hand over; only if `shares_memory`.
            lent: the payload is not copied: it must not change before the peer has received it or `copy_unsent` is called.
        """

    def copy_unsent(self) -> None:  # noqa: B027  nothing to do where payloads are always copied
        """Copy the lent payloads that the operating system has not taken yet: their owner may change them then. Any thread may call it."""

    def hand_over(self) -> None:  # noqa: B027  nothing to do where no operating system is between the ends
        """Wait until the operating system has all that was sent: the other end gets it even if this process is killed."""

    @property
    def unsent(self) -> int:
        """How many bytes the operating system has not taken yet: `close` drops them. Any thread may ask."""
        return 0

    def has_ended(self) -> bool:
        """Return True if the other end is known to have ended the connection, before `Hub.poll` reports it. Any thread may call it."""
        return False

    def has_news(self) -> bool:
        """Return True if something is known to have come that `Hub.poll` has not read. Any thread may call it."""
        return False

    def recycle(self, payload: memoryview) -> None:  # noqa: B027  nothing to do where every payload has new memory
        """Use the memory of a `Message.payload` for later messages. Nobody may look at it any more. Any thread may call it."""

    def place_with(self, place: Callable[[Mapping[str, Any], int], memoryview | None]) -> None:  # noqa: B027  payloads have new memory then
        """Ask ``place`` for the memory of each payload, by its message's header and its number of bytes; None: any memory.

        The polling thread calls it before it receives the payload, and holds a lock that `divert` takes.
        """

    def divert(self) -> None:  # noqa: B027  nothing to do where no payload has a place
        """Receive the rest of the payload under way, if it has a place, into other memory. Any thread may call it."""

    @abstractmethod
    def send_ahead(self, name: str, start: int, stop: int) -> None:
        """Send the bytes ``start`` to ``stop`` of a bound region without a message; only if not `shares_memory`.

        The peer's region has them when the peer receives the next message. A thread of the connection hands them to the operating system,
        so that this thread can compute meanwhile. Bytes that change before that message are sent again.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection after one attempt to send what is queued. `Hub.poll` does not report this end."""


Arrivals: TypeAlias = list[tuple[Connection, Message | Closed]]
"""What `Hub.poll` returns: messages and ends with their connections, in order of arrival."""


class Hub(ABC):
    """Hold all connections of one process: listen, connect, and wait for messages."""

    host: str
    """The identity of this machine."""
    address: Address | None = None
    """What `listen` has returned; None before."""

    @abstractmethod
    def another(self) -> Hub:
        """Return a hub for another thread of this process, with the same token, that does not listen yet."""

    @abstractmethod
    def listen(self, host: str | None = None, port: int = 0) -> Address:
        """Accept peers from now on; port 0: the system chooses.

        Raises:
            ConfigurationError: the port is taken, or the address is not of this machine.
        """

    @abstractmethod
    def connect(self, address: Address) -> Connection:
        """Open a connection to a listening hub: with shared memory if both are on one host, over TCP otherwise.

        Raises:
            JobError: no process listens there.
        """

    @abstractmethod
    def poll(self, timeout_s: float | None) -> Arrivals:
        """Wait for messages, at most ``timeout_s`` seconds (None: for ever), and return all that have come, in order of arrival.

        Messages of a peer are delivered only after it has proved that it knows the job's token. An accepted connection first appears with
        its first message. Each connection yields at most one `Closed`, as its last item, after all messages that came before the end of the
        stream.
        """

    @abstractmethod
    def wake(self) -> None:
        """Make a `poll` in another thread, or the next one, return at once. May be called from any thread or signal handler."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening and close every connection."""
