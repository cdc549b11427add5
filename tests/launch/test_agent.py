"""An agent's own decisions, without processes: what it starts when."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import pytest

from offbeat.launch.agent import BEGINNING_S, PREPARED_S, Agent, Duties
from offbeat.launch.preload import NOTHING
from offbeat.launch.program import Program
from offbeat.transport.base import Message


class Stub:
    """Takes any call of an agent: its clock, its connection, its servers, a child."""

    pid = 7

    def __init__(self) -> None:
        self.at = 100.0
        self.prepared: list[float] = []

    def now(self) -> float:
        return self.at

    def send(self, header: Mapping[str, Any], payload: object = ()) -> None: ...

    def prepare(self, environment: Mapping[str, str]) -> None:
        self.prepared.append(self.at)


@pytest.mark.parametrize("works", [True, False])
def test_workers_begin_before_it_prepares_for_servers_that_return(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """The imports of that process take a core for seconds, which first steps need more."""
    program = Program("train.py")
    duties = Duties(program=program, workers=1, seat=0, local_size=1, advertise="", preload=NOTHING, start_s=1.0, grace_s=1.0)
    agent, stub = Agent(duties, "token", lambda: None), Stub()
    for name in ("_clock", "_connection", "_servers"):
        monkeypatch.setattr(agent, name, stub)
    monkeypatch.setattr(agent, "_start", lambda header: stub)
    monkeypatch.setattr(agent, "_server_environment", dict)
    agent._prepare_since = stub.at
    agent._start_waiting()
    stub.at += 2.0
    if works:
        agent._waiting[1] = {"role": "worker", "number": 0}
    agent._start_waiting()
    stub.at += BEGINNING_S - 0.1
    agent._start_waiting()
    assert stub.prepared == []
    stub.at += 0.1 if works else PREPARED_S
    agent._start_waiting()
    agent._start_waiting()
    assert stub.prepared == [stub.at]


def test_an_order_to_leave_reaches_a_worker_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the imports of the process from which it is forked. Once there, it would train on after Ctrl-C."""
    duties = Duties(program=Program("train.py"), workers=1, seat=0, local_size=1, advertise="", preload=NOTHING, start_s=1.0, grace_s=1.0)
    agent, told = Agent(duties, "token", lambda: None), list[tuple[str, Any]]()
    monkeypatch.setattr(agent, "_tell", lambda kind, payload=(), **header: told.append((kind, header)))
    agent._waiting[3] = {"role": "worker", "number": 0}
    agent._on_item(Message({"kind": "signal", "child": 3, "number": int(signal.SIGTERM)}, memoryview(b""), ()))
    assert agent._waiting == {} and told == [("ended", {"child": 3, "status": -signal.SIGTERM})]
