"""Let a stream of messages outlive its socket: each message is numbered, and kept by its sender until the other end has it for good.

When a server's process dies, messages are lost that it had received and not handled, or not sent yet. (If a socket breaks while both
processes live, nothing is lost: a connection continues over another.) A `Link` runs over the connections of one process after another.
Both ends number their messages; each message has the number of the other end's newest message received, so that earlier ones need not be
kept. Over a new connection each end sends again what it has kept; the other end recognises repetitions by their numbers.

The end that can die counts a message as received once the message is in a log from which its next process begins (``runtime/recovery``), or
once its standby has it (`OutputCommit`). A gradient that came with a message is not in the log record: see `Link.keep_carried`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from offbeat.errors import ProtocolError
from offbeat.transport.base import Buffer, Connection, Message, PartArrived, SharedMemory
from offbeat.transport.output_commit import OutputCommit
from offbeat.transport.schema import Kinds, MessageSchema, Unfit, fields, row, shown, text, whole

STAMP: Final = "at"
"""The header field with a message's number, and the number of the newest message that its sender confirms."""
RESUME: Final = Kinds({"resume": MessageSchema(fields({"session": text(100), "received": whole()}))})
"""A link's first message over a new connection, from each end."""
AWAIT: Final = Kinds({"await": MessageSchema(fields({"session": text(100)}))})
"""To a standby: this link will move to this connection if the standby leads. Before, messages with a region may come over it."""
LEADING: Final = Kinds({"leading": MessageSchema(fields({"term": whole()}))})
"""The standby's answer, once it leads."""
STANDBY: Final = Kinds({"standby": MessageSchema(fields({"address": text(1000)}))})
"""To the end that has connected, without a number: the server has a new standby at this address."""
HEARD: Final = Kinds({kind: MessageSchema(fields({"received": whole()})) for kind in ("confirm", "again")})
"""To the other end, without a number. ``confirm``: it need not keep its messages up to this number, which no message has had for long.
``again``, to a leader: send the standby's messages after this number, since the standby sends no more."""
EARLY_MAX: Final = 64
"""Most messages of a link that are held because an earlier one is missing."""
CONFIRM_EVERY: Final = 64
"""Number of messages received since the last confirmation after which ``confirm`` is sent."""
_stamp = row(whole(), whole())


class _Kept(NamedTuple):
    number: int
    header: Mapping[str, Any]
    carry: str | None
    payload: list[Buffer]
    memory: tuple[SharedMemory, ...]
    position: int
    """Position of the log record from which the message follows."""
    lent: bool = False
    """True if the payload does not change, so that it need not be copied."""
    served: bool = False
    """True if the standby sends the message, and not the leader."""


class _Here:
    """Hold the part of a link that belongs to this process: another process that takes the link over makes a new one."""

    def __init__(self) -> None:
        self.socket: Connection | None = None
        self.aside: Connection | None = None
        """The connection between the standby and the other end, while the standby may serve."""
        self.ahead = 0
        """Bytes of the next region that were sent ahead over `aside`."""
        self.early: dict[int, Message] = {}
        """By number: messages that have arrived before an earlier one."""
        self.ready = False
        """True once the other end has resumed over the present socket; before, no message is sent, as it would overtake earlier ones."""
        self.offered = 0
        """Number of the newest message that was handed to the present socket, or to the standby's."""
        self.lock = threading.RLock()


class Link(Connection):
    """One end of a stream of messages that outlives its sockets.

    Args:
        session: the name of the stream, the same at both ends.
        peer: the other end's name in messages.
        shares_memory: True if both ends map the same memory; False: the sockets carry the regions.
        commit: the output commit of a server with a standby, by which messages wait for the standby. None: none waits.
    """

    def __init__(self, session: str, peer: str, *, shares_memory: bool = True, commit: OutputCommit | None = None) -> None:
        self.session, self.peer = session, peer
        self.shares_memory = shares_memory
        self.interface = ""
        self.beside = False
        """True if the other end is on this server's machine, the standby is not, and the job cannot go on without a gradient lost
        with the machine."""
        self.served = False
        """True if the standby, on the other end's machine, sends the messages with a region in place of the leader. Both switch at the
        same record."""
        self.servable = True
        """At a leader: False once the other end has lost its connection to the present standby."""
        self.may_overtake = False
        """True if a message may arrive before an earlier one, since the standby's and the leader's messages use two sockets."""
        self.closed = False
        self.sent = self.received = 0
        """Numbers of the newest message that this end has sent, and of the newest that it has received."""
        self.delivered = 0
        """Number of this end's newest message that the other end is known to have received."""
        self.bytes_received = 0
        """Bytes received over the present socket as of the last `note_bytes`."""
        self.kept_carried: int | None = None
        """Number of the message whose region the other end must keep, see `keep_carried`; None: none."""
        self.lacks_carried = False
        """True in a standby that has taken over, while that region is missing here."""
        self._commit = commit
        self._confirmable: deque[tuple[int, int]] = deque()
        """Positions of log records, each with the number of the message that may be confirmed once the record is committed."""
        self._confirmed = 0
        self._told = 0
        """The number that was confirmed to the other end last."""
        self._kept: deque[_Kept] = deque()
        self._regions: dict[str, tuple[memoryview, PartArrived | None]] = {}
        self._here = _Here()

    def __repr__(self) -> str:
        return f"<link {self.session} to {self.peer}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the sockets, which belong to this process. Regions that both ends map are bound anew."""
        return {**vars(self), "_here": None, "_regions": {} if self.shares_memory else self._regions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _here=_Here())

    @property
    def socket(self) -> Connection | None:
        """The connection that carries the messages at present; None: there is none."""
        return self._here.socket

    @property
    def is_resumed(self) -> bool:
        """True if the other end has resumed over the present socket."""
        return self._here.ready

    @property
    def unsent(self) -> int:
        """How much waits: bytes that the operating system has not taken yet or, while there is no socket, messages; 0: nothing."""
        with self._here.lock:
            return self._here.socket.unsent if self._here.socket is not None and self._here.ready else len(self._kept)

    @property
    def confirmed(self) -> int:
        """The number up to which the other end need not keep its messages."""
        if self._commit is None:
            return self.received
        while self._confirmable and not self._commit.holds(self._confirmable[0][0]):
            self._confirmed = self._confirmable.popleft()[1]
        return self._confirmed

    def resume(self, connection: Connection) -> None:
        """Continue over a new connection, as soon as the other end does (see `resumed`)."""
        with self._here.lock:
            self._here.socket, self._here.ready, self.bytes_received = connection, False, 0
            self._here.early.clear()
            if not self.shares_memory:
                self._bind_all(connection)
            self._told = self.confirmed
            connection.send({"kind": "resume", "session": self.session, "received": self._told})

    def resumed(self, received: int) -> None:
        """Send again the messages after number ``received``, the newest that the other end has."""
        with self._here.lock:
            self.forget(received)
            self._kept = deque(kept._replace(served=False) for kept in self._kept)
            assert self._here.socket is not None, "the other end resumes over a socket"
            self._here.ready, self._here.offered = True, received
            self.advance()

    def advance(self) -> None:
        """Send messages whose record is now committed; close the socket if the link is closed."""
        with self._here.lock:
            if self._here.socket is None or not self._here.ready:
                return
            for kept in self._kept if self._here.offered < self.sent else ():
                if kept.number > self._here.offered:
                    if self._commit is not None and self._commit.holds(kept.position):
                        return
                    self._here.offered = kept.number
                    if not kept.served:
                        self._send(self._here.socket, kept)
            if self.closed:
                self._here.socket.close()
            else:
                self._confirm()

    def _confirm(self) -> None:
        """Send ``confirm`` if `CONFIRM_EVERY` messages were received since the last confirmation."""
        if self._here.socket is not None and self._here.ready and (confirmed := self.confirmed) - self._told >= CONFIRM_EVERY:
            self._told = confirmed
            self._here.socket.send({"kind": "confirm", "received": confirmed})

    def cut(self) -> None:
        """Note that the socket has ended."""
        with self._here.lock:
            self._here.socket, self._here.ready = None, False

    def note_bytes(self) -> int | None:
        """Return the number of bytes received over the present socket, None if it is the same as at the last call."""
        if self._here.socket is None or self._here.socket.bytes_received == self.bytes_received:
            return None
        self.bytes_received = self._here.socket.bytes_received
        return self.bytes_received

    def take(self, message: Message) -> Message | None:
        """Return a message that has arrived, without its stamp; None: it is a repetition, is held back, or is for the link itself.

        Raises:
            ProtocolError: the stamp cannot be read, or a message before it is missing.
        """
        stamp = message.header.pop(STAMP, None)
        if stamp is None:
            if message.header.get("kind") not in ("confirm", "again"):
                return message
            kind = HEARD.check(message.header, self.peer, len(message.payload), len(message.memory))
            self._delivered(message.header["received"])
            if kind == "again":
                self._serve_again()
            return None
        try:
            _stamp(stamp)
        except Unfit as unfit:
            raise ProtocolError(f"{self.peer} sent a message with {STAMP} = {shown(stamp)} (expected {unfit.expected})") from None
        number, received = stamp
        if number > self.received + 1 and self.may_overtake and len(self._here.early) < EARLY_MAX:
            self._here.early[number] = message
            return None
        if number > self.received + 1:
            raise ProtocolError(f"{self.peer} sent message {number} after message {self.received} (expected none to be missing)")
        self._delivered(received)
        if number <= self.received:
            if number == self.kept_carried:
                self.lacks_carried = False
            return None
        self.note(number)
        return message

    def take_early(self) -> Message | None:
        """Return the next message if it has arrived early, before the last one that `take` returned; None: it has not arrived yet."""
        message = self._here.early.pop(self.received + 1, None)
        if message is not None:
            self.note(self.received + 1)
        return message

    def go_aside(self, connection: Connection | None) -> None:
        """Use another connection for messages with a region: at a standby to send them, at a worker to receive them; None: do not."""
        with self._here.lock:
            self._here.aside, self._here.ahead = connection, 0
            if connection is not None:
                self._bind_all(connection)

    def _bind_all(self, connection: Connection) -> None:
        for name, (region, arrived) in self._regions.items():
            connection.bind(name, region, arrived)

    def _serve_again(self) -> None:
        """Send the messages that the standby was to send and the other end lacks: the standby is gone, or cannot reach it."""
        with self._here.lock:
            self.served = self.servable = False
            kept, self._kept = self._kept, deque(kept._replace(served=False) for kept in self._kept)
            for one in kept:
                if one.served and one.number <= self._here.offered and self._here.socket is not None and self._here.ready:
                    self._send(self._here.socket, one)

    def _delivered(self, received: int) -> None:
        """Forget the messages that the other end has received, and confirm those of the other end, without the one just arrived."""
        if received > self.sent:
            raise ProtocolError(f"{self.peer} has received {received} messages (expected at most {self.sent}, as many as were sent)")
        with self._here.lock:
            self.forget(received)
            self._confirm()

    def note(self, number: int) -> None:
        """Note that a message has been received."""
        self.received = number
        if self._commit is not None and self.kept_carried is None:
            if len(self._confirmable) >= CONFIRM_EVERY:
                _ = self.confirmed  # shortens the queue: where nothing is sent, as at a standby, no other call does
            self._confirmable.append((self._commit.position, number))

    def keep_carried(self) -> None:
        """Let the other end keep the newest message and those after it, until `release_carried`.

        The region that came with the message is in this process's memory only. If a standby takes over, the other end repeats the message,
        with an unchanged region, since its owner waits. If no region is bound, none came, and nothing is kept.
        """
        if self._commit is not None and self._regions:
            if self._confirmable and self._confirmable[-1][1] == self.received:
                self._confirmable.pop()
            self.kept_carried = self.received

    def release_carried(self) -> None:
        """Note that the region that came last is no longer needed."""
        if self.kept_carried is not None and self._commit is not None:
            self.kept_carried, self.lacks_carried = None, False
            self._confirmable.append((self._commit.position, self.received))

    def forget(self, received: int) -> None:
        """Forget this end's messages up to number ``received``, which the other end has."""
        self.delivered = max(self.delivered, received)
        while self._kept and self._kept[0].number <= received:
            self._kept.popleft()

    # Methods of a connection.

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        """Bind a region over each connection. If both ends map its memory, nothing is carried."""
        with self._here.lock:
            self._regions[name] = region, arrived
            for connection in (self._here.socket, self._here.aside):
                if connection is not None and not self.shares_memory:
                    connection.bind(name, region, arrived)

    def send(
        self,
        header: Mapping[str, Any],
        *,
        carry: str | None = None,
        payload: Sequence[Buffer] = (),
        memory: Sequence[SharedMemory] = (),
        lent: bool = False,
    ) -> None:
        """Send a message as `Connection.send` does; ``lent``: the payload does not change as long as the process lives."""
        with self._here.lock:
            if self.closed:
                return
            self.sent += 1
            position = 0
            if self._commit is not None:
                position = self._commit.position
                self._commit.sent += 1
            data: list[Buffer] = list(payload) if lent else [bytes(part) for part in payload]
            served = self.served and carry is not None
            self._kept.append(_Kept(self.sent, header, carry, data, tuple(memory), position, lent, served))
            if served and self._here.aside is not None:
                gone = self._here.ahead == len(self._regions[carry][0]) if carry is not None else True
                self._here.aside.send({**header, STAMP: [self.sent, 0]}, carry=None if gone else carry)
                self._here.ahead = 0
            self.advance()

    def send_aside(self, header: Mapping[str, Any]) -> None:
        """Send a message without a number, which may be lost, such as a heartbeat."""
        with self._here.lock:
            if self._here.socket is not None and self._here.ready and not self.closed:
                self._here.socket.send(header)

    def _send(self, connection: Connection, kept: _Kept) -> None:
        carry = None if self.shares_memory else kept.carry
        self._told = self.confirmed
        header = {**kept.header, STAMP: [kept.number, self._told]}
        connection.send(header, carry=carry, payload=kept.payload, memory=kept.memory, lent=kept.lent)

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        """At a serving standby: send a part of a region if all parts before it were sent; `send` sends the rest, or all of it.

        Over another connection nothing is sent ahead: a repeated message has the whole region.
        """
        with self._here.lock:
            if self.served and self._here.aside is not None and start == self._here.ahead:
                self._here.aside.send_ahead(name, start, stop)
                self._here.ahead = stop

    def recall_ahead(self) -> None:
        """Forget that bytes were sent ahead: `send` will send other ones."""
        with self._here.lock:
            self._here.ahead = 0

    def close(self) -> None:
        with self._here.lock:
            if not self.closed:
                self.closed = True
                if self._here.ready:
                    self.advance()  # closes the socket once no message waits
                elif self._here.socket is not None:
                    self._here.socket.close()
