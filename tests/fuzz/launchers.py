"""The processes that start a job as receivers: the supervisor, its side of the agents, and an agent."""

from __future__ import annotations

import io
import random
from typing import Any
from unittest.mock import patch

from rich.console import Console
from tests.fuzz.receiver import Mute, Outcome, Receiver, checked
from tests.launch.test_agents import Supervised
from tests.support.memory_network import MemoryConnection, MemoryHub, MemoryNetwork

from offbeat.errors import ConfigurationError
from offbeat.launch.agent import Agent, Duties
from offbeat.launch.agents import RemoteChild
from offbeat.launch.hangs import ProcessStanding
from offbeat.launch.program import Program
from offbeat.launch.restarts import WorkerProcess
from offbeat.launch.supervisor import Supervisor
from offbeat.report.live import LiveProgress
from offbeat.report.table import comparison, job_tables
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Message
from offbeat.types import WorkerId


class ToSupervisor(Receiver):
    """The supervisor, attacked by server 0."""

    name = "to-supervisor"

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self.engine = Supervised().engine

    def begin(self) -> None:
        self.shown = io.StringIO()
        display = LiveProgress(Console(file=self.shown, force_terminal=self.draw.random() < 0.5, width=100, height=30))
        self.line = Mute("server 0")
        self.supervisor = Supervisor(JobSettings(workers=3), self.engine, token="token", max_restarts=1, display=display)
        self.display = display
        with patch.object(self.engine, "start_server", lambda *_: RemoteChild(1, Mute("agent"), "node1")):
            self.supervisor._servers.begin()
        if self.draw.random() < 0.9:
            listening = {"kind": "listening", "number": 0, "address": ["node1", ["10.0.0.1", 7777], ""]}
            self.supervisor._servers.on_message(self.line, Message(listening, memoryview(b""), ()))
        if self.draw.random() < 0.9:
            self.supervisor._servers.begin_job()
        for number in range(3):
            started = RemoteChild(2 + number, Mute("agent"), "node1")
            started.pid = 77
            self.supervisor._workers._states[WorkerId(number)] = WorkerProcess(started, standing=ProcessStanding(0.0))

    def receive(self, message: Message) -> Outcome:
        supervisor = self.supervisor
        supervisor._on_message(self.line, message)
        supervisor._workers.check_hangs(loading=False)
        assert supervisor._workers.any_joined in (True, False)
        for number, worker in supervisor._workers._states.items():
            worker.has_pushed(number, supervisor._workers.snapshot)
        if supervisor._summary is not None:
            self.display._console.print(*job_tables(supervisor._summary, 200), comparison([supervisor._summary]))
        self.shown.truncate(0)
        if self.line.closed:
            if supervisor._failure is not None:
                checked(supervisor._failure[0])
            return Outcome.REFUSED
        return Outcome.ENDED if supervisor._failure is not None else Outcome.TAKEN

    def end(self) -> None:
        self.display.close()
        self.supervisor._hub.close()


class FromAgent(Receiver):
    """The supervisor's side of agents, attacked by an agent."""

    name = "from-agent"

    def begin(self) -> None:
        self.supervised = Supervised(seats=4, least=self.draw.choice([1, 4]))
        self.hub = self.supervised.agent(0, "node0")
        [ours] = self.hub.connections
        assert isinstance(ours.other, MemoryConnection)
        self.line = ours.other
        self.supervised.engine.ready_for_servers()
        self.supervised.engine.start_server(0, "leader", None, None) if self.draw.random() < 0.7 else None
        if self.draw.random() < 0.3:
            other = self.hub.connect(self.supervised.address)
            assert isinstance(other, MemoryConnection) and other.other is not None
            self.line = other.other

    def receive(self, message: Message) -> Outcome:
        engine = self.supervised.engine
        engine.on_message(self.line, message)
        engine.tick(1.0)
        engine.ready_for_servers()
        assert all(self.supervised.notes)
        self.supervised.notes.clear()
        self.hub.inbox.clear()
        return Outcome.REFUSED if self.line.closed else Outcome.TAKEN


class ToAgent(Receiver):
    """An agent, attacked by the supervisor. What it would start is noted and not started."""

    name = "to-agent"

    def begin(self) -> None:
        program = Program("train.py", ())
        duties = Duties(program=program, workers=2, seat=None, start_s=1.0, grace_s=1.0)
        self.agent = Agent(duties, "token", lambda: None)
        self.agent._hub = MemoryHub(MemoryNetwork(), "token")  # type: ignore[assignment]
        self.agent._connection = self.line = Mute("the supervisor")

    def receive(self, message: Message) -> Outcome:
        try:
            self.agent._on_item(message)
        except ConfigurationError:
            return Outcome.ENDED
        if self.agent._over is not None:
            return Outcome.ENDED
        for header in self.agent._waiting.values():
            flat: list[Any] = header["variables"]
            variables = dict(zip(flat[::2], flat[1::2], strict=True))
            assert all(name and "=" not in name and "\0" not in name + value for name, value in variables.items())
        if self.agent._waiting:
            self.agent._waiting.clear()
        return Outcome.TAKEN
