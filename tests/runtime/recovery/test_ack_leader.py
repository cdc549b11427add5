"""With ``--ack leader`` the standby may lack what workers have seen of one version: they are brought back to what the standby knows."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.recovery import test_replicas as plain
from tests.tiers import examples

from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.worker.links import Links
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.link import Link
from offbeat.transport.memory import MemoryHub, MemoryNetwork

CLIENTS = plain.CLIENTS
MORE = 5
"""Versions after which a schedule ends."""


class Adding(plain.Summing):
    """Adds each number that a client pushes to its own as soon as it comes, and keeps the history: asp with one parameter."""

    handed_on: ClassVar[tuple[str, ...]] = (*plain.Summing.handed_on, "history", "lives", "clients", "fenced")

    def _begin(self, settings: JobSettings, servers: Any) -> None:
        super()._begin(settings, servers)
        self.history: list[tuple[int, int]] = []
        """By version: the client and its number."""
        self.lives: dict[Connection, int] = {}
        self.clients: dict[Connection, int] = {}
        self.fenced = 0

    def _handle(self, connection: Connection, item: Message | Closed) -> None:
        if connection is self._supervisor or connection is self._launcher or not isinstance(item, Message):
            super()._handle(connection, item)
        elif item.header["kind"] == "hello":
            self.clients[connection], self.lives[connection] = item.header["client"], 0
            super()._handle(connection, item)
        elif item.header["life"] == self.lives[connection]:
            self._add(connection)
        else:
            assert isinstance(connection, Link)  # from before the fence: its number may have been overwritten
            connection.release_carried()

    def _add(self, connection: Connection) -> None:
        assert self._stream is not None and isinstance(connection, Link)
        replica = self._stream.keeper
        replica.folded()
        total = replica.total(8)
        if not replica.replays:
            total[:] = self.regions[connection]
        number = int.from_bytes(total, "big")
        replica.done_with(total)
        self.value += number
        self.history.append((self.clients[connection], number))
        connection.release_carried()
        connection.send({"kind": "parameters", **self._seen(), "life": self.lives[connection]}, early=True)

    def _seen(self) -> dict[str, int]:
        return {"value": self.value, "version": len(self.history)}

    def _on_reconciled(self, link: Link, unknown: int) -> None:
        super()._on_reconciled(link, unknown)
        if unknown:
            self.lives[link] += 1
            self.fenced += 1
            link.send({"kind": "fence", **self._seen(), "life": self.lives[link]})


class Client:
    """Pushes numbers that nobody else pushes, and notes what it has seen."""

    def __init__(self, number: int, network: MemoryNetwork, leader: Address, standby: Address | None) -> None:
        self.number, self.turn, self.life, self.version = number, 0, 0, 0
        self.back: list[int] = []
        """By how many versions it was set back at each fence."""
        self.links = Links(MemoryHub(network, "token"))
        self.region = bytearray(8)
        self.link = self.links.connect_replicated(leader, standby)
        self.link.bind("push", memoryview(self.region))
        self.link.send({"kind": "hello", "client": number})
        self.welcome = False

    def look(self) -> None:
        for _, item in self.links.poll(0.0):
            assert isinstance(item, Message), item
            header = item.header
            if header["kind"] == "fence":
                self.life = header["life"]
                self.back.append(self.version - header["version"])
            elif header["kind"] == "parameters" and header["life"] != self.life:
                continue  # it had been sent before the fence
            if header["kind"] != "welcome":
                self.version = header["version"]
            self.turn += 1
            self.region[:] = (1000 * self.number + self.turn).to_bytes(8, "big")
            self.link.send({"kind": "push", "life": self.life}, carry="push")


class Cluster(plain.Cluster):
    settings = JobSettings(workers=CLIENTS, replicas=1, ack="leader")
    server = Adding
    client = Client


def some_turns(chance: random.Random, cluster: Cluster, leader: int, standby: int, count: int) -> None:
    """The standby has its turn less often: mostly it is behind."""
    for _ in range(count):
        what = chance.choices(range(2 + CLIENTS), (6, chance.choice((0, 0, 1)), *[4] * CLIENTS))[0]
        cluster.turn((leader, standby)[what]) if what < 2 else cluster.clients[what - 2].look()


def cut_off(standby: plain.Summing) -> None:
    """Lose what the standby has not read of its leader's."""
    assert standby._stream is not None and standby._leader is not None
    standby._stream.former.add(standby._leader)
    standby._leader = None


@examples(600, quick=100)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_at_most_one_version_is_lost_and_all_go_on(seed: int, deaths: int) -> None:
    chance, cluster, leader, standby = random.Random(seed), Cluster(), 0, 1
    for _ in range(deaths):
        some_turns(chance, cluster, leader, standby, chance.randrange(60))
        newest = max(client.version for client in cluster.clients)
        before = list(cluster.servers[leader].history)  # type: ignore[attr-defined]
        cluster.hubs[leader].close()
        if chance.random() < 0.7:
            cut_off(cluster.servers[standby])
        cluster.lead(standby)
        while cluster.servers[standby]._stands_by:
            cluster.turn(standby)
        server = cluster.servers[standby]
        assert isinstance(server, Adding)
        assert server.history[: len(before)] == before[: len(server.history)], "it has what the leader had, but for the end"
        assert len(server.history) >= newest - 1, "clients have seen one version more at most"
        for _ in range(200):
            cluster.turn(standby)
            cluster.clients[chance.randrange(CLIENTS)].look()
        assert len(server.history) > newest + MORE
        assert all(client.version > newest for client in cluster.clients)
        leader, standby = standby, cluster.renew(standby)
        while not cluster.followed(standby):
            some_turns(chance, cluster, leader, standby, 3)
            cluster.turn(standby)
    numbers = [number for _, number in cluster.servers[leader].history]  # type: ignore[attr-defined]
    assert len(set(numbers)) == len(numbers), "no number was added twice"
    assert cluster.servers[leader].value == sum(numbers)
    assert all(back <= 1 for client in cluster.clients for back in client.back)


def test_a_standby_that_is_behind_loses_one_version() -> None:
    cluster = Cluster()
    while len(cluster.servers[1].history) < 4:  # type: ignore[attr-defined]
        for number in range(2):
            cluster.turn(number)
        for client in cluster.clients:
            client.look()
    before = max(client.version for client in cluster.clients)
    for _ in range(20):  # the standby stands still
        cluster.turn(0)
        for client in cluster.clients:
            client.look()
    newest = max(client.version for client in cluster.clients)
    assert newest > before, "they go on"
    for _ in range(20):
        cluster.turn(0)
        for client in cluster.clients:
            client.look()
    assert max(client.version for client in cluster.clients) == newest, "and not far"
    cluster.hubs[0].close()
    server = cluster.servers[1]
    assert isinstance(server, Adding)
    cut_off(server)
    known = len(server.history)
    cluster.lead()
    for _ in range(100):
        cluster.turn(1)
        for client in cluster.clients:
            client.look()
    assert newest - known == 1
    assert server.fenced >= 1 and [back for client in cluster.clients for back in client.back] == [1]
    assert len(server.history) > newest + MORE
