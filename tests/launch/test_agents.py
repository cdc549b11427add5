"""Agents: which are taken in, which are refused, how many must have come, and what an agent starts when. No process is started."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from tests.support.memory_network import MemoryHub, MemoryNetwork

from offbeat.launch.agent import Agent, Duties
from offbeat.launch.agent_messages import versions
from offbeat.launch.agents import NOT_ENCRYPTED, AgentEngine
from offbeat.launch.program import Program
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.transport.base import Address, Message
from offbeat.types import WorkerId


class Supervised:
    """An engine with agents that only talk."""

    def __init__(self, *, seats: int = 4, least: int | None = None, workers: int = 1, guests: bool = False) -> None:
        self._network = MemoryNetwork(shares_memory=False)
        self.hub = MemoryHub(self._network, "secret")
        self.engine = AgentEngine(
            seats=seats,
            workers=workers,
            start_s=60.0,
            listen="127.0.0.1",
            port=0,
            reached="",
            guests=guests,
        )
        job = JobSettings(workers=seats * workers, least=(least or seats) * workers, timeout_s=10.0)
        self.notes: list[str] = []
        self.address = self.engine.begin(job, self.hub, "secret", self.notes.append)

    def agent(self, seat: int | None, node: str = "node0", **changes: Any) -> MemoryHub:
        """Connect an agent that says hello, and return its hub."""
        hub = MemoryHub(self._network, "secret")
        hello = {"kind": "agent", "seat": seat, "node": node, "host": node, "local_size": 1, "workers": 1, "port": 1, "address": ""}
        hub.connect(self.address).send({**hello, "versions": versions(), **changes})
        self.serve()
        return hub

    def serve(self) -> None:
        for connection, item in self.hub.poll(0.0):
            if isinstance(item, Message):
                assert self.engine.on_message(connection, item)
            else:
                self.engine.on_closed(connection, item.reason)


def worker(number: int, *, servers_return: bool = False) -> WorkerSettings:
    return WorkerSettings(worker=WorkerId(number), workers=4, token="secret", servers=(), servers_return=servers_return)


def told(hub: MemoryHub) -> list[Mapping[str, Any]]:
    return [item.header for _, item in hub.poll(0.0) if isinstance(item, Message)]


def kinds(headers: Sequence[Mapping[str, Any]]) -> list[str]:
    return [header["kind"] for header in headers]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"versions": [*versions()[:1], "torch 0.1"]}, f"node1 has torch 0.1, the supervisor's machine {versions()[1]}: install the same"),
        ({"workers": 2}, "node1 would start 2 workers an agent, this job has 1 .--nproc-per-node."),
        ({"seat": 4}, "node1 finds no free seat: the job has 4, and all are taken .--nnodes."),
    ],
)
def test_agents_that_do_not_fit(changes: dict[str, Any], sentence: str) -> None:
    supervised = Supervised()
    [header] = told(supervised.agent(**{"seat": 1, "node": "node1", **changes}))
    assert header["kind"] == "refused"
    with pytest.raises(ValueError, match=sentence):
        raise ValueError(header["reason"])
    assert any("refused an agent: node1" in note for note in supervised.notes)


def test_a_job_begins_when_enough_machines_are_whole() -> None:
    supervised = Supervised(seats=6, least=4)
    supervised.agent(4, "node2", local_size=2)
    supervised.agent(0, "node0", local_size=2)
    supervised.agent(2, "node1", local_size=2)
    supervised.agent(1, "node0", local_size=2)
    assert not supervised.engine.ready_for_servers(), "node1 and node2 lack an agent each"
    supervised.agent(3, "node1", local_size=2)
    assert supervised.engine.ready_for_servers()
    assert supervised.engine.arrived() == []


def test_too_few_machines() -> None:
    supervised = Supervised(seats=3, least=2)
    supervised.engine.tick(59.0)
    supervised.agent(1)
    assert not supervised.engine.ready_for_servers()
    assert supervised.notes == ["1 of 3 agents came (node0): waiting for 1 more, for at most 60 s (--start-timeout)"]
    supervised.engine.tick(60.0)
    assert not supervised.engine.ready_for_servers()
    assert supervised.engine.failure is not None
    reason, mistake = supervised.engine.failure
    assert "2 agents were to come within 60 s (--start-timeout), and 1 of 3 agents came (node0): 1 more did not; start" in reason
    assert not mistake


def test_who_has_no_number_gets_a_free_one_and_comes_later() -> None:
    supervised = Supervised(seats=2, least=1, workers=2)
    supervised.agent(0, workers=2)
    assert supervised.engine.ready_for_servers()
    [header] = told(supervised.agent(None, "node1", workers=2))
    assert (header["kind"], header["seat"]) == ("seated", 1)
    assert supervised.engine.arrived() == [WorkerId(2), WorkerId(3)] and supervised.engine.arrived() == []


def test_a_silent_agent_takes_the_silent_ones_of_its_machine_along() -> None:
    supervised = Supervised(least=3)
    for seat, node in enumerate(["node0", "node1", "node1"]):
        supervised.agent(seat, node)
    assert supervised.engine.ready_for_servers()
    children = [supervised.engine.start_worker(worker(number)) for number in range(3)]
    supervised.engine.tick(9.0)
    supervised.agent(3, "node0")
    assert [child is not None and child.lost is None for child in children] == [True] * 3
    supervised.engine.tick(10.0)
    reasons = [child.lost for child in children if child is not None]
    assert all(reason is not None and "nothing came from" in reason for reason in reasons)
    assert supervised.engine.start_worker(worker(3)) is not None, "the one that was heard is there"


def test_a_guest_is_not_lost_for_its_silence_but_for_the_end_of_its_connection_or_a_successor() -> None:
    """Its thread cannot speak while the script imports a large library."""
    supervised = Supervised(seats=2, guests=True)
    hubs = [supervised.agent(seat, f"node{seat}") for seat in range(2)]
    assert supervised.engine.ready_for_servers()
    children = [supervised.engine.start_worker(worker(number)) for number in range(2)]

    def lost() -> list[str | None]:
        return [child.lost for child in children if child is not None]

    supervised.engine.tick(1000.0)
    assert lost() == [None, None]
    hubs[0].close()
    supervised.serve()
    [why, other] = lost()
    assert why is not None and "has ended" in why and other is None
    supervised.agent(1, "node2")
    assert lost() == [why, "node2 has come in place of node1, which was silent"]
    assert supervised.engine.arrived() == [WorkerId(1)]


def test_clear_text_between_machines_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFBEAT_TLS", raising=False)
    supervised = Supervised(seats=2)
    supervised.agent(0, "node0")
    supervised.agent(1, "node1")
    assert supervised.engine.ready_for_servers()
    assert supervised.notes.count(NOT_ENCRYPTED) == 1


def test_servers_begin_on_the_machine_of_the_supervisor_whichever_agent_comes_first() -> None:
    """Started by hand, agents have no number: another machine's may be the first. The loss of such a machine must not end the job."""
    supervised = Supervised(seats=2)
    other = supervised.agent(None, "node1")
    own = supervised.agent(None, "node0", host=supervised.hub.host)
    for number, (hub, idle) in enumerate([(own, other), (other, own), (own, other)]):
        supervised.engine.start_server(number, "leader", None, None)
        assert kinds(told(hub))[-1] == "start"
        assert "start" not in kinds(told(idle))


def test_the_only_server_is_started_again_where_it_was_while_an_agent_is_there() -> None:
    supervised = Supervised(seats=2)
    other = supervised.agent(0, "node1")
    own = supervised.agent(1, "node0", host=supervised.hub.host)
    assert supervised.engine.servers_return(1)
    supervised.engine.start_worker(worker(0, servers_return=True))
    assert supervised.engine.start_server(0, "again", None, Address("node0", ("10.0.0.1", 7777), "offbeat-3f")) is not None
    [start] = [header for header in told(own) if header["kind"] == "start"]
    variables = dict(zip(start["variables"][::2], start["variables"][1::2], strict=True))
    assert (variables["OFFBEAT_LISTEN"], variables["OFFBEAT_PORT"], variables["OFFBEAT_LOCAL"]) == ("10.0.0.1", "7777", "offbeat-3f")
    [start] = [header for header in told(other) if header["kind"] == "start"]
    assert "OFFBEAT_SERVERS_RETURN" in start["variables"][::2], "workers wait for it"
    own.close()
    supervised.serve()
    assert supervised.engine.start_server(0, "again", None, None) is None, "what it has left is in the memory of this machine"


def test_several_servers_do_not_return() -> None:
    """Some of them are on other machines than what the supervisor holds for them."""
    assert not Supervised().engine.servers_return(2)


def test_an_order_to_leave_reaches_a_worker_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the imports of the process from which it is forked. Once there, it would train on after Ctrl-C."""
    duties = Duties(program=Program("train.py"), seat=0, start_s=1.0, grace_s=1.0)
    agent, told = Agent(duties, "token", lambda: None), list[tuple[str, Any]]()
    monkeypatch.setattr(agent, "_tell", lambda kind, payload=(), **header: told.append((kind, header)))
    agent._waiting[3] = {"role": "worker", "number": 0}
    agent._on_item(Message({"kind": "signal", "child": 3, "number": int(signal.SIGTERM)}, memoryview(b""), ()))
    assert agent._waiting == {} and told == [("ended", {"child": 3, "status": -signal.SIGTERM})]
