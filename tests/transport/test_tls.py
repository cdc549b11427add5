"""Encrypted connections: each kind of stranger is refused with a sentence of its own, and the others go on."""

from __future__ import annotations

import contextlib
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
from tests.transport.test_sockets import pump

from offbeat.errors import ConfigurationError, RefusedError
from offbeat.transport.base import Arrivals, Closed, Message
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


@pytest.fixture
def serve() -> Iterator[Callable[[Tls | None], SocketHub]]:
    servers: list[SocketHub] = []

    def begin(tls: Tls | None) -> SocketHub:
        servers.append(SocketHub(SECRET, local=False, tls=tls))
        servers[-1].listen()
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def messages(arrived: Arrivals) -> list[Message]:
    return [item for _, item in arrived if isinstance(item, Message)]


def ask(server: SocketHub, tls: Tls | None, token: str = SECRET, port: int | None = None) -> Message | Closed:
    """Return the message of a hub as it has come to the server, or the end of the connection as that hub sees it."""
    hub = SocketHub(token, local=False, tls=tls)
    assert server.address is not None
    address = server.address if port is None else server.address._replace(tcp=("127.0.0.1", port))
    with contextlib.closing(hub):
        hub.connect(address).send({"kind": "hello"})
        came, answers = pump([server, hub], lambda arrived: bool(arrived[1] or messages(arrived[0])))
        [item] = [item for _, item in answers] or [*messages(came)]
        return item


def refusal(server: SocketHub, tls: Tls | None, token: str = SECRET, port: int | None = None) -> str:
    answer = ask(server, tls, token, port)
    assert isinstance(answer, Closed), answer
    return answer.reason


def test_strangers_are_refused_and_the_others_go_on(serve: Callable[[Tls | None], SocketHub]) -> None:
    server = serve(EVERYWHERE)
    member = SocketHub(SECRET, local=False, tls=EVERYWHERE)
    assert server.address is not None
    connection = member.connect(server.address)
    assert "the peer speaks clear text, and this job requires TLS" in refusal(server, None)
    assert "the token shown is not this job's" in refusal(server, EVERYWHERE, "another job's token")
    connection.send({"kind": "still here"})
    [came, _] = pump([server, member], lambda arrived: bool(messages(arrived[0])))
    assert [message.header for message in messages(came)] == [{"kind": "still here"}]
    member.close()


def test_tls_against_a_clear_server(serve: Callable[[Tls | None], SocketHub]) -> None:
    reason = refusal(serve(None), EVERYWHERE)
    assert "the peer speaks clear text" in reason or "in place of answering in TLS: give every machine the same --tls options" in reason


def test_certificates_of_the_users_own(serve: Callable[[Tls | None], SocketHub], tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    server = serve(ours.tls("server"))
    assert isinstance(ask(server, ours.tls("worker")), Message)
    assert "is not one that --tls-ca" in refusal(server, theirs.tls("stranger"))
    assert "the peer does not take --tls-cert" in refusal(server, theirs.tls("guest", trusted=ours))
    assert "the peer does not take the certificate that this process made" in refusal(server, EVERYWHERE)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--tls-cert .*nowhere.*: cannot be used .*; name PEM files"):
        Identity(Tls(certificate=str(tmp_path / "nowhere"), key="", authority=str(tmp_path / "nothing")))


def test_somebody_in_between_with_a_certificate_of_their_own(serve: Callable[[Tls | None], SocketHub]) -> None:
    """The proxy decrypts and encrypts again, and passes on what it reads: a client of the job notices nothing but the binding."""
    server = serve(EVERYWHERE)
    assert server.address is not None
    tcp, listener = server.address.tcp, socket.create_server(("127.0.0.1", 0))
    between = Identity(EVERYWHERE)

    def pass_on() -> None:
        client, _ = listener.accept()
        outer = between._server.wrap_socket(client, server_side=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        inner = context.wrap_socket(socket.create_connection(tcp))
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
    reason = refusal(server, EVERYWHERE, port=listener.getsockname()[1])
    assert "omebody in between has answered this connection and passed the handshake on" in reason
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


def test_loopback_is_exempt(serve: Callable[[Tls | None], SocketHub]) -> None:
    assert isinstance(ask(serve(Tls()), None), Message)
