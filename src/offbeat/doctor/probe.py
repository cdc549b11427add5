"""Measure the way from this process to a `peer.Peer`: round trips, clocks, and bytes per second in both directions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from offbeat.doctor.messages import FROM_PEER, Visit
from offbeat.doctor.readings import Flow
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.transport.base import Address, Closed, Connection, Hub, Message, SharedMemory
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.tcp import CONNECT_TIMEOUT_S
from offbeat.types import Seconds

PINGS: Final = 20
PIECE_NBYTES: Final = 1 << 20
"""Sent in one message between machines."""
WINDOW: Final = 16
"""Messages on the way at a time, each of `PIECE_NBYTES`."""
SHARED_NBYTES: Final = 16 << 20
"""Written to shared memory, and read from it, for one message."""
SILENT_S: Final[Seconds] = 10.0
"""Seconds without an answer after which the other end counts as silent."""
_ZEROS: Final = memoryview(bytes(PIECE_NBYTES))


class Sender:
    """Send pieces for some seconds, and count those that the other end has taken.

    Args:
        connection: to the other end.
        seconds: how long; at least one piece is sent.
        shared: memory that both ends have mapped; None: the bytes go with the messages.
    """

    def __init__(self, connection: Connection, seconds: Seconds, shared: SharedMemory | None) -> None:
        self._connection, self._seconds, self._shared = connection, seconds, shared
        self._began = self._last = 0.0
        self._source = memoryview(bytes(shared.nbytes)) if shared is not None else _ZEROS
        self.outstanding = self._taken = 0
        """Pieces on the way."""

    def begin(self, now: Seconds) -> None:
        """Send the first pieces."""
        self._began = self._last = now
        for _ in range(WINDOW if self._shared is None else 1):
            self._send()

    def took(self, now: Seconds) -> bool:
        """Note that the other end has taken a piece. Returns True once all have been taken and the time is over."""
        self.outstanding -= 1
        self._taken += 1
        self._last = now
        if now - self._began < self._seconds:
            self._send()
        return self.outstanding == 0

    def rate(self) -> float:
        """Return bytes per second."""
        return self._taken * len(self._source) / max(self._last - self._began, 1e-9)

    def _send(self) -> None:
        self.outstanding += 1
        if self._shared is None:
            self._connection.send({"kind": "data"}, payload=[self._source], lent=True)
        else:
            self._shared.view[:] = self._source
            self._connection.send({"kind": "data"})


def take(connection: Connection, message: Message, shared: SharedMemory | None) -> int:
    """Take a piece, and say so. Returns its number of bytes. Shared memory is read, as a fold reads it."""
    nbytes = len(message.payload)
    if shared is not None:
        nbytes = len(bytes(shared.view))
    connection.recycle(message.payload)
    connection.send({"kind": "took"})
    return nbytes


class _Asker:
    """One end of a measurement: send, and wait for the answer.

    Raises:
        JobError: nobody listens at the address.
    """

    def __init__(self, hub: Hub, address: Address, patience_s: Seconds = SILENT_S) -> None:
        self._hub, self._patience_s = hub, patience_s
        self.connection = hub.connect(address)
        self._waiting: list[Message] = []

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def ask(self, kind: str, expected: str, memory: Sequence[SharedMemory] = (), **fields: object) -> Message:
        """Send a message and return the answer."""
        self.connection.send({"kind": kind, **fields}, memory=memory)
        return self.next(expected)

    def next(self, *expected: str) -> Message:
        """Return the next message. Raises `JobError` if there is none, or the other end has refused this one."""
        while not self._waiting:
            arrived = self._hub.poll(self._patience_s)
            for _, item in arrived:
                if isinstance(item, Closed):
                    raise JobError(item.reason)
                self._waiting.append(item)
            if not arrived:
                raise JobError(f"no answer of {self.connection.peer} within {self._patience_s:g} s")
        message = self._waiting.pop(0)
        kind = FROM_PEER.check(message.header, self.connection.peer, len(message.payload), len(message.memory))
        if kind not in expected:
            raise ProtocolError(f"{self.connection.peer} sent {kind!r} (expected {' or '.join(expected)})")
        return message


def measure(hub: Hub, address: Address, seconds: Seconds) -> tuple[Flow, Visit | None]:
    """Measure the way to a peer.

    Args:
        hub: of this process; nobody else polls it.
        address: where the peer listens.
        seconds: how long bytes are sent, half of it in each direction; 0: only round trips are made.

    Returns:
        What was measured, or why nothing was; and what the peer says of its machine.
    """
    visit = None
    try:
        with contextlib.closing(_Asker(hub, address)) as asker:
            said = asker.ask("visit", "welcome").header
            visit = Visit(said["name"], tuple(said["versions"]), tuple(said["findings"]))
            trip_s, ahead_s = min(_ping(asker) for _ in range(PINGS))
            there, back = _throughput(asker, seconds) if seconds else (0.0, 0.0)
            flow = Flow(
                way="shared memory" if asker.connection.shares_memory else "TCP",
                there_bytes_per_s=there,
                back_bytes_per_s=back,
                round_trip_s=trip_s,
                clock_s=ahead_s,
                clock_error_s=trip_s / 2,
                interface=asker.connection.interface,
            )
    except (ConfigurationError, JobError, ProtocolError) as error:
        flow = Flow(failure=str(error))
    return flow, visit


def ask_to_measure(hub: Hub, address: Address, target: tuple[str, int], seconds: Seconds) -> Flow:
    """Return what the peer at ``address`` measures of the way from there to ``target``."""
    try:
        with contextlib.closing(_Asker(hub, address, SILENT_S + CONNECT_TIMEOUT_S + seconds)) as asker:
            said = asker.ask("measure", "measured", address=list(target), seconds=seconds).header
            return Flow(**{name: said[name] for name in Flow.__dataclass_fields__})
    except (ConfigurationError, JobError, ProtocolError) as error:
        return Flow(failure=str(error))


def _ping(asker: _Asker) -> tuple[Seconds, Seconds]:
    """Return the seconds of a round trip, and how far the other end's wall clock is ahead of this one's, if both ways take as long."""
    began, wall = time.monotonic(), time.time()
    clock_s = asker.ask("ping", "pong").header["clock_s"]
    trip_s = time.monotonic() - began
    return trip_s, clock_s - (wall + trip_s / 2)


def _throughput(asker: _Asker, seconds: Seconds) -> tuple[float, float]:
    """Return the bytes per second to the other end and back."""
    with contextlib.ExitStack() as stack:
        shared = None
        if asker.connection.shares_memory:
            shared = stack.enter_context(contextlib.closing(MemoryBlock.allocate(SHARED_NBYTES, "doctor")))
            asker.ask("block", "ready", memory=[shared])
        sender = Sender(asker.connection, seconds / 2, shared)
        sender.begin(time.monotonic())
        asker.next("took")
        while not sender.took(time.monotonic()):
            asker.next("took")
        began = time.monotonic()
        message = asker.ask("back", "data", seconds=seconds / 2)
        nbytes, last = 0, began
        while message.header["kind"] == "data":
            nbytes += take(asker.connection, message, shared)
            last = time.monotonic()
            message = asker.next("data", "sent")
        return sender.rate(), nbytes / max(last - began, 1e-9)
