"""Answer another process that measures the way to this one: round trips, wall clock, bytes in both directions, its own findings.

A peer knows the job's token, as all processes of a job do, and speaks over the same hubs, handshake and TLS. It measures the way to a third
machine where it is asked to. `probe` is the side that asks.

``python -m offbeat.doctor.peer`` is a peer for the processes of this machine: it prints its address, and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from offbeat.doctor import probe
from offbeat.doctor.messages import TO_PEER, Visit
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.runtime.job.settings import take_token
from offbeat.transport.base import Address, Closed, Connection, Message, SharedMemory
from offbeat.transport.hub import SocketHub
from offbeat.types import Seconds

POLL_S: Final[Seconds] = 0.5
MEASURING_MAX: Final = 16
"""Most measurements of ways to third machines at a time."""


class Peer:
    """Answer all who ask.

    Args:
        hub: listens already.
        visit: what this machine says of itself.
        say: called with a line for each process that begins to measure.
    """

    def __init__(self, hub: SocketHub, visit: Visit, say: Callable[[str], object] = lambda line: None) -> None:
        self._hub, self._visit, self._say = hub, visit, say
        self._shared: dict[Connection, SharedMemory] = {}
        self._source = bytes(probe.SHARED_NBYTES)
        self._measuring = threading.Semaphore(MEASURING_MAX)

    def serve(self, goes_on: Callable[[], bool], also: Sequence[int] = ()) -> None:
        """Answer until ``goes_on`` returns False, which is asked twice a second, and once a descriptor of ``also`` can be read."""
        while goes_on():
            for connection, item in self._hub.poll(POLL_S, also):
                self._take(connection, item)

    def _take(self, connection: Connection, item: Message | Closed) -> None:
        if isinstance(item, Closed):
            self._forget(connection)
            return
        try:
            kind = TO_PEER.check(item.header, connection.peer, len(item.payload), len(item.memory))
            self._answer(connection, kind, item)
        except ProtocolError as error:
            self._say(f"{error}: its connection is closed")
            self._forget(connection)
            connection.close()

    def _answer(self, connection: Connection, kind: str, message: Message) -> None:
        header = message.header
        match kind:
            case "visit":
                self._say(f"{connection.peer} measures the way to this machine")
                connection.send({"kind": "welcome", **self._visit.to_plain()})
            case "ping":
                connection.send({"kind": "pong", "clock_s": time.time()})
            case "block":
                if len(message.memory) != 1 or message.memory[0].nbytes != probe.SHARED_NBYTES:
                    raise ProtocolError(f"{connection.peer} shares no block of {probe.SHARED_NBYTES} bytes")
                self._forget(connection)
                self._shared[connection] = message.memory[0]
                connection.send({"kind": "ready"})
            case "data":
                if (block := self._shared.get(connection)) is not None:
                    bytes(block.view)  # as a fold reads it
                connection.recycle(message.payload)
                connection.send({"kind": "took"})
            case "give":
                if (block := self._shared.get(connection)) is not None:
                    block.view[:] = self._source
                connection.send({"kind": "data"}, payload=[probe.ZEROS] if block is None else [], lent=True)
            case "measure":
                if not self._measuring.acquire(blocking=False):
                    raise ProtocolError(f"{connection.peer} asks for more than {MEASURING_MAX} measurements at a time")
                threading.Thread(target=self._measure, args=(connection, header), name="offbeat-measure", daemon=True).start()

    def _measure(self, connection: Connection, header: Mapping[str, Any]) -> None:
        """Measure the way to a third machine, and tell the result."""
        host, port = header["address"]
        try:
            with contextlib.closing(self._hub.another()) as hub:
                flow, _ = probe.measure(hub, Address("", (host, port), ""), header["seconds"])
            connection.send({"kind": "measured", **asdict(flow)})
        finally:
            self._measuring.release()

    def _forget(self, connection: Connection) -> None:
        if (block := self._shared.pop(connection, None)) is not None:
            block.close()


def main(arguments: Sequence[str] = ()) -> int:
    """Be a peer for the processes of this machine until standard input ends."""
    with contextlib.closing(SocketHub(take_token())) as hub:
        try:
            print(json.dumps(hub.listen()), flush=True)
        except (ConfigurationError, JobError) as error:
            print(error, file=sys.stderr)
            return 1
        # Nothing is ever written to it, so that only its end can be read.
        Peer(hub, Visit()).serve(lambda: not select.select([0], [], [], 0.0)[0], also=[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
