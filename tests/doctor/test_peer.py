"""Two processes measure each other over real sockets, and a peer that is not what it should be ends nothing but its own connection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offbeat.doctor import machine, pairs, probe
from offbeat.doctor.messages import Visit
from offbeat.doctor.peer import Peer
from offbeat.errors import ConfigurationError
from offbeat.transport.base import Address, Closed, Hub
from offbeat.transport.hub import SocketHub
from offbeat.transport.shm import MemoryBlock
from offbeat.transport.tls import Tls

TOKEN = "a secret of a test"
FINDING = {"name": "cores", "state": "note", "seen": "half", "remedy": "more", "figures": {"cores": 1}}


@contextlib.contextmanager
def served(tls: Tls | None = None, said: list[str] | None = None, kind: type[Peer] = Peer) -> Iterator[Address]:
    """Serve in a thread; yields the address."""
    ended = threading.Event()
    with contextlib.closing(SocketHub(TOKEN, tls=tls)) as hub:
        address = hub.listen()
        lines = [] if said is None else said
        peer = kind(hub, Visit(versions=("offbeat 1",), findings=(FINDING,)), lines.append)
        thread = threading.Thread(target=peer.serve, args=(lambda: not ended.is_set(),))
        thread.start()
        try:
            yield address
        finally:
            ended.set()
            hub.wake()
            thread.join(10.0)
            assert not thread.is_alive()


def elsewhere(address: Address) -> Address:
    """The same place, as another machine knows it."""
    return Address("", address.tcp, "")


@pytest.mark.parametrize("local", [True, False])
def test_both_ways_are_measured(local: bool) -> None:
    with served() as address, contextlib.closing(SocketHub(TOKEN, local=local)) as hub:
        flow, visit = probe.measure(hub, address if local else elsewhere(address), 0.1)
    assert flow.failure == "" and flow.way == ("shared memory" if local else "TCP")
    assert flow.there_bytes_per_s > 1e6 and flow.back_bytes_per_s > 1e6
    assert 0.0 < flow.round_trip_s < 1.0 and abs(flow.clock_s) <= flow.clock_error_s + 0.05
    assert flow.interface == ("" if local else "127.0.0.1")
    assert visit.versions == ("offbeat 1",)
    assert [dict(one) for one in visit.findings] == [{name: FINDING[name] for name in ("name", "state", "seen", "remedy")}]


def test_a_third_machine_measures_on_request_also_without_bytes() -> None:
    with served() as first, served() as second, contextlib.closing(SocketHub(TOKEN, local=False)) as hub:
        assert probe.ask_to_measure(hub, elsewhere(first), second.tcp, 0.1).there_bytes_per_s > 1e6
        trip = probe.ask_to_measure(hub, elsewhere(first), second.tcp, 0.0)
        assert trip.failure == "" and trip.there_bytes_per_s == 0.0 and trip.round_trip_s > 0.0


def test_all_pairs_of_three_machines() -> None:
    with served() as first, served() as second, contextlib.closing(SocketHub(TOKEN, local=False)) as hub:
        found = pairs.between_machines(hub, "here", [first.tcp, second.tcp], None, 0.1)
    names = [f"127.0.0.1:{address.tcp[1]}" for address in (first, second)]
    assert [(one.here, one.there) for one in found] == [("here", names[0]), ("here", names[1]), (names[0], names[1])]
    assert not any(one.flow.failure for one in found)


def test_who_is_not_there_fails_alone(free_port: int) -> None:
    with served() as first, contextlib.closing(SocketHub(TOKEN, local=False)) as hub:
        machines = [first.tcp, ("127.0.0.1", free_port), ("no such name", 1)]
        found = {one.there: one for one in pairs.between_machines(hub, "here", machines, None, 0.1)}
        assert "nobody listens" in probe.ask_to_measure(hub.another(), elsewhere(first), ("127.0.0.1", free_port), 0.1).failure
    good, gone, unknown = found.values()
    assert good.flow.failure == "" and "nobody listens" in gone.flow.failure
    assert unknown.name is not None and unknown.name.failure
    assert len(found) == 3, "nobody is asked to reach who cannot be reached"


@pytest.fixture
def free_port() -> int:
    with contextlib.closing(SocketHub(TOKEN)) as hub:
        return hub.listen().tcp[1]


def test_a_wrong_token_and_other_tls_options_are_said() -> None:
    with served() as address, contextlib.closing(SocketHub("another secret of a test", local=False)) as hub:
        assert "token" in probe.measure(hub, elsewhere(address), 0.1)[0].failure
    with served(Tls(everywhere=True)) as address:
        with contextlib.closing(SocketHub(TOKEN, local=False)) as hub:
            assert "--tls" in probe.measure(hub, elsewhere(address), 0.1)[0].failure
        with contextlib.closing(SocketHub(TOKEN, local=False, tls=Tls(everywhere=True))) as hub:
            assert probe.measure(hub, elsewhere(address), 0.1)[0].failure == ""


HOSTILE: list[dict[str, Any]] = [
    {"kind": "no such kind"},
    {"kind": "measure", "address": ["x", 0], "seconds": 0.0},
    {"kind": "measure", "address": ["x", 1], "seconds": 1e9},
    {"kind": "measure", "address": "x", "seconds": 0.0},
    {"kind": "block"},
    {"kind": ["visit"]},
    {},
]


@pytest.mark.parametrize("header", HOSTILE, ids=str)
def test_nonsense_ends_its_own_connection_only(header: dict[str, Any]) -> None:
    said: list[str] = []
    with served(said=said) as address:
        with contextlib.closing(SocketHub(TOKEN)) as hub:
            hub.connect(address).send(header)
            assert any(isinstance(item, Closed) for item in until(hub))
        with contextlib.closing(SocketHub(TOKEN)) as hub:
            assert probe.measure(hub, address, 0.0)[0].failure == ""
    assert any("connection is closed" in line for line in said)


def test_shared_memory_of_a_wrong_size_is_refused() -> None:
    with served() as address, contextlib.closing(SocketHub(TOKEN)) as hub:
        block = MemoryBlock.allocate(4096, "test")
        hub.connect(address).send({"kind": "block"}, memory=[block])
        assert any(isinstance(item, Closed) for item in until(hub))
        block.close()


def until(hub: Hub) -> list[object]:
    """What comes next."""
    arrived = hub.poll(10.0)
    assert arrived, "nothing has come within 10 s"
    return [item for _, item in arrived]


def test_an_answer_that_is_none_is_a_failure() -> None:
    class Wrong(Peer):
        def _answer(self, connection: Any, kind: str, message: Any) -> None:
            connection.send({"kind": "welcome", "versions": 7})

    with served(kind=Wrong) as address, contextlib.closing(SocketHub(TOKEN)) as hub:
        flow, visit = probe.measure(hub, address, 0.1)
    assert "sent 'welcome' with versions = 7" in flow.failure and visit == Visit()


@pytest.mark.parametrize("text", ["", ":", "a:b", "a:0", "a:65536", ",", "a,,b"])
def test_what_is_no_machine(text: str) -> None:
    with pytest.raises(ConfigurationError, match="write HOST or HOST:PORT"):
        pairs.targets([text])


def test_too_many_machines_and_one_named_twice() -> None:
    assert pairs.targets(["a,a:29400", "a", "a:"]) == [("a", 29400)]
    assert len(pairs.targets(["a:1:2x", "[::1"])) == 2, "addresses that cannot be resolved, which is found later"
    with pytest.raises(ConfigurationError, match="at most 64"):
        pairs.targets([",".join(f"n{number}" for number in range(65))])


def test_certificates_are_tried_by_a_handshake(tmp_path: Path) -> None:
    assert machine.certificate(Tls()).failure == ""
    missing = machine.certificate(Tls(certificate=str(tmp_path / "none.pem"), authority=str(tmp_path / "ca.pem")))
    assert "cannot be used" in missing.failure and missing.begins_s is None
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_bytes(b"\xff\xfe no certificate")
    assert "cannot be used" in machine.certificate(Tls(certificate=str(nonsense), authority=str(nonsense))).failure
