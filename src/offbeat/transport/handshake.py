"""Authenticate both ends of a connection: each proves that it knows the job's token, without sending the token.

The server (the end that accepted) opens with a nonce. The client answers with its own nonce and HMAC-SHA256(token, "client" + both nonces);
the server replies with HMAC-SHA256(token, "server" + both nonces). The two words prevent an answer from being sent back to its author. The
server proves itself, too, because a client will send it gradients and map memory that it hands over.
"""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod

from offbeat.errors import ProtocolError, RefusedError
from offbeat.transport.wire import Header

NONCE_NBYTES = 32
WRONG_TOKEN = "the token shown is not this job's; give every process of a job the same token"


def proof(token: str, side: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the HMAC of both nonces, which only an end that knows the token can compute."""
    return hmac.digest(token.encode(), side.encode() + server_nonce + client_nonce, "sha256")


class Handshake(ABC):
    """Run one end's side of the handshake. It has succeeded when `open` is True."""

    def __init__(self, token: str) -> None:
        self.open = False
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_NBYTES)

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

    def answer(self, header: Header) -> Header:
        client_nonce = _bytes(header, "_nonce", NONCE_NBYTES)
        expected = proof(self._token, "client", self._nonce, client_nonce)
        if not hmac.compare_digest(_bytes(header, "_proof", len(expected)), expected):
            raise RefusedError(WRONG_TOKEN)
        self.open = True
        return {"_proof": proof(self._token, "server", self._nonce, client_nonce)}


class ClientHandshake(Handshake):
    """The end that made the connection."""

    def __init__(self, token: str) -> None:
        super().__init__(token)
        self._server_nonce: bytes | None = None

    def opening(self) -> None:
        return None

    def answer(self, header: Header) -> Header | None:
        if self._server_nonce is None:
            self._server_nonce = _bytes(header, "_nonce", NONCE_NBYTES)
            return {"_nonce": self._nonce, "_proof": proof(self._token, "client", self._server_nonce, self._nonce)}
        expected = proof(self._token, "server", self._server_nonce, self._nonce)
        if not hmac.compare_digest(_bytes(header, "_proof", len(expected)), expected):
            raise RefusedError("the server does not know this job's token")
        self.open = True
        return None


def _bytes(header: Header, key: str, nbytes: int) -> bytes:
    value = header.get(key)
    if not isinstance(value, bytes) or len(value) != nbytes:
        raise ProtocolError(f"the peer sent something before the handshake (expected {key}, {nbytes} bytes)")
    return value
