"""Reach the servers again that come back in a new process, or whose standby takes over: a worker keeps its process, and waits for them."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from typing import Final
from weakref import WeakSet

from offbeat.errors import JobError
from offbeat.runtime.job.settings import read_addresses
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Hub, Message
from offbeat.transport.link import LEADING, RESUME, STAMP, STANDBY, Link
from offbeat.types import Seconds

RETRY_S: Final[Seconds] = 0.02
"""Seconds between two attempts to reach a server."""
RETURN_S: Final[Seconds] = 60.0
"""Seconds after which a server is taken for gone. The supervisor ends the job earlier if a server does not come back."""
SETTLE_S: Final[Seconds] = 10.0


class Links:
    """The connections of one worker, of which some outlive their sockets.

    One thread polls. While it computes, another may call `tend`.

    Args:
        hub: of the worker.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._at: dict[Connection, Link] = {}
        """By connection."""
        self._plain: set[Connection] = set()
        """Connections that are no links: they end with the server's process."""
        self._addresses: dict[Link, Address] = {}
        """Of the process at the other end; with standbys, of the one that leads, as far as this end knows."""
        self._cut: dict[Link, tuple[Seconds, str]] = {}
        """Links without a socket: until when to try, and why the last one has ended."""
        self._replicated: set[Link] = set()
        """Links to servers with a standby, which says when it leads."""
        self._standbys: dict[Connection, Link] = {}
        """By connection to a standby: the link that goes over it once the standby leads."""
        self._standby_at: dict[Link, Address] = {}
        """Where the standby of this link's server listens."""
        self._former: WeakSet[Connection] = WeakSet()
        """Connections that this end has closed; messages may still be queued."""
        self._polls = threading.RLock()
        """Held by the thread that polls."""
        self._early: Arrivals = []
        """What `tend` has read, for the next `poll`."""
        self._error: Exception | None = None
        """What has happened in `tend`, for the next `poll`."""
        self._closed = False

    def connect(self, address: Address, *, lasting: bool, anywhere: bool = False) -> Connection:
        """Connect to a server; a server on its way back is awaited if the connection is ``lasting``.

        Args:
            address: of the server.
            lasting: True: the connection is a link if it shares memory.
            anywhere: True: it is one also over TCP, since it carries no region that the server would have to write down.

        Raises:
            JobError: nobody listens there.
        """
        connection = self._await(address) if lasting else self._hub.connect(address)
        if not lasting or not (connection.shares_memory or anywhere):
            self._plain.add(connection)
            return connection
        link = Link(secrets.token_hex(8), connection.peer, shares_memory=connection.shares_memory)
        link.interface = connection.interface
        self._addresses[link] = address
        self._go_over(link, connection)
        return link

    def _await(self, address: Address) -> Connection:
        until = time.monotonic() + RETURN_S
        while True:
            try:
                return self._hub.connect(address)
            except JobError as error:
                # Where a server is on its way back, its machine refuses at once.
                if time.monotonic() >= until or isinstance(error.__cause__, TimeoutError | socket.gaierror):
                    raise
            time.sleep(RETRY_S)

    def connect_replicated(self, leader: Address, standby: Address | None) -> Link:
        """Return a link to a server that has a standby, or has had one. Raises `JobError` if neither process can be reached."""
        link = Link(secrets.token_hex(8), f"{leader.tcp[0]}, port {leader.tcp[1]}", shares_memory=False)
        self._addresses[link] = leader
        self._replicated.add(link)
        waits = standby is not None and self._wait_for(link, standby)
        try:
            connection = self._hub.connect(leader)
        except JobError as error:
            if not waits:
                raise
            self._cut[link] = time.monotonic() + RETURN_S, str(error)
            return link
        link.peer, link.interface = connection.peer, connection.interface
        self._go_over(link, connection)
        return link

    def _wait_for(self, link: Link, standby: Address) -> bool:
        """Keep a connection to the standby, which says over it that it leads. Returns False if it cannot be reached."""
        try:
            connection = self._hub.connect(standby)
        except JobError:
            return False
        link.may_overtake = True
        link.go_aside(connection)
        connection.send({"kind": "await", "session": link.session})
        self._standbys[connection] = link
        self._standby_at[link] = standby
        return True

    def _on_new_standby(self, link: Link, text: str) -> None:
        """Keep a connection to the standby that a server has got, in place of one to an earlier standby."""
        (standby,) = read_addresses(text)
        # Also if the address is that of the earlier one: a new process may have its port.
        self._standby_at.pop(link, None)
        for connection in [connection for connection, waiting in self._standbys.items() if waiting is link]:
            del self._standbys[connection]
            self._former.add(connection)
            connection.close()
            self._ask_leader(link)
        self._wait_for(link, standby)

    def is_replicated(self, link: Link) -> bool:
        """Return True if the link's server has standbys."""
        return link in self._replicated

    def replicated_at(self, link: Link) -> tuple[Address, Address | None]:
        """Return where the leader and the standby of a link's server listen by now, for `connect_replicated`; None: no standby is known."""
        return self._addresses[link], self._standby_at.get(link)

    def poll(self, timeout_s: Seconds | None) -> Arrivals:
        """Do as `Hub.poll`. A link has ended only when its server does not come back."""
        with self._polls:
            if self._error is not None:
                raise self._error
            early, self._early = self._early, []
            return early + self._poll(0.0 if early else timeout_s)

    def tend(self) -> bool:
        """Reach servers again to which a connection is broken, or that have died or have a standby, while the thread that polls computes.

        Otherwise this worker would be taken for dead: its heartbeat goes over the link. Nothing is read while all links are there, since
        what comes may change memory from which the script computes.

        Returns:
            False if a link is not there, and another call is useful soon.
        """
        if not self._polls.acquire(blocking=False):
            return True
        try:
            if self._closed or self._error is not None or not self._lacks_link():
                return True
            self._early += self._poll(0.0)
            return not self._lacks_link()
        except Exception as error:
            self._error = error
            return True
        finally:
            self._polls.release()

    def _lacks_link(self) -> bool:
        at = [(link, link.socket) for link in self._addresses if not link.closed]
        return (
            any(now is None or not link.is_resumed or now.has_ended() for link, now in at)
            or any(connection.has_ended() for connection in self._plain)
            or any(connection.has_news() for connection in self._standbys)
        )

    def close(self) -> None:
        """Close the hub."""
        with self._polls:
            self._closed = True
            self._hub.close()

    def _poll(self, timeout_s: Seconds | None) -> Arrivals:
        arrived = self._reach_again()
        if self._cut:
            timeout_s = RETRY_S if timeout_s is None else min(timeout_s, RETRY_S)
        for connection, item in self._hub.poll(0.0 if arrived else timeout_s):
            link = self._at.get(connection)
            if connection in self._former:
                continue  # it had come before this end has closed the connection
            if connection in self._standbys and isinstance(item, Message) and STAMP in item.header:
                self._take(self._standbys[connection], item, arrived)
            elif connection in self._standbys:
                self._from_standby(connection, item)
            elif link is None:
                if isinstance(item, Closed):
                    self._plain.discard(connection)
                arrived.append((connection, item))
            elif isinstance(item, Closed):
                del self._at[connection]
                link.cut()
                gone = link in self._replicated and link not in self._standbys.values()
                if gone or item.reason.startswith("refused"):
                    arrived.append((link, item))
                else:
                    self._cut[link] = time.monotonic() + RETURN_S, item.reason
            elif item.header.get("kind") == "resume":
                RESUME.check(item.header, link.peer, len(item.payload), len(item.memory))
                link.resumed(item.header["received"])
            elif item.header.get("kind") == "refused" and not link.is_resumed:
                # If it has gone on before, the server has taken this end for gone: over TCP a connection may break that nobody has closed.
                del self._at[connection]
                self._former.add(connection)
                link.cut()
                arrived.append((link, Closed(str(item.header.get("reason", ""))) if link.received else item))
            elif item.header.get("kind") == "standby":
                STANDBY.check(item.header, link.peer, len(item.payload), len(item.memory))
                self._on_new_standby(link, item.header["address"])
            else:
                self._take(link, item, arrived)
        return arrived

    def _take(self, link: Link, item: Message, arrived: Arrivals) -> None:
        """Let a message that has come over a link, or from its standby, be among those that have arrived, and those that waited for it."""
        message = link.take(item)
        while message is not None:
            arrived.append((link, message))
            message = link.take_early()

    def _ask_leader(self, link: Link) -> None:
        """Let the leader send what its standby, which is gone, has not: parameters, if this worker is on the machine of the standby."""
        link.go_aside(None)
        link.send_aside({"kind": "again", "received": link.received})

    def _from_standby(self, connection: Connection, item: Message | Closed) -> None:
        """Go over this connection from now on, if the standby leads: also if the former leader is only frozen."""
        link = self._standbys.pop(connection)
        address = self._standby_at.pop(link)
        if isinstance(item, Closed):
            if link in self._cut:
                self._cut[link] = 0.0, self._cut[link][1]
            self._ask_leader(link)
            return
        link.go_aside(None)
        LEADING.check(item.header, connection.peer, len(item.payload), len(item.memory))
        former = link.socket
        if former is not None:
            del self._at[former]
            self._former.add(former)
            link.cut()
            former.close()
        self._cut.pop(link, None)
        self._addresses[link] = address
        self._go_over(link, connection)

    def settle(self) -> None:
        """Wait for servers that are on their way back: what was sent to them is not lost."""
        deadline = time.monotonic() + SETTLE_S
        while not all(link.settled for link in self._addresses) and time.monotonic() < deadline:
            if any(isinstance(item, Closed) for _, item in self.poll(RETRY_S)):
                return

    def _reach_again(self) -> list[tuple[Connection, Message | Closed]]:
        lost: list[tuple[Connection, Message | Closed]] = []
        for link, (until, reason) in list(self._cut.items()):
            if link.closed:
                del self._cut[link]
                continue
            if link in self._replicated:  # its standby says when it leads
                if time.monotonic() >= until:
                    del self._cut[link]
                    lost.append((link, Closed(reason)))
                continue
            try:
                connection = self._hub.connect(self._addresses[link])
            except JobError:
                if time.monotonic() >= until:
                    del self._cut[link]
                    lost.append((link, Closed(reason)))
                continue
            if connection.shares_memory == link.shares_memory:
                del self._cut[link]
                self._go_over(link, connection)
            else:
                connection.close()  # it listens, and not yet for processes of its own host
        return lost

    def _go_over(self, link: Link, connection: Connection) -> None:
        self._at[connection] = link
        link.resume(connection)
