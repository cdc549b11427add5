"""Encrypted connections: each kind of stranger is refused with a sentence of its own, and the others go on."""

from __future__ import annotations

import datetime
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.launch.waiting import until

from offbeat.errors import ConfigurationError, RefusedError
from offbeat.transport.base import Address, Closed, Message
from offbeat.transport.handshake import WRONG_TOKEN, ClientHandshake, ServerHandshake
from offbeat.transport.hub import SocketHub
from offbeat.transport.tls import Identity, Tls

SECRET = "a secret of the job"
EVERYWHERE = Tls(everywhere=True)


class Authority:
    """Signs certificates, and writes them to files."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = folder / f"{name}.pem"
        self._certificate = self._signed(name, self._key, authority=True)
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def tls(self, who: str, trusted: Authority | None = None) -> Tls:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, key_file = self._folder / f"{who}.crt", self._folder / f"{who}.key"
        certificate.write_bytes(self._signed(who, key, authority=False).public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        return Tls(certificate=str(certificate), key=str(key_file), authority=str((trusted or self).file), everywhere=True)

    def _signed(self, who: str, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (who, self._name)]
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1]).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        return builder.sign(self._key, hashes.SHA256())


class Server:
    """A hub that answers each message with its header, in a thread of its own."""

    def __init__(self, tls: Tls | None) -> None:
        self.hub = SocketHub(SECRET, local=False, tls=tls)
        self.address = self.hub.listen()
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over:
            for connection, item in self.hub.poll(None):
                if isinstance(item, Message):
                    connection.send(item.header)

    def close(self) -> None:
        self._over = True
        self.hub.wake()
        self._thread.join()
        self.hub.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Tls | None], Server]]:
    servers: list[Server] = []

    def begin(tls: Tls | None) -> Server:
        servers.append(Server(tls))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def first_item(hub: SocketHub) -> Message | Closed:
    """Wait for a message or an end, and return it."""
    found: list[Message | Closed] = []

    def come() -> bool:
        found.extend(item for _, item in hub.poll(0.1))
        return bool(found)

    until("an answer", come)
    return found[0]


def ask(address: Address, tls: Tls | None, token: str = SECRET) -> Message | Closed:
    """Return what comes back for a message."""
    hub = SocketHub(token, local=False, tls=tls)
    try:
        hub.connect(address).send({"kind": "hello"})
        return first_item(hub)
    finally:
        hub.close()


def refusal(address: Address, tls: Tls | None, token: str = SECRET) -> str:
    answer = ask(address, tls, token)
    assert isinstance(answer, Closed), answer
    return answer.reason


def test_an_answer_comes_through(serve: Callable[[Tls | None], Server]) -> None:
    answer = ask(serve(EVERYWHERE).address, EVERYWHERE)
    assert isinstance(answer, Message) and answer.header == {"kind": "hello"}


def test_strangers_are_refused_and_the_others_go_on(serve: Callable[[Tls | None], Server]) -> None:
    server = serve(EVERYWHERE)
    member = SocketHub(SECRET, local=False, tls=EVERYWHERE)
    connection = member.connect(server.address)
    assert "the peer speaks clear text, and this job requires TLS" in refusal(server.address, None)
    assert "the token shown is not this job's" in refusal(server.address, EVERYWHERE, "another job's token")
    connection.send({"kind": "still here"})
    assert isinstance(first_item(member), Message)
    member.close()


def test_tls_against_a_clear_server(serve: Callable[[Tls | None], Server]) -> None:
    reason = refusal(serve(None).address, EVERYWHERE)
    assert "the peer speaks clear text" in reason or "in place of answering in TLS: give every machine the same --tls options" in reason


def test_certificates_of_the_users_own(serve: Callable[[Tls | None], Server], tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server = serve(ours.tls("server"))
    assert isinstance(ask(server.address, ours.tls("worker")), Message)
    assert "is not one that --tls-ca" in refusal(server.address, theirs.tls("stranger"))
    assert "the peer does not take --tls-cert" in refusal(server.address, theirs.tls("guest", trusted=ours))
    assert "the peer does not take the certificate that this process made" in refusal(server.address, EVERYWHERE)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-cert .*nowhere.*: cannot be used .*; name PEM files"):
        Identity(Tls(certificate=str(tmp_path / "nowhere"), key="", authority=str(tmp_path / "nothing")))


def test_somebody_in_between_with_a_certificate_of_their_own(serve: Callable[[Tls | None], Server]) -> None:
    """The proxy decrypts and encrypts again, and passes on what it reads: a client of the job notices nothing but the binding."""
    server = serve(EVERYWHERE)
    listener = socket.create_server(("127.0.0.1", 0))
    between = Identity(EVERYWHERE)

    def pass_on() -> None:
        client, _ = listener.accept()
        outer = between._server.wrap_socket(client, server_side=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        inner = context.wrap_socket(socket.create_connection(server.address.tcp))
        other = {outer: inner, inner: outer}
        with selectors.DefaultSelector() as selector:
            for one in other:
                selector.register(one, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, ssl.SSLSocket)
                    data = key.fileobj.recv(1 << 16)
                    if not data:
                        outer.close()
                        inner.close()
                        return
                    other[key.fileobj].sendall(data)

    proxy = threading.Thread(target=pass_on)
    proxy.start()
    address = server.address._replace(tcp=("127.0.0.1", listener.getsockname()[1]))
    assert "omebody in between has answered this connection and passed the handshake on" in refusal(address, EVERYWHERE)
    proxy.join()
    listener.close()


def test_a_recorded_proof_is_worthless_on_another_connection() -> None:
    first, client = ServerHandshake(SECRET, lambda: b"certificate"), ClientHandshake(SECRET, lambda: b"certificate")
    shown = client.answer(first.opening())
    assert shown is not None
    assert first.answer(shown) is not None and first.open
    second = ServerHandshake(SECRET, lambda: b"certificate")
    with pytest.raises(RefusedError, match=WRONG_TOKEN[:40]):
        second.answer(shown)
    assert not second.open


def test_loopback_is_exempt(serve: Callable[[Tls | None], Server]) -> None:
    assert isinstance(ask(serve(Tls()).address, None), Message)
