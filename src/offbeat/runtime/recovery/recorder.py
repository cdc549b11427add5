"""Write down the messages of a server, return them to its next process, and keep the links over which they come.

The server hands every message, end of a connection and tick to the recorder before it handles it. A server of which the recorder has given
up goes on as one without a recorder, until it dies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime.recovery import snapshot
from offbeat.runtime.recovery.input_log import LOG_NBYTES, InputLog, LogFull
from offbeat.runtime.recovery.keeper import LOG, Keeper
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.transport.link import RESUME, STAMP, Link
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds

SUPERVISOR: Final = "supervisor"
SESSIONS_MAX: Final = 1 << 14
PAYLOAD_NBYTES: Final = 32 << 20
"""Payloads of more bytes are kept as blocks of memory of their own."""

log = logging.getLogger(__name__)


class Recorder:
    """The recorder of one server.

    Args:
        supervisor: the connection to the supervisor.
        kept: the blocks that an earlier process of this server has left, by name.
    """

    def __init__(self, supervisor: Connection, kept: dict[str, MemoryBlock]) -> None:
        self.keeper = Keeper(supervisor, kept)
        self._log: InputLog | None = None
        """None: there is no memory for it."""
        try:
            block = self.keeper.sparse(LOG_NBYTES, LOG)
            self._log = InputLog(block.view, block.reserve)
        except ConfigurationError as error:
            self.keeper.give_up(str(error))
        self.keeper.note_result = lambda name, number, result: self._write(["result", name, number, result])
        self.supervisor = Link(SUPERVISOR, supervisor.peer)
        self._own = {SUPERVISOR: self.supervisor}
        """By name: the links that this server has made."""
        self.sessions: dict[str, Link] = {}
        """By name: the links of workers and of other servers that have called."""
        self._at: dict[Connection, Link] = {supervisor: self.supervisor}
        """By socket."""

    # Links.

    def link_at(self, connection: Connection) -> Link | None:
        """Return the link that goes over a connection at present; None: it is a connection of its own."""
        return self._at.get(connection)

    def make(self, session: str, peer: str) -> Link:
        """Return a new link from this server to another; it goes over no connection yet."""
        link = self._own[session] = Link(session, peer)
        return link

    def join(self, link: Link, connection: Connection) -> None:
        """Let a link go over this connection from now on."""
        if link.socket is not None:
            self._at.pop(link.socket, None)
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
                if received or len(self.sessions) >= SESSIONS_MAX:
                    raise ProtocolError(f"{connection.peer} goes on with a link of which this server has no record (expected a new one)")
                link = self.sessions[session] = Link(session, connection.peer)
                self._write(["open", session, connection.peer])
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
        self.sessions.pop(link.session, None)

    # Writing.

    def _write(self, record: list[Any]) -> None:
        if self._log is not None and self.keeper.given_up is None:
            try:
                self._log.append(record)
            except (LogFull, ConfigurationError) as error:
                self.keeper.give_up(f"what it was told does not fit into memory: {error}")

    def begun(self, began: Seconds, started: str, settings: Mapping[str, Any], servers: str) -> None:
        """Note the beginning of the job."""
        self._write(["begin", began, started, settings, servers])

    def message(self, now: Seconds, link: Link, message: Message) -> None:
        """Note a message that is about to be handled."""
        names = []
        for number, block in enumerate(message.memory):
            assert isinstance(block, MemoryBlock)
            names.append(f"{link.session} {link.received} {number}")
            self.keeper.keep(names[-1], block)
        payload: bytes | str = bytes(message.payload) if len(message.payload) <= PAYLOAD_NBYTES else self._apart(link, message.payload)
        self._write(["message", now, link.session, link.received, message.header, payload, names])

    def _apart(self, link: Link, payload: memoryview) -> str:
        name = f"{link.session} {link.received} payload"
        block = MemoryBlock.allocate(len(payload), "payload")
        block.view[:] = payload
        self.keeper.keep(name, block)
        return name

    def closed(self, now: Seconds, link: Link, reason: str) -> None:
        """Note the end of a link that is about to be handled."""
        self._write(["closed", now, link.session, reason])

    def tick(self, now: Seconds) -> None:
        """Note a tick, and from which links bytes have come since the last one."""
        stirred = [(session, nbytes) for session, link in self.sessions.items() if (nbytes := link.note_bytes()) is not None]
        self._write(["tick", now, stirred])

    def written(self, now: Seconds, result: Sequence[Any]) -> None:
        """Note the result of writing files that is about to be handled, as its fields."""
        self._write(["written", now, list(result)])

    def returned(self, now: Seconds) -> None:
        """Note that a new process goes on."""
        self._write(["returned", now])

    # Snapshots, and reading.

    def save(self, state: Callable[[], Any], parts: Mapping[str, Any]) -> None:
        """Write a snapshot in place of the records so far, if that is due. For ``parts`` see `snapshot.dumps`."""
        if self._log is None or self.keeper.given_up is not None or not (self._log.due or self.keeper.snapshot_due):
            return
        self.keeper.snapshot_due = False
        self.sessions = {session: link for session, link in self.sessions.items() if not link.closed}
        try:
            whole = self._own, self.sessions, self.keeper.made, state()
            data, names = snapshot.dumps(whole, self.keeper, {**parts, "keeper": self.keeper})
            self._log.begin(data)
        except (TypeError, LogFull, ConfigurationError) as error:
            self.keeper.give_up(str(error))
            return
        self.keeper.drop_all_but({LOG, *names})

    def restore(self, parts: Mapping[str, Any]) -> Any:
        """Return the state that the newest snapshot has; None: there is none."""
        if self._log is None:
            return None
        for record in self._log.records():
            if record[0] == "result":
                _, name, number, result = record
                self.keeper.results.setdefault(name, {})[number] = result
        data = self._log.snapshot()
        if not len(data):
            return None
        supervisor = next(iter(self._at))
        self._own, self.sessions, self.keeper.made, state = snapshot.loads(data, self.keeper, {**parts, "keeper": self.keeper})
        self.supervisor = self._own[SUPERVISOR]
        self._at = {supervisor: self.supervisor}
        return state

    def records(self) -> Iterator[list[Any]]:
        """Return what the server was told since the snapshot, as `again` takes it."""
        return (record for record in (self._log.records() if self._log is not None else ()) if record[0] != "result")

    def again(self, record: list[Any]) -> tuple[Link, Message]:
        """Return the link and the message of a record that `message` has written."""
        _, _, session, received, header, payload, names = record
        link = self._own[session] if session in self._own else self.sessions[session]
        link.received = received
        memory: tuple[SharedMemory, ...] = tuple(self.keeper[name] for name in names)
        data = self.keeper[payload].view if isinstance(payload, str) else memoryview(payload)
        return link, Message(header, data, memory)


def is_bare(message: Message) -> bool:
    """Return True if a message has no number: it need not arrive, or belongs to no link."""
    return STAMP not in message.header
