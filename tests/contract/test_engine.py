"""One suite for whatever starts, watches and ends a child: local processes, forks of the forkserver, and a real agent."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.launch.waiting import alive, output, until

from offbeat.launch.agents import AgentEngine
from offbeat.launch.engine import Child, Engine
from offbeat.launch.local import LocalEngine
from offbeat.launch.preload import NOTHING, Preload
from offbeat.launch.program import Program
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.transport.base import Address, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import FIRST_WORKER

AGENT = """
import json, sys
from offbeat.launch.agent import Agent, Duties
from offbeat.launch.program import Program
from offbeat.runtime.job.settings import read_addresses, take_token
script, address = sys.argv[1:]
duties = Duties(program=Program(script), seat=0, start_s=30.0, grace_s=5.0)
sys.exit(Agent(duties, take_token(), lambda: read_addresses(address)[0]).run())
"""
TIMEOUT_S = 60.0
"""Longer than the last tests take, during which nobody serves the agent that all others share: it would take the job for dead."""
FOREVER = "import time; time.sleep(1000)"
WORKER = WorkerSettings(worker=FIRST_WORKER, workers=1, token="", servers=(Address("host", ("127.0.0.1", 1), ""),))


class Bench:
    """An engine at work, with one worker whose script each test writes."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.script = folder / "script.py"
        self.script.touch()
        self._token = secrets.token_hex(16)
        self._hub = SocketHub(self._token)
        self.agent: subprocess.Popen[bytes] | None = None
        program = Program(str(self.script))
        self.engine: Engine
        if kind == "agent":
            self.engine = AgentEngine(seats=1, workers=1, start_s=30.0, listen="127.0.0.1", port=0, reached="")
        else:
            self.engine = LocalEngine(program, preload=Preload(("json",)) if kind == "preload" else NOTHING)
        self.now = 0.0
        self.notes: list[str] = []
        self.address = self.engine.begin(JobSettings(workers=1, timeout_s=TIMEOUT_S), self._hub, self._token, self.notes.append)
        if kind == "agent":
            self.start_agent()
        self.wait("servers can start", self.engine.ready_for_servers)
        self.wait("workers can start", self.engine.ready_for_workers)

    def start_agent(self) -> None:
        arguments = [sys.executable, "-c", AGENT, str(self.script), json.dumps([self.address])]
        self.agent = subprocess.Popen(arguments, env={**os.environ, "OFFBEAT_TOKEN": self._token})

    def wait(self, what: str, ready: Callable[[], object]) -> None:
        def served() -> object:
            for connection, item in self._hub.poll(0.01):
                if isinstance(item, Message):
                    assert self.engine.on_message(connection, item), f"{item.header} is not the engine's"
                else:
                    self.engine.on_closed(connection, item.reason)
            self.engine.tick(self.now)
            return ready()

        until(what, served)

    def start(self, program: str) -> Child:
        self.script.write_text(program)
        child = self.engine.start_worker(WORKER)
        assert child is not None
        return child

    def printed(self, child: Child) -> list[bytes]:
        """Return all that a process prints to stdout and to stderr until its end."""
        return output(child, self.wait)

    def ended(self, child: Child) -> int:
        self.printed(child)
        status = child.ended()
        assert status is not None
        return status

    def close(self) -> None:
        self.wait("all know of the end", lambda: self.engine.over(7, "the tests are over"))
        self.engine.close()
        self._hub.close()
        if self.agent is not None:
            assert self.agent.wait(30) in (7, -9), "an agent ends with the job's status"


@pytest.fixture(scope="module", params=["local", "preload", "agent"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.mark.parametrize(("program", "status"), [("", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_how_a_child_ends(bench: Bench, program: str, status: int) -> None:
    child = bench.start(program)
    assert bench.ended(child) == status and child.lost is None


def test_what_it_prints_is_complete_and_kept_apart(bench: Bench) -> None:
    out, err = bench.printed(bench.start("import sys; print('x' * 300_000); print('a mistake', file=sys.stderr); print('the end')"))
    assert (out, err) == (b"x" * 300_000 + b"\nthe end\n", b"a mistake\n")


def test_it_finds_its_job_and_its_place(bench: Bench) -> None:
    names = ["OFFBEAT_WORKER", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    out, _ = bench.printed(bench.start(f"import os; print(*[os.environ[name] for name in {names}])"))
    assert out == b"0 0 0 1 1 127.0.0.1\n"


def test_its_number_is_known(bench: Bench) -> None:
    child = bench.start(FOREVER)
    bench.wait("its number", lambda: child.pid)
    assert alive(child.pid)
    child.kill()
    assert bench.ended(child) == -9


def test_a_signal_reaches_it(bench: Bench) -> None:
    child = bench.start(
        "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: exit(3))\nprint('ready', flush=True)\nwhile True: time.sleep(1)"
    )
    said: list[bytes] = []

    def ready() -> bool:
        said.extend(data for _, data in child.read())
        return b"ready" in b"".join(said)

    bench.wait("its handler", ready)
    child.signal(signal.SIGTERM)
    assert bench.ended(child) == 3


def test_killing_takes_its_children_along_and_a_stopped_one_dies(bench: Bench, tmp_path: Path) -> None:
    program = """
import os, signal, subprocess
other = subprocess.Popen(["sleep", "1000"])
open(FILE, "w").write(f"{other.pid}\\n")
os.kill(os.getpid(), signal.SIGSTOP)
"""
    child = bench.start(program.replace("FILE", repr(str(tmp_path / "pid"))))
    bench.wait("it stands", lambda: child.pid and alive(child.pid) and psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    grandchild = int((tmp_path / "pid").read_text())
    child.strike()
    assert bench.ended(child) == -9
    until("the grandchild's end", lambda: not alive(grandchild))


def test_a_child_that_ends_leaves_no_grandchild(bench: Bench, tmp_path: Path) -> None:
    child = bench.start(f"import subprocess\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid))")
    assert bench.ended(child) == 0
    until("the grandchild's end", lambda: not alive(int((tmp_path / "pid").read_text())))


def test_children_are_told_apart(bench: Bench) -> None:
    first = bench.start("print(1)")
    bench.wait("the first", lambda: first.pid)
    assert bench.printed(first) == [b"1\n", b""]
    second = bench.start("print(2)")
    assert bench.printed(second) == [b"2\n", b""]
    assert first.pid != second.pid


def test_a_lost_machine_takes_its_children_along_and_returns(tmp_path: Path) -> None:
    bench = Bench("agent", tmp_path)
    assert bench.engine.arrived() == [] and bench.agent is not None
    child = bench.start(FOREVER)
    bench.wait("its number", lambda: child.pid)
    bench.agent.kill()
    bench.wait("the loss", lambda: child.ended() is not None)
    assert child.lost is not None and "has ended" in child.lost and child.ended() == -9
    until("its end, by the kernel", lambda: not alive(child.pid))
    assert bench.engine.start_worker(WORKER) is None, "its machine is not there"
    bench.start_agent()
    bench.wait("its return", lambda: bench.engine.arrived() == [FIRST_WORKER])
    assert bench.ended(bench.start("raise SystemExit(5)")) == 5
    bench.close()


def test_a_silent_machine_is_lost_and_ends_its_children_itself(tmp_path: Path) -> None:
    bench = Bench("agent", tmp_path)
    assert bench.agent is not None
    child = bench.start(FOREVER)
    bench.wait("its number", lambda: child.pid)
    stopped = psutil.Process(bench.agent.pid)
    stopped.suspend()
    bench.wait("a stopped agent", lambda: stopped.status() == psutil.STATUS_STOPPED)
    bench.wait("the last messages", lambda: True)
    bench.now += TIMEOUT_S
    bench.wait("the loss", lambda: child.ended() is not None)
    assert child.lost is not None and "nothing came" in child.lost
    assert alive(child.pid), "it runs on, until its agent wakes up"
    stopped.resume()
    until("its end", lambda: not alive(child.pid))
    bench.wait("the agent comes again", lambda: bench.engine.arrived() == [FIRST_WORKER])
    bench.close()


def test_a_machine_that_is_told_to_end_lets_its_children_leave_and_may_return(tmp_path: Path) -> None:
    bench = Bench("agent", tmp_path)
    assert bench.agent is not None
    child = bench.start(FOREVER)
    bench.wait("its number", lambda: child.pid)
    bench.agent.send_signal(signal.SIGTERM)
    assert bench.ended(child) == -signal.SIGTERM
    assert child.lost is not None and "it was told to end by SIGTERM" in child.lost
    assert bench.agent.wait(30) == 128 + signal.SIGTERM
    bench.start_agent()
    bench.wait("its return", lambda: bench.engine.arrived() == [FIRST_WORKER])
    bench.close()


def test_a_second_agent_for_a_seat_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bench = Bench("agent", tmp_path)
    first = bench.agent
    bench.start_agent()
    second = bench.agent
    assert first is not None and second is not None
    bench.wait("a refusal", lambda: any("refused" in note for note in bench.notes))
    assert "has come as number 0, but" in bench.notes[-1]
    bench.wait("its end", lambda: second.poll() is not None)
    assert second.returncode == 1 and "ConfigurationError" in capfd.readouterr().err
    assert bench.ended(bench.start("")) == 0, "the first one goes on"
    bench.agent = first
    bench.close()
