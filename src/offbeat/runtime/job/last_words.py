"""Report why a process fails to a process that can still tell the user: a worker to server 0, a server to the supervisor.

A process that ends right after `Connection.send` may not have finished its handshake, and its message would be lost. So it waits briefly
until the other end has answered ``noted``. Of a process that ends without this, only the exit status is known.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.transport.base import Closed, Connection, Hub
from offbeat.transport.hub import SocketHub
from offbeat.transport.link import Link
from offbeat.types import Seconds

PATIENCE_S: Seconds = 2.0
"""Seconds to wait for ``noted``; after that the receiver is dead or too busy."""


def say(hub: Hub, connection: Connection, header: Mapping[str, Any]) -> None:
    """Send a message, and wait until the answer ``noted``, the end of the connection, or the timeout."""
    connection.send(header)
    over = connection.socket if isinstance(connection, Link) else connection
    deadline = time.monotonic() + PATIENCE_S
    while (left_s := deadline - time.monotonic()) > 0.0:
        for peer, item in hub.poll(left_s):
            if peer is over and (isinstance(item, Closed) or item.header.get("kind") == "noted"):
                return


def failing(worker: int, error: BaseException, *, pushed: bool) -> dict[str, Any]:
    """Return a worker's last message.

    >>> failing(1, ValueError("no such file"), pushed=True)
    {'kind': 'failing', 'worker': 1, 'reason': 'ValueError: no such file', 'pushed': True}
    """
    return {"kind": "failing", "worker": worker, "reason": in_words(error), "pushed": pushed}


def in_words(error: BaseException) -> str:
    """Return an exception as one line; the type is left out for an `OffbeatError`, whose text is a sentence.

    >>> in_words(OffbeatError("use fewer workers")), in_words(KeyError("x"))
    ('use fewer workers', "KeyError: 'x'")
    """
    text = " ".join(str(error).split())[:1000]
    if isinstance(error, OffbeatError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def from_outside(error: OffbeatError) -> None:
    """Tell the job, if there is one, why this process does not become one of its workers."""
    with contextlib.suppress(OffbeatError):
        settings = WorkerSettings.from_environment()
        if settings is None:
            return
        hub = SocketHub(settings.token)
        try:
            say(hub, hub.connect(settings.servers[0]), failing(settings.worker, error, pushed=False))
        finally:
            hub.close()
