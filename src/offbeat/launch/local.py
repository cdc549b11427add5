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
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
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
            self._kill_all()

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
            self._record("server", number, "started")
        for worker in range(self._settings.workers):
            self._workers[worker] = _Worker(self._spawn(worker))
            self._record("worker", worker, "started")

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
            self._record("worker", worker, "exited", describe(status))
            if status == 0:
                state.status = 0
                continue
            self._tell("lost", worker=worker, reason=f"its process {describe(status)}")
            if state.restarts < self._max_restarts and (status < 0 or self._has_pushed(worker)):
                state.restarts += 1
                state.child = self._spawn(worker)
                self._record("worker", worker, "restarted", f"{state.restarts} of {self._max_restarts}")
                self._display.note(f"worker {worker} {describe(status)}: restarted ({state.restarts} of {self._max_restarts})")
            else:
                state.status = status
                self._display.note(f"worker {worker} {describe(status)}: not restarted, {self._why_not(worker, state, status)}")

    def _has_pushed(self, worker: WorkerId) -> bool:
        rows = self._snapshot["per_worker"] if self._snapshot is not None else []
        return any(row["worker"] == worker and row["pushes"] > 0 for row in rows)

    def _why_not(self, worker: WorkerId, state: _Worker, status: int) -> str:
        if state.restarts >= self._max_restarts:
            return f"--max-restarts {self._max_restarts} is used up" if self._max_restarts else "--max-restarts is 0"
        return "it failed before its first step and would again"

    # Ending.

    def _conclude(self) -> Outcome:
        """Every worker process has ended for good."""
        statuses = {worker: state.status for worker, state in self._workers.items()}
        joined = self._snapshot is not None and any(row["incarnations"] for row in self._snapshot["per_worker"])
        if all(statuses.values()):
            words = ", ".join(f"worker {worker} {describe(status or 0)}" for worker, status in statuses.items())
            return self._end(1, f"no worker finished: {words}")
        if not joined:
            self._serve(3 * POLL_S)
            joined = self._snapshot is not None and any(row["incarnations"] for row in self._snapshot["per_worker"])
        if not joined:
            script = self._settings.script
            return self._end(1, f"{script} ended without making an offbeat.DistributedOptimizer, so nothing was trained together")
        return self._end(0, "every worker's script has ended")

    def _stop(self, number: int) -> Outcome:
        """The user, or the cluster, wants the job to end: the workers get the signal and a little time."""
        name = signal.Signals(number).name
        self._display.note(f"{name}: stopping the workers (again: at once)")
        for state in self._workers.values():
            state.child.signal(number)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(state.child.ended() is None for state in self._workers.values()):
            self._serve(POLL_S)
        for state in self._workers.values():
            state.child.kill()
        return self._end(128 + number, f"stopped by {name}")

    def _end(self, status: int, reason: str) -> Outcome:
        """Let the coordinator close its books, then stop the servers."""
        for state in self._workers.values():
            state.child.kill()
        self._tell("finish", ok=status == 0, reason=reason)
        deadline = time.monotonic() + GRACE_S
        while self._summary is None and 0 in self._links and time.monotonic() < deadline:
            self._serve(POLL_S)
        return Outcome(status, reason, self._summary or self._snapshot)

    def _kill_all(self) -> None:
        for child in [*(state.child for state in self._workers.values()), *self._servers.values()]:
            child.kill()

    def _tell(self, kind: str, **fields: Any) -> None:
        if 0 in self._links:
            self._links[0].send({"kind": kind, **fields})

    def _record(self, role: str, number: int, what: str, detail: str = "") -> None:
        self._tell("process", fields={"role": role, "number": number, "what": what, "detail": detail})


def _share(processes: int) -> int:
    """This machine's cores, divided among processes that compute at the same time."""
    return max(1, len(os.sched_getaffinity(0)) // processes)

