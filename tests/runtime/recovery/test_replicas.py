"""A leader may die or freeze between any two messages: its standby goes on, and nobody has seen what the standby does not know."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory_network import MemoryConnection, MemoryHub, MemoryNetwork
from tests.tiers import examples

from offbeat.errors import FencedError, JobError, ProtocolError
from offbeat.journal.file import Journal
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.leading_server import LeadingServer
from offbeat.runtime.recovery.replica import Replica
from offbeat.runtime.serving import ServerState, Service
from offbeat.runtime.standby_server import StandbyServer
from offbeat.runtime.worker.links import Links
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.link import Link
from offbeat.transport.output_commit import OutputCommit

CLIENTS = 3
ROUNDS = 8
BARE = JobSettings(workers=CLIENTS, replicas=1)


def pushed(client: int, turn: int) -> int:
    return 1 + client * 100 + turn


def expected(turn: int) -> int:
    return sum(pushed(client, earlier) for client in range(CLIENTS) for earlier in range(turn + 1))


class Summing(Service):
    """Waits until every client has pushed a number, adds the sum to its own, and tells every client."""

    own: ClassVar[tuple[str, ...]] = ("out", "waiting", "regions")
    """What a new standby gets: in place of a journal, which this server has none of."""

    def handed_on(self, *, journal: bool) -> ServerState:
        state = super().handed_on(journal=journal)
        state.journal = {name: getattr(self, name) for name in self.own}
        return state

    def take_over(self, state: ServerState, journal: Journal) -> None:
        super().take_over(state, journal)
        vars(self).update(state.journal)

    def begin(self, settings: JobSettings, servers: Sequence[Address]) -> None:
        self.settings, self.servers = settings, servers
        self.out = memoryview(bytearray(8))
        self.waiting: dict[Connection, memoryview] = {}
        self.regions: dict[Connection, memoryview] = {}

    def _handle(self, connection: Connection, item: Message | Closed) -> None:
        if connection is self.supervisor or connection is self._launcher:
            super()._handle(connection, item)
        elif isinstance(item, Message) and item.header["kind"] == "hello":
            self.regions[connection] = memoryview(bytearray(8))
            connection.bind("push", self.regions[connection])
            connection.bind("pull", self.out)
            connection.send({"kind": "welcome"})
        elif isinstance(item, Message):
            self.waiting[connection] = self.regions[connection]
            if len(self.waiting) == CLIENTS:
                self._fold()

    def _fold(self) -> None:
        replica = self._survival
        assert isinstance(replica, Replica)
        total = replica.total(8)
        if not replica.replays:
            total[:] = sum(int.from_bytes(region, "big") for region in self.waiting.values()).to_bytes(8, "big")
        self.out[:] = (int.from_bytes(self.out, "big") + int.from_bytes(total, "big")).to_bytes(8, "big")
        replica.done_with(total)
        for connection in self.waiting:
            assert isinstance(connection, Link)
            connection.release_carried()
            connection.send({"kind": "parameters"}, carry="pull")
        self.waiting.clear()


class Near(MemoryHub):
    """A hub on the machine of everybody with whom it speaks, as far as anybody can see."""

    def connect(self, address: Address) -> Connection:
        connection = super().connect(address)
        connection.within_host = connection.other.within_host = True  # type: ignore[attr-defined]
        return connection


class Client:
    """Pushes a number in each turn, and checks what comes back. The last one is on the machine of the standby."""

    def __init__(self, number: int, network: MemoryNetwork, leader: Address, standby: Address | None) -> None:
        self.number, self.turn = number, -1
        self.links = Links((Near if number == CLIENTS - 1 else MemoryHub)(network, "token"))
        self.region, self.pull = bytearray(8), bytearray(8)
        self.link = self.links.connect_replicated(leader, standby)
        self.link.bind("push", memoryview(self.region))
        self.link.bind("pull", memoryview(self.pull))
        self.link.send({"kind": "hello"})

    def look(self) -> None:
        for _, item in self.links.poll(0.0):
            assert isinstance(item, Message), item
            if item.header["kind"] == "parameters":
                assert int.from_bytes(self.pull, "big") == expected(self.turn)
            self.turn += 1
            self.region[:] = pushed(self.number, self.turn).to_bytes(8, "big")  # what was there is used up
            self.link.send({"kind": "push"}, carry="push")


class Cluster:
    """The processes of one server, the clients, and the supervisor."""

    settings = BARE
    service: type[Summing] = Summing
    client: type[Any] = Client

    def __init__(self) -> None:
        self.network = MemoryNetwork(shares_memory=False)
        self.supervisor = MemoryHub(self.network, "token")
        self.supervisor_at = self.supervisor.listen()
        self.now = 0.0
        self.hubs: list[MemoryHub] = []
        self.addresses: list[Address] = []
        self.servers: list[LeadingServer | StandbyServer] = []
        self.at: list[Connection] = []
        """The supervisor's ends of its connections to the processes."""
        self.term = 1
        self.start(stands_by=False)
        self.start(stands_by=True)
        self.at[0].send({**self.job(0), "kind": "job"})
        self.at[1].send({**self.job(0), "kind": "stand_by", "address": json.dumps([self.addresses[1]]), "runs": False})
        for _ in range(3):
            self.turn(0)
            self.turn(1)
        self.clients = [self.client(number, self.network, *self.addresses) for number in range(CLIENTS)]

    def start(self, *, stands_by: bool) -> None:
        """Start one more process of the server."""
        hub = MemoryHub(self.network, "token")
        self.hubs.append(hub)
        self.addresses.append(hub.listen())
        launcher, now = hub.connect(self.supervisor_at), lambda: self.now
        kind = StandbyServer if stands_by else LeadingServer
        self.servers.append(kind(0, hub, launcher, clock=now, computed=now, service=self.service(0, hub, launcher, now)))
        self.at.append(launcher.other)  # type: ignore[attr-defined]

    def job(self, leader: int) -> dict[str, Any]:
        return {"settings": json.loads(json.dumps(self.settings.to_wire())), "servers": json.dumps([self.addresses[leader]]), "key": "k"}

    def turn(self, server: int) -> None:
        self.now += 0.01
        process = self.servers[server]
        process.turn(0.0)
        if isinstance(process, StandbyServer) and process.leads is not None:
            self.servers[server] = process.leads

    def lead(self, leader: int = 0, standby: int = 1) -> None:
        """The supervisor decides that the standby leads."""
        self.term += 1
        self.at[leader].send({"kind": "fenced", "term": self.term})
        self.at[standby].send({"kind": "lead", "term": self.term, "servers": json.dumps([self.addresses[standby]])})

    def renew(self, leader: int) -> int:
        """The supervisor starts a new standby of this leader. Returns its number."""
        self.start(stands_by=True)
        number = len(self.servers) - 1
        self.at[number].send({**self.job(leader), "kind": "stand_by", "address": json.dumps([self.addresses[number]]), "runs": True})
        return number

    def followed(self, standby: int) -> bool:
        """Whether a leader has said, since the last call, that this standby could lead."""
        return ("followed", json.dumps([self.addresses[standby]])) in self.reports()

    def reports(self) -> list[tuple[str, Any]]:
        return [(item.header["kind"], item.header.get("address")) for _, item in self.supervisor.poll(0.0) if isinstance(item, Message)]

    def finish(self, server: int, rounds: int = ROUNDS) -> None:
        for _ in range(20 * ROUNDS):
            self.turn(server)
            for client in self.clients:
                client.look()
        assert all(client.turn >= rounds for client in self.clients), [client.turn for client in self.clients]


@examples(600, quick=30)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(("dies", "freezes", "its standby dies")), min_size=1, max_size=4))
def test_at_any_moment_the_standby_goes_on_where_the_leader_was_and_gets_one_of_its_own(seed: int, faults: list[str]) -> None:
    chance, cluster, leader, standby = random.Random(seed), Cluster(), 0, 1
    for fault in faults:
        for _ in range(chance.randrange(60)):
            some_turn(chance, cluster, leader, standby)
        former = leader
        if fault == "its standby dies":
            cluster.hubs[standby].close()
            cluster.at[leader].send({"kind": "alone"})
        else:
            if fault == "dies":
                cluster.hubs[leader].close()
            cluster.lead(leader, standby)
            leader = standby
            for _ in range(chance.randrange(10)):
                cluster.clients[chance.randrange(CLIENTS)].look()
                cluster.turn(leader)
        if fault == "freezes":  # it wakes up, with everything that has come to it meanwhile
            with pytest.raises(FencedError, match=f"its standby leads, in term {cluster.term}"):
                cluster.turn(former)
        new = cluster.renew(leader)
        for _ in range(chance.randrange(10)):  # it may die before it could lead
            some_turn(chance, cluster, leader, new)
        if chance.random() < 0.3:
            cluster.hubs[new].close()
            cluster.at[leader].send({"kind": "alone"})
            new = cluster.renew(leader)
        standby = new
        while not cluster.followed(standby):  # no death is survived until then
            some_turn(chance, cluster, leader, standby)
    cluster.hubs[standby].close()
    cluster.at[leader].send({"kind": "alone"})
    cluster.finish(leader, max(client.turn for client in cluster.clients) + 3)
    assert (stream := cluster.servers[leader]._stream) is not None and not stream.commit.holds(stream.commit.position)


def some_turn(chance: random.Random, cluster: Cluster, leader: int, standby: int) -> None:
    what = chance.randrange(2 + CLIENTS)
    cluster.turn((leader, standby)[what]) if what < 2 else cluster.clients[what - 2].look()


def test_a_worker_on_the_standbys_machine_gets_its_parameters_from_there() -> None:
    cluster = Cluster()
    for _ in range(20 * ROUNDS):
        cluster.turn(0)
        cluster.turn(1)
        for client in cluster.clients:
            client.look()
    far, near = cluster.clients[0], cluster.clients[-1]
    assert near.turn >= ROUNDS and near.link.socket is not None and far.link.socket is not None
    assert near.link.received - far.link.received in (0, 1), "it has each message"
    assert far.link.socket.bytes_received - near.link.socket.bytes_received > 8 * ROUNDS, "and from the leader those without a region"


@examples(100, quick=8)
@given(st.integers(0, 2**32))
def test_what_a_standby_was_to_send_the_leader_sends_if_it_does_not(seed: int) -> None:
    """Its connection to the worker breaks while both live, at any moment."""
    chance, cluster = random.Random(seed), Cluster()
    for _ in range(60 + chance.randrange(80)):
        some_turn(chance, cluster, 0, 1)
    near = cluster.clients[-1]
    assert near.link.may_overtake
    [between] = near.links._standbys
    assert isinstance(between, MemoryConnection) and between.other is not None
    with cluster.network.changed:
        for end in (between.other, between):
            end.deliver(Closed("reset by peer"))
            end.other = None
    turns = max(client.turn for client in cluster.clients)
    for _ in range(10 * ROUNDS):
        cluster.turn(0)
        cluster.turn(1)
        for client in cluster.clients:
            client.look()
    assert all(client.turn > turns + ROUNDS for client in cluster.clients), [client.turn for client in cluster.clients]


def test_a_leader_whose_standby_is_gone_sends_nothing_until_it_may_go_on_alone() -> None:
    cluster = Cluster()
    for client in cluster.clients:
        client.look()
    cluster.hubs[1].close()
    for _ in range(5):
        cluster.turn(0)
        for client in cluster.clients:
            client.look()
    assert [client.turn for client in cluster.clients] == [-1] * CLIENTS, "no welcome, since no standby knows of it"
    assert "standby_gone" in dict(cluster.reports())
    cluster.at[0].send({"kind": "alone"})
    cluster.finish(0)


class OneOfTwo(Cluster):
    """The processes of server 0, where another server may have its part of each gradient."""

    settings = JobSettings(workers=CLIENTS, replicas=1, servers=2)


def test_without_a_gradient_that_nobody_can_send_again_the_job_ends_with_the_reason() -> None:
    cluster = OneOfTwo()
    for _ in range(4):
        cluster.turn(0)
        cluster.turn(1)
        cluster.clients[0].look()
    service = cluster.servers[1].service
    assert isinstance(service, Summing) and service.waiting, "a push has come to the leader, and the standby knows of it"
    cluster.hubs[0].close()
    cluster.lead()
    cluster.turn(1)  # the client that has pushed has died as well, and does not come back
    cluster.now += 60.0
    with pytest.raises(JobError, match="lacks a gradient that had come to the leader"):
        cluster.turn(1)


def test_bytes_in_pieces_come_whole_although_the_transport_is_ahead() -> None:
    """It asks for the place of the next ones before those that have come are handled."""
    replica, pieces = Replica(OutputCommit()), []
    for number, nbytes in enumerate((5, 8, 8, 3)):
        for start in range(0, nbytes, 3):
            payload = bytes([number + start]) * min(3, nbytes - start)
            header = {"kind": "bytes", "start": start, "nbytes": nbytes}
            place = replica.place(header, len(payload))
            assert place is not None
            place[:] = payload
            pieces.append(Message(header, place, ()))
    for piece in pieces:
        replica.on_bytes(piece)
    assert [bytes(block)[::3] for block in replica.given(4)] == [b"\0\3", b"\1\4\7", b"\2\5\10", b"\3"]
    with pytest.raises(ProtocolError, match=r"out of order \(expected byte 0\)"):
        replica.on_bytes(pieces[1])


def test_who_is_not_the_standby_of_the_supervisor_gets_no_records() -> None:
    cluster = Cluster()
    stranger = MemoryHub(cluster.hubs[0].network, "token")
    for key in ("", "another"):
        line = stranger.connect(cluster.addresses[0])
        line.send({"kind": "follow", "number": 0, "key": key, "address": "[]"})
        cluster.turn(0)
        [(_, refused), (_, end)] = stranger.poll(0.0)
        assert isinstance(refused, Message) and "is not the standby that was started" in refused.header["reason"]
        assert isinstance(end, Closed)
