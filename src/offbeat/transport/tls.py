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
PLAIN_NBYTES = 256 << 10
"""Most bytes that are encrypted at once."""
JOINED_NBYTES = 16 << 10
"""Most bytes of small pieces that are joined to one record."""
RAW_NBYTES = 256 << 10
STRANGE_READ_NBYTES = 4 << 10
"""Most raw bytes that are read at once, of a peer that has proved the token and of another."""
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
        return TlsSocket(sock, self._server if server else self._client, self.fingerprint if server else None, self.tls)

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

    OpenSSL sees only the bytes that were read for it. So one call does a bounded amount of work, whatever the peer sends: records without
    content, such as changes of keys, are read on and on by an OpenSSL that reads from the socket itself.

    Args:
        sock: connected; belongs to this object.
        context: of this end.
        fingerprint: of the listening end's certificate, if this is the listening end.
        tls: the job's settings, for messages.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, fingerprint: bytes | None, tls: Tls) -> None:
        self._sock, self._tls = sock, tls
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._server = fingerprint is not None
        self._object = context.wrap_bio(self._in, self._out, server_side=self._server)
        self._lock = threading.Lock()
        self._fingerprint = fingerprint
        self._established = False
        self._failure: str | None = None
        """Why the handshake has failed. OpenSSL says it once only."""
        self._unsent = memoryview(b"")
        """What is encrypted and the kernel has not taken yet."""
        self._reads_left = 1
        """How often the socket may still be read in this turn."""
        self.strange_nbytes: int | None = 0
        """How many raw bytes have come while the peer has not proved the token; None: it has."""
        self.family = sock.family
        if not self._server:
            with contextlib.suppress(AwaitsPeerError, OSError, RefusedError):
                self._advance()  # sends the first message; a failure is told when the socket is read

    def binding(self) -> bytes:
        """Return the fingerprint of the listening end's certificate, as this end knows it."""
        if self._fingerprint is None:
            self._fingerprint = _fingerprint(self._object.getpeercert(binary_form=True) or b"")
        return self._fingerprint

    def establish(self) -> None:
        """Go on with the TLS handshake. Raises `AwaitsPeerError` until it is done."""
        with self._lock:
            while not self._established:
                try:
                    self._advance()
                except AwaitsPeerError:
                    if not self._fill():
                        raise

    def begin_turn(self, reads: int) -> None:
        """Let the socket be read so many times before `recv_into` says that there is nothing."""
        self._reads_left = 1 if self.strange_nbytes is not None else reads

    def pending(self) -> bool:
        """Return True if bytes have come that nobody has read; no event will come for them."""
        with self._lock:
            return self._established and (self._object.pending() > 0 or self._in.pending > 0)

    def recv_into(self, space: memoryview) -> int:
        with self._lock:
            self._advance()
            while True:
                try:
                    return self._object.read(len(space), space)  # type: ignore[return-value]
                except ssl.SSLWantReadError:
                    self._push()  # an answer to a change of keys
                    if not self._fill():
                        raise BlockingIOError from None
                except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                    return 0
                except ssl.SSLError as error:
                    raise RefusedError(self._why(error)) from None

    def recv(self, nbytes: int) -> bytes:
        """Return bytes as they have come, encrypted: only for emptying the socket before it is closed."""
        return self._sock.recv(nbytes)

    def send(self, data: Buffer) -> int:
        """Encrypt bytes, and offer them to the kernel; what it does not take is left to `flush`."""
        with self._lock:
            if not self._established:
                raise AwaitsPeerError
            if not self._push():
                raise BlockingIOError
            try:
                nbytes = self._object.write(memoryview(data)[:PLAIN_NBYTES])
            except ssl.SSLError as error:
                raise ConnectionError(str(error)) from None  # reading says why
            self._push()
            return nbytes

    def sendmsg(self, views: Sequence[Buffer]) -> int:
        if len(views[0]) >= JOINED_NBYTES or len(views) == 1:
            return self.send(views[0])
        joined: list[Buffer] = []
        nbytes = 0
        for view in views:
            if joined and nbytes + len(view) > JOINED_NBYTES:
                break
            joined.append(view)
            nbytes += len(view)
        return self.send(b"".join(joined))

    def flush(self) -> bool:
        """Offer to the kernel what is encrypted. Returns True if it has taken everything."""
        with self._lock:
            return self._push()

    def refuse_in_clear(self, frame: bytes) -> None:
        """Send a last message to a peer that does not speak TLS."""
        with contextlib.suppress(OSError):
            self._sock.send(frame)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()

    def detach(self) -> int:
        return self._sock.detach()

    def fileno(self) -> int:
        return self._sock.fileno()

    def getpeername(self) -> tuple[str, int]:
        host, port = self._sock.getpeername()[:2]
        return str(host), int(port)

    def getsockname(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return host, port

    def _push(self) -> bool:
        while self._unsent or self._out.pending:
            if not self._unsent:
                self._unsent = memoryview(self._out.read())
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except (BlockingIOError, InterruptedError):
                return False
        return True

    def _fill(self) -> bool:
        """Read from the socket once, if this turn allows it. Returns False if it does not; raises `BlockingIOError` if nothing has come."""
        if self._reads_left <= 0:
            return False
        self._reads_left -= 1
        data = self._sock.recv(RAW_NBYTES if self.strange_nbytes is None else STRANGE_READ_NBYTES)
        if self.strange_nbytes is not None:
            self.strange_nbytes += len(data)
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()
        return True

    def _advance(self) -> None:
        """Go on with the handshake as far as the bytes allow that were read."""
        if self._established:
            return
        if self._failure is not None:
            raise RefusedError(self._failure)
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            self._push()
            raise AwaitsPeerError from None
        except ssl.SSLError as error:
            with contextlib.suppress(OSError):
                self._push()  # the alert
            self._failure = self._why(error)
            raise RefusedError(self._failure) from None
        self._established = True
        self._push()

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
