"""Keep, for each server of a job, which process leads it, how that process is reached, and when it has last reported."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from offbeat.launch.engine import Child
from offbeat.launch.hangs import ServerWatch
from offbeat.launch.lasting import LastingServer
from offbeat.transport.base import Address, Connection


@dataclass(slots=True)
class Servers:
    """The processes that lead the servers of a job; their standbys are in `standbys.Standbys`."""

    watch: ServerWatch
    children: dict[int, Child] = field(default_factory=dict)
    connections: dict[int, Connection] = field(default_factory=dict)
    addresses: dict[int, Address] = field(default_factory=dict)
    lasting: dict[int, LastingServer] = field(default_factory=dict)
    """What outlives the processes of each server."""

    def number_of(self, connection: Connection) -> int | None:
        """Return the server whose process has this connection; None: it is another's."""
        return next((number for number, server in self.connections.items() if server is connection), None)

    def all_listen(self) -> bool:
        """Return True if every server can be reached. Call it after all were started."""
        return len(self.addresses) == len(self.children)

    def listening(self) -> list[Address]:
        """Return where the servers listen, in their order."""
        return [self.addresses[number] for number in sorted(self.children)]

    def where(self) -> str:
        """Return where the servers listen, for a message."""
        return json.dumps(self.listening())

    def on_closed(self, connection: Connection) -> None:
        """Handle the end of a connection, perhaps that of a server."""
        for lasting in self.lasting.values():
            lasting.cut(connection)
        number = self.number_of(connection)
        if number is not None:
            del self.connections[number]
