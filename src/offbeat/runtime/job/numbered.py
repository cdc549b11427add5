"""Number the messages between servers by optimizer, so that one connection serves all optimizers of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.transport.base import Connection, SharedMemory


class Numbered:
    """Send to another server what is about one optimizer.

    Args:
        connection: to that server.
        number: of the optimizer; messages about the first one, 0, have no number.
    """

    def __init__(self, connection: Connection, number: int) -> None:
        self.shares_memory = connection.shares_memory
        self._connection, self._about = connection, {"number_of_optimizer": number} if number else {}

    def send(self, header: Mapping[str, Any], memory: Sequence[SharedMemory] = ()) -> None:
        """Send as `Connection.send` does, with the optimizer's number in the header."""
        self._connection.send({**header, **self._about}, memory=memory)
