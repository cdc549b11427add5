"""Connections as receivers, on real sockets: of a peer without the token, and of one whose parts of regions are sent ahead."""

from __future__ import annotations

import socket
from typing import Any

from tests import malformed
from tests.fuzz.receiver import Finding, Outcome, Receiver, checked

from offbeat.runtime.parameter_server.encoding import EncodedParameters, ParameterChanges, ShardEncoding
from offbeat.tensors.halves import Halves
from offbeat.tensors.layout import Layout, Span
from offbeat.tensors.wire_formats import Encoded
from offbeat.transport import wire
from offbeat.transport.base import Message
from offbeat.transport.buffers import Buffers
from offbeat.transport.handshake import ClientHandshake, Handshake, ServerHandshake
from offbeat.transport.stream import StreamConnection

NBYTES = malformed.LAYOUT["nbytes"]


class Open(Handshake):
    """A handshake that is done."""

    def __init__(self) -> None:
        super().__init__("token")
        self.open = True

    def opening(self) -> None:
        return None

    def answer(self, header: wire.Header) -> wire.Header | None:
        raise AssertionError("the handshake is done")


class Carried(Receiver):
    """A server's end of a worker's connection: regions, and parts sent ahead, which are decoded as they come."""

    name = "carried"

    def gate(self) -> Handshake:
        return Open()

    def begin(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.peer = socket.create_connection(listener.getsockname())
            accepted, _ = listener.accept()
        accepted.setblocking(False)
        self.peer.setblocking(False)
        self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.connection = StreamConnection(accepted, "a worker", self.gate(), lambda connection: None, Buffers())
        if self.connection.gate.open:
            self.connection._reader.admit()
            self.connection.is_open = self.connection.begun = True
            self.bind()

    def bind(self) -> None:
        layout, span = Layout.from_wire(malformed.LAYOUT), Span(0, NBYTES)
        wire_format: Encoded = self.draw.choice(["int8", "bf16"])
        halves = Halves(memoryview(bytearray(NBYTES)))
        parameters: Any = (ParameterChanges if wire_format == "int8" else EncodedParameters)(layout, span, halves)
        self.kept = ShardEncoding(self.connection, layout, span, wire_format, memoryview(bytearray(NBYTES)), parameters)

    def feed(self, data: bytes) -> Outcome:
        """Send the bytes, and let the connection read: the frames are cut out by the connection's own reader."""
        if not self._made or self._taken >= self.lasts:
            self.close()
            self._made = True
            self.begin()
        self._taken += 1
        sent, outcome = 0, Outcome.TAKEN
        while outcome is Outcome.TAKEN and sent < len(data):
            sent += self.peer.send(data[sent:])
            outcome = self._read()
        if outcome is Outcome.REFUSED or (outcome is Outcome.UNFINISHED and self.draw.random() < 0.7):
            self.close()
        return outcome

    def receive(self, message: Message) -> Outcome:
        raise AssertionError("the connection reads by itself")

    def _read(self) -> Outcome:
        while True:
            before = self.connection.bytes_received
            messages, closed = self.connection.receive()
            if closed is not None:
                checked(closed.reason)
                return Outcome.REFUSED
            if messages and not self.connection.gate.open:
                raise Finding(f"messages of a peer without the token: {messages}")
            if self.connection.bytes_received == before:
                break
        return Outcome.UNFINISHED if self.connection._reader.unfinished else Outcome.TAKEN

    def end(self) -> None:
        self.connection.release()
        self.peer.close()


class Stranger(Carried):
    """Either end of a connection, attacked by a peer that does not know the token."""

    name = "handshake"

    def gate(self) -> Handshake:
        gate: Handshake = self.draw.choice([ServerHandshake, ClientHandshake])("token")
        return gate

    def _read(self) -> Outcome:
        outcome = super()._read()
        if self.connection.gate.open:
            raise Finding("a peer without the token was let in")
        return outcome
