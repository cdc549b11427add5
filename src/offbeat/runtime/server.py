"""Run one server process: ``python -m offbeat.runtime.server``, started by a launcher. It is a loop around a hub.

It listens and reports its address before it imports torch, so that workers can start at the same time.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from offbeat.errors import ConfigurationError, JobError, OffbeatError, ProtocolError
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job import last_words, messages
from offbeat.runtime.job.notices import NOTICES
from offbeat.runtime.job.settings import JobSettings, read_addresses, take_token
from offbeat.runtime.recovery.recorder import Recorder, is_bare
from offbeat.transport.base import Address, Closed, Connection, Hub, Message
from offbeat.transport.hub import SocketHub
from offbeat.transport.link import Link
from offbeat.transport.schema import shown
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds

if TYPE_CHECKING:
    from offbeat.runtime.coordination.shard_files import ShardFiles
    from offbeat.runtime.coordinators import LiveCoordinators
    from offbeat.runtime.parameter_server.shard import LiveShard

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 0.2
PASSED_ON: Sequence[str] = ("worker", "number", "steps", "push", "hyper")
"""Fields of a worker's push to another server that are passed on to server 0."""
LOOPBACK = "127.0.0.1"
TICK_S: Seconds = 0.05
"""Least seconds between two ticks that a recorder writes down, unless a timer is due."""
RETRY_S: Seconds = 0.02
"""Seconds between two attempts to reach server 0 again."""
RETURN_S: Seconds = 10.0
"""Least seconds that workers have to connect to the new process of a server."""
EARLY_MAX = 16
"""Most messages of one peer that are kept until this server can begin."""


_OF_THIS_PROCESS = {
    "_hub",
    "_clock",
    "_launcher",
    "_recorder",
    "_kept",
    "_resuming",
    "_moment",
    "_again_told",
    "_noticed",
    "_tick_at",
    "_return_until",
    "_status_at",
    "_refused",
}


class JobEnded(Exception):
    """The supervisor has told this server to end."""


class Server:
    """Hold the state of one server process.

    Args:
        number: server 0 hosts the coordinator.
        hub: listening already.
        supervisor: the connection to the launcher.
        clock: seconds, monotonic, from any origin.
    """

    def __init__(self, number: int, hub: Hub, supervisor: Connection, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._number = number
        self._hub = hub
        self._supervisor = supervisor
        self._clock = clock
        self._began = clock()
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._settings: JobSettings | None = None
        self._shards: dict[int, Connection] = {}
        self._coordinator: LiveCoordinators | None = None
        self._to_coordinator: Connection | None = None
        self._live_shards: dict[int, LiveShard] = {}
        """By number of the optimizer: this server's shard of its parameters; empty on server 0."""
        self._at: dict[Connection, int] = {}
        """By worker's connection: the number of the optimizer that it belongs to."""
        self._refused: WeakSet[Connection] = WeakSet()
        """Connections that this server has closed; messages that came with the refused one may still be queued."""
        self._early: list[tuple[Connection, Message]] = []
        self._early_orders: list[Message] = []
        """Messages of the supervisor that came before every other server had called."""
        self._files: ShardFiles | None = None
        """Writes this server's part of checkpoints; None on server 0, and where there are none."""
        self._noticed: str | None = None
        """The signal by which this process was told to leave, until the supervisor has been told."""
        self._status_at: Seconds = 0.0
        """When the last status, or sign of life, was sent to the supervisor."""
        self._launcher = supervisor
        """The connection itself, where `_supervisor` is a link over it."""
        self._recorder: Recorder | None = None
        """Writes down the messages of this server, for its next process; None: the death of this process ends the job."""
        self._kept: dict[str, MemoryBlock] = {}
        """What an earlier process has left with the supervisor."""
        self._resuming: dict[Connection, Message] = {}
        """By connection: the first message of a link that has come before this server knows its job."""
        self._servers: Sequence[Address] = ()
        self._moment: Seconds | None = None
        """While something is handled: when it came, which is when the next process takes it to have come."""
        self._again_told = False
        """True while this process handles the messages that an earlier process of this server has handled."""
        self._tick_at: Seconds = 0.0
        """When to tick next, if nothing is due before."""
        self._return_until: Seconds | None = None
        """Until when links of an earlier process may come back; None: none is awaited."""

    def now(self) -> Seconds:
        """Return the seconds since this server began; while something is handled, the time at which it came."""
        return self._clock() - self._began if self._moment is None else self._moment

    def run(self) -> None:
        """Serve until the supervisor ends the job. Raises `JobError` if the job cannot go on."""
        try:
            while True:
                self.turn(self._patience())
        except OffbeatError as error:
            if self._coordinator is not None:
                with contextlib.suppress(OffbeatError):
                    self._close_journal(self._coordinator, False, str(error))
            raise
        finally:
            if self._files is not None:
                self._files.close()
            if self._coordinator is not None:
                self._coordinator.release_memory()

    def turn(self, timeout_s: Seconds) -> None:
        """Handle the messages that come within ``timeout_s``, and what is due.

        Raises:
            JobEnded: the supervisor has ended the job.
            JobError: the job cannot go on.
        """
        self.hear(timeout_s)
        self.tick()

    def hear(self, timeout_s: Seconds) -> None:
        """Handle the messages that come within ``timeout_s``. Raises what `turn` raises."""
        for connection, item in self._hub.poll(timeout_s):
            self._arrived(connection, item)

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        """Handle what has come over a connection, which may be the present one of a link."""
        recorder = self._recorder
        if isinstance(item, Message) and item.header.get("kind") == "resume":
            self._on_resume(connection, item)
            return
        self._resuming.pop(connection, None)
        link = None if recorder is None else recorder.link_at(connection)
        if recorder is None or link is None:
            self._handle(connection, item)
        elif isinstance(item, Closed):
            recorder.cut(connection)
            if link is self._supervisor:
                self._handle(link, item)
            elif link is not self._to_coordinator and link not in self._shards.values():  # what becomes of a server the supervisor knows
                self._end(recorder, link, item.reason)
        elif link is self._supervisor and is_bare(item):
            self._handle(link, item)
        else:
            self._take(recorder, link, connection, item)

    def _on_resume(self, connection: Connection, message: Message) -> None:
        """Let a link go on over a connection, as soon as this server knows its job."""
        if self._recorder is None and self._settings is None:
            self._resuming[connection] = message
            return
        try:
            if self._recorder is None:
                raise ProtocolError(f"{connection.peer} sent 'resume' to a server that does not outlive its process (expected 'hello')")
            self._recorder.on_resume(connection, message)
        except ProtocolError as error:
            refuse(connection, error)

    def _take(self, recorder: Recorder, link: Link, connection: Connection, item: Message) -> None:
        try:
            message = link.take(item)
        except ProtocolError as error:
            recorder.cut(connection)
            self._end(recorder, link, f"it broke the protocol: {refuse(connection, error)}")
            return
        if message is not None:
            now = self.now()
            recorder.message(now, link, message)
            self._at_moment(now, self._handle, link, message)

    def _end(self, recorder: Recorder, link: Link, reason: str) -> None:
        """Handle the end of a link."""
        now = self.now()
        recorder.closed(now, link, reason)
        recorder.end(link)
        link.close()
        self._at_moment(now, self._handle, link, Closed(reason))

    def _at_moment(self, now: Seconds, do: Callable[..., None], *arguments: Any) -> None:
        """Do something at a time that the next process will know."""
        self._moment = now
        try:
            do(*arguments)
        finally:
            self._moment = None

    def tick(self) -> None:
        """Do what is due by now."""
        now, recorder = self.now(), self._recorder
        if recorder is not None:
            self._await_return(recorder, now)
        if recorder is None or now >= self._tick_at or ((due := self.wake_at()) is not None and now >= due):
            self._tick_at = now + TICK_S
            if recorder is not None:
                recorder.tick(now)
            self._at_moment(now, self._tick)
        self._report()
        if recorder is not None:
            recorder.save(self._state, self._parts)

    def _tick(self) -> None:
        if self._coordinator is not None:
            self._coordinator.tick(self.now())
        for shard in self._live_shards.values():
            shard.tick(self.now())
        if self._files is not None:
            self._files.tick()

    def wake_at(self) -> Seconds | None:
        """Return when to call `tick` at the latest, by `now`; None: only for messages and for the regular status."""
        if self._coordinator is not None:
            return self._coordinator.wake_at()
        return min((at for shard in self._live_shards.values() if (at := shard.wake_at()) is not None), default=None)

    def _patience(self) -> Seconds:
        if self._cut_off:
            return RETRY_S
        due = self.wake_at()
        return STATUS_PERIOD_S if due is None else min(STATUS_PERIOD_S, max(0.0, due - self.now()))

    def _handle(self, connection: Connection, item: Message | Closed) -> None:
        if connection is self._supervisor:
            if isinstance(item, Closed):
                raise JobError("the supervisor is gone")
            try:
                self._on_supervisor(item)
            except ProtocolError as error:
                raise JobError(f"{error}, and a server does not outlive the connection to its supervisor") from error
        elif isinstance(item, Closed):
            self._on_closed(connection, item.reason)
        elif connection not in self._refused:
            try:
                self._on_message(connection, item)
            except (JobError, JobEnded):
                raise
            except Exception as error:
                # No message of a peer may end the job. The checks of its fields raise ProtocolError; any other error is a mistake of
                # ours, so it is logged with its traceback.
                if not isinstance(error, OffbeatError):
                    log.exception("server %d could not handle a message of %s, and closes its connection", self._number, connection.peer)
                self._refused.add(connection)
                if isinstance(connection, Link) and self._recorder is not None:
                    self._recorder.end(connection)
                self._on_closed(connection, f"it broke the protocol: {refuse(connection, error)}")

    def _on_supervisor(self, message: Message) -> None:
        header, coordinator = message.header, self._coordinator
        match messages.FROM_SUPERVISOR.check(header, "the supervisor", len(message.payload), len(message.memory)):
            case "kept":
                block = message.memory[0] if message.memory else None
                if isinstance(block, MemoryBlock):
                    self._kept[header["name"]] = block
            case "job":
                settings, servers = self._job_of(header)
                if header.get("outlives", False):
                    self._outlive(header)
                else:
                    self._begin(settings, servers)
            case "finish":
                self._finish(header["ok"], header["reason"])
            case _ if coordinator is None:
                self._early_orders.append(message)
            case "process":
                coordinator.on_process(header["fields"], self.now())
            case "lost":
                coordinator.on_lost(header["worker"], header["reason"], self.now())
            case "ended":
                coordinator.on_ended(header["worker"], self.now())
            case "checkpoint":
                coordinator.ask_for_checkpoint(header["within_s"])

    def _job_of(self, header: Mapping[str, Any]) -> tuple[JobSettings, Sequence[Address]]:
        """Return the job's settings, and where its servers listen. Raises `ProtocolError` if they cannot be read, or came before."""
        if self._settings is not None:
            raise ProtocolError("the supervisor sent 'job' a second time (expected once)")
        try:
            return JobSettings.from_wire(header["settings"]), read_addresses(header["servers"])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ProtocolError(
                f"the supervisor sent 'job' with settings or servers that cannot be read: {type(error).__name__} (expected those of this "
                "version of offbeat)"
            ) from None

    def _begin(self, settings: JobSettings, servers: Sequence[Address]) -> None:
        """Begin after every server listens: server 0 waits for the calls of the others."""
        self._settings, self._servers = settings, servers
        if self._number > 0:
            if self._recorder is None:
                self._to_coordinator = self._hub.connect(servers[0])
            else:
                self._to_coordinator = self._recorder.make(f"server {self._number}", "server 0")  # goes over a socket from the next tick on
            self._to_coordinator.send({"kind": "shard", "number": self._number})
        elif settings.servers == 1:
            self._open()

    # Going on in a new process.

    def _outlive(self, header: Mapping[str, Any]) -> None:
        """Begin a job that outlives this process, or go on with it where an earlier process has died."""
        self._launcher.send({"kind": "loading"})
        recorder = self._recorder = Recorder(self._launcher, self._kept)
        self._supervisor = recorder.supervisor
        state = recorder.restore(self._parts)
        if state is not None:
            self._supervisor = recorder.supervisor
            vars(self).update(state)
        returns = state is not None
        self._again_told = True
        for record in recorder.records():
            returns = True
            self._again(recorder, record)
        self._again_told = False
        if returns:
            recorder.returned(self.now())
            self._has_returned()
            self._return_until = self.now() + max(RETURN_S, self._settings.timeout_s if self._settings is not None else 0.0)
        else:
            recorder.begun(self._began, self._started, header["settings"], header["servers"])
            self._begin(*self._job_of(header))
        recorder.join(recorder.supervisor, self._launcher)
        self._kept = {}
        waiting, self._resuming = self._resuming, {}
        for connection, message in waiting.items():
            self._on_resume(connection, message)

    def _again(self, recorder: Recorder, record: list[Any]) -> None:
        """Do again what an earlier process has done, or was about to do, when it was told this."""
        match record:
            case ["begin", began, started, settings, servers]:
                self._began, self._started = began, started
                self._begin(JobSettings.from_wire(settings), read_addresses(servers))
            case ["open", session, peer]:
                recorder.sessions[session] = Link(session, peer)
            case ["message", now, *_]:
                self._at_moment(now, self._handle, *recorder.again(record))
            case ["closed", now, session, reason]:
                link = recorder.sessions.pop(session)
                link.close()
                self._at_moment(now, self._handle, link, Closed(reason))
            case ["tick", now, stirred]:
                for session, nbytes in stirred:
                    recorder.sessions[session].bytes_received = nbytes
                self._at_moment(now, self._tick)
            case ["returned", _]:
                self._has_returned()

    def _has_returned(self) -> None:
        if self._coordinator is not None:
            self._coordinator.has_returned()

    def _state(self) -> dict[str, Any]:
        """Return what a snapshot has besides links: all that is not of this process."""
        if self._coordinator is not None:
            self._coordinator.flush()
        return {name: value for name, value in vars(self).items() if name not in _OF_THIS_PROCESS}

    @property
    def _parts(self) -> dict[str, Any]:
        return {"server": self, "hub": self._hub}

    @property
    def _cut_off(self) -> bool:
        return isinstance(self._to_coordinator, Link) and self._to_coordinator.socket is None

    def _await_return(self, recorder: Recorder, now: Seconds) -> None:
        """Connect to server 0 again, and end the links that have not come back in time."""
        if self._cut_off:
            assert isinstance(self._to_coordinator, Link)
            with contextlib.suppress(JobError):
                connection = self._hub.connect(self._servers[0])
                if connection.shares_memory:
                    recorder.join(self._to_coordinator, connection)
                else:
                    connection.close()
        if self._return_until is not None and now >= self._return_until:
            self._return_until = None
            for link in recorder.gone():
                if link not in self._shards.values():
                    self._end(recorder, link, "it has not come back to the new process of this server")

    def _open(self) -> None:
        """Let workers come: at server 0, once every other server has called."""
        self._supervisor.send({"kind": "loading"})
        from offbeat.runtime.coordinators import LiveCoordinators  # imports torch, while workers start

        assert self._settings is not None
        keeper = None if self._recorder is None else self._recorder.keeper
        allocate = MemoryBlock.allocate if keeper is None else keeper.allocate
        self._coordinator = LiveCoordinators(
            self._settings, self._shards, self._supervisor, self._hub, allocate, self._started, self.now, keeper
        )
        early, self._early = self._early, []
        orders, self._early_orders = self._early_orders, []
        for message in orders:
            self._on_supervisor(message)
        for connection, message in early:
            self._handle(connection, message)

    def _on_message(self, connection: Connection, message: Message) -> None:
        kind = message.header.get("kind")
        if self._number > 0 and connection is self._to_coordinator:
            self._on_server_0(connection, message)
        elif self._number == 0 and kind == "shard" and self._settings is not None:
            self._on_call(self._settings, connection, message)
        elif self._number == 0 and kind == "failing":
            self._on_failing(connection, message)
        elif self._number == 0 and self._coordinator is not None:
            self._coordinator.on_message(connection, message, self.now())
        elif self._number > 0 and (number := self._about(connection, message)) in self._live_shards:
            self._serve(number, connection, message)
        elif sum(waiting is connection for waiting, _ in self._early) < EARLY_MAX:
            self._early.append((connection, message))
        else:
            raise ProtocolError(f"{connection.peer} sent {EARLY_MAX} messages before server {self._number} began (expected it to wait)")

    def _about(self, connection: Connection, message: Message) -> int:
        """Return the number of the optimizer that a worker's message is about; the worker states it in ``attach``."""
        if message.header.get("kind") != "attach":
            return self._at.get(connection, 0)
        number = message.header.get("number_of_optimizer", 0)
        return number if isinstance(number, int) else 0

    def _on_call(self, settings: JobSettings, connection: Connection, message: Message) -> None:
        """Handle the first message of another server, at server 0."""
        messages.CALL.check(message.header, connection.peer, len(message.payload), len(message.memory))
        number = message.header["number"]
        if not 0 < number < settings.servers or number in self._shards or connection in self._shards.values():
            raise ProtocolError(
                f"{connection.peer} sent 'shard' with number = {number} (expected the number of a server that has not called yet)"
            )
        self._shards[number] = connection
        if len(self._shards) == settings.servers - 1:
            try:
                self._open()
            except ConfigurationError as error:  # the user's mistake, not this peer's
                raise JobError(str(error)) from error

    def _on_server_0(self, connection: Connection, message: Message) -> None:
        """Handle a message of server 0, at another server."""
        kind = messages.FROM_SERVER_0.check(message.header, "server 0", len(message.payload), len(message.memory))
        if kind == "setup":
            self._set_up(message)
            return
        number = message.header.get("number_of_optimizer", 0)
        if number not in self._live_shards:
            raise ProtocolError("server 0 sent 'orders' before 'setup' (expected 'setup' first)")
        shard = self._live_shards[number]
        messages.check_orders(message.header["orders"], of_shard=shard.orders_of_shard)
        shard.check_orders(message.header["orders"])
        try:
            measured = shard.apply(message.header["orders"])
        except KeyError as error:
            raise ProtocolError(f"server 0 sent 'orders' about a worker or a push that is not known here: {error}") from error
        for version, norms in measured:
            self._tell_coordinator(number, {"kind": "measured", "version": version, "norms": norms})

    def _on_failing(self, connection: Connection, message: Message) -> None:
        """Pass a worker's failure report on to the supervisor, before the worker's process can end."""
        messages.FAILING.check(message.header, connection.peer, len(message.payload), len(message.memory))
        fields = {name: message.header[name] for name in ("worker", "reason", "pushed")}
        if self._coordinator is not None:
            self._coordinator.on_last_words(connection, fields["worker"], fields["reason"])
        if not self._again_told:  # the supervisor knows of what an earlier process has handled
            self._launcher.send({"kind": "failing", **fields})
        connection.send({"kind": "noted"})

    def _set_up(self, message: Message) -> None:
        self._supervisor.send({"kind": "loading"})
        from offbeat.core.policy import ServerRule
        from offbeat.policies import rule_of
        from offbeat.runtime.coordination.checkpoint_content import Resumed
        from offbeat.runtime.coordination.shard_files import ShardFiles
        from offbeat.runtime.parameter_server.per_shard import shard_of
        from offbeat.tensors.layout import Layout
        from offbeat.tensors.optimizers import OptimizerSpec

        header = message.header
        layout, spec = Layout.from_wire(header["layout"]), OptimizerSpec.from_wire(header["optimizer"])
        memory = message.memory[0] if message.memory else None
        assert self._settings is not None
        keeper = None if self._recorder is None else self._recorder.keeper
        shard = shard_of(self._number, layout, spec, rule_of(ServerRule, header["sync"]), self._settings, self.now, memory, keeper)
        number = header.get("number_of_optimizer", 0)
        if self._settings.resume is not None:
            resumed = Resumed(self._settings.resume)
            shard.restore(resumed.copy_for(number, layout, shard.span, spec), resumed.version_at(number, self._number, self._settings))
        if self._settings.checkpoint is not None:
            self._files = self._files or ShardFiles(self._settings.checkpoint.folder, self._number, self._tell_coordinator, self._hub.wake)
            shard.save = partial(self._files.save, number)
        self._live_shards[number] = shard
        early, self._early = self._early, []
        for connection, waiting in early:
            self._handle(connection, waiting)

    def _serve(self, number: int, connection: Connection, message: Message) -> None:
        """Handle a worker's message at a server other than 0: only copying, and what the coordinator orders."""
        shard = self._live_shards[number]
        header, worker = message.header, shard.worker_at(connection)
        name = connection.peer if worker is None else f"worker {worker}"
        kind = messages.TO_SHARD.check(header, name, len(message.payload), len(message.memory))
        assert self._settings is not None
        if kind == "attach":
            if header["worker"] >= self._settings.workers:
                raise ProtocolError(f"worker {header['worker']} is not one of this job's {self._settings.workers} workers")
        elif worker is None:
            raise ProtocolError(f"{name} sent {kind!r} before it attached (expected 'attach')")
        elif header.get("worker", worker) != worker:
            raise ProtocolError(f"{name} sent {kind!r} with worker = {header['worker']} (expected {worker})")
        match kind:
            case "attach":
                self._at[connection] = number
                shard.attach(header["worker"], connection, message, in_place=header["in_place"])
                connection.send({"kind": "attached"})
            case "push":
                if ("push" in header) != shard.orders_of_shard:
                    expected = "one" if shard.orders_of_shard else "none at this server"
                    raise ProtocolError(
                        f"{name} sent 'push' with push = {shown(header.get('push'))} (expected {expected}, under this rule)"
                    )
                shard.decode(connection)
                shard.take(header["worker"], header["number"], message.payload)
                fields = {field: header[field] for field in PASSED_ON if field in header}
                self._tell_coordinator(number, {**fields, "kind": "arrived"})
            case "got":
                shard.got(connection)
            case "initial":
                if not header["provided"]:
                    shard.initialise(header["worker"])
                self._tell_coordinator(number, {"kind": "initialised", "worker": header["worker"], "number": header["number"]})
            case "state":
                shard.answer_state(connection, message)

    def _tell_coordinator(self, number: int, header: dict[str, Any]) -> None:
        assert self._to_coordinator is not None
        about = {"number_of_optimizer": number} if number else {}
        self._to_coordinator.send({**header, **about, "shard": self._number})

    def _on_closed(self, connection: Connection, reason: str) -> None:
        if connection is self._to_coordinator:
            raise JobError(f"server 0 is gone ({reason}), and its part of the parameters with it")
        self._early = [(c, m) for c, m in self._early if c is not connection]
        if (shard := self._live_shards.get(self._at.pop(connection, 0))) is not None:
            shard.closed(connection)
        if self._coordinator is not None:
            self._coordinator.on_closed(connection, reason, self.now())

    def notice(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal ``number``, which tells this process to leave: the supervisor ends the job in order."""
        self._noticed = signal.Signals(number).name
        self._hub.wake()

    def _report(self) -> None:
        if self._noticed is not None:
            self._launcher.send({"kind": "noticed", "signal": self._noticed})
            self._noticed = None
        if self.now() - self._status_at >= STATUS_PERIOD_S:
            self._status_at = self.now()
            if self._coordinator is None:
                self._launcher.send({"kind": "alive"})
            else:
                self._launcher.send({"kind": "status", "snapshot": self._coordinator.tally.summary(brief=True)})

    def _finish(self, ok: bool, reason: str) -> None:
        if self._coordinator is not None:
            self._close_journal(self._coordinator, ok, reason)
        raise JobEnded

    def _close_journal(self, coordinator: LiveCoordinators, ok: bool, reason: str) -> None:
        """Close the journal, and send the supervisor the summary even if that fails."""
        try:
            coordinator.close(ok, reason, self.now())
        finally:
            self._launcher.send({"kind": "summary", "summary": coordinator.tally.summary()})


def main() -> int:
    """Run server OFFBEAT_SERVER of the job whose supervisor listens at OFFBEAT_SUPERVISOR."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends servers, after the workers
    number = int(os.environ["OFFBEAT_SERVER"])
    port, listen = int(os.environ.get("OFFBEAT_PORT", "0")), os.environ.get("OFFBEAT_LISTEN") or LOOPBACK
    supervisor, local = read_addresses(os.environ["OFFBEAT_SUPERVISOR"])[0], os.environ.get("OFFBEAT_LOCAL", "")
    return serve(number, SocketHub(take_token(), local_name=local), supervisor, port, listen)


def serve(number: int, hub: Hub, supervisor_at: Address, port: int = 0, listen: str = LOOPBACK) -> int:
    """Run server ``number`` until the supervisor ends it or the job fails.

    Args:
        number: which server.
        hub: not listening yet.
        supervisor_at: where to report.
        port: where to listen; 0: the system chooses.
        listen: the address of this machine at which to listen.

    Returns:
        The exit status. The hub is closed then.
    """
    supervisor = hub.connect(supervisor_at)
    try:
        address = hub.listen(listen, port)
        supervisor.send({"kind": "listening", "number": number, "address": address})
        server = Server(number, hub, supervisor)
        if threading.current_thread() is threading.main_thread():
            for notice in NOTICES:
                signal.signal(notice, server.notice)
        server.run()
    except JobEnded:
        return 0
    except OffbeatError as error:
        mistake = any(isinstance(one, ConfigurationError) for one in (error, error.__cause__))
        last_words.say(hub, supervisor, {"kind": "failed", "reason": str(error), "mistake": mistake})
        return 1
    finally:
        hub.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
