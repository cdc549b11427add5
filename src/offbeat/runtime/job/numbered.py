"""A connection on which every message says which optimizer it is about: between servers, one connection serves them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.transport.base import Buffer, Connection, SharedMemory


class Numbered(Connection):
    """Another server's connection, as the coordinator of one more optimizer sees it.

    Args:
        connection: to that server.
        number: of the optimizer, at least 1: messages about the first say nothing of it.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection, self._number = connection, number
        self.peer, self.shares_memory, self.interface = connection.peer, connection.shares_memory, connection.interface
        self.bytes_received = 0

    def bind(self, name: str, region: memoryview) -> None:
        raise AssertionError("servers carry no memory region to each other, so none is bound")

    def send(
        self, header: Mapping[str, Any], *, carry: str | None = None, payload: Sequence[Buffer] = (), memory: Sequence[SharedMemory] = ()
    ) -> None:
        """As `Connection.send`."""
        self._connection.send({**header, "number_of_optimizer": self._number}, carry=carry, payload=payload, memory=memory)

    def close(self) -> None:
        raise AssertionError("the connection serves other optimizers too, and is not closed for one of them")
