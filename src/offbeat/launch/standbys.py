"""Keep the standbys of a job's servers, and decide which process of a server leads.

The supervisor makes this decision since it also decides which processes are dead, and since the job ends with the supervisor. A standby is
told to lead only after the supervisor has given the leader up, and a leader may go on without its standby only after the supervisor has
given the standby up: so no two processes of a server may send at the same time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.launch.engine import Child
from offbeat.launch.hangs import ServerWatch
from offbeat.launch.processes import describe
from offbeat.runtime.job import messages
from offbeat.transport.base import Address, Connection, Message
from offbeat.types import Seconds

PATIENCE_S: Seconds = 2.0
"""Least seconds without a report after which a server with a standby is taken for frozen; more if the job's timeout is longer."""


def patience_of(timeout_s: Seconds) -> Seconds:
    """Return the seconds without a report after which a process of a server with a standby is taken for frozen."""
    return max(PATIENCE_S, timeout_s)


@dataclass(slots=True)
class Standby:
    """The standby of one server."""

    child: Child
    connection: Connection | None = None
    address: Address | None = None
    follows: bool = False
    """True once it gets the leader's records."""


class Standbys:
    """The standbys of all servers.

    Args:
        timeout_s: the job's.
        note: shows a line to the user.
    """

    def __init__(self, timeout_s: Seconds, note: Callable[[str], None]) -> None:
        self.key = secrets.token_hex(16)
        """Shows a leader that a process is the standby that the supervisor has started."""
        self._note = note
        self._of: dict[int, Standby] = {}
        self._terms: dict[int, int] = {}
        self._fenced: dict[Connection, int] = {}
        """By connection of a process that no longer leads: its server."""
        self._watch = ServerWatch(timeout_s, patience_of(timeout_s))

    def add(self, number: int, child: Child, now: Seconds) -> None:
        """Note that the process of a standby has been started."""
        self._of[number] = Standby(child)
        self._terms.setdefault(number, 1)
        self._watch.heard(number, now, loading=True)

    def children(self) -> list[Child]:
        """Return the processes of all standbys."""
        return [standby.child for standby in self._of.values()]

    def addresses(self, servers: int) -> tuple[Address | None, ...]:
        """Return where the standby of each server listens; None: there is none that could take over."""
        return tuple(self._of[number].address if self.ready(number) else None for number in range(servers))

    def ready(self, number: int) -> bool:
        """Return True if the standby of this server could take over."""
        return number in self._of and self._of[number].follows and self._of[number].connection is not None

    def all_listen(self) -> bool:
        """Return True if every standby can be reached."""
        return all(standby.address is not None for standby in self._of.values())

    def all_follow(self) -> bool:
        """Return True if every standby gets records."""
        return all(standby.follows for standby in self._of.values())

    # Messages.

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> bool:
        """Handle a message of a standby, or of a process that no longer leads. Returns False if the message is of another process.

        Raises:
            ProtocolError: the message cannot be read.
        """
        header = message.header
        if connection in self._fenced:
            return True  # it was told to end
        number = next((number for number, standby in self._of.items() if standby.connection is connection), None)
        if number is None and (header.get("kind"), header.get("role")) != ("listening", "standby"):
            return False
        kind = messages.TO_SUPERVISOR.check(header, connection.peer, len(message.payload), len(message.memory))
        if number is not None:
            self._watch.heard(number, now, loading=kind == "loading")
            if kind == "failed":
                self._note(f"the standby of server {number} cannot go on: {header['reason']}")
                connection.send({"kind": "noted"})
            return True
        standby = self._of.get(header["number"])
        if standby is None or standby.connection is not None:
            raise ProtocolError(f"{connection.peer} is no standby of this job")
        host, tcp, local = header["address"]
        standby.connection, standby.address = connection, Address(host, (tcp[0], tcp[1]), local)
        return True

    def on_closed(self, connection: Connection) -> None:
        """Handle the end of a connection."""
        self._fenced.pop(connection, None)
        for standby in self._of.values():
            if standby.connection is connection:
                standby.connection = None

    def followed(self, number: int) -> None:
        """Note that the leader sends records to its standby."""
        if number in self._of:
            self._of[number].follows = True

    def tell(self, **header: Any) -> None:
        """Send every standby a message."""
        for standby in self._of.values():
            if standby.connection is not None:
                standby.connection.send(header)

    def stand_by(self, number: int, job: dict[str, Any]) -> None:
        """Let the standby of a server follow the leader."""
        connection = self._of[number].connection
        if connection is not None:
            connection.send({**job, "kind": "stand_by", "key": self.key})

    # Decisions.

    def ended(self, now: Seconds) -> list[tuple[int, str]]:
        """Return the servers whose standby has ended or does not report, and what has happened to it."""
        found = []
        for number, standby in self._of.items():
            if (status := standby.child.ended()) is not None:
                found.append((number, describe(status) if standby.child.lost is None else f"is gone ({standby.child.lost})"))
        frozen = self._watch.frozen(now)
        if frozen is not None and not found:
            found.append((frozen[0], "does not report"))
        return found

    def give_up(self, number: int) -> None:
        """Let go of a standby; it will never lead."""
        standby = self._of.pop(number, None)
        self._watch.forget(number)
        if standby is not None:
            standby.child.strike()
            if standby.connection is not None:
                self._fenced[standby.connection] = number

    def promote(self, number: int, leader: Connection | None) -> tuple[Standby, int]:
        """Fence the leader of a server. Returns the standby that leads instead, and its term."""
        standby = self._of.pop(number)
        self._watch.forget(number)
        self._terms[number] += 1
        if leader is not None:
            self._fenced[leader] = number
            leader.send({"kind": "fenced", "term": self._terms[number]})
        return standby, self._terms[number]
