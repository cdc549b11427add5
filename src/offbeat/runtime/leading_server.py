"""Serve as the leader of a server with a standby: the standby gets each handled record before any other process sees its effect.

A leader that is alone, since it has taken over or since its standby has died, may get a new standby at any time:

```
    new standby ──follow──► leader ──state, records──► standby     messages leave at once, as without a standby
                              │ ◄────acknowledged────────│         from now on they wait for the standby
                              │ ◄────acknowledged────────│         it has all that anybody has seen:
          workers ◄──standby──┤                                    each keeps an idle connection to it
       supervisor ◄─followed──┘                                    it leads if this process dies
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from offbeat.errors import FencedError, JobError, ProtocolError
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job.settings import read_addresses
from offbeat.runtime.lasting_server import TICK_S, Server
from offbeat.runtime.recovery.replica import StreamRecorder
from offbeat.runtime.recovery.replica_messages import FROM_STANDBY
from offbeat.runtime.recovery.sessions import SERVER, SessionLinks
from offbeat.transport.base import Closed, Connection, Hub, Message
from offbeat.transport.link import AWAIT, Link
from offbeat.transport.schema import shown
from offbeat.types import Seconds

CALLS_MAX = 4
"""Most calls of standbys that are kept until the job is known."""
IMPORTING = ("shard", "hello", "setup")
"""Kinds of messages whose receiver may import modules for a long time."""


class LeadingServer(Server):
    """Lead. Arguments are those of `Server`."""

    def __init__(self, number: int, hub: Hub, launcher: Connection, **more: Any) -> None:
        super().__init__(number, hub, launcher, **more)
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
        """Calls of standbys that have come before the job, or before this process may have a new standby."""
        self._standby_at = ""
        """Where the standby listens, in JSON."""
        self._standby_ready = False
        """True if a standby that came later could lead from now on, and the workers are told of it."""
        self._standby_reported = False
        """True once the supervisor has been told."""
        self._invited: WeakSet[Connection] = WeakSet()
        """Connections over which a link may go since this process leads, and none goes yet."""
        self._told: WeakSet[Connection] = WeakSet()
        """Sockets over which a worker has been told where the standby listens."""
        self._postponed: deque[Callable[[], None]] = deque()
        """After a takeover: what has come before every gradient that is needed has come again."""

    def take_over(
        self,
        stream: StreamRecorder,
        term: int,
        away_s: Seconds,
        key: str,
        awaiting: dict[Connection, None],
        resuming: dict[Connection, Message],
    ) -> None:
        """Go on where the leader has stopped, with the service of its standby.

        Args:
            stream: of the standby, which has handled all that has come.
            term: of this leader.
            away_s: for how long no process has served.
            key: with it the next standby shows that the supervisor has started it.
            awaiting: connections over which links will go from now on.
            resuming: those over which one goes already, with its first message.
        """
        self._term, self._key, self._awaiting, self._resuming = term, key, awaiting, resuming
        self._stream = stream
        stream.withdraws = lambda: self._may_withdraw
        self._has_returned(away_s)
        stream.join(stream.supervisor, self._launcher)
        self._say_leading()
        self._go_on_with_waiting()
        self._settle()

    # Messages.

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        stream = self._stream
        if stream is not None and connection in stream.former:
            return
        self._invited.discard(connection)
        if stream is not None and stream.survival.standby is connection:
            self._from_standby(stream, connection, item)
            self._settle()
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
            self._invited.add(connection)

    def _carry_out(self, kind: str, message: Message) -> bool:
        header = message.header
        match kind:
            case "job" if self._job is None and self._stream is None:
                self.service.job_of(header)  # raises if it cannot be read
                self._job, self._key = header, header.get("key", "")
                self._listen_to_called()
            case "alone":
                if self._job is not None:
                    self._begin_with(None, self._job)
                elif self._stream is not None:
                    self._stream.go_on_alone()
                self._listen_to_called()
            case "fenced":
                raise FencedError(f"server {self.service.number} is fenced: its standby leads, in term {header['term']}")
            case "moved":
                self._move(header["servers"])
            case _:
                return super()._carry_out(kind, message)
        return True

    # The standby.

    def _on_follow(self, connection: Connection, message: Message) -> None:
        """Let the standby follow, and begin the job if it has waited for this."""
        stream = self._stream
        known = self._job is not None or stream is not None
        if known and (message.header["number"] != self.service.number or message.header["key"] != self._key):
            raise ProtocolError(f"{connection.peer} sent 'follow' and is not the standby that was started for server {self.service.number}")
        if self._job is not None:
            self._standby_at = _checked_address(connection, message)
            self._begin_with(connection, self._job)
        elif stream is not None and stream.is_alone and not self._lacking:
            self._standby_at = _checked_address(connection, message)
            self._let_join(stream, connection)
        elif len(self._called) < CALLS_MAX:
            self._called[connection] = message
        else:
            raise ProtocolError(
                f"{connection.peer} sent 'follow' to server {self.service.number}, which waits for its job or its supervisor"
            )

    def _listen_to_called(self) -> None:
        """Handle the calls of standbys that have waited."""
        called, self._called = self._called, {}
        for connection, call in called.items():
            self._on_idle(connection, call)

    def _let_join(self, stream: StreamRecorder, connection: Connection) -> None:
        """Give a new standby the state of this server, between two records."""
        stream.flush()
        self._launcher.send({"kind": "loading"})  # to copy a large state takes long
        try:
            stream.let_join(connection, self.service.handed_on(journal=True), self.service.parts, self.service.now())
        except TypeError as error:
            self._say_standby_gone(f"the state of server {self.service.number} cannot be sent to a new one: it has {error}")
            refuse(connection, ProtocolError(str(error)))

    def _begin_with(self, connection: Connection | None, job: Mapping[str, Any]) -> None:
        """Begin the job with the standby that has come; None: without one."""
        self._job = None
        self._launcher.send({"kind": "loading"})
        stream = self._stream = self.service.links = StreamRecorder(self._launcher, replays=False)
        stream.withdraws = lambda: self._may_withdraw
        if connection is not None:
            stream.follow(connection)
        self._begin(job)
        stream.join(stream.supervisor, self._launcher)
        if connection is not None:
            self._launcher.send({"kind": "followed", "address": self._standby_at})
        self._go_on_with_waiting()
        stream.flush()

    def _from_standby(self, stream: StreamRecorder, connection: Connection, item: Message | Closed) -> None:
        reason = item.reason if isinstance(item, Closed) else None
        if isinstance(item, Message):
            try:
                FROM_STANDBY.check(item.header, connection.peer, len(item.payload), len(item.memory))
                if item.header["kind"] == "serves":
                    stream.serve(item.header["session"])
                elif stream.acknowledged(item.header.get("at", -1), self.service.now()):
                    self._standby_ready, self._standby_reported = True, False
                    self._told.clear()
            except ProtocolError as error:
                reason = str(error)
                connection.close()
        if reason is not None:
            stream.former.add(connection)
            stream.lose_standby()
            self._say_standby_gone(reason)

    def _say_standby_gone(self, reason: str) -> None:
        self._standby_ready = False
        self._launcher.send({"kind": "standby_gone", "reason": reason[:1000], "address": self._standby_at})

    def _announce_standby(self, stream: StreamRecorder) -> None:
        """Tell each worker where the standby listens that could lead from now on, and the supervisor once all have been told.

        A worker that comes later, or over another socket, is told when it comes: this message is not one that a link sends again.
        """
        links = [link for link in stream.sessions.values() if not link.closed and not link.session.startswith(SERVER)]
        for link in links:
            if link.socket is not None and link.socket not in self._told:
                self._told.add(link.socket)
                link.socket.send({"kind": "standby", "address": self._standby_at})
        # A worker that has not come back from the last takeover yet would wait for this process if the standby led by then.
        back = self._return_until is None or not self._invited
        if not self._standby_reported and back and all(link.socket is not None for link in links):
            self._standby_reported = True
            self._launcher.send({"kind": "followed", "address": self._standby_at})

    # The links.

    @property
    def _may_withdraw(self) -> bool:
        """True if the job can go on without a gradient that this server lacks: it decides that no server folds its part of it."""
        return (
            self.service.settings is not None
            and self.service.state.job is not None
            and (self.service.settings.servers == 1 or self.service.state.job.decides)
        )

    def _withdraw(self, link: Link) -> None:
        """Go on without a gradient that will not come again, from before anything else is handled: nothing may be folded with it."""
        link.release_carried()
        self._postponed.appendleft(lambda: self.service.record(["withdrawn", self.service.now(), link.session]))

    def _withdraw_those_of(self, stream: StreamRecorder, message: Message) -> None:
        """Go on without the gradients of a worker whose process has ended, of which this message of the supervisor tells."""
        if self.service.state.job is None or not self._may_withdraw or message.header.get("kind") not in ("ended", "lost"):
            return
        theirs = self.service.state.job.connections_of(message.header["worker"])
        for link in stream.lacking:
            if link in theirs:
                self._withdraw(link)

    def _taken(self, recorder: SessionLinks, link: Link, message: Message) -> None:
        if message.header.get("kind") in IMPORTING:
            self._launcher.send({"kind": "loading"})
        if self._lacking and link is self.service.supervisor and self._stream is not None:
            self._withdraw_those_of(self._stream, message)
        self._when_complete(lambda: super(LeadingServer, self)._taken(recorder, link, message))

    def _end(self, recorder: SessionLinks, link: Link, reason: str) -> None:
        self._when_complete(lambda: super(LeadingServer, self)._end(recorder, link, reason))

    def _when_complete(self, does: Callable[[], None]) -> None:
        """Do something now, or after a takeover once nothing is lacking, in the order of the calls."""
        if self._lacking or self._postponed:
            self._postponed.append(does)
        else:
            does()

    def _settle(self) -> None:
        """Give the standby its record, and handle what has been postponed once nothing is lacking."""
        if self._stream is None:
            return
        if self._standby_ready:
            self._announce_standby(self._stream)
        self._stream.flush()
        while self._postponed and not self._lacking:
            self._postponed.popleft()()
            self._stream.flush()
        if self._called and not self._lacking and self._stream.is_alone:
            self._listen_to_called()

    def _move(self, servers: str) -> None:
        """Note which processes lead the servers."""
        self.service.servers = read_addresses(servers)
        link = self.service.state.to_coordinator
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
        if self._return_until is not None and self.service.now() >= self._return_until:
            if self._may_withdraw:
                for link in self._stream.lacking:
                    self._withdraw(link)
                self._settle()
                return
            names = ", ".join(link.peer for link in self._stream.lacking)
            raise JobError(
                f"the standby of server {self.service.number} has taken over, and lacks a gradient that had come to the leader: its worker "
                f"({names}) has died with the leader, or does not answer"
            )
        self._await_return(self._stream, self.service.now())
        self._report()

    def _patience(self) -> Seconds:
        return TICK_S if self._lacking else super()._patience()

    @property
    def _lacking(self) -> bool:
        return self._stream is not None and bool(self._stream.lacking)


def _checked_address(connection: Connection, message: Message) -> str:
    """Return the address in a standby's call, after it was read: workers get it as it is."""
    text: str = message.header["address"]
    try:
        (_,) = read_addresses(text)
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ProtocolError(f"{connection.peer} sent 'follow' with address = {shown(text)} (expected one address, in JSON)") from None
    return text
