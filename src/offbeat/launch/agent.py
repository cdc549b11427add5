"""Start processes of a job on this machine for a supervisor on any machine: an agent, also called a babysitter.

An agent connects to the supervisor, gets a seat, starts what the supervisor asks for, passes on the output and ends of its processes, and
ends with the job's status. The end of a process that it has started never ends it. An agent that is cut off from the supervisor kills its
processes, since the supervisor counts them as dead, and connects again.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.core.backoff import Backoff
from offbeat.errors import BY_SIGNAL, ConfigurationError, JobError, ProtocolError
from offbeat.guarded import pass_on, say
from offbeat.launch.agent_messages import HELLO, TO_AGENT, versions
from offbeat.launch.agents import WAIT_SAID_S, beat_of
from offbeat.launch.environment import common_environment, free_port, server_environment
from offbeat.launch.hangs import LivedClock
from offbeat.launch.lack import lack_of
from offbeat.launch.notice import NoticeCommand
from offbeat.launch.preload import NOTHING, Preload
from offbeat.launch.processes import LocalChild
from offbeat.launch.program import Program
from offbeat.launch.starter import Starter
from offbeat.launch.stop_signals import StopSignals
from offbeat.runtime.job.settings import TOKEN
from offbeat.transport.addresses import is_loopback
from offbeat.transport.base import Address, Closed, Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import Seconds

POLL_S: Seconds = 0.1
RETRY_S: Seconds = 0.5
"""Seconds between two attempts to connect."""
GONE_S: Seconds = 5.0
"""Seconds without a listener at the supervisor's address after which the job is over."""
UNHEARD_MAX = 16
"""Most messages with output that the supervisor has not acknowledged; further output waits in its pipe."""
BEFORE_SEAT_TIMEOUT_S: Seconds = 10.0


def hello(hub: SocketHub, seat: int | None, address: str, local_size: int = 1, workers: int = 1) -> dict[str, Any]:
    """Return an agent's first message.

    Args:
        hub: the agent's hub.
        seat: the agent's number; None: the supervisor gives it one.
        address: the address at which others reach this machine; "": unknown.
        local_size: number of agents on this machine.
        workers: number of workers that the agent starts.
    """
    return {
        "kind": HELLO,
        "seat": seat,
        "node": socket.gethostname(),
        "host": hub.host,
        "local_size": local_size,
        "workers": workers,
        "port": free_port(""),
        "address": address,
        "versions": versions(),
    }


@dataclass(frozen=True, kw_only=True)
class Duties:
    """Describe the work of one agent.

    Args:
        program: the program of the workers.
        workers: number of workers that the agent starts.
        seat: the agent's number; None: the supervisor gives it one.
        local_size: number of agents on this machine.
        advertise: the address at which others reach this machine; "": that of its connection to the supervisor.
        preload: modules to import once, in a process that workers are forked from.
        start_s: seconds to look for the supervisor.
        grace_s: seconds that processes have to end after a signal to this agent.
        notice: detects that this machine is about to be taken away; None: only signals do.
    """

    program: Program
    workers: int = 1
    seat: int | None
    local_size: int = 1
    advertise: str = ""
    preload: Preload = NOTHING
    start_s: Seconds
    grace_s: Seconds
    notice: NoticeCommand | None = None


class Agent:
    """Serve one supervisor.

    Args:
        duties: the agent's work.
        token: the job's token.
        find: returns the supervisor's address, None while it is not known.
        supervisor: the supervisor's process, if this agent has started it; the agent ends after it.
    """

    def __init__(self, duties: Duties, token: str, find: Callable[[], Address | None], supervisor: LocalChild | None = None) -> None:
        self._duties, self._token, self._find, self._supervisor = duties, token, find, supervisor
        self._starter = Starter(
            duties.program,
            duties.preload,
            common_environment(duties.workers * duties.local_size),
            say,
            names_imports=duties.seat in (0, None),  # one agent does, for all
        )
        self._children: dict[int, LocalChild] = {}
        self._waiting: dict[int, Mapping[str, Any]] = {}
        """Orders to start a process, by child number; they wait for the imports that it needs."""
        self._backoff = Backoff()
        """Pause after this machine has lacked descriptors or memory for a process."""
        self._hub: SocketHub
        self._connection: Connection | None = None
        self._address: Address | None = None
        self._seat = duties.seat
        self._timeout_s = BEFORE_SEAT_TIMEOUT_S
        self._seated = False
        self._unheard = 0
        self._heard_at: Seconds = 0.0
        self._beat_at: Seconds = 0.0
        self._clock = LivedClock()
        self._told = StopSignals()
        self._passed_on = 0
        """Number of signals that were sent on to the supervisor's process."""
        self._leaving_at: Seconds | None = None
        self._over: tuple[int, str] | None = None

    def run(self) -> int:
        """Serve until the job is over. Returns its exit status.

        Raises:
            ConfigurationError: the supervisor does not accept this agent.
            JobError: the supervisor cannot be reached, or is gone.
        """
        self._hub = SocketHub(self._token)
        with self._told.heeded(self._hub.wake):
            try:
                if self._duties.preload.modules:
                    self._starter.begin()
                while self._over is None:
                    self._connect()
                    self._serve()
                    self._end_children()
                self._hub.close()
                if self._supervisor is None:
                    return self._over[0]
                while (status := self._supervisor.wait(POLL_S)) is None:
                    pass
                return status if status >= 0 else BY_SIGNAL - status
            finally:
                self._end_children()
                self._starter.close()
                self._hub.close()
                if self._duties.notice is not None:
                    self._duties.notice.close()

    # The connection.

    def _connect(self) -> None:
        """Connect to the supervisor and send the hello, trying again for ``start_s`` seconds."""
        began = self._clock.now()
        deadline = began + self._duties.start_s
        said = False
        nobody_since: Seconds | None = None
        while True:
            if self._supervisor_ended():
                return
            if self._told.number is not None:
                say(f"told to end by {signal.Signals(self._told.number).name} before the job has begun here")
                raise SystemExit(BY_SIGNAL + self._told.number)
            why = "its address is not known yet"
            address = self._find()
            if address is not None:
                try:
                    self._connection = self._hub.connect(address)
                    break
                except JobError as error:
                    why = str(error)
                    nobody = isinstance(error.__cause__, ConnectionRefusedError)
                    nobody_since = (nobody_since or self._clock.now()) if nobody else None
            now = self._clock.now()
            if self._seated and nobody_since is not None and now - nobody_since >= GONE_S:
                raise JobError(f"the job's supervisor is gone, and the job with it: {why}")
            why = why.partition(": is the server")[0]
            if now - began >= WAIT_SAID_S and not said:
                said = True
                say(f"waiting for the job's supervisor, for at most {self._duties.start_s:g} s (--start-timeout): {why}")
            if now >= deadline:
                raise JobError(
                    f"no supervisor within {self._duties.start_s:g} s (--start-timeout): {why}. Is the "
                    "same command running on the first machine, and does a firewall let this machine reach it?"
                )
            self._hub.poll(RETRY_S)
        self._address = address
        self._heard_at = self._clock.now()
        self._unheard = 0
        interface = self._connection.interface
        address_here = self._duties.advertise or ("" if is_loopback(interface) else interface)
        self._connection.send(hello(self._hub, self._seat, address_here, self._duties.local_size, self._duties.workers))

    def _supervisor_ended(self) -> bool:
        """Return True if this agent has started the supervisor, and the supervisor has ended: then the job is over."""
        if self._supervisor is not None and self._over is None and (status := self._supervisor.ended()) is not None:
            self._over = status, "the supervisor has ended"
        return self._over is not None

    def _tell(self, kind: str, payload: Sequence[bytes] = (), **fields: Any) -> None:
        assert self._connection is not None
        self._connection.send({"kind": kind, **fields}, payload=payload)

    def _serve(self) -> None:
        """Carry out the supervisor's requests, until the connection or the job ends."""
        while self._over is None and self._connection is not None:
            pipes = [pipe for child in self._all_children() for pipe in child.pipes()] if self._unheard < UNHEARD_MAX else []
            for connection, item in self._hub.poll(POLL_S, pipes):
                if connection is self._connection:
                    try:
                        self._on_item(item)
                    except ProtocolError as error:
                        self._cut_off(str(error))
            self._start_waiting()
            self._pass_on()
            self._keep_alive()
            self._told.look(self._duties.notice, self._clock.now(), say)
            self._heed_signals()
            self._supervisor_ended()

    def _on_item(self, item: Message | Closed) -> None:
        if isinstance(item, Closed):
            if item.reason.startswith("refused"):
                raise ConfigurationError(f"the supervisor refuses this machine: {item.reason}")
            self._cut_off(f"the connection to the supervisor has ended ({item.reason})")
            return
        self._heard_at = self._clock.now()
        header = item.header
        kind = TO_AGENT.check(header, "the supervisor", len(item.payload), len(item.memory))
        child = self._children.get(header.get("child", -1))
        match kind:
            case "seated":
                if not self._seated and self._elsewhere():
                    assert self._address is not None
                    host, port = self._address.tcp
                    say(f"this machine takes part in the job; the output of its processes comes to the supervisor, at {host}, port {port}")
                self._seat, self._timeout_s, self._seated = header["seat"], header["timeout_s"], True
            case "refused":
                raise ConfigurationError(header["reason"])
            case "start":
                self._waiting[header["child"]] = header
            case "heard":
                self._unheard -= 1
            case "over":
                self._over = header["status"], header["reason"]
                if header["says"]:
                    say(f"the job has ended with status {header['status']}: {header['reason']}")
            case "signal" if child is not None:
                child.signal(header["number"])
            case "strike" if child is not None:
                child.strike()
            case "signal" | "strike" if self._waiting.pop(header["child"], None) is not None:  # it was not started: it has nothing to save
                self._tell("ended", child=header["child"], status=-header.get("number", signal.SIGKILL))
            case "stacks" if child is not None:
                why_not = child.print_stacks()
                if why_not is not None:
                    self._tell("said", [f"no stacks: {why_not}\n".encode()], child=header["child"], error=True)

    def _elsewhere(self) -> bool:
        """Return True if the supervisor, which gets this machine's output, is on another machine."""
        here = self._address is None or self._connection is None or self._address.host == self._hub.host
        return not here and self._connection is not None and not is_loopback(self._connection.interface)

    def _cut_off(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self._supervisor_ended():
            say(f"{reason}: its processes here end, and it is looked for again")

    def _keep_alive(self) -> None:
        if self._connection is None:
            return
        now = self._clock.now()
        if now - self._heard_at >= self._timeout_s:
            self._cut_off(f"nothing has come from the supervisor for {now - self._heard_at:.1f} s")
        elif now - self._beat_at >= beat_of(self._timeout_s):
            self._beat_at = now
            self._tell("alive")

    # Its processes.

    def _all_children(self) -> list[LocalChild]:
        return [*self._children.values(), *self._helpers()]

    def _helpers(self) -> list[LocalChild]:
        return [] if self._starter.base is None else [self._starter.base]

    def _start_waiting(self) -> None:
        """Start the processes that were ordered, once what they import is there."""
        if any(header["role"] == "server" for header in self._waiting.values()):
            self._starter.begin()
        ready = {"worker": self._starter.ready_for_workers(), "server": not self._starter.imports()}
        for number, header in list(self._waiting.items()):
            if self._connection is None:
                self._waiting.clear()
            elif ready[header["role"]]:
                if not self._backoff.due(self._clock.now()):
                    continue
                del self._waiting[number]
                try:
                    self._children[number] = child = self._start(header)
                except (OSError, ValueError) as error:
                    if self._may_pass(error, header):
                        self._waiting[number] = header
                        continue
                    why = f"offbeat: {header['role']} {header['number']} cannot be started: {error}\n"
                    self._tell("said", [why.encode()], child=number, error=True)
                    self._unheard += 1
                    self._tell("ended", child=number, status=1)
                else:
                    self._backoff = Backoff()
                    self._tell("started", child=number, pid=child.pid)

    def _may_pass(self, error: OSError | ValueError, header: Mapping[str, Any]) -> bool:
        """Return True if a process that could not be started is to be tried again later, since this machine lacked something for it."""
        now = self._clock.now()
        lack = lack_of(error) if isinstance(error, OSError) else None
        if lack is None or self._backoff.hopeless(now):
            return False
        if not self._backoff.failing:
            say(f"{header['role']} {header['number']} cannot be started yet, and is tried again: {lack}")
        self._backoff.failed(now)
        return True

    def _start(self, header: Mapping[str, Any]) -> LocalChild:
        flat = header["variables"]
        variables = {**dict(zip(flat[::2], flat[1::2], strict=True)), TOKEN: self._token}
        if header["role"] == "server":
            assert self._address is not None
            return self._starter.start_server({**server_environment(1, token=self._token, supervisor=self._address), **variables})
        return self._starter.start_worker(variables)

    def _pass_on(self) -> None:
        """Send the supervisor the processes' output and ends."""
        for helper in self._helpers():
            for _, data in helper.read():
                pass_on(data)
        for number, child in list(self._children.items()):
            if self._connection is None:
                return
            if self._unheard < UNHEARD_MAX:
                self._pass_output_on(number, child)
            if (status := child.ended()) is None:
                continue
            self._pass_output_on(number, child)
            if child.drained:
                del self._children[number]
                self._tell("ended", child=number, status=status)

    def _pass_output_on(self, number: int, child: LocalChild) -> None:
        for error, data in child.read():
            self._tell("said", [data], child=number, error=error)
            self._unheard += 1

    def _heed_signals(self) -> None:
        """Pass a signal on to this agent's supervisor; without one, notify the processes of this machine, and end after them."""
        number = self._told.number
        if number is None:
            return
        if self._supervisor is not None:
            if self._passed_on <= self._told.insists:
                self._passed_on += 1
                self._supervisor.signal(number)
            return
        now = self._clock.now()
        if self._leaving_at is None:
            self._leaving_at = now
            if self._connection is not None:
                self._tell("leaving", reason=f"it was told to end by {signal.Signals(number).name}")
            for child in self._children.values():
                child.notify(signal.SIGTERM)
        if not self._children or now - self._leaving_at >= self._duties.grace_s or self._told.insists:
            self._over = self._over or (BY_SIGNAL + number, "told to end")

    def _end_children(self) -> None:
        for child in self._children.values():
            child.strike()
        for child in self._children.values():
            child.kill()
            with contextlib.suppress(OSError, ValueError):
                for _, data in child.read():
                    pass_on(data)
        self._children.clear()
        self._waiting.clear()
