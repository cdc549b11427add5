"""Report why a process fails to a process that can still tell the user: a worker to server 0, a server to the supervisor.

A process that ends right after `Connection.send` may not have finished its handshake, and its message would be lost. So it waits briefly
until the other end has answered ``noted``. Of a process that ends without this, only the exit status is known.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final

from offbeat.errors import NOT_OWN, ConfigurationError, OffbeatError
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.transport.base import Closed, Connection, Hub, Message
from offbeat.transport.hub import SocketHub
from offbeat.transport.link import Link
from offbeat.types import Seconds

TRACEBACK: Final = "Traceback (most recent call last):"
PATIENCE_S: Seconds = 2.0
"""Seconds to wait for ``noted``; after that the receiver is dead or too busy."""


def say(hub: Hub, connection: Connection, header: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send a message, and wait until the answer ``noted``, the end of the connection, or the timeout. Returns the answer's header."""
    connection.send(header)
    over = connection.socket if isinstance(connection, Link) else connection
    deadline = time.monotonic() + PATIENCE_S
    while (left_s := deadline - time.monotonic()) > 0.0:
        for peer, item in hub.poll(left_s):
            if peer is over and isinstance(item, Closed):
                return {}
            if peer is over and isinstance(item, Message) and item.header.get("kind") == "noted":
                return item.header
    return {}


def failing(worker: int, error: BaseException, *, pushed: bool, over: bool = False) -> dict[str, Any]:
    """Return a worker's last message. ``over``: its script had been told that the job has ended.

    >>> said = failing(1, ValueError("no such file"), pushed=True)
    >>> said["reason"], said["type"], said["place"], said["final"]
    ('ValueError: no such file', 'ValueError', None, False)
    """
    ours = isinstance(error, OffbeatError) and not isinstance(error, ConfigurationError)  # what has happened to the job is no bug
    return {
        "kind": "failing",
        "worker": worker,
        "reason": in_words(error),
        "pushed": pushed,
        "type": type(error).__name__,
        "place": None if ours else place_of(error),
        "final": isinstance(error, ConfigurationError),
        "over": over,
    }


def place_of(error: BaseException) -> str | None:
    """Return the line of the script's own code that an exception has come through last, as ``file:line``; None: it has no traceback.

    Code of Python, of this package and of installed packages is not the script's, unless there is no other.

    >>> try:
    ...     import json
    ...     json.loads("{")
    ... except ValueError as error:
    ...     place_of(error).endswith(":3")
    True
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if error.__traceback__ is not None:  # an exception that is reported on its way has not come through its callers yet
        callers = traceback.walk_stack(error.__traceback__.tb_frame.f_back)
        frames = [*((frame.f_code.co_filename, line) for frame, line in [*callers][::-1]), *frames]
    own = [(name, line) for name, line in frames if not name.startswith(NOT_OWN)]
    name, line = (own or frames or [("", 0)])[-1]
    if not name:
        return None
    inside = os.path.relpath(name) if name.startswith(os.getcwd() + os.sep) else name
    return f"{inside[-300:]}:{line}"


def in_words(error: BaseException) -> str:
    """Return an exception as one line; the type is left out for an `OffbeatError`, whose text is a sentence.

    >>> in_words(OffbeatError("use fewer workers")), in_words(KeyError("x"))
    ('use fewer workers', "KeyError: 'x'")
    """
    text = " ".join(_without_traceback(str(error)).split())[:1000]
    if isinstance(error, OffbeatError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _without_traceback(text: str) -> str:
    """Leave a traceback out of an exception's text, to which PyTorch adds that of the DataLoader's process; what was raised there stays.

    >>> traced = "Traceback (most recent call last):\\n  File 'train.py', line 3, in read\\n    return a[i]\\nIndexError: 7"
    >>> _without_traceback("Caught IndexError in DataLoader worker process 0.\\nOriginal " + traced).splitlines()
    ['Caught IndexError in DataLoader worker process 0.', 'IndexError: 7']
    """
    if TRACEBACK not in text:
        return text
    return "\n".join(line for line in text.splitlines() if TRACEBACK not in line and not line.startswith("  "))


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
