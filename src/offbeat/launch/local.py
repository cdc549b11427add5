"""The supervisor of a job on this machine: starts servers and workers, restarts what died, passes signals on, and cleans up.

It computes nothing and decides nothing about training; the coordinator in server 0 does, and tells it what to show. One thread, one loop.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from offbeat.launch.processes import Child, describe
from offbeat.runtime.settings import JobSettings, WorkerSettings
from offbeat.transport.base import Address, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import Seconds, WorkerId

GRACE_S = 5.0
"""How long workers may take to end after a signal before they are killed."""
NEWS_S = 2.0
"""How long to wait for news of a worker that may have joined just before its end."""
POLL_S = 0.1
"""How soon the end of a process is noticed that has no connection to tell of it."""


class Display(Protocol):
    """Who shows the job to the user."""

    def update(self, snapshot: dict[str, Any], now: Seconds) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(slots=True)
class _Worker:
    child: Child
    restarts: int = 0
    status: int | None = None
    """Once it has ended for good: its exit status, negative for a signal."""
    failure: tuple[str, bool] | None = None
    """The last words of its newest process: why its script failed, and whether it had pushed before."""

    def describe(self, status: int) -> str:
        """How its process ended, in words."""
        return f"failed: {self.failure[0]}" if status > 0 and self.failure is not None else describe(status)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    status: int
    """The exit status for the command line."""
    reason: str
    summary: dict[str, Any] | None


class Supervisor:
    """Runs one job.

    Args:
        settings: the job.
        command: the script and its arguments, after the interpreter.
        max_restarts: how often each worker may be restarted.
        port: where server 0 listens; 0: the system chooses.
        display: who shows it.

    Raises:
        ConfigurationError: a server could not begin, for instance because its port is taken.
    """

    def __init__(self, settings: JobSettings, command: list[str], *, max_restarts: int, port: int, display: Display) -> None:
        self._settings = settings
        self._command = command
        self._max_restarts = max_restarts
        self._port = port
        self._display = display
        self._token = secrets.token_hex(16)
        self._hub = SocketHub(self._token)
        self._servers: dict[int, Child] = {}
        self._links: dict[int, Connection] = {}
        self._addresses: dict[int, Address] = {}
        self._workers: dict[WorkerId, _Worker] = {}
        self._snapshot: dict[str, Any] | None = None
        self._summary: dict[str, Any] | None = None
        self._failure: tuple[str, bool] | None = None
        self._signals: list[int] = []

    def run(self) -> Outcome:
        """Run the job to its end; every process is gone afterwards, however it ended."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            self._start()
            return self._attend()
        finally:
            self._kill_all()
            self._hub.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        self._hub.wake()
        if len(self._signals) > 1:
            for child in self._children():
                child.strike()

    # Starting.

    def _start(self) -> None:
        address = self._hub.listen()
        for number in range(self._settings.servers):
            environment = {
                **os.environ,
                "OFFBEAT_SERVER": str(number),
                "OFFBEAT_TOKEN": self._token,
                "OFFBEAT_SUPERVISOR": json.dumps([address]),
                "OFFBEAT_PORT": str(self._port),
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(_share(self._settings.servers))),
                "OMP_WAIT_POLICY": "PASSIVE",  # a server's idle threads must not spin: the cores are the workers'
            }
            self._servers[number] = Child([sys.executable, "-m", "offbeat.runtime.server"], environment)
        while len(self._addresses) < self._settings.servers:
            self._serve(POLL_S)
            self._check_servers()
            if self._failure is not None or self._signals:
                return
        for number, link in sorted(self._links.items()):
            servers = json.dumps([self._addresses[n] for n in range(self._settings.servers)])
            link.send({"kind": "job", "settings": self._settings.to_wire(), "servers": servers})
            self._record("server", number, "started", f"pid {self._servers[number].pid}")
        for worker in range(self._settings.workers):
            self._workers[worker] = _Worker(self._spawn(worker))
            self._record("worker", worker, "started", f"pid {self._workers[worker].child.pid}")

    def _spawn(self, worker: WorkerId) -> Child:
        settings = WorkerSettings(
            worker=worker,
            workers=self._settings.workers,
            token=self._token,
            servers=tuple(self._addresses[n] for n in range(self._settings.servers)),
            seed=self._settings.seed,
            timeout_s=self._settings.timeout_s,
            slow=self._settings.slow,
        )
        threads = os.environ.get("OMP_NUM_THREADS", str(_share(self._settings.workers)))
        environment = {**os.environ, **settings.to_environment(), "OMP_NUM_THREADS": threads}
        return Child([sys.executable, *self._command], environment)

    # Running.

    def _attend(self) -> Outcome:
        while True:
            self._serve(POLL_S)
            self._check_servers()
            if self._failure is not None:
                reason, mistake = self._failure
                return self._end(2 if mistake else 1, reason)
            if self._signals:
                return self._stop(self._signals[0])
            self._check_workers()
            if all(worker.status is not None for worker in self._workers.values()):
                return self._conclude()

    def _serve(self, timeout_s: Seconds) -> None:
        for connection, item in self._hub.poll(timeout_s):
            if isinstance(item, Message):
                self._on_message(connection, item.header)
            else:
                self._links = {number: link for number, link in self._links.items() if link is not connection}

    def _on_message(self, connection: Connection, header: dict[str, Any]) -> None:
        match header["kind"]:
            case "listening":
                host, tcp, local = header["address"]
                self._links[header["number"]] = connection
                self._addresses[header["number"]] = Address(host, (tcp[0], tcp[1]), local)
            case "status":
                self._snapshot = header["snapshot"]
                self._display.update(header["snapshot"], time.monotonic())
            case "summary":
                self._summary = header["summary"]
            case "failed":
                self._failure = self._failure or (header["reason"], header["mistake"])
                connection.send({"kind": "noted"})
            case "failing":
                if header["worker"] in self._workers:
                    self._workers[header["worker"]].failure = (header["reason"], header["pushed"])
            case "kill":
                self._rehearse_kill(header["worker"])

    def _rehearse_kill(self, worker: WorkerId) -> None:
        self._display.note(f"killing worker {worker}, as ordered by --kill")
        self._workers[worker].child.signal(signal.SIGKILL)

    def _check_servers(self) -> None:
        for number, child in self._servers.items():
            status = child.ended()
            if status is not None and self._failure is None:
                self._serve(0.0)  # its last words may explain it better
                reason = f"server {number} {describe(status)}, and its part of the parameters is gone with it"
                if self._failure is None:
                    self._failure = (reason, False)

    def _check_workers(self) -> None:
        for worker, state in self._workers.items():
            if state.status is not None or (status := state.child.ended()) is None:
                continue
            self._serve(0.0)  # its last words are there before its end is seen
            if self._failure is not None:
                return
            how = state.describe(status)
            self._record("worker", worker, "exited", how)
            if status == 0:
                state.status = 0
                self._tell("ended", worker=worker)
                continue
            self._tell("lost", worker=worker, reason=f"its process {describe(status)}")
            why_not = self._why_not(worker, state, status)
            if why_not is None:
                state.restarts += 1
                state.failure = None
                state.child = self._spawn(worker)
                count = f"{state.restarts} of {self._max_restarts}"
                self._record("worker", worker, "restarted", f"{count}, pid {state.child.pid}")
                self._display.note(f"worker {worker} {how}: restarted ({count})")
            else:
                state.status = status
                self._display.note(f"worker {worker} {how}: not restarted, {why_not}")

    def _why_not(self, worker: WorkerId, state: _Worker, status: int) -> str | None:
        """Why a worker that has died is not restarted; None: it is."""
        if status in (-signal.SIGTERM, 128 + signal.SIGTERM):
            return "it was told to leave"
        if status > 0 and not self._has_pushed(worker, state):
            return "it failed before its first step and would again"
        if state.restarts >= self._max_restarts:
            return f"--max-restarts {self._max_restarts} is used up" if self._max_restarts else "--max-restarts is 0"
        return None

    def _has_pushed(self, worker: WorkerId, state: _Worker) -> bool:
        if state.failure is not None:
            return state.failure[1]
        rows = self._snapshot["per_worker"] if self._snapshot is not None else []
        return any(row["worker"] == worker and row["pushes"] > 0 for row in rows)

    # Ending.

    def _conclude(self) -> Outcome:
        """Every worker process has ended for good."""
        failed = {worker: state.describe(state.status) for worker, state in self._workers.items() if state.status}
        if len(failed) == len(self._workers):
            return self._end(1, f"no worker finished: {_grouped(failed)}")
        deadline = time.monotonic() + NEWS_S
        while not self._joined() and 0 in self._links and time.monotonic() < deadline:
            self._serve(POLL_S)
        if not self._joined():
            script = self._settings.script
            return self._end(1, f"{script} ended without making an offbeat.DistributedOptimizer, so nothing was trained together")
        return self._end(0, f"every other worker's script has ended; {_grouped(failed)}" if failed else "every worker's script has ended")

    def _joined(self) -> bool:
        return self._snapshot is not None and any(row["incarnations"] for row in self._snapshot["per_worker"])

    def _stop(self, number: int) -> Outcome:
        """The user, or the cluster, wants the job to end: the workers are asked to leave, and get a little time for it.

        SIGTERM for them in any case: they take it as a notice, where SIGINT would end each in a traceback.
        """
        name = signal.Signals(number).name
        self._display.note(f"{name}: stopping the workers (again: at once)")
        for state in self._workers.values():
            state.child.signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(state.child.ended() is None for state in self._workers.values()):
            self._serve(POLL_S)
        for state in self._workers.values():
            state.child.kill()
        return self._end(128 + number, f"stopped by {name}")

    def _end(self, status: int, reason: str) -> Outcome:
        """Let the coordinator close its books, then stop the servers."""
        for state in self._workers.values():
            state.child.strike()
        for state in self._workers.values():
            state.child.kill()
        self._tell("finish", ok=status == 0, reason=reason)
        deadline = time.monotonic() + GRACE_S
        while self._summary is None and 0 in self._links and time.monotonic() < deadline:
            self._serve(POLL_S)
        return Outcome(status, reason, self._summary or self._snapshot)

    def _kill_all(self) -> None:
        for child in self._children():
            child.strike()
        for child in self._children():
            child.kill()

    def _children(self) -> list[Child]:
        return [*(state.child for state in self._workers.values()), *self._servers.values()]

    def _tell(self, kind: str, **fields: Any) -> None:
        if 0 in self._links:
            self._links[0].send({"kind": kind, **fields})

    def _record(self, role: str, number: int, what: str, detail: str = "") -> None:
        self._tell("process", fields={"role": role, "number": number, "what": what, "detail": detail})


def _grouped(words: dict[WorkerId, str]) -> str:
    """What became of workers, each thing said once.

    >>> _grouped({0: "killed by SIGKILL", 1: "failed: no data", 2: "failed: no data"})
    'worker 0 killed by SIGKILL; workers 1, 2 failed: no data'
    """
    alike: dict[str, list[str]] = {}
    for worker, text in words.items():
        alike.setdefault(text, []).append(str(worker))
    return "; ".join(f"worker{'s' * (len(who) > 1)} {', '.join(who)} {text}" for text, who in alike.items())


def _share(processes: int) -> int:
    """This machine's cores, divided among processes that compute at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
