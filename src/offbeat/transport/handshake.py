"""Authenticate both ends of a connection: each proves that it knows the job's token, without sending the token.

The server (the end that accepted) opens with a nonce. The client answers with its own nonce and HMAC-SHA256(token, "client" + both nonces);
the server replies with HMAC-SHA256(token, "server" + both nonces). The two words prevent an answer from being sent back to its author.
The nonces make a recorded proof worthless on another connection. Both proofs also cover the **channel** as each end knows it (`channel`):
the kind of transport; of a local socket its name and the users at both ends; with TLS the fingerprint of the server's certificate. So a
process in between cannot answer at one channel and pass the proofs on over another. The server proves itself, too, because a client will
send it gradients and map memory that it hands over.

The proofs also cover what the ends say of their **stream** (`Stream`): which one the client goes on with over this socket, and how many of
its bytes each end has.
"""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import msgpack  # type: ignore[import-untyped]

from offbeat.errors import ProtocolError, RefusedError
from offbeat.transport.wire import Header

NONCE_NBYTES = 32
STREAM_NBYTES = 16
TEXT_LENGTH = 200
WRONG_TOKEN = (
    "the token shown is not this job's; give every process of a job the same token. "
    "Or somebody in between has answered this connection and passed the handshake on over another one"
)
CLEAR_TEXT = "_clear"
"""In the message of a client that does not use TLS and has heard nothing: a server that requires TLS waits for the client to begin."""
GONE = "this process has no such stream: it was closed here, or belonged to an earlier process"


class Stream(NamedTuple):
    """What an end says of the stream of bytes that it goes on with over a new socket."""

    name: bytes
    """Chosen by the client at random; b"" at the server, and of a client whose stream does not outlive its socket."""
    begun: bool
    """True if the client has gone through a handshake for this stream before, so that the server must know it."""
    received: int
    """How many bytes of the other end's stream this end has."""
    process: str
    """This end's process, see `tcp.process_identity`."""
    local: str
    """The name of the local socket at which this end listens; "": it does not."""


NO_STREAM = Stream(b"", False, 0, "", "")
Known: TypeAlias = Callable[[bytes], int | None]
"""Returns how many bytes of a client's stream this process has; None: it does not know this stream."""


def channel(kind: str, *parts: object) -> bytes:
    """Return what both ends of a connection know of its transport, as bytes that the proofs cover.

    >>> channel("local", "offbeat-3f", 1000, 1000) == channel("tcp")
    False
    """
    packed: bytes = msgpack.packb([kind, *parts])
    return packed


class Handshake(ABC):
    """Run one end's side of the handshake. It has succeeded when `open` is True.

    Args:
        token: the job's.
        binding: returns the `channel`, as this end knows it, or as it may be to the client.
        stream: what this end says of its stream.
    """

    def __init__(self, token: str, binding: Callable[[], bytes] | None = None, stream: Stream = NO_STREAM) -> None:
        self.open = self.continues = False
        """Whether it has succeeded; whether the client goes on with a stream that this process has from an earlier socket."""
        self.stream = stream
        self.peer: Stream = stream._replace(process="")
        """What the other end has said; known once `open` is True."""
        self._token, self._binding = token, binding
        self._nonce = secrets.token_bytes(NONCE_NBYTES)

    def _proof(self, side: str, server_nonce: bytes, client_nonce: bytes, stream: Stream) -> bytes:
        about = b"" if self._binding is None else self._binding()
        covered: bytes = msgpack.packb([side, server_nonce, client_nonce, about, list(stream)])
        return hmac.digest(self._token.encode(), covered, "sha256")

    def _shown(self, header: Header, side: str, server_nonce: bytes, client_nonce: bytes) -> Stream | None:
        """Return what the other end says of its stream; None if it does not know the token."""
        stream = _stream(header)
        expected = self._proof(side, server_nonce, client_nonce, stream)
        return stream if hmac.compare_digest(_bytes(header, "_proof", len(expected)), expected) else None

    @abstractmethod
    def opening(self) -> Header | None:
        """Return the first message of this end; None if the other end sends first."""

    @abstractmethod
    def answer(self, header: Header) -> Header | None:
        """Take a message of the other end, and return the answer; None: nothing is left to send.

        Raises:
            ProtocolError: it is not the expected message.
            RefusedError: the other end does not know the token, or goes on with a stream that this process does not know.
        """


class ServerHandshake(Handshake):
    """The end that accepted the connection.

    ``known`` is asked for streams of earlier sockets; ``nearer`` is the channel to a client that knows more of it than others.
    """

    def __init__(
        self,
        token: str,
        binding: Callable[[], bytes] | None = None,
        stream: Stream = NO_STREAM,
        known: Known = lambda name: None,
        nearer: bytes | None = None,
    ) -> None:
        super().__init__(token, binding, stream)
        self._known, self._nearer = known, nearer

    def opening(self) -> Header:
        return {"_nonce": self._nonce}

    def answer(self, header: Header) -> Header | None:
        if CLEAR_TEXT in header:
            return None
        client_nonce = _bytes(header, "_nonce", NONCE_NBYTES)
        peer = self._shown(header, "client", self._nonce, client_nonce)
        if peer is None and (nearer := self._nearer) is not None:
            self._binding = lambda: nearer
            peer = self._shown(header, "client", self._nonce, client_nonce)
        if peer is None:
            raise RefusedError(WRONG_TOKEN)
        received = self._known(peer.name) if peer.name else None
        if received is None and peer.begun:
            raise RefusedError(GONE)
        self.peer, self.stream, self.continues = peer, self.stream._replace(received=received or 0), received is not None
        self.open = True
        return {"_proof": self._proof("server", self._nonce, client_nonce, self.stream), "_stream": list(self.stream)}


class ClientHandshake(Handshake):
    """The end that made the connection."""

    def __init__(self, token: str, binding: Callable[[], bytes] | None = None, stream: Stream = NO_STREAM) -> None:
        super().__init__(token, binding, stream)
        self._server_nonce: bytes | None = None

    def opening(self) -> None:
        return None

    def answer(self, header: Header) -> Header | None:
        if self._server_nonce is None:
            self._server_nonce = _bytes(header, "_nonce", NONCE_NBYTES)
            shown = self._proof("client", self._server_nonce, self._nonce, self.stream)
            return {"_nonce": self._nonce, "_proof": shown, "_stream": list(self.stream)}
        peer = self._shown(header, "server", self._server_nonce, self._nonce)
        if peer is None:
            raise RefusedError("the server does not know this job's token")
        self.peer, self.open = peer, True
        return None


def _stream(header: Header) -> Stream:
    match header.get("_stream"):
        case [bytes(name), bool(begun), int(received), str(process), str(local)] if (
            len(name) in (0, STREAM_NBYTES)
            and type(received) is int
            and 0 <= received < 1 << 63
            and len(process) <= TEXT_LENGTH
            and len(local) <= TEXT_LENGTH
        ):
            return Stream(name, begun, received, process, local)
    raise _unexpected("_stream, of 5 fields")


def _bytes(header: Header, key: str, nbytes: int) -> bytes:
    value: Any = header.get(key)
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise _unexpected(f"{key}, {nbytes} bytes")
    return value


def _unexpected(expected: str) -> ProtocolError:
    return ProtocolError(f"the peer sent something before the handshake (expected {expected})")
