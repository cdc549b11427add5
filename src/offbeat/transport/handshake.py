"""Authenticate both ends of a connection: each proves that it knows the job's token, without sending the token.

The server (the end that accepted) opens with a nonce. The client answers with its own nonce and HMAC-SHA256(token, "client" + both nonces);
the server replies with HMAC-SHA256(token, "server" + both nonces). The two words prevent an answer from being sent back to its author.
The nonces make a recorded proof worthless on another connection. With TLS both proofs also cover the fingerprint of the server's
certificate, as each end knows it: somebody in between, with a certificate of their own, cannot pass the proofs on. The server proves
itself, too, because a client will send it gradients and map memory that it hands over.
"""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable

from offbeat.errors import ProtocolError, RefusedError
from offbeat.transport.wire import Header

NONCE_NBYTES = 32
WRONG_TOKEN = "the token shown is not this job's; give every process of a job the same token"
WRONG_BINDING = WRONG_TOKEN + ". Or somebody in between has answered this connection with a certificate of their own"
CLEAR_TEXT = "_clear"
"""In the message of a client that does not use TLS and has heard nothing: a server that requires TLS waits for the client to begin."""


def proof(token: str, side: str, server_nonce: bytes, client_nonce: bytes, binding: bytes = b"") -> bytes:
    """Return the HMAC of both nonces and of the certificate, which only an end that knows the token can compute."""
    return hmac.digest(token.encode(), side.encode() + server_nonce + client_nonce + binding, "sha256")


class Handshake(ABC):
    """Run one end's side of the handshake. It has succeeded when `open` is True.

    Args:
        token: the job's.
        binding: returns the fingerprint of the server's certificate, as this end knows it; None: the connection is not encrypted.
    """

    def __init__(self, token: str, binding: Callable[[], bytes] | None = None) -> None:
        self.open = False
        self._token, self._binding = token, binding
        self._nonce = secrets.token_bytes(NONCE_NBYTES)

    def _proof(self, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
        return proof(self._token, side, server_nonce, client_nonce, b"" if self._binding is None else self._binding())

    @abstractmethod
    def opening(self) -> Header | None:
        """Return the first message of this end; None if the other end sends first."""

    @abstractmethod
    def answer(self, header: Header) -> Header | None:
        """Take a message of the other end, and return the answer; None: nothing is left to send.

        Raises:
            ProtocolError: it is not the expected message.
            RefusedError: the other end does not know the token.
        """


class ServerHandshake(Handshake):
    """The end that accepted the connection."""

    def opening(self) -> Header:
        return {"_nonce": self._nonce}

    def answer(self, header: Header) -> Header | None:
        if CLEAR_TEXT in header:
            return None
        client_nonce = _bytes(header, "_nonce", NONCE_NBYTES)
        expected = self._proof("client", self._nonce, client_nonce)
        if not hmac.compare_digest(_bytes(header, "_proof", len(expected)), expected):
            raise RefusedError(WRONG_TOKEN if self._binding is None else WRONG_BINDING)
        self.open = True
        return {"_proof": self._proof("server", self._nonce, client_nonce)}


class ClientHandshake(Handshake):
    """The end that made the connection."""

    def __init__(self, token: str, binding: Callable[[], bytes] | None = None) -> None:
        super().__init__(token, binding)
        self._server_nonce: bytes | None = None

    def opening(self) -> None:
        return None

    def answer(self, header: Header) -> Header | None:
        if self._server_nonce is None:
            self._server_nonce = _bytes(header, "_nonce", NONCE_NBYTES)
            return {"_nonce": self._nonce, "_proof": self._proof("client", self._server_nonce, self._nonce)}
        expected = self._proof("server", self._server_nonce, self._nonce)
        if not hmac.compare_digest(_bytes(header, "_proof", len(expected)), expected):
            raise RefusedError("the server does not know this job's token")
        self.open = True
        return None


def _bytes(header: Header, key: str, nbytes: int) -> bytes:
    value = header.get(key)
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise ProtocolError(f"the peer sent something before the handshake (expected {key}, {nbytes} bytes)")
    return value
