"""Let a stream of messages outlive its socket: each is numbered, and kept by its sender until the other end has it for good.

When a server's process dies, what its sockets had received and it had not handled is lost, and so is what it had not sent. A `Link` is a
connection over one socket after another. Both ends number the messages that they send, and each message says how many of the other end's
were received, so that these need not be kept any more. Over a new socket each end sends again what it has kept; what had arrived is
recognised by its number.

The end that can die counts a message as received once it is in a log from which the next process begins (``runtime/recovery``).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.transport.base import Buffer, Connection, Message, PartArrived, SharedMemory
from offbeat.transport.schema import Kinds, MessageSchema, Unfit, fields, row, shown, text, whole

STAMP: Final = "at"
"""The header field with the number of a message, and the number of messages received."""
RESUME: Final = Kinds({"resume": MessageSchema(fields({"session": text(100), "received": whole()}))})
"""The first message over a new socket of a link, from each end."""
_stamp = row(whole(), whole())


class _Kept(NamedTuple):
    number: int
    header: Mapping[str, Any]
    carry: str | None
    payload: list[bytes]
    memory: tuple[SharedMemory, ...]


class Link(Connection):
    """One end of a stream of messages that outlives its sockets. Only between ends that share memory.

    Args:
        session: names the stream at both ends.
        peer: the other end, in words.
    """

    shares_memory = True
    interface = ""

    def __init__(self, session: str, peer: str) -> None:
        self.session, self.peer = session, peer
        self.closed = False
        self.sent = self.received = 0
        """Numbers of the newest message that this end has sent, and of the newest that it has received."""
        self.bytes_received = 0
        """As `note_bytes` has seen it last."""
        self._kept: deque[_Kept] = deque()
        self._regions: dict[str, memoryview] = {}
        self._socket: Connection | None = None
        self._ready = False
        """True once the other end has said, over the present socket, what it has received: earlier messages must not be overtaken."""
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<link {self.session} to {self.peer}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the socket, which is this process's own."""
        return {name: value for name, value in vars(self).items() if name not in ("_socket", "_ready", "_lock", "_regions")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _socket=None, _ready=False, _lock=threading.RLock(), _regions={})

    @property
    def socket(self) -> Connection | None:
        """Return the connection over which messages go at present; None: there is none."""
        return self._socket

    @property
    def settled(self) -> bool:
        """Return True if every message has been sent over a socket that is still there."""
        return self._ready or not self._kept

    def resume(self, connection: Connection) -> None:
        """Go on over a new connection, as soon as the other end does (see `resumed`)."""
        with self._lock:
            self._socket, self._ready, self.bytes_received = connection, False, 0
            connection.send({"kind": "resume", "session": self.session, "received": self.received})

    def resumed(self, received: int) -> None:
        """Send again what the other end, which has received so many messages, does not have."""
        with self._lock:
            self._forget(received)
            assert self._socket is not None, "the other end resumes over a socket"
            for kept in self._kept:
                self._send(self._socket, kept)
            self._ready = True
            if self.closed:
                self._socket.close()

    def cut(self) -> None:
        """Note that the socket has ended."""
        with self._lock:
            self._socket, self._ready = None, False

    def note_bytes(self) -> int | None:
        """Return how many bytes have come over the present socket, if there are more than at the last call; else None."""
        if self._socket is None or self._socket.bytes_received == self.bytes_received:
            return None
        self.bytes_received = self._socket.bytes_received
        return self.bytes_received

    def take(self, message: Message) -> Message | None:
        """Return a message that has come, without its stamp; None: it had come before.

        Raises:
            ProtocolError: its stamp cannot be read, or a message is missing before it.
        """
        stamp = message.header.pop(STAMP, None)
        if stamp is None:
            return message
        try:
            _stamp(stamp)
        except Unfit as unfit:
            raise ProtocolError(f"{self.peer} sent a message with {STAMP} = {shown(stamp)} (expected {unfit.expected})") from None
        number, received = stamp
        if received > self.sent:
            raise ProtocolError(f"{self.peer} has received {received} messages (expected at most {self.sent}, as many as were sent)")
        if number > self.received + 1:
            raise ProtocolError(f"{self.peer} sent message {number} after message {self.received} (expected none to be missing)")
        with self._lock:
            self._forget(received)
        if number <= self.received:
            return None
        self.received = number
        return message

    def _forget(self, received: int) -> None:
        while self._kept and self._kept[0].number <= received:
            self._kept.popleft()

    # As a connection.

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        """Do nothing: both ends map the memory that a region names, and nothing is carried."""
        self._regions[name] = region

    def send(
        self,
        header: Mapping[str, Any],
        *,
        carry: str | None = None,
        payload: Sequence[Buffer] = (),
        memory: Sequence[SharedMemory] = (),
        lent: bool = False,
    ) -> None:
        with self._lock:
            if self.closed:
                return
            self.sent += 1
            kept = _Kept(self.sent, header, carry, [bytes(part) for part in payload], tuple(memory))
            self._kept.append(kept)
            if self._socket is not None and self._ready:
                self._send(self._socket, kept)

    def send_aside(self, header: Mapping[str, Any]) -> None:
        """Send a message that need not arrive, such as a heartbeat. It has no number."""
        with self._lock:
            if self._socket is not None and self._ready and not self.closed:
                self._socket.send(header)

    def _send(self, connection: Connection, kept: _Kept) -> None:
        connection.send({**kept.header, STAMP: [kept.number, self.received]}, payload=kept.payload, memory=kept.memory)

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        raise AssertionError(f"nothing is sent ahead to {self.peer}: the ends share memory")

    def close(self) -> None:
        with self._lock:
            if not self.closed:
                self.closed = True
                if self._socket is not None:
                    self._socket.close()
