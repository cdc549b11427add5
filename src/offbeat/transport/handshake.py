"""Who is heard: both ends prove that they know the job's token before anything else is said, without sending the token.

The server (the end that accepted) opens with a nonce. The client answers with its own nonce and HMAC-SHA256(token, "client" + both nonces);
the server replies with HMAC-SHA256(token, "server" + both nonces). The two words keep an answer from being played back to its author.
The server proves itself as well because a client is about to send it gradients and to map memory that it hands over.
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
    """What only somebody who knows the token can say about these nonces."""
    return hmac.digest(token.encode(), side.encode() + server_nonce + client_nonce, "sha256")


class Gate(ABC):
    """One end's side of the exchange. It is over when `open` is true."""

    def __init__(self, token: str) -> None:
        self.open = False
        self._token = token
        self._nonce = secrets.token_bytes(NONCE_NBYTES)

    @abstractmethod
    def opening(self) -> Header | None:
        """What this end says first, unasked."""

    @abstractmethod
    def answer(self, header: Header) -> Header | None:
        """Take what the other end said and give the answer.

        Raises:
            ProtocolError: the other end says something else.
            RefusedError: it does not know the token.
        """


class ServerGate(Gate):
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


class ClientGate(Gate):
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
        raise ProtocolError(f"the peer must show {key} ({nbytes} bytes) before anything else")
    return value
