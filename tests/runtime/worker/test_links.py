"""A worker's connections to servers that may come back."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.support.hand_driven_coordinator import Mailbox
from tests.support.memory_network import MemoryConnection, MemoryHub, MemoryNetwork
from tests.transport.test_sockets import pump

from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.recovery.sessions import SessionLinks
from offbeat.runtime.worker import links
from offbeat.runtime.worker.links import Links
from offbeat.transport import shm
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.transport.link import Link

AT = Address("127.0.0.1", ("127.0.0.1", 1), "")


class Away(Mailbox):
    """The hub of a worker whose server listens from the third attempt on."""

    attempts = 0

    def connect(self, address: Address) -> Connection:
        self.attempts += 1
        if self.attempts < 3:
            raise JobError("nobody listens")
        return self.line


def test_a_worker_that_starts_while_a_server_is_on_its_way_back_awaits_it() -> None:
    hub = Away()
    assert isinstance(Links(hub).connect(AT, lasting=True), Link)
    assert hub.attempts == 3
    [resume] = hub.line.sent
    assert resume["kind"] == "resume" and resume["received"] == 0


def test_a_server_that_does_not_come_back_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    for lasting in (False, True):
        monkeypatch.setattr(links, "RETURN_S", 0.0)
        hub = Away()
        with pytest.raises(JobError, match="nobody listens"):
            Links(hub).connect(AT, lasting=lasting)
        assert hub.attempts == 1


@pytest.mark.skipif(not shm.AVAILABLE, reason="local sockets need Linux")
@pytest.mark.parametrize("local", [False, True])
def test_what_a_worker_sends_last_arrives_whole(local: bool) -> None:
    """A rank hands in its replica as it leaves: more than the operating system takes at once."""
    server, worker = SocketHub("secret", local=local), Links(SocketHub("secret", local=local))
    address, payload = server.listen(), bytes(8 << 20)
    worker.connect(address, lasting=False).send({"kind": "donation"}, payload=[payload])

    def leave() -> None:
        worker.settle()
        worker.close()

    leaving = threading.Thread(target=leave)
    leaving.start()
    [arrived] = pump([server], lambda arrived: len(arrived[0]) == 2)
    leaving.join(60.0)
    server.close()
    (_, message), (_, end) = arrived
    assert isinstance(message, Message) and bytes(message.payload) == payload
    assert end == Closed("end of stream")


class Server:
    """A server's end of links over TCP."""

    def __init__(self) -> None:
        network = MemoryNetwork(shares_memory=False)
        supervisor = MemoryHub(network, "token")
        self.hub, self.worker = MemoryHub(network, "token"), Links(MemoryHub(network, "token"))
        self.at = self.hub.listen()
        self.sessions = Sessions(self.hub.connect(supervisor.listen()))

    def link(self) -> Link:
        """A new link of the worker to this server."""
        link = self.worker.connect(self.at, lasting=True, anywhere=True)
        assert isinstance(link, Link)
        return link

    def exchange(self) -> list[Message]:
        """Handle what has come here, and then at the worker, to which nothing has come but the answer to `resume`."""
        taken = self.turn()
        assert self.worker.poll(0.0) == []
        return taken

    def turn(self) -> list[Message]:
        """Handle what has come. Returns the messages of links."""
        taken = []
        for connection, item in self.hub.poll(0.0):
            if isinstance(item, Closed):
                self.sessions.cut(connection)
            elif item.header["kind"] == "resume":
                try:
                    self.sessions.on_resume(connection, item)
                except ProtocolError as error:
                    refuse(connection, error)
            else:
                link = self.sessions.link_at(connection)
                assert link is not None
                taken += [message for message in [link.take(item)] if message is not None]
        return taken


class Sessions(SessionLinks):
    def write(self, record: list[Any]) -> None:
        """Nothing outlives this test."""


def cut(link: Connection) -> None:
    assert isinstance(link, Link) and link.socket is not None
    assert isinstance(link.socket, MemoryConnection) and link.socket.other is not None
    link.socket.other.end("connection reset")


def test_over_tcp_only_who_asks_for_it_gets_a_link() -> None:
    server = Server()
    assert not isinstance(server.worker.connect(server.at, lasting=True), Link)
    link = server.link()
    assert not link.shares_memory and link.interface == "127.0.0.1"
    link.send({"kind": "hello"})
    assert server.exchange() == [], "it waits for the answer"
    assert [message.header for message in server.turn()] == [{"kind": "hello"}]
    assert not server.sessions.sessions[link.session].shares_memory


def test_over_tcp_a_link_goes_on_over_another_socket() -> None:
    server = Server()
    link = server.link()
    for number in range(3):
        link.send({"kind": "push", "number": number})
        server.exchange()
        cut(link)
        server.worker.poll(0.0)
        server.worker.poll(0.0)
    got = []
    for _ in range(3):
        got += server.exchange()
    assert [message.header["number"] for message in got] == [0, 1, 2]


def test_while_its_thread_computes_another_reaches_the_server_again() -> None:
    server = Server()
    link = server.link()
    server.exchange()
    server.sessions.sessions[link.session].send({"kind": "answer"})
    assert server.worker.tend(), "the link is there"
    cut(link)
    assert not server.worker.tend() and not server.worker.tend()
    server.turn()
    assert server.worker.tend() and link.is_resumed
    link.send_aside({"kind": "heard"})
    link.send({"kind": "push"})
    server.turn()
    assert [item.header["kind"] for _, item in server.worker.poll(0.0) if isinstance(item, Message)] == ["answer"]


def test_what_goes_wrong_meanwhile_is_raised_by_the_thread_that_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    link = server.link()
    server.exchange()

    def wrong(timeout_s: float | None) -> None:
        raise ProtocolError("the peer sent nonsense")

    monkeypatch.setattr(server.worker._hub, "poll", wrong)
    cut(link)
    assert server.worker.tend(), "no other call would help"
    with pytest.raises(ProtocolError, match="nonsense"):
        server.worker.poll(0.0)


@pytest.mark.parametrize("answered", [True, False])
def test_a_server_that_has_ended_a_link_does_not_take_it_for_a_new_one(answered: bool) -> None:
    """What has come over the link would come again: over TCP a connection may break while both ends live."""
    server = Server()
    link = server.link()
    link.send({"kind": "hello"})
    server.exchange()
    server.turn()
    far = server.sessions.sessions[link.session]
    if answered:
        far.send({"kind": "welcome"})
        server.worker.poll(0.0)
    cut(link)
    server.sessions.end(far)
    arrived: list[Any] = []
    for _ in range(4):
        server.turn()
        arrived += server.worker.poll(0.0)
    [(its, item)] = arrived
    assert its is link
    reason = item.reason if isinstance(item, Closed) else item.header["reason"]
    assert isinstance(item, Closed) == answered and "goes on with a link of which this server has no record" in reason


def test_a_link_that_was_closed_here_is_not_made_anew() -> None:
    server = Server()
    link = server.link()
    server.exchange()
    cut(link)
    link.close()
    for _ in range(3):
        assert server.worker.poll(0.0) == []
    assert not [connection for connection, _ in server.hub.poll(0.0) if not connection.closed]  # type: ignore[attr-defined]
