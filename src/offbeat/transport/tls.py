"""Encrypt connections between machines with TLS 1.3, by certificates that each process makes for itself or by the user's own.

A process's own certificate proves nothing by itself. The handshake (`handshake`) ties it to the job: both proofs of the token cover the
certificate that the listening end shows, so whoever answers in its place with another certificate is refused. Connections within a machine
stay in clear: local sockets always, loopback addresses unless `Tls.everywhere` is set.

OpenSSL's objects must not be used by two threads at once, and on a connection one thread reads while another sends: `TlsSocket` takes a
lock.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offbeat.errors import ConfigurationError, RefusedError
from offbeat.transport.addresses import is_loopback
from offbeat.transport.base import Buffer

VARIABLE = "OFFBEAT_TLS"
CLEAR = "the peer speaks clear text, and this job requires TLS: give every machine the same --tls options"
_LIFETIME = datetime.timedelta(days=3650)


class AwaitsPeerError(Exception):
    """Nothing can be sent before the peer's part of the TLS handshake has come."""


@dataclass(frozen=True, kw_only=True)
class Tls:
    """How the connections of a job are encrypted.

    >>> Tls.of({"OFFBEAT_TLS": Tls(everywhere=True).to_text()}) == Tls(everywhere=True)
    True
    >>> Tls.of({}) is None
    True
    """

    certificate: str = ""
    """The file with this machine's certificate chain, PEM; "": each process makes a certificate for itself."""
    key: str = ""
    """The file with its key; "": in the file of the certificate."""
    authority: str = ""
    """The file with the certificates of the authority that has signed the certificates of all machines."""
    everywhere: bool = False
    """True: encrypt connections over loopback, too."""

    def to_text(self) -> str:
        """Return the value of OFFBEAT_TLS for child processes."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Tls | None:
        """Return what the launcher has written to OFFBEAT_TLS; None: connections stay in clear."""
        text = environment.get(VARIABLE)
        return cls(**json.loads(text)) if text else None


class Identity:
    """The certificate of one process, and what it asks of the certificates of others.

    Args:
        tls: the job's settings.

    Raises:
        ConfigurationError: a file cannot be read, or certificate and key do not belong together.
    """

    def __init__(self, tls: Tls) -> None:
        self.tls = tls
        self._server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if tls.certificate:
            self.fingerprint = self._load_files(tls)
        else:
            self.fingerprint = self._make()
        for context in (self._server, self._client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # machines are reached by address
            context.verify_mode = ssl.CERT_REQUIRED if tls.certificate else ssl.CERT_NONE
        self._server.num_tickets = 0

    def applies_to(self, sock: socket.socket) -> bool:
        """Return True if a connected TCP socket must be encrypted."""
        with contextlib.suppress(OSError, ValueError):
            return self.tls.everywhere or not is_loopback(sock.getpeername()[0])
        return True

    def wrap(self, sock: socket.socket, *, server: bool) -> TlsSocket:
        """Return the encrypted socket; its handshake goes on as the socket is read."""
        context = self._server if server else self._client
        inner = context.wrap_socket(sock, server_side=server, do_handshake_on_connect=False, suppress_ragged_eofs=True)
        return TlsSocket(inner, self.fingerprint if server else None, self.tls)

    def _load_files(self, tls: Tls) -> bytes:
        try:
            for context in (self._server, self._client):
                context.load_cert_chain(tls.certificate, tls.key or None)
                context.load_verify_locations(tls.authority)
            text = Path(tls.certificate).read_text()
            first = text[text.index(ssl.PEM_HEADER) : text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)]
            return _fingerprint(ssl.PEM_cert_to_DER_cert(first))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"--tls-cert {tls.certificate}, --tls-key {tls.key}, --tls-ca {tls.authority}: cannot be used ({error}); name PEM files: "
                "a certificate, its key, and the authority that has signed the certificates of all machines"
            ) from None

    def _make(self) -> bytes:
        """Make a key and a certificate, signed by itself. Returns the fingerprint."""
        from cryptography import x509  # only jobs on several machines need it
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "offbeat")])
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _LIFETIME)
            .not_valid_after(now + _LIFETIME)
            .sign(key, hashes.SHA256())
        )
        pem = certificate.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with tempfile.NamedTemporaryFile(prefix="offbeat-", suffix=".pem") as file:  # mode 600; Python's ssl reads files only
            file.write(pem)
            file.flush()
            self._server.load_cert_chain(file.name)
        return _fingerprint(certificate.public_bytes(serialization.Encoding.DER))


class TlsSocket:
    """A non-blocking TLS socket with the calls of `socket.socket` that a connection uses.

    Args:
        inner: its handshake is not done.
        fingerprint: of the listening end's certificate, if this is the listening end.
        tls: the job's settings, for messages.
    """

    def __init__(self, inner: ssl.SSLSocket, fingerprint: bytes | None, tls: Tls) -> None:
        self._inner, self._tls = inner, tls
        self._lock = threading.Lock()
        self._server = fingerprint is not None
        self._fingerprint = fingerprint
        self._established = False
        self._failure: str | None = None
        """Why the handshake has failed. OpenSSL says it once only."""
        self.family = inner.family
        if not self._server:
            with contextlib.suppress(AwaitsPeerError, BlockingIOError, RefusedError):
                self._advance()  # sends the first message; a failure is told when the socket is read

    def binding(self) -> bytes:
        """Return the fingerprint of the listening end's certificate, as this end knows it."""
        if self._fingerprint is None:
            self._fingerprint = _fingerprint(self._inner.getpeercert(binary_form=True) or b"")
        return self._fingerprint

    def establish(self) -> None:
        """Go on with the TLS handshake. Raises `AwaitsPeerError` until it is done."""
        with self._lock:
            self._advance()

    def pending(self) -> bool:
        """Return True if bytes were decrypted that nobody has read; no event will come for them."""
        with self._lock:
            return self._established and self._inner.pending() > 0

    def recv_into(self, space: memoryview) -> int:
        with self._lock:
            self._advance()
            try:
                return self._inner.recv_into(space)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None
            except ssl.SSLError as error:
                raise RefusedError(self._why(error)) from None

    def recv(self, nbytes: int) -> bytes:
        """Return bytes as they have come, encrypted: only for emptying the socket before it is closed."""
        return socket.socket.recv(self._inner, nbytes)

    def send(self, data: Buffer) -> int:
        with self._lock:
            try:
                self._advance()
                return self._inner.send(data)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None
            except (RefusedError, ssl.SSLError) as error:
                raise ConnectionError(str(error)) from None  # reading says why

    def sendmsg(self, views: Sequence[Buffer]) -> int:
        return self.send(views[0])

    def refuse_in_clear(self, frame: bytes) -> None:
        """Send a last message to a peer that does not speak TLS."""
        with contextlib.suppress(OSError):
            socket.socket.send(self._inner, frame)

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self._inner, how)  # SSLSocket's would forget the TLS state, which another thread may be using

    def close(self) -> None:
        self._inner.close()

    def detach(self) -> int:
        return self._inner.detach()

    def fileno(self) -> int:
        return self._inner.fileno()

    def getpeername(self) -> tuple[str, int]:
        host, port = self._inner.getpeername()[:2]
        return str(host), int(port)

    def getsockname(self) -> tuple[str, int]:
        host, port = self._inner.getsockname()[:2]
        return host, port

    def _advance(self) -> None:
        """Go on with the handshake as far as the peer's messages allow."""
        if self._established:
            return
        if self._failure is not None:
            raise RefusedError(self._failure)
        try:
            self._inner.do_handshake()
        except ssl.SSLWantReadError:
            raise AwaitsPeerError from None
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            self._failure = self._why(error)
            raise RefusedError(self._failure) from None
        self._established = True

    def _why(self, error: ssl.SSLError) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"the peer's certificate is not one that --tls-ca {self._tls.authority} stands for: {error.verify_message}"
        reason = error.reason or str(error)
        if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
            ours = f"--tls-cert {self._tls.certificate}" if self._tls.certificate else "the certificate that this process made for itself"
            return f"the peer does not take {ours} ({reason}): give every machine --tls-cert, --tls-key and --tls-ca of the same authority"
        if "WRONG_VERSION" in reason or "HTTP_REQUEST" in reason or "UNEXPECTED_MESSAGE" in reason or "RECORD" in reason:
            return CLEAR
        if isinstance(error, ssl.SSLEOFError) or "EOF" in reason:
            return "the peer has ended the connection in place of answering in TLS: give every machine the same --tls options"
        return f"TLS with the peer failed: {reason}"


def _fingerprint(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()
