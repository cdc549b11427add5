"""Keep what outlives a server's process: its memory, its messages, and how often it was started again."""

from __future__ import annotations

from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.transport.link import RESUME, Link
from offbeat.types import Seconds


class LastingServer:
    """One server, through all of its processes.

    Args:
        number: of the server.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.link = Link("supervisor", f"server {number}")
        self.kept: dict[str, SharedMemory] = {}
        """Blocks of memory that the server's next process will need, by name. Nobody maps them here."""
        self.job_sent = False
        self.restarts = 0
        self.returning = False
        """True from the end of a process until the next one has gone on."""
        self._mortal: str | None = None

    def why_mortal(self, max_restarts: int) -> str | None:
        """Return why the server is not started again when its process ends; None: it is.

        >>> LastingServer(0).why_mortal(3), LastingServer(0).why_mortal(0)
        (None, '--max-restarts 0 is used up')
        """
        if self._mortal is not None:
            return self._mortal
        if self.restarts >= max_restarts:
            return f"--max-restarts {max_restarts} is used up"
        return None

    def returns(self, now: Seconds) -> None:
        """Note that the next process is about to be started."""
        self.restarts += 1
        self.returning = True
        self.link.cut()

    def cut(self, connection: Connection) -> None:
        """Note that a connection has ended, perhaps that of this server."""
        if self.link.socket is connection:
            self.link.cut()

    def take(self, connection: Connection, message: Message) -> Message | None:
        """Return a message of the server without its number; None: it is the link's own, or came before. Raises `ProtocolError`."""
        if message.header.get("kind") != "resume":
            return self.link.take(message)
        RESUME.check(message.header, self.link.peer, len(message.payload), len(message.memory))
        self.link.resume(connection)
        self.link.resumed(message.header["received"])
        self.returning = False
        return None

    def on_message(self, kind: str, message: Message) -> None:
        """Handle what the server says of its memory."""
        match kind:
            case "keep" if message.memory:
                self.kept[message.header["name"]] = message.memory[0]
            case "drop":
                self.kept.pop(message.header["name"], None)
            case "mortal":
                self._mortal = message.header["reason"]
