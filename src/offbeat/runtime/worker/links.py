"""Keep a worker's server links: await servers that come back in a new process, or whose standby takes over, in the same worker process."""

from __future__ import annotations

import contextlib
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
"""Seconds after which a server counts as gone. The supervisor ends the job earlier if a server does not come back."""
SETTLE_S: Final[Seconds] = 10.0


class Links:
    """Hold one worker's connections; server links among them outlive their sockets.

    One thread polls. While it computes, another thread may call `tend`.

    Args:
        hub: the worker's hub.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._at: dict[Connection, Link] = {}
        """Server link by its present socket."""
        self._plain: set[Connection] = set()
        """Connections that are not server links: they end with the server's process."""
        self._addresses: dict[Link, Address] = {}
        """Address of the process at the other end; with standbys, of the newest leader that this end has found."""
        self._cut: dict[Link, tuple[Seconds, str]] = {}
        """Server links without a socket: the monotonic time at which they count as lost, and the reason for which the last socket ended."""
        self._replicated: set[Link] = set()
        """Server links to servers with a standby, which reports when it leads."""
        self._standbys: dict[Connection, tuple[Link, Address]] = {}
        """By connection to a standby: the server link that moves to it once the standby leads, and the standby's address."""
        self._former: WeakSet[Connection] = WeakSet()
        """Connections that this end has closed; their messages may still be queued, and are ignored."""
        self._polls = threading.RLock()
        """Held by the thread that polls or tends."""
        self._early: Arrivals = []
        """Items that `tend` has read, for the next `poll`."""
        self._error: Exception | None = None
        """An exception in `tend`, which each later `poll` raises."""
        self._closed = False

    def connect(self, address: Address, *, lasting: bool, anywhere: bool = False) -> Connection:
        """Connect to a server.

        Args:
            address: the server's address.
            lasting: True: await a server that is restarting, and return a server link if the connection shares memory.
            anywhere: True: return a server link also if it does not, since no message has a region, which the server would have to log.

        Raises:
            JobError: no process listens at the address.
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
                # The machine of a restarting server refuses at once; a timeout or an unknown name is another fault.
                if time.monotonic() >= until or isinstance(error.__cause__, TimeoutError | socket.gaierror):
                    raise
            time.sleep(RETRY_S)

    def connect_replicated(self, leader: Address, standby: Address | None) -> Link:
        """Return a link to a server that has or had a standby. Raises `JobError` if neither process can be reached."""
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
        """Connect to the standby, which reports over this connection when it leads. Returns False if it cannot be reached."""
        try:
            connection = self._hub.connect(standby)
        except JobError:
            return False
        link.may_overtake = True
        link.go_aside(connection)
        connection.send({"kind": "await", "session": link.session})
        self._standbys[connection] = link, standby
        return True

    def _on_new_standby(self, link: Link, text: str) -> None:
        """Connect to a server's new standby, in place of the connection to an earlier one."""
        (standby,) = read_addresses(text)
        # Reconnect even to the same address: a new process may have the earlier one's port.
        for connection in [connection for connection, (waiting, _) in self._standbys.items() if waiting is link]:
            del self._standbys[connection]
            self._former.add(connection)
            connection.close()
            self._ask_leader(link)
        self._wait_for(link, standby)

    def is_replicated(self, link: Link) -> bool:
        """Return True if the link's server has or had a standby."""
        return link in self._replicated

    def replicated_at(self, link: Link) -> tuple[Address, Address | None]:
        """Return the addresses of the leader and the standby of a link's server, for `connect_replicated`; None: no standby is known."""
        at = [address for waiting, address in list(self._standbys.values()) if waiting is link]  # a list: another thread may call this
        return self._addresses[link], at[0] if at else None

    def poll(self, timeout_s: Seconds | None) -> Arrivals:
        """Do as `Hub.poll`. A server link yields `Closed` only once its server has not come back."""
        with self._polls:
            if self._error is not None:
                raise self._error
            early, self._early = self._early, []
            return early + self._poll(0.0 if early else timeout_s)

    def tend(self) -> bool:
        """Reconnect server links while the polling thread computes, after a socket has ended or a standby has sent something.

        Returns:
            False if a server link still lacks its socket, so that another call soon is useful.
        """
        # Without this the worker would be declared dead: its heartbeat goes over the link. Nothing is read while all links are
        # connected, since a message may change memory from which the script computes.
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
                continue  # it was queued when this end closed the connection
            if connection in self._standbys and isinstance(item, Message) and STAMP in item.header:
                self._take(self._standbys[connection][0], item, arrived)
            elif connection in self._standbys:
                self._from_standby(connection, item)
            elif link is None:
                if isinstance(item, Closed):
                    self._plain.discard(connection)
                arrived.append((connection, item))
            elif isinstance(item, Closed):
                del self._at[connection]
                link.cut()
                gone = link in self._replicated and all(waiting is not link for waiting, _ in self._standbys.values())
                if gone or item.reason.startswith("refused"):
                    arrived.append((link, item))
                else:
                    self._cut[link] = time.monotonic() + RETURN_S, item.reason
            elif item.header.get("kind") == "resume":
                RESUME.check(item.header, link.peer, len(item.payload), len(item.memory))
                link.resumed(item.header["received"])
            elif item.header.get("kind") == "refused" and not link.is_resumed:
                # A link resumed before: the server has ended it, since over TCP a connection may break that neither end has closed.
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
        """Append a message from a server link or its standby to ``arrived``, and with it the messages that waited for it."""
        message = link.take(item)
        while message is not None:
            arrived.append((link, message))
            message = link.take_early()

    def _ask_leader(self, link: Link) -> None:
        """Have the leader send what its standby, now gone, has not: parameters, if this worker is on the standby's machine."""
        link.go_aside(None)
        link.send_aside({"kind": "again", "received": link.received})

    def _from_standby(self, connection: Connection, item: Message | Closed) -> None:
        """Move the link to a standby's connection once the standby leads, even if the former leader is only frozen."""
        link, address = self._standbys.pop(connection)
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
        """Wait until all messages are on their way, also to restarting servers, or until a server is lost or takes nothing for `SETTLE_S`.

        What a rank hands in as it leaves (its replica, for the last checkpoint) is more than the operating system takes at once.
        """
        until, before = 0.0, 0
        while waiting := sum(link.unsent for link in (*self._addresses, *self._plain)):
            if waiting != before:
                until, before = time.monotonic() + SETTLE_S, waiting
            if time.monotonic() >= until or any(isinstance(item, Closed) for _, item in self.poll(RETRY_S)):
                return

    def _reach_again(self) -> list[tuple[Connection, Message | Closed]]:
        lost: list[tuple[Connection, Message | Closed]] = []
        for link, (until, reason) in list(self._cut.items()):
            if link.closed:
                del self._cut[link]
                continue
            connection: Connection | None = None
            if link not in self._replicated:  # the standby of a replicated server reports when it leads
                with contextlib.suppress(JobError):
                    connection = self._hub.connect(self._addresses[link])
            if connection is None:
                if time.monotonic() >= until:
                    del self._cut[link]
                    lost.append((link, Closed(reason)))
            elif connection.shares_memory == link.shares_memory:
                del self._cut[link]
                self._go_over(link, connection)
            else:
                connection.close()  # the server listens, but not yet on the socket for processes of its own host
        return lost

    def _go_over(self, link: Link, connection: Connection) -> None:
        self._at[connection] = link
        link.resume(connection)
