"""A hub that can be made to stand still, as SIGSTOP makes a process: nothing is sent, heartbeats included, and nothing is heard."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from offbeat.transport.base import Address, Arrivals, Buffer, Connection, Hub, SharedMemory
from offbeat.transport.hub import SocketHub


class FreezableHub(Hub):
    """Wraps a worker's hub; `thawed` says whether it moves. A connection goes by the same object as in the hub beneath."""

    def __init__(self, hub: SocketHub) -> None:
        self._beneath = hub
        self.thawed = threading.Event()
        self.thawed.set()
        self._connections: dict[Connection, _FreezableConnection] = {}

    def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        return self._beneath.listen(host, port)

    def connect(self, address: Address) -> Connection:
        beneath = self._beneath.connect(address)
        self._connections[beneath] = _FreezableConnection(beneath, self.thawed)
        return self._connections[beneath]

    def poll(self, timeout_s: float | None) -> Arrivals:
        arrivals = self._beneath.poll(timeout_s)
        self.thawed.wait()
        return [(self._connections[connection], item) for connection, item in arrivals]

    def wake(self) -> None:
        self._beneath.wake()

    def close(self) -> None:
        self._beneath.close()


class _FreezableConnection(Connection):
    def __init__(self, beneath: Connection, thawed: threading.Event) -> None:
        self._beneath, self._thawed = beneath, thawed
        self.peer, self.shares_memory = beneath.peer, beneath.shares_memory

    @property
    def bytes_received(self) -> int:  # type: ignore[override]
        return self._beneath.bytes_received

    def bind(self, name: str, region: memoryview) -> None:
        self._beneath.bind(name, region)

    def send(
        self, header: Mapping[str, Any], *, carry: str | None = None, payload: Sequence[Buffer] = (), memory: Sequence[SharedMemory] = ()
    ) -> None:
        self._thawed.wait()
        self._beneath.send(header, carry=carry, payload=payload, memory=memory)

    def close(self) -> None:
        with suppress(OSError):
            self._beneath.close()
