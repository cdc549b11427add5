"""Who is heard, and who no longer is."""

from __future__ import annotations

from tests.support.memory_network import MemoryHub, MemoryNetwork

from offbeat.runtime.coordination.peers import Peers
from offbeat.types import Incarnation


def test_what_a_process_has_sent_last_is_no_sign_of_life_once_its_connection_has_closed() -> None:
    network = MemoryNetwork()
    server, worker = MemoryHub(network, "secret"), MemoryHub(network, "secret")
    link, peers = worker.connect(server.listen()), Peers()
    link.send({"kind": "hello"})
    [(connection, _)] = server.poll(0.0)
    peers.enter(0, connection)
    peers[0].incarnation = Incarnation(1)
    assert [peer.worker for peer in peers if peer.stirred()] == [0]
    link.send({"kind": "the last push"})
    server.poll(0.0)
    assert peers.close(connection) is peers[0] and peers[0].stirred()
    assert list(peers) == []


def test_a_worker_that_stood_still_with_the_coordinator_did_not_compute_meanwhile() -> None:
    network = MemoryNetwork()
    server, worker = MemoryHub(network, "secret"), MemoryHub(network, "secret")
    link, peers = worker.connect(server.listen()), Peers()
    link.send({"kind": "hello"})
    [(connection, _)] = server.poll(0.0)
    peers.enter(0, connection)
    peers[0].stood_still_s += 8.0
    assert [peers[0].computed(8.25), peers[0].computed(8.25)] == [0.25, 8.25]
    peers[0].stood_still_s += 8.0
    assert peers[0].computed(0.25) == 0.25, "it waited"
