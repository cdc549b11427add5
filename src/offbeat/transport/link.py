"""Let a stream of messages outlive its socket: each is numbered, and kept by its sender until the other end has it for good.

When a server's process dies, what it had received and not handled is lost, and so is what it had not sent. (A socket that breaks while both
processes live costs nothing: a connection goes on over another.) A `Link` is a connection over one process's connection after another. Both
ends number the messages that they send, and each message says how many of the other end's were received, so that these need not be kept any
more. Over a new socket each end sends again what it has kept; what had arrived is recognised by its number.

The end that can die counts a message as received once it is in a log from which the next process begins (``runtime/recovery``), or once
its standby has it (`OutputCommit`). A gradient that came with a message is not in that record: see `Link.keep_carried`.
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
"""The header field with the number of a message, and the number of messages received."""
RESUME: Final = Kinds({"resume": MessageSchema(fields({"session": text(100), "received": whole()}))})
"""The first message over a new socket of a link, from each end."""
AWAIT: Final = Kinds({"await": MessageSchema(fields({"session": text(100)}))})
"""To a standby: this link would go over this connection if the standby led. Until then messages with a region may come over it."""
LEADING: Final = Kinds({"leading": MessageSchema(fields({"term": whole()}))})
"""The answer, when the standby leads."""
STANDBY: Final = Kinds({"standby": MessageSchema(fields({"address": text(1000)}))})
"""To the end that has called, without a number: the server has a new standby, which listens there."""
HEARD: Final = Kinds({kind: MessageSchema(fields({"received": whole()})) for kind in ("confirm", "again")})
"""To the other end, without a number. ``confirm``: it need not keep its messages up to this one, which no message has said for long.
``again``, to a leader: its standby sends no more, and this end has received so many messages."""
EARLY_MAX: Final = 64
"""Most messages of a link that wait for an earlier one."""
CONFIRM_EVERY: Final = 64
"""Messages after which it is sent."""
_stamp = row(whole(), whole())


class _Kept(NamedTuple):
    number: int
    header: Mapping[str, Any]
    carry: str | None
    payload: list[Buffer]
    memory: tuple[SharedMemory, ...]
    position: int
    """Of the record from which the message follows."""
    lent: bool = False
    """True if nobody changes the payload."""
    served: bool = False
    """True if the standby sends it, and not the leader."""


class _Here:
    """The part of a link that is this process's own: another process that takes the link over makes it anew."""

    def __init__(self) -> None:
        self.socket: Connection | None = None
        self.aside: Connection | None = None
        """Between the standby and the other end, while the standby serves."""
        self.ahead = 0
        """How many bytes of the region that is sent next have gone over it."""
        self.early: dict[int, Message] = {}
        """By number: messages that have come before an earlier one."""
        self.ready = False
        """True once the other end has said, over the present socket, what it has received: earlier messages must not be overtaken."""
        self.offered = 0
        """The number of the newest message that was handed to the present socket."""
        self.lock = threading.RLock()


class Link(Connection):
    """One end of a stream of messages that outlives its sockets.

    Args:
        session: names the stream at both ends.
        peer: the other end, in words.
        shares_memory: True if both ends map the same memory; False: the sockets carry the regions.
        commit: of a server with a standby: what is sent waits until the standby knows of it. None: nothing waits.
    """

    def __init__(self, session: str, peer: str, *, shares_memory: bool = True, commit: OutputCommit | None = None) -> None:
        self.session, self.peer = session, peer
        self.shares_memory = shares_memory
        self.interface = ""
        self.beside = False
        """True if the other end is on the machine of this server, the standby is on another, and the job cannot go on without a
        gradient that a loss of the machine would take."""
        self.served = False
        """True if messages with a region reach the other end from the standby, which is on its machine, and not from the leader. Both know
        from which record on."""
        self.servable = True
        """At a leader: False once the other end has lost its connection to the present standby."""
        self.may_overtake = False
        """True if a message may come before an earlier one: the standby's and the leader's go over two sockets."""
        self.closed = False
        self.sent = self.received = 0
        """Numbers of the newest message that this end has sent, and of the newest that it has received."""
        self.delivered = 0
        """The number of the newest message of this end that the other end has received, as far as this end knows."""
        self.bytes_received = 0
        """As `note_bytes` has seen it last."""
        self.kept_carried: int | None = None
        """The number of the message whose region the other end must keep, see `keep_carried`; None: none."""
        self.lacks_carried = False
        """True while that region is missing here, in the process of a standby that has taken over."""
        self._commit = commit
        self._confirmable: deque[tuple[int, int]] = deque()
        """Positions of records, and the number of the message that may be confirmed once the record is committed."""
        self._confirmed = 0
        self._told = 0
        """What the other end was told last to have been confirmed."""
        self._kept: deque[_Kept] = deque()
        self._regions: dict[str, tuple[memoryview, PartArrived | None]] = {}
        self._here = _Here()

    def __repr__(self) -> str:
        return f"<link {self.session} to {self.peer}>"

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the sockets, which are this process's own. Regions that both ends map are bound anew."""
        return {**vars(self), "_here": None, "_regions": {} if self.shares_memory else self._regions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _here=_Here())

    @property
    def socket(self) -> Connection | None:
        """Return the connection over which messages go at present; None: there is none."""
        return self._here.socket

    @property
    def is_resumed(self) -> bool:
        """Return True if the other end has answered over the present socket."""
        return self._here.ready

    @property
    def settled(self) -> bool:
        """Return True if every message has been sent over a socket that is still there."""
        return self._here.ready or not self._kept

    @property
    def confirmed(self) -> int:
        """Return the number up to which the other end need not keep its messages any more."""
        if self._commit is None:
            return self.received
        while self._confirmable and not self._commit.holds(self._confirmable[0][0]):
            self._confirmed = self._confirmable.popleft()[1]
        return self._confirmed

    def resume(self, connection: Connection) -> None:
        """Go on over a new connection, as soon as the other end does (see `resumed`)."""
        with self._here.lock:
            self._here.socket, self._here.ready, self.bytes_received = connection, False, 0
            self._here.early.clear()
            if not self.shares_memory:
                self._bind_all(connection)
            self._told = self.confirmed
            connection.send({"kind": "resume", "session": self.session, "received": self._told})

    def resumed(self, received: int) -> None:
        """Send again what the other end, which has received so many messages, does not have."""
        with self._here.lock:
            self.forget(received)
            self._kept = deque(kept._replace(served=False) for kept in self._kept)
            assert self._here.socket is not None, "the other end resumes over a socket"
            self._here.ready, self._here.offered = True, received
            self.advance()

    def advance(self) -> None:
        """Send what has waited for its record to be committed."""
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
        """Tell the other end what it need not keep, if it has long heard nothing of this end that would have told it."""
        if self._here.socket is not None and self._here.ready and (confirmed := self.confirmed) - self._told >= CONFIRM_EVERY:
            self._told = confirmed
            self._here.socket.send({"kind": "confirm", "received": confirmed})

    def cut(self) -> None:
        """Note that the socket has ended."""
        with self._here.lock:
            self._here.socket, self._here.ready = None, False

    def note_bytes(self) -> int | None:
        """Return how many bytes have come over the present socket, if there are more than at the last call; else None."""
        if self._here.socket is None or self._here.socket.bytes_received == self.bytes_received:
            return None
        self.bytes_received = self._here.socket.bytes_received
        return self.bytes_received

    def take(self, message: Message) -> Message | None:
        """Return a message that has come, without its stamp; None: it had come before, or is the link's own.

        Raises:
            ProtocolError: its stamp cannot be read, or a message is missing before it.
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
        """Return the next message if it has come before the last one that `take` has returned; None: it has not come yet."""
        message = self._here.early.pop(self.received + 1, None)
        if message is not None:
            self.note(self.received + 1)
        return message

    def go_aside(self, connection: Connection | None) -> None:
        """Let messages with a region come over another socket than the others, from the standby, or go over it; None: there is none."""
        with self._here.lock:
            self._here.aside, self._here.ahead = connection, 0
            if connection is not None:
                self._bind_all(connection)

    def _bind_all(self, connection: Connection) -> None:
        for name, (region, arrived) in self._regions.items():
            connection.bind(name, region, arrived)

    def _serve_again(self) -> None:
        """Send what the standby was to send and the other end has not received: the standby is gone, or does not reach it any more."""
        with self._here.lock:
            self.served = self.servable = False
            kept, self._kept = self._kept, deque(kept._replace(served=False) for kept in self._kept)
            for one in kept:
                if one.served and one.number <= self._here.offered and self._here.socket is not None and self._here.ready:
                    self._send(self._here.socket, one)

    def _delivered(self, received: int) -> None:
        """Note what the other end says that it has received, and confirm to it what this end has, before the message that has just come."""
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
                _ = self.confirmed  # perhaps nothing is sent that would ask for it, as at a standby
            self._confirmable.append((self._commit.position, number))

    def keep_carried(self) -> None:
        """Let the other end keep the newest message and those after it, until `release_carried`.

        The region that came with the message is in the memory of this process alone. If a standby takes over, the other end sends the
        message again, with the region, which is as it was: its owner waits. Where no region is bound none came, and nothing is kept.
        """
        if self._commit is not None and self._regions:
            if self._confirmable and self._confirmable[-1][1] == self.received:
                self._confirmable.pop()
            self.kept_carried = self.received

    def release_carried(self) -> None:
        """Note that the region that came last is not needed any more."""
        if self.kept_carried is not None and self._commit is not None:
            self.kept_carried, self.lacks_carried = None, False
            self._confirmable.append((self._commit.position, self.received))

    def forget(self, received: int) -> None:
        """Forget what the other end has received."""
        self.delivered = max(self.delivered, received)
        while self._kept and self._kept[0].number <= received:
            self._kept.popleft()

    # As a connection.

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        """Bind a region over each socket. Where both ends map the memory that a region names, nothing is carried."""
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
        """Send a message as `Connection.send` does; ``lent``: nobody changes the payload as long as the process lives."""
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
        """Send a message that need not arrive, such as a heartbeat. It has no number."""
        with self._here.lock:
            if self._here.socket is not None and self._here.ready and not self.closed:
                self._here.socket.send(header)

    def _send(self, connection: Connection, kept: _Kept) -> None:
        carry = None if self.shares_memory else kept.carry
        self._told = self.confirmed
        header = {**kept.header, STAMP: [kept.number, self._told]}
        connection.send(header, carry=carry, payload=kept.payload, memory=kept.memory, lent=kept.lent)

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        """Send a part of a region from the standby, if it serves and all parts before have gone; `send` sends the rest, or all of it.

        Nothing is sent ahead over another socket: what is sent again is sent as a whole.
        """
        with self._here.lock:
            if self.served and self._here.aside is not None and start == self._here.ahead:
                self._here.aside.send_ahead(name, start, stop)
                self._here.ahead = stop

    def recall_ahead(self) -> None:
        """Note that what was sent ahead is not what `send` sends."""
        with self._here.lock:
            self._here.ahead = 0

    def close(self) -> None:
        with self._here.lock:
            if not self.closed:
                self.closed = True
                if self._here.ready:
                    self.advance()  # which closes the socket, once nothing waits
                elif self._here.socket is not None:
                    self._here.socket.close()
