"""Reach the servers again that come back in a new process: a worker keeps its process, and its memory, and waits for them."""

from __future__ import annotations

import secrets
import time
from typing import Final

from offbeat.errors import JobError
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Hub, Message
from offbeat.transport.link import RESUME, Link
from offbeat.types import Seconds

RETRY_S: Final[Seconds] = 0.02
"""Seconds between two attempts to reach a server."""
RETURN_S: Final[Seconds] = 60.0
"""Seconds after which a server is taken for gone. The supervisor ends the job earlier if a server does not come back."""
SETTLE_S: Final[Seconds] = 10.0


class Links:
    """The connections of one worker, of which some outlive their sockets.

    Args:
        hub: of the worker.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._at: dict[Connection, Link] = {}
        """By socket."""
        self._addresses: dict[Link, Address] = {}
        self._cut: dict[Link, tuple[Seconds, str]] = {}
        """Links without a socket: until when to try, and why the last one has ended."""

    def connect(self, address: Address, *, lasting: bool) -> Connection:
        """Connect to a server; a ``lasting`` connection is a link, if it shares memory, and a server on its way back is awaited.

        Raises:
            JobError: nobody listens there.
        """
        connection = self._await(address) if lasting else self._hub.connect(address)
        if not lasting or not connection.shares_memory:
            return connection
        link = Link(secrets.token_hex(8), connection.peer)
        self._addresses[link] = address
        self._go_over(link, connection)
        return link

    def _await(self, address: Address) -> Connection:
        until = time.monotonic() + RETURN_S
        while True:
            try:
                return self._hub.connect(address)
            except JobError:
                if time.monotonic() >= until:
                    raise
            time.sleep(RETRY_S)

    def poll(self, timeout_s: Seconds | None) -> Arrivals:
        """Do as `Hub.poll`. A link has ended only when its server does not come back."""
        if not self._addresses:
            return self._hub.poll(timeout_s)
        arrived = self._reach_again()
        if self._cut:
            timeout_s = RETRY_S if timeout_s is None else min(timeout_s, RETRY_S)
        for connection, item in self._hub.poll(0.0 if arrived else timeout_s):
            link = self._at.get(connection)
            if link is None:
                arrived.append((connection, item))
            elif isinstance(item, Closed):
                del self._at[connection]
                link.cut()
                if item.reason.startswith("refused"):
                    arrived.append((link, item))
                else:
                    self._cut[link] = time.monotonic() + RETURN_S, item.reason
            elif item.header.get("kind") == "resume":
                RESUME.check(item.header, link.peer, len(item.payload), len(item.memory))
                link.resumed(item.header["received"])
            elif (message := link.take(item)) is not None:
                arrived.append((link, message))
        return arrived

    def settle(self) -> None:
        """Wait for servers that are on their way back: what was sent to them is not lost."""
        deadline = time.monotonic() + SETTLE_S
        while not all(link.settled for link in self._addresses) and time.monotonic() < deadline:
            if any(isinstance(item, Closed) for _, item in self.poll(RETRY_S)):
                return

    def _reach_again(self) -> list[tuple[Connection, Message | Closed]]:
        lost: list[tuple[Connection, Message | Closed]] = []
        for link, (until, reason) in list(self._cut.items()):
            try:
                connection = self._hub.connect(self._addresses[link])
            except JobError:
                if time.monotonic() >= until:
                    del self._cut[link]
                    lost.append((link, Closed(reason)))
                continue
            if connection.shares_memory:
                del self._cut[link]
                self._go_over(link, connection)
            else:
                connection.close()  # it listens, and not yet for processes of its own host
        return lost

    def _go_over(self, link: Link, connection: Connection) -> None:
        self._at[connection] = link
        link.resume(connection)
