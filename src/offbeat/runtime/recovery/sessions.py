"""Keep the links of a server: to the supervisor, to workers and to other servers. Each may go over another socket later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from weakref import WeakSet

from offbeat.errors import ProtocolError
from offbeat.transport.base import Connection, Message
from offbeat.transport.link import RESUME, Link
from offbeat.types import Seconds

SUPERVISOR: Final = "supervisor"
SERVER: Final = "server"
"""How the names of links to server 0 from other servers begin."""
SESSIONS_MAX: Final = 1 << 14
ENDED_MAX: Final = 1 << 12
"""Links that have ended whose names are known: a link ends once for each process of a worker, or each loss of its connection."""


class SessionLinks:
    """The links of one server.

    Args:
        supervisor: the connection to the supervisor.
    """

    def __init__(self, supervisor: Connection) -> None:
        self.supervisor = self._new(SUPERVISOR, supervisor.peer)
        self._own = {SUPERVISOR: self.supervisor}
        """By name: the links that this server has made."""
        self.sessions: dict[str, Link] = {}
        """By name: the links of workers and of other servers that have called."""
        self.ended: dict[str, None] = {}
        """Names of links that have ended, oldest first. Over TCP a link may end while its other end lives, and would go on."""
        self._at: dict[Connection, Link] = {supervisor: self.supervisor}
        """By socket."""
        self.former: WeakSet[Connection] = WeakSet()
        """Sockets that a link has left; messages may still be queued."""

    def _new(self, session: str, peer: str, *, shares_memory: bool = True) -> Link:
        return Link(session, peer, shares_memory=shares_memory)

    def write(self, record: list[Any]) -> None:
        """Write a record for the server's next process."""
        raise NotImplementedError

    def message(self, now: Seconds, link: Link, message: Message) -> Message:
        """Write down a message that is about to be handled. Returns what is to be handled, which may be a copy of it."""
        raise NotImplementedError

    def named(self, session: str) -> Link:
        """Return a link by its name. Raises `KeyError`."""
        return self._own[session] if session in self._own else self.sessions[session]

    def link_at(self, connection: Connection) -> Link | None:
        """Return the link that goes over a connection at present; None: it is a connection of its own."""
        return self._at.get(connection)

    def open(self, session: str, peer: str, *, beside: bool = False, shares_memory: bool = True) -> Link:
        """Return a new link of a peer that has called; for ``beside`` and ``shares_memory`` see `Link`."""
        link = self.sessions[session] = self._new(session, peer, shares_memory=shares_memory)
        link.beside = beside
        return link

    def _beside(self, connection: Connection) -> bool:
        """Return True if a loss of this machine takes the other end of the connection, whose gradient the standby then needs."""
        return False

    def make(self, session: str, peer: str) -> Link:
        """Return a new link from this server to another; it goes over no connection yet."""
        link = self._own[session] = self._new(session, peer)
        return link

    def join(self, link: Link, connection: Connection) -> None:
        """Let a link go over this connection from now on."""
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
        """Handle the first message of a link over a new connection, from either end.

        Raises:
            ProtocolError: the link is not known here.
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
        """Return the links that have not come back."""
        return [link for link in self.sessions.values() if link.socket is None and not link.closed]

    def end(self, link: Link) -> None:
        """Forget a link that has ended."""
        ended = self.sessions.pop(link.session, None)
        if ended is not None and not link.session.startswith(SERVER):  # the next process of a server has a link of the same name
            self.ended[link.session] = None
        while len(self.ended) > ENDED_MAX:
            del self.ended[next(iter(self.ended))]

    # What is written beside the messages.

    def begun(self, began: Seconds, started: str, settings: Mapping[str, Any], servers: str) -> None:
        """Note the beginning of the job."""
        self.write(["begin", began, started, settings, servers])

    def closed(self, now: Seconds, link: Link, reason: str) -> None:
        """Note the end of a link that is about to be handled."""
        self.write(["closed", now, link.session, reason])

    def tick(self, now: Seconds) -> None:
        """Note a tick, and from which links bytes have come since the last one."""
        stirred = [(session, nbytes) for session, link in self.sessions.items() if (nbytes := link.note_bytes()) is not None]
        self.write(["tick", now, stirred])

    def stood_still(self, now: Seconds, seconds: Seconds) -> None:
        """Note that the process stood still for so long until now."""
        self.write(["stood still", now, seconds])

    def written(self, now: Seconds, result: Sequence[Any]) -> None:
        """Note the result of writing files that is about to be handled, as its fields."""
        self.write(["written", now, list(result)])

    def withdrawn(self, now: Seconds, link: Link) -> None:
        """Note that a gradient that had come to the former leader will not come again."""
        self.write(["withdrawn", now, link.session])

    def returned(self, now: Seconds, away_s: Seconds) -> None:
        """Note that a new process goes on after so long."""
        self.write(["returned", now, away_s])
