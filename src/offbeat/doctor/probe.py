"""Measure the way from this process to a `peer.Peer`: round trips, clocks, and bytes per second in both directions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Final

from offbeat.doctor.messages import FROM_PEER, Visit
from offbeat.doctor.readings import Flow
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.transport.base import Address, Closed, Hub, Message, SharedMemory
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
ZEROS: Final = memoryview(bytes(PIECE_NBYTES))


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

    def next(self, expected: str) -> Message:
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
        if kind != expected:
            raise ProtocolError(f"{self.connection.peer} sent {kind!r} (expected {expected!r})")
        return message


def measure(hub: Hub, address: Address, seconds: Seconds) -> tuple[Flow, Visit]:
    """Measure the way to a peer.

    Args:
        hub: of this process; nobody else polls it.
        address: where the peer listens.
        seconds: how long bytes are sent, half of it in each direction; 0: only round trips are made.

    Returns:
        What was measured, or why nothing was; and what the peer says of its machine.
    """
    visit = Visit()
    try:
        with contextlib.closing(_Asker(hub, address)) as asker:
            said = asker.ask("visit", "welcome").header
            visit = Visit(tuple(said["versions"]), tuple(said["findings"]))
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
    connection = asker.connection
    if not connection.shares_memory:
        there = _rate(asker, "took", lambda: connection.send({"kind": "data"}, payload=[ZEROS], lent=True), seconds / 2)
        return there, _rate(asker, "data", lambda: connection.send({"kind": "give"}), seconds / 2)
    with contextlib.closing(MemoryBlock.allocate(SHARED_NBYTES, "doctor")) as shared:
        asker.ask("block", "ready", memory=[shared])
        source = bytes(SHARED_NBYTES)

        def give() -> None:
            shared.view[:] = source
            connection.send({"kind": "data"})

        there = _rate(asker, "took", give, seconds / 2, shared)
        return there, _rate(asker, "data", lambda: connection.send({"kind": "give"}), seconds / 2, shared)


def _rate(asker: _Asker, answer: str, ask: Callable[[], None], seconds: Seconds, shared: SharedMemory | None = None) -> float:
    """Return the bytes per second of pieces that are asked for so long, one at least.

    Args:
        asker: this end.
        answer: the kind of the message that follows each question; with ``data`` a piece comes, which is taken as a fold takes it.
        ask: sends the question, or a piece.
        seconds: how long.
        shared: memory that both ends have mapped, which holds one piece; None: the bytes go with the messages.
    """
    nbytes = PIECE_NBYTES if shared is None else SHARED_NBYTES
    outstanding, taken = WINDOW if shared is None else 1, 0
    began = last = time.monotonic()
    for _ in range(outstanding):
        ask()
    while outstanding:
        asker.connection.recycle(asker.next(answer).payload)
        if shared is not None and answer == "data":
            bytes(shared.view)
        taken, last = taken + 1, time.monotonic()
        if last - began < seconds:
            ask()
        else:
            outstanding -= 1
    return taken * nbytes / max(last - began, 1e-9)
