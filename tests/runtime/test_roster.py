"""Who is heard, and who no longer is."""

from __future__ import annotations

from offbeat.runtime.roster import Roster
from offbeat.transport.memory import MemoryHub, MemoryNetwork


def test_what_a_process_sent_before_its_connection_closed_is_no_sign_of_life_afterwards() -> None:
    network = MemoryNetwork()
    server, worker = MemoryHub(network, "secret"), MemoryHub(network, "secret")
    at, roster = server.listen(), Roster()
    for text in ("hello", "my last push"):
        link = worker.connect(at) if text == "hello" else link
        link.send({"kind": text})
        [(connection, _)] = server.poll(0.0)
        if text == "hello":
            roster.enter(0, connection)
            roster[0].incarnation = 1
            assert [peer.worker for peer in roster if peer.stirred()] == [0]
    peer = roster.close(connection)
    assert peer is not None and peer.stirred()
    assert list(roster) == []
