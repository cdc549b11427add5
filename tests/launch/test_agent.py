"""An agent's own decisions, without processes: what it starts when."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from offbeat.launch.agent import Agent, Duties
from offbeat.launch.program import Program
from offbeat.transport.base import Message


def test_an_order_to_leave_reaches_a_worker_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the imports of the process from which it is forked. Once there, it would train on after Ctrl-C."""
    duties = Duties(program=Program("train.py"), seat=0, start_s=1.0, grace_s=1.0)
    agent, told = Agent(duties, "token", lambda: None), list[tuple[str, Any]]()
    monkeypatch.setattr(agent, "_tell", lambda kind, payload=(), **header: told.append((kind, header)))
    agent._waiting[3] = {"role": "worker", "number": 0}
    agent._on_item(Message({"kind": "signal", "child": 3, "number": int(signal.SIGTERM)}, memoryview(b""), ()))
    assert agent._waiting == {} and told == [("ended", {"child": 3, "status": -signal.SIGTERM})]
