"""Keep a server's links: to the supervisor, to workers and to other servers. Each may move to another socket later."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakSet

from offbeat.errors import ProtocolError
from offbeat.transport.base import Connection, Message
from offbeat.transport.link import RESUME, Link
from offbeat.types import Seconds

SUPERVISOR: Final = "supervisor"
SERVER: Final = "server"
"""Prefix of the session names of other servers' links to server 0."""
SESSIONS_MAX: Final = 1 << 14
ENDED_MAX: Final = 1 << 12
"""Most ended links whose names are kept: a link ends once for each process of a worker, or each loss of its connection."""


class SessionLinks:
    """Hold the links of one server, by session name.

    Args:
        supervisor: the connection to the supervisor.
    """

    def __init__(self, supervisor: Connection) -> None:
        self.supervisor = self._new(SUPERVISOR, supervisor.peer)
        self._own = {SUPERVISOR: self.supervisor}
        """By session name: the links that this server has made."""
        self.sessions: dict[str, Link] = {}
        """By session name: the links that workers and other servers have made."""
        self.ended: dict[str, None] = {}
        """Session names of ended links, oldest first. Over TCP a link may end here while its other end lives, and tries to resume it."""
        self._at: dict[Connection, Link] = {supervisor: self.supervisor}
        """Link by its present socket."""
        self.former: WeakSet[Connection] = WeakSet()
        """Sockets that a link has left; their messages may still be queued."""

    def _new(self, session: str, peer: str, *, shares_memory: bool = True) -> Link:
        return Link(session, peer, shares_memory=shares_memory)

    def write(self, record: list[Any]) -> None:
        """Write a log record for the server's next process, or its standby."""
        raise NotImplementedError

    def message(self, now: Seconds, link: Link, message: Message) -> Message:
        """Log a message before it is handled. Returns the message to handle, which may be a copy."""
        raise NotImplementedError

    def _take_over(self, own: dict[str, Link], sessions: dict[str, Link]) -> None:
        """Go on with the links of another process of this server. The socket to the supervisor is this process's own."""
        supervisor = next(iter(self._at))
        self._own, self.sessions = own, sessions
        self.supervisor = own[SUPERVISOR]
        self._at = {supervisor: self.supervisor}

    def _brought_to(self, record: list[Any]) -> tuple[Link, list[Any]]:
        """Bring a link to the message of a record that `message` has written. Returns the link, and what the record has of the message."""
        _, _, session, received, delivered, *content = record
        link = self.named(session)
        link.note(received)
        link.forget(delivered)
        return link, content

    def named(self, session: str) -> Link:
        """Return a link by its session name. Raises `KeyError`."""
        return self._own[session] if session in self._own else self.sessions[session]

    def knows(self, link: Link) -> bool:
        """Return False once a link has ended. What still comes over it must not be written: no other process could find the link."""
        return self._own.get(link.session, self.sessions.get(link.session)) is link

    def link_at(self, connection: Connection) -> Link | None:
        """Return the link whose socket is this connection; None: it belongs to no link."""
        return self._at.get(connection)

    def open(self, session: str, peer: str, *, beside: bool = False, shares_memory: bool = True) -> Link:
        """Return a new link that another process has made; for ``beside`` and ``shares_memory`` see `Link`."""
        link = self.sessions[session] = self._new(session, peer, shares_memory=shares_memory)
        link.beside = beside
        return link

    def _beside(self, connection: Connection) -> bool:
        """Return True if a loss of this machine takes the connection's other end, whose gradient the standby then needs."""
        return False

    def make(self, session: str, peer: str) -> Link:
        """Return a new link from this server to another; it has no socket yet."""
        link = self._own[session] = self._new(session, peer)
        return link

    def join(self, link: Link, connection: Connection) -> None:
        """Move a link to this connection."""
        if link.socket is not None:
            self._at.pop(link.socket, None)
            self.former.add(link.socket)
        self._at[connection] = link
        link.resume(connection)

    def cut(self, connection: Connection) -> None:
        """Note that a connection has ended."""
        link = self._at.pop(connection)
        if link.socket is connection:
            link.cut()

    def on_resume(self, connection: Connection, message: Message) -> None:
        """Handle a link's first message over a new connection, from either end.

        Raises:
            ProtocolError: the link is unknown here, though it is not new.
        """
        RESUME.check(message.header, connection.peer, len(message.payload), len(message.memory))
        session, received = message.header["session"], message.header["received"]
        link = self._at.get(connection)
        if link is None:
            link = self.sessions.get(session)
            if link is None:
                if received or session in self.ended or len(self.sessions) >= SESSIONS_MAX:
                    raise ProtocolError(f"{connection.peer} goes on with a link of which this server has no record (expected a new one)")
                beside, shares = self._beside(connection), connection.shares_memory
                link = self.open(session, connection.peer, beside=beside, shares_memory=shares)
                self.write(["open", session, connection.peer, beside, shares])
            old = link.socket
            self.join(link, connection)
            if old is not None:
                old.close()
        link.resumed(received)

    def gone(self) -> list[Link]:
        """Return the links that have lost their socket and not come back."""
        return [link for link in self.sessions.values() if link.socket is None and not link.closed]

    def end(self, link: Link) -> None:
        """Forget a link that has ended."""
        ended = self.sessions.pop(link.session, None)
        if ended is not None and not link.session.startswith(SERVER):  # that server's next process uses the same session name
            self.ended[link.session] = None
        while len(self.ended) > ENDED_MAX:
            del self.ended[next(iter(self.ended))]

    def stirred(self) -> list[tuple[str, int]]:
        """Return the links over which bytes have come since the last call, and the number of bytes over the present socket of each."""
        return [(session, nbytes) for session, link in self.sessions.items() if (nbytes := link.note_bytes()) is not None]
