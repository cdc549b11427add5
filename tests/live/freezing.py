"""A hub that can be made to stand still, as SIGSTOP makes a process: nothing is sent, heartbeats included, and nothing is heard."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from offbeat.transport.base import Address, Arrivals, Buffer, Connection, Hub, PartArrived, SharedMemory
from offbeat.transport.hub import SocketHub


class FreezableHub(Hub):
    """Wraps a worker's hub; `thawed` says whether it moves. A connection goes by the same object as in the hub beneath."""

    def __init__(self, hub: SocketHub, thawed: threading.Event | None = None) -> None:
        self._beneath = hub
        self.host = hub.host
        self.thawed = thawed if thawed is not None else threading.Event()
        if thawed is None:
            self.thawed.set()
        self._connections: dict[Connection, _FreezableConnection] = {}

    def another(self) -> FreezableHub:
        return FreezableHub(self._beneath.another(), self.thawed)

    def listen(self, host: str | None = None, port: int = 0) -> Address:
        return self._beneath.listen(host, port)

    def connect(self, address: Address) -> Connection:
        return self._above(self._beneath.connect(address))

    def poll(self, timeout_s: float | None) -> Arrivals:
        arrivals = self._beneath.poll(timeout_s)
        self.thawed.wait()
        return [(self._above(connection), item) for connection, item in arrivals]

    def _above(self, beneath: Connection) -> Connection:
        if beneath not in self._connections:
            self._connections[beneath] = _FreezableConnection(beneath, self.thawed)
        return self._connections[beneath]

    def wake(self) -> None:
        self._beneath.wake()

    def close(self) -> None:
        self._beneath.close()


class _FreezableConnection(Connection):
    def __init__(self, beneath: Connection, thawed: threading.Event) -> None:
        self._beneath, self._thawed = beneath, thawed
        self.peer, self.shares_memory, self.interface = beneath.peer, beneath.shares_memory, beneath.interface

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        return self._beneath.bytes_received

    def bind(self, name: str, region: memoryview, arrived: PartArrived | None = None) -> None:
        self._beneath.bind(name, region, arrived)

    def send(
        self,
        header: Mapping[str, Any],
        *,
        carry: str | None = None,
        payload: Sequence[Buffer] = (),
        memory: Sequence[SharedMemory] = (),
        lent: bool = False,
    ) -> None:
        self._thawed.wait()
        self._beneath.send(header, carry=carry, payload=payload, memory=memory, lent=lent)

    def copy_unsent(self) -> None:
        self._beneath.copy_unsent()

    def recycle(self, payload: memoryview) -> None:
        self._beneath.recycle(payload)

    def place_with(self, place: Callable[[Mapping[str, Any], int], memoryview | None]) -> None:
        self._beneath.place_with(place)

    def divert(self) -> None:
        self._beneath.divert()

    def send_ahead(self, name: str, start: int, stop: int) -> None:
        self._thawed.wait()
        self._beneath.send_ahead(name, start, stop)

    def close(self) -> None:
        with suppress(OSError):
            self._beneath.close()
