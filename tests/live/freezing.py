"""A hub that can be made to stand still, as SIGSTOP makes a process: nothing is sent, heartbeats included, and nothing is heard."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.transport.base import Arrivals
from offbeat.transport.hub import SocketHub
from offbeat.transport.stream import StreamConnection


class FreezableHub(SocketHub):
    """A worker's hub; `thawed` says whether it moves."""

    def __init__(self, token: str, host: str, thawed: threading.Event | None = None) -> None:
        super().__init__(token, host=host)
        self.thawed = threading.Event() if thawed is None else thawed
        if thawed is None:
            self.thawed.set()

    def another(self) -> FreezableHub:
        return FreezableHub(self._token, self.host, self.thawed)

    def poll(self, timeout_s: float | None, also: Sequence[int] = ()) -> Arrivals:
        arrivals = super().poll(timeout_s, also)
        self.thawed.wait()
        return arrivals

    def _add(self, *about: Any) -> StreamConnection:
        connection = super()._add(*about)
        for name in ("send", "send_ahead"):
            setattr(connection, name, self._once_thawed(getattr(connection, name)))
        return connection

    def _once_thawed(self, send: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(send)
        def sent(*args: Any, **kwargs: Any) -> None:
            self.thawed.wait()
            send(*args, **kwargs)

        return sent
