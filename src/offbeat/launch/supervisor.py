"""The supervisor of a job on this machine: starts servers and workers, restarts what died, passes signals on, and cleans up.

It computes nothing and decides nothing about training; the coordinator in server 0 does, and tells it what to show. One thread, one loop.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from offbeat.errors import ProtocolError
from offbeat.journal.records import seal
from offbeat.launch.environment import common_environment, free_port, server_environment, worker_environment
from offbeat.launch.forkserver import POSSIBLE, Forkserver
from offbeat.launch.hangs import STACKS_S, LivedClock, ProcessStanding, ServerWatch
from offbeat.launch.outcome import Display, End, Outcome, verdict
from offbeat.launch.output import Output
from offbeat.launch.processes import Child, describe, start
from offbeat.launch.program import Program
from offbeat.launch.restarts import LastWords, WorkerProcess, why_not_restarted
from offbeat.runtime.job import messages
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.worker import stacks
from offbeat.transport.base import Address, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import Seconds, WorkerId

__all__ = ["Outcome", "Supervisor"]

GRACE_S = 5.0
"""How long processes may take to end after a last signal before they are killed."""
NEWS_S = 2.0
"""How long to wait for news of a worker that may have joined just before its end."""
POLL_S = 0.1
"""How soon the end of a process is noticed that has no connection to tell of it."""


class Supervisor:
    """Runs one job.

    Args:
        settings: the job.
        program: what the workers run.
        max_restarts: how often each worker may be restarted.
        grace_s: how long the scripts may take to end after Ctrl-C or SIGTERM.
        port: where server 0 listens; 0: the system chooses.
        preload: modules to import once, in a process that workers are forked from; none: each worker is a new process.
        log_dir: a folder for the raw output of each worker and server; None: nowhere.
        display: who shows it.

    Raises:
        ConfigurationError: a server could not begin, for instance because its port is taken.
    """

    def __init__(
        self,
        settings: JobSettings,
        program: Program,
        *,
        max_restarts: int,
        grace_s: Seconds = 30.0,
        port: int,
        preload: Sequence[str] = (),
        log_dir: Path | None = None,
        display: Display,
    ) -> None:
        self._settings = settings
        self._program = program
        self._preload = preload
        self._zygote: Forkserver | None = None
        self._max_restarts, self._grace_s = max_restarts, grace_s
        self._port = port
        self._display = display
        self._output = Output(display, log_dir)
        self._group_port = free_port() if settings.torchrun_env else None
        self._token = secrets.token_hex(16)
        self._hub = SocketHub(self._token)
        self._servers: dict[int, Child] = {}
        self._links: dict[int, Connection] = {}
        self._addresses: dict[int, Address] = {}
        self._workers: dict[WorkerId, WorkerProcess] = {}
        self._snapshot: dict[str, Any] | None = None
        self._summary: dict[str, Any] | None = None
        self._failure: tuple[str, bool] | None = None
        self._journal_failure: str | None = None
        self._signals: list[int] = []
        self._clock = LivedClock()
        self._server_watch = ServerWatch(settings.timeout_s)

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
            _kill(self._children())
            if self._zygote is not None:
                self._zygote.child.kill()
            self._hub.close()
            self._output.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        self._hub.wake()
        if len(self._signals) > 1:
            for child in [*self._children(), *([] if self._zygote is None else [self._zygote.child])]:
                child.strike()

    # Starting.

    def _start(self) -> None:
        address = self._hub.listen()
        if self._preload and not POSSIBLE:
            self._display.note("--preload works on Linux only: here every worker imports for itself")
        elif self._preload:
            environment = common_environment(self._settings)
            self._zygote = Forkserver(self._program, self._preload, environment, capture=True)
            self._attach("preload", 0, self._zygote.child)
        for number in range(self._settings.servers):
            environment = server_environment(number, self._settings, token=self._token, supervisor=address, port=self._port)
            self._servers[number] = start([sys.executable, "-m", "offbeat.runtime.server"], environment, capture=True)
            self._attach("server", number, self._servers[number])
            self._server_watch.heard(number, self._clock.now(), loading=True)
        if not self._begun(lambda: len(self._addresses) == self._settings.servers):
            return
        for number, link in sorted(self._links.items()):
            servers = json.dumps([self._addresses[n] for n in range(self._settings.servers)])
            link.send({"kind": "job", "settings": self._settings.to_wire(), "servers": servers})
            self._record("server", number, "started", f"pid {self._servers[number].pid}")
        if not self._begun(self._zygote_settled):  # the servers load, too, meanwhile
            return
        for worker in range(self._settings.workers):
            self._workers[worker] = WorkerProcess(self._spawn(worker), standing=ProcessStanding(self._clock.now()))
            self._record("worker", worker, "started", f"pid {self._workers[worker].child.pid}")

    def _begun(self, ready: Callable[[], bool]) -> bool:
        """Wait for a part of the start; False: something has happened that ends the job first."""
        while not ready():
            self._serve(POLL_S)
            self._check_servers()
            if self._failure is not None or self._signals:
                return False
        return self._failure is None

    def _zygote_settled(self) -> bool:
        if self._zygote is None:
            return True
        settled = self._zygote.settled()
        if self._zygote.failure is not None:
            self._failure = self._failure or (self._zygote.failure, True)
        elif self._zygote.over:
            self._display.note("the process that was to import for all workers has died: they import for themselves")
        return settled

    def _spawn(self, worker: WorkerId) -> Child:
        servers = tuple(self._addresses[n] for n in range(self._settings.servers))
        environment = worker_environment(worker, self._settings, token=self._token, servers=servers, group_port=self._group_port)
        forked = self._zygote.fork(environment, self._program) if self._zygote is not None else None
        child = forked or start([sys.executable, *self._program.command], environment, capture=True)
        self._attach("worker", worker, child)
        return child

    def _attach(self, role: str, number: int, child: Child) -> None:
        self._output.attach(role, number, child)

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
            self._check_hangs()
            if all(worker.status is not None for worker in self._workers.values()):
                return self._conclude()

    def _serve(self, timeout_s: Seconds) -> None:
        for connection, item in self._hub.poll(timeout_s, self._output.pipes()):
            if isinstance(item, Message):
                self._on_message(connection, item.header)
                for number in [number for number, link in self._links.items() if link is connection]:
                    self._server_watch.heard(number, self._clock.now(), loading=item.header.get("kind") == "loading")
            else:
                self._links = {number: link for number, link in self._links.items() if link is not connection}
        self._output.drain()

    def _serve_until(self, ready: Callable[[], bool], limit_s: Seconds) -> None:
        deadline = time.monotonic() + limit_s
        while not ready() and time.monotonic() < deadline:
            self._serve(POLL_S)

    def _on_message(self, connection: Connection, header: dict[str, Any]) -> None:
        try:
            kind = messages.TO_SUPERVISOR.check(header, connection.peer)
            fresh = kind == "listening" and header["number"] in self._servers and header["number"] not in self._links
            # A server that cannot listen, its port being taken, says so before it has said where it listens.
            starting = kind == "failed" and len(self._links) < len(self._servers)
            if not fresh and not starting and connection not in self._links.values():
                raise ProtocolError(f"{connection.peer} sent {kind!r} and is no server of this job")
        except ProtocolError as error:
            self._display.note(f"{error}: not heard")
            connection.close()
            return
        match kind:
            case "listening":
                host, tcp, local = header["address"]
                self._links[header["number"]] = connection
                self._addresses[header["number"]] = Address(host, (tcp[0], tcp[1]), local)
            case "status":
                self._snapshot = header["snapshot"]
                self._display.update(header["snapshot"], time.monotonic())
            case "standing":
                told = self._workers.get(header["worker"])
                if told is not None and told.child.pid == header["pid"]:
                    told.standing.heard(header, self._clock.now())
                    if header["standing"] == "too late":
                        told.too_late = True
                        told.child.strike()
            case "journal_failed":
                self._journal_failure = header["reason"]
                self._display.note(f"the journal cannot be written any more, and training goes on without it: {header['reason']}")
            case "summary":
                self._summary = header["summary"]
            case "failed":
                self._failure = self._failure or (header["reason"], header["mistake"])
                connection.send({"kind": "noted"})
            case "failing":
                if header["worker"] in self._workers:
                    self._workers[header["worker"]].failure = LastWords(header["reason"], header["pushed"])
            case "kill":
                if header["worker"] in self._workers:
                    self._display.note(f"killing worker {header['worker']}, as ordered by --kill")
                    self._workers[header["worker"]].child.signal(signal.SIGKILL)

    def _check_servers(self) -> None:
        for number, child in self._servers.items():
            status = child.ended()
            if status is not None and self._failure is None:
                self._serve(0.0)  # its last words may explain it better
                reason = f"server {number} {describe(status)}, and its part of the parameters is gone with it"
                if self._failure is None:
                    self._failure = (reason, False)
        frozen = self._server_watch.frozen(self._clock.now())
        if frozen is not None and self._failure is None:
            self._failure = (frozen, False)

    def _check_workers(self) -> None:
        for worker, state in self._workers.items():
            if state.status is not None or (status := state.child.ended()) is None:
                continue
            self._serve(0.0)  # its last words are there before its end is seen
            if self._failure is not None:
                return
            how = state.describe(status)
            self._record("worker", worker, "exited", how)
            if status == 0 or state.too_late:
                state.status = 0
                self._tell("ended", worker=worker)
                if state.too_late:
                    self._display.note(f"worker {worker} {how}")
                continue
            self._tell("lost", worker=worker, reason=f"its process {how}")
            pushed = state.has_pushed(worker, self._snapshot)
            why_not = why_not_restarted(status, pushed=pushed, restarts=state.restarts, max_restarts=self._max_restarts)
            self._output.drain()  # before it is said that it has ended
            if why_not is None:
                state.restarts += 1
                state.failure = None
                state.child = self._spawn(worker)
                state.standing = ProcessStanding(self._clock.now())
                count = f"{state.restarts} of {self._max_restarts}"
                self._record("worker", worker, "restarted", f"{count}, pid {state.child.pid}")
                self._display.note(f"worker {worker} {how}: restarted ({count})")
            else:
                state.status = status
                self._display.note(f"worker {worker} {how}: not restarted, {why_not}")

    def _check_hangs(self) -> None:
        """Kill the worker processes that hang, once they have had time to print their stacks."""
        now, settings = self._clock.now(), self._settings
        loading = self._server_watch.loading(0)
        for worker, state in self._workers.items():
            standing = state.standing
            if loading:  # server 0 cannot say yet who has said hello
                standing.started = now
            if state.status is not None or state.child.ended() is not None:
                continue
            if standing.doomed is None:
                standing.doomed = standing.hung(now, settings.timeout_s, settings.progress_timeout_s)
                if standing.doomed is None:
                    continue
                self._record("worker", worker, "hung", standing.doomed)
                why_silent = stacks.why_silent(state.child.pid)
                said = "its stacks follow on its stderr" if why_silent is None else f"no stacks: {why_silent}"
                self._display.note(f"worker {worker} {standing.doomed}: it is killed; {said}")
                standing.kill_at = now
                if why_silent is None and stacks.NUMBER is not None:
                    state.child.signal(stacks.NUMBER)
                    standing.kill_at += STACKS_S
            if now >= standing.kill_at:
                state.child.strike()

    # Ending.

    def _conclude(self) -> Outcome:
        """Every worker process has ended for good."""
        ends = {w: End(state.status, state.describe(state.status)) for w, state in self._workers.items() if state.status is not None}
        if any(end.status == 0 for end in ends.values()):
            self._serve_until(lambda: self._joined() or 0 not in self._links, NEWS_S)
        return self._end(*verdict(ends, joined=self._joined(), script=self._settings.script))

    def _joined(self) -> bool:
        return self._snapshot is not None and any(row["incarnations"] for row in self._snapshot["per_worker"])

    def _stop(self, number: int) -> Outcome:
        """The user, or the cluster, wants the job to end: the workers are asked to leave, and get a little time for it.

        Ctrl-C becomes a `KeyboardInterrupt` in each script, which may catch it and save; anything else a notice to leave after the step.
        """
        name = signal.Signals(number).name
        self._display.note(f"{name}: stopping the workers (again: at once)")
        for state in self._workers.values():
            # Before its hello a process has nothing to save, and a traceback of its imports would help nobody.
            gently = number == signal.SIGINT and state.standing.came
            state.child.signal(signal.SIGINT if gently else signal.SIGTERM)
        if not self._all_leave(self._grace_s) and self._failure is None and number == signal.SIGINT and len(self._signals) == 1:
            self._display.note(f"not all scripts have ended within {self._grace_s:g} s of Ctrl-C (--grace): SIGTERM")
            for state in self._workers.values():
                state.child.signal(signal.SIGTERM)
            self._all_leave(GRACE_S)
        return self._end(128 + number, f"stopped by {name}")

    def _all_leave(self, limit_s: Seconds) -> bool:
        """Wait for the ends of all workers, none of which is restarted; whether they have come.

        The coordinator hears of each: others may wait for a worker that ends before it has joined.
        """

        def over() -> bool:
            for worker, state in self._workers.items():
                if state.status is None and (status := state.child.ended()) is not None:
                    state.status = status
                    self._record("worker", worker, "exited", state.describe(status))
                    self._tell("lost", worker=worker, reason=f"its process {state.describe(status)}")
            self._check_servers()
            ended = all(state.status is not None for state in self._workers.values())
            return ended or self._failure is not None or len(self._signals) > 1

        self._serve_until(over, limit_s)
        return all(state.status is not None for state in self._workers.values())

    def _end(self, status: int, reason: str) -> Outcome:
        """Let the coordinator close its books, then stop the servers."""
        _kill([state.child for state in self._workers.values()])
        self._output.drain()
        self._tell("finish", ok=status == 0, reason=reason)
        self._serve_until(lambda: self._summary is not None or 0 not in self._links, GRACE_S)
        if self._summary is None and self._snapshot is not None and self._settings.journal is not None:
            _kill(list(self._servers.values()))  # server 0 may be stopped, and must not go on to write
            seal(self._settings.journal, reason)
        if self._journal_failure is not None:
            status, reason = status or 1, f"{reason}; but the journal is not complete: {self._journal_failure}"
        return Outcome(status, reason, self._summary or self._snapshot)

    def _children(self) -> list[Child]:
        return [*(state.child for state in self._workers.values()), *self._servers.values()]

    def _tell(self, kind: str, **fields: Any) -> None:
        if 0 in self._links:
            self._links[0].send({"kind": kind, **fields})

    def _record(self, role: str, number: int, what: str, detail: str = "") -> None:
        self._tell("process", fields={"role": role, "number": number, "what": what, "detail": detail})


def _kill(children: Sequence[Child]) -> None:
    """All at once, and only then one after the other to its end."""
    for child in children:
        child.strike()
    for child in children:
        child.kill()
