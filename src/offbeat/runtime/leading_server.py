"""Serve as the leader of a server with a standby: the standby gets each handled record before any other process sees its effect."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.errors import FencedError, JobError, ProtocolError
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job.settings import read_addresses
from offbeat.runtime.lasting_server import TICK_S, Server
from offbeat.runtime.recovery.replica import StreamRecorder
from offbeat.runtime.recovery.replica_messages import FROM_STANDBY
from offbeat.runtime.recovery.sessions import SessionLinks
from offbeat.transport.base import Closed, Connection, Hub, Message
from offbeat.transport.link import AWAIT, Link
from offbeat.types import Seconds

CALLS_MAX = 4
"""Most calls of standbys that are kept until the job is known."""
IMPORTING = ("shard", "hello", "setup")
"""Kinds of messages whose receiver may import modules for a long time."""


class LeadingServer(Server):
    """Lead. Arguments are those of `Server`."""

    def __init__(self, number: int, hub: Hub, supervisor: Connection, **clock: Callable[[], Seconds]) -> None:
        super().__init__(number, hub, supervisor, **clock)
        self._term = 1
        self._stream: StreamRecorder | None = None
        """Writes the records to the standby; None: the job has not begun."""
        self._awaiting: dict[Connection, None] = {}
        """Idle connections over which links will go once this process leads."""
        self._job: Mapping[str, Any] | None = None
        """The job, until the standby has come."""
        self._key = ""
        """With it the standby shows that the supervisor has started it."""
        self._called: dict[Connection, Message] = {}
        """Calls of standbys that have come before the job."""
        self._postponed: deque[Callable[[], None]] = deque()
        """After a takeover: what has come before every gradient that is needed has come again."""

    # Messages.

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        stream = self._stream
        if stream is not None and connection in stream.former:
            return
        if stream is not None and stream.keeper.standby is connection:
            self._from_standby(stream, connection, item)
        elif isinstance(item, Closed) and (connection in self._awaiting or connection in self._called):
            self._awaiting.pop(connection, None)
            self._called.pop(connection, None)
        elif isinstance(item, Message) and item.header.get("kind") in ("await", "follow"):
            self._on_idle(connection, item)
        else:
            super()._arrived(connection, item)
            self._settle()

    def _on_idle(self, connection: Connection, message: Message) -> None:
        """Handle the first message of a standby, or of a connection over which a link will go."""
        try:
            if message.header["kind"] == "await":
                AWAIT.check(message.header, connection.peer, len(message.payload), len(message.memory))
                self._awaiting[connection] = None
                self._say_leading()
            else:
                FROM_STANDBY.check(message.header, connection.peer, len(message.payload), len(message.memory))
                self._on_follow(connection, message)
        except ProtocolError as error:
            refuse(connection, error)

    def _say_leading(self) -> None:
        """Let the links go over the connections that have waited for it."""
        awaiting, self._awaiting = self._awaiting, {}
        for connection in awaiting:
            connection.send({"kind": "leading", "term": self._term})

    def _carry_out(self, kind: str, message: Message) -> None:
        header = message.header
        match kind:
            case "job" if self._job is None and self._stream is None:
                self._job_of(header)  # raises if it cannot be read
                self._job, self._key = header, header.get("key", "")
                called, self._called = self._called, {}
                for connection, call in called.items():
                    self._on_idle(connection, call)
            case "alone" if self._stream is not None:
                self._stream.go_on_alone()
            case "fenced":
                raise FencedError(f"server {self._number} is fenced: its standby leads, in term {header['term']}")
            case "moved":
                self._move(header["servers"])
            case _:
                super()._carry_out(kind, message)

    # The standby.

    def _on_follow(self, connection: Connection, message: Message) -> None:
        """Let the standby follow, and begin the job, which has waited for this."""
        if self._job is None and self._stream is None and len(self._called) < CALLS_MAX:
            self._called[connection] = message
            return
        if self._job is None or message.header["number"] != self._number or message.header["key"] != self._key:
            raise ProtocolError(f"{connection.peer} sent 'follow' and is not the standby that was started for server {self._number}")
        job, self._job = self._job, None
        self._launcher.send({"kind": "loading"})
        stream = self._recorder = self._stream = StreamRecorder(self._launcher, replays=False)
        self._supervisor = stream.supervisor
        stream.follow(connection)
        stream.begun(self._began, self._started, job["settings"], job["servers"])
        self._begin(*self._job_of(job))
        stream.join(stream.supervisor, self._launcher)
        self._launcher.send({"kind": "followed"})
        self._go_on_with_waiting()
        stream.flush()

    def _from_standby(self, stream: StreamRecorder, connection: Connection, item: Message | Closed) -> None:
        reason = item.reason if isinstance(item, Closed) else None
        if isinstance(item, Message):
            try:
                FROM_STANDBY.check(item.header, connection.peer, len(item.payload), len(item.memory))
                stream.acknowledged(item.header.get("at", -1))
            except ProtocolError as error:
                reason = str(error)
                connection.close()
        if reason is not None:
            stream.former.add(connection)
            stream.lose_standby()
            self._launcher.send({"kind": "standby_gone", "reason": reason[:1000]})

    # The links.

    def _taken(self, recorder: SessionLinks, link: Link, message: Message) -> None:
        if message.header.get("kind") in IMPORTING:
            self._launcher.send({"kind": "loading"})
        if self._lacking:
            self._postponed.append(lambda: super(LeadingServer, self)._taken(recorder, link, message))
        else:
            super()._taken(recorder, link, message)

    def _end(self, recorder: SessionLinks, link: Link, reason: str) -> None:
        if self._lacking:
            self._postponed.append(lambda: super(LeadingServer, self)._end(recorder, link, reason))
        else:
            super()._end(recorder, link, reason)

    def _settle(self) -> None:
        """Give the standby its record, and handle what has been postponed once nothing is lacking."""
        if self._stream is None:
            return
        self._stream.flush()
        while self._postponed and not self._lacking:
            self._postponed.popleft()()
            self._stream.flush()

    def _move(self, servers: str) -> None:
        """Note which processes lead the servers."""
        self._servers = read_addresses(servers)
        link = self._to_coordinator
        if isinstance(link, Link) and self._stream is not None and link.socket is not None:
            socket = link.socket
            self._stream.cut(socket)
            self._stream.former.add(socket)
            socket.close()  # the link goes over another one from the next tick on

    def tick(self) -> None:
        """Do what is due; after a takeover, nothing before every gradient that is needed has come again."""
        if not self._lacking:
            super().tick()
            self._settle()
            return
        assert self._stream is not None
        if self._return_until is not None and self.now() >= self._return_until:
            names = ", ".join(link.peer for link in self._stream.lacking)
            raise JobError(
                f"the standby of server {self._number} has taken over, and lacks a gradient that had come to the leader: its worker "
                f"({names}) has died with the leader, or does not answer"
            )
        self._await_return(self._stream, self.now())
        self._report()

    def _patience(self) -> Seconds:
        return TICK_S if self._lacking else super()._patience()

    @property
    def _lacking(self) -> bool:
        return self._stream is not None and bool(self._stream.lacking)
