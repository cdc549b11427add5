"""Number the messages of a connection between servers by optimizer, so that one connection serves all optimizers of a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.transport.base import Connection, PartArrived


class Numbered(Connection):
    """Present another server's connection to the coordinator of a further optimizer.

    Args:
        connection: to that server.
        number: of the optimizer, at least 1; messages about the first optimizer have no number.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number
        self.peer, self.shares_memory, self.interface = connection.peer, connection.shares_memory, connection.interface
        self.bytes_received = 0

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        raise AssertionError("bind() on a connection between servers, which carries no memory region")

    def send(self, header: Mapping[str, Any], **more: Any) -> None:
        """Send as `Connection.send` does, with the optimizer's number in the header."""
        self._connection.send({**header, "number_of_optimizer": self._number}, **more)

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        raise AssertionError("send_ahead() on a connection between servers, which carries no memory region")

    def close(self) -> None:
        raise AssertionError("close() for one optimizer of a connection that serves several")
