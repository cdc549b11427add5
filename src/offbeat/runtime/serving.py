"""Handle the messages of a server: from the supervisor, workers and other servers. It is a loop around a hub."""

from __future__ import annotations

import contextlib
import datetime
import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from offbeat.errors import ConfigurationError, JobError, OffbeatError, ProtocolError
from offbeat.journal.followed import Batch
from offbeat.runtime.coordination.file_writer import FileWriter, Written
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job import messages
from offbeat.runtime.job.settings import JobSettings, read_addresses
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.runtime.recovery.replica import Replica
from offbeat.transport.base import Address, Closed, Connection, Hub, Message
from offbeat.transport.schema import shown
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds

if TYPE_CHECKING:
    from offbeat.runtime.coordination.shard_files import ShardFiles
    from offbeat.runtime.coordinators import LiveCoordinators
    from offbeat.runtime.parameter_server.shard import LiveShard

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 0.2
STOOD_STILL_S: Seconds = 3.0
"""If so much time passes in which this process neither waits for messages nor computes, it stood still, and probably the whole machine.

A server that waits for a processor of a busy machine does so for 1.5 s at times: that is no stop."""
PASSED_ON: Sequence[str] = ("worker", "number", "steps", "push", "hyper")
"""Fields of a worker's push to another server that are passed on to server 0."""
EARLY_MAX = 16
"""Most messages of one peer that are kept until this server can begin."""


class Stillness:
    """Measure for how long this process neither waits nor computes, so that a stop is known.

    Args:
        clock: seconds, monotonic.
        computed: the processor seconds of this process so far.

    >>> times = iter([0.0, 9.0])
    >>> Stillness(lambda: next(times), lambda: 0.0).since(waited_s=1.0)
    8.0
    """

    def __init__(self, clock: Callable[[], Seconds], computed: Callable[[], Seconds]) -> None:
        self._clock, self._computed = clock, computed
        self._looked = clock(), computed()

    def since(self, waited_s: Seconds) -> Seconds:
        """Return the seconds since the last call in which this process neither waited, for at most ``waited_s``, nor computed."""
        (then, computed), self._looked = self._looked, (self._clock(), self._computed())
        return self._looked[0] - then - waited_s - (self._looked[1] - computed)


@dataclass(slots=True, eq=False)
class ServerState:
    """All that a server keeps from one message to the next besides its links: its next process goes on with it, and its standby."""

    began: Seconds
    """By the clock of the process."""
    started: str
    shards: dict[int, Connection] = field(default_factory=dict)
    """On server 0: the connections to the other servers, by number."""
    coordinator: LiveCoordinators | None = None
    """None on other servers, and until all servers have called."""
    to_coordinator: Connection | None = None
    """The connection to server 0; None there."""
    live_shards: dict[int, LiveShard] = field(default_factory=dict)
    """By number of the optimizer: this server's shard of its parameters; empty on server 0."""
    at: dict[Connection, int] = field(default_factory=dict)
    """By worker's connection: the number of the optimizer that it belongs to."""
    early: list[tuple[Connection, Message]] = field(default_factory=list)
    """Messages that came before this server could begin."""
    early_orders: list[Message] = field(default_factory=list)
    """Messages of the supervisor that came before every other server had called."""
    files: ShardFiles | None = None
    """This server's part of checkpoints; None on server 0, and where there are none."""
    writes: Any = None
    """The files that were being written when the state was handed on."""
    journal: Any = None
    """How far the journal had come then; None: this server has none."""


class ServingEnded(Exception):
    """The supervisor has told this server to end."""


class Serving:
    """Do what one server does.

    Args:
        number: server 0 hosts the coordinator.
        hub: listening already.
        supervisor: the connection to the launcher.
        clock: seconds, monotonic, from any origin.
        computed: the processor seconds of this process so far. Under a simulated clock that clock: it leaps, and nothing stands still.
    """

    def __init__(
        self,
        number: int,
        hub: Hub,
        supervisor: Connection,
        clock: Callable[[], Seconds] = time.monotonic,
        computed: Callable[[], Seconds] = time.process_time,
    ) -> None:
        self._number = number
        self._hub = hub
        self._supervisor = supervisor
        self._clock = clock
        self.state = ServerState(clock(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        self._settings: JobSettings | None = None
        self._servers: Sequence[Address] = ()
        self._refused: WeakSet[Connection] = WeakSet()
        """Connections that this server has closed; messages that came with the refused one may still be queued."""
        self._writer = FileWriter(hub.wake)
        """Writes this server's files of checkpoints."""
        self._noticed: str | None = None
        """The signal by which this process was told to leave, until the supervisor has been told."""
        self._status_at: Seconds = 0.0
        """When the last status, or sign of life, was sent to the supervisor."""
        self._stillness = Stillness(clock, computed)
        self._launcher = supervisor
        """The connection to the supervisor itself, over which signs of life go."""

    def now(self) -> Seconds:
        """Return the seconds since this server began."""
        return self._clock() - self.state.began

    def run(self) -> None:
        """Serve until the supervisor ends the job. Raises `JobError` if the job cannot go on."""
        try:
            while True:
                self.turn(self._patience())
        except OffbeatError as error:
            if self.state.coordinator is not None:
                with contextlib.suppress(OffbeatError):
                    self._close_journal(self.state.coordinator, False, str(error))
            raise
        finally:
            self._writer.close()
            if self.state.coordinator is not None:
                self.state.coordinator.release_memory()

    def turn(self, timeout_s: Seconds) -> None:
        """Handle the messages that come within ``timeout_s``, and what is due.

        Raises:
            ServingEnded: the supervisor has ended the job.
            JobError: the job cannot go on.
        """
        self.hear(timeout_s)
        self.tick()

    def hear(self, timeout_s: Seconds) -> None:
        """Handle the messages that come within ``timeout_s``. Raises what `turn` raises."""
        arrived = self._hub.poll(timeout_s)
        if (seconds := self._stillness.since(timeout_s)) > STOOD_STILL_S:
            self._stood_still(seconds)
        for connection, item in arrived:
            self._arrived(connection, item)

    def _stood_still(self, seconds: Seconds) -> None:
        """Note that this process has stood still for so long until now."""
        if self.state.coordinator is not None:
            self.state.coordinator.stood_still(seconds, self.now())

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        """Handle what has come over a connection."""
        self._handle(connection, item)

    def tick(self) -> None:
        """Do what is due by now."""
        for result in self._writer.results():
            self._on_written(result)
        self._tick()
        self._report()

    def _on_written(self, result: Written) -> None:
        """Handle the result of writing files of a checkpoint."""
        self._writer.handled(result)
        if self.state.coordinator is not None:
            self.state.coordinator.on_written(result, self.now())
        elif self.state.files is not None:
            self.state.files.on_written(result)

    def _tick(self) -> None:
        if self.state.coordinator is not None:
            self.state.coordinator.tick(self.now())
        for shard in self.state.live_shards.values():
            shard.tick(self.now())

    def wake_at(self) -> Seconds | None:
        """Return when to call `tick` at the latest, by `now`; None: only for messages and for the regular status."""
        if self.state.coordinator is not None:
            return self.state.coordinator.wake_at()
        return min((at for shard in self.state.live_shards.values() if (at := shard.wake_at()) is not None), default=None)

    def _patience(self) -> Seconds:
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
            except (JobError, ServingEnded):
                raise
            except Exception as error:
                # No message of a peer may end the job. The checks of its fields raise ProtocolError; any other error is a mistake of
                # ours, so it is logged with its traceback.
                if not isinstance(error, OffbeatError):
                    log.exception("server %d could not handle a message of %s, and closes its connection", self._number, connection.peer)
                self._refused.add(connection)
                self._dropped(connection)
                self._on_closed(connection, f"it broke the protocol: {refuse(connection, error)}")

    def _dropped(self, connection: Connection) -> None:
        """Note that a connection was closed because its peer broke the protocol."""

    def _on_supervisor(self, message: Message) -> None:
        kind = messages.FROM_SUPERVISOR.check(message.header, "the supervisor", len(message.payload), len(message.memory))
        self._carry_out(kind, message)

    def _carry_out(self, kind: str, message: Message) -> None:
        """Carry out an order of the supervisor."""
        header, coordinator = message.header, self.state.coordinator
        match kind:
            case "job":
                self._begin(*self._job_of(header))
            case "finish":
                self._finish(header["ok"], header["reason"])
            case "records_taken":
                if coordinator is not None and coordinator.journal.followed is not None:
                    coordinator.journal.followed.answered()
            case _ if coordinator is None:
                self.state.early_orders.append(message)
            case "process":
                coordinator.on_process(header["fields"], self.now())
            case "lost":
                if header.get("killed", False):  # what is still on its way from the process is no sign of life
                    self._refused.update(coordinator.connections_of(header["worker"]))
                coordinator.on_lost(header["worker"], header["reason"], self.now())
            case "ended":
                coordinator.on_ended(header["worker"], self.now())
            case "checkpoint":
                coordinator.ask_for_checkpoint(header["within_s"], last=header.get("last", False))

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
            self.state.to_coordinator = self._call(servers[0])
            self.state.to_coordinator.send({"kind": "shard", "number": self._number})
        elif settings.servers == 1:
            self._open()

    def _call(self, coordinator: Address) -> Connection:
        """Return a new connection to server 0."""
        return self._hub.connect(coordinator)

    @property
    def _keeper(self) -> Keeper | Replica | None:
        """Return what holds memory with which this server outlives its process, or hands it to a standby; None: there is neither."""
        return None

    def _open(self) -> None:
        """Let workers come: at server 0, once every other server has called."""
        self._supervisor.send({"kind": "loading"})
        from offbeat.runtime.coordinators import LiveCoordinators  # imports torch, while workers start

        assert self._settings is not None
        keeper = self._keeper
        allocate = keeper.allocate if isinstance(keeper, Keeper) else MemoryBlock.allocate
        self.state.coordinator = LiveCoordinators(
            self._settings, self.state.shards, self._supervisor, self._hub, allocate, self.state.started, self.now, keeper, self._writer
        )
        early, self.state.early = self.state.early, []
        orders, self.state.early_orders = self.state.early_orders, []
        for message in orders:
            self._on_supervisor(message)
        for connection, message in early:
            self._handle(connection, message)

    def _on_message(self, connection: Connection, message: Message) -> None:
        kind = message.header.get("kind")
        if self._number > 0 and connection is self.state.to_coordinator:
            self._on_server_0(connection, message)
        elif self._number == 0 and kind == "shard" and self._settings is not None:
            self._on_call(self._settings, connection, message)
        elif self._number == 0 and kind == "failing":
            self._on_failing(connection, message)
        elif self._number == 0 and self.state.coordinator is not None:
            self.state.coordinator.on_message(connection, message, self.now())
        elif self._number > 0 and (number := self._about(connection, message)) in self.state.live_shards:
            self._serve(number, connection, message)
        elif sum(waiting is connection for waiting, _ in self.state.early) < EARLY_MAX:
            self.state.early.append((connection, message))
        else:
            raise ProtocolError(f"{connection.peer} sent {EARLY_MAX} messages before server {self._number} began (expected it to wait)")

    def _about(self, connection: Connection, message: Message) -> int:
        """Return the number of the optimizer that a worker's message is about; the worker states it in ``attach``."""
        if message.header.get("kind") != "attach":
            return self.state.at.get(connection, 0)
        number = message.header.get("number_of_optimizer", 0)
        return number if isinstance(number, int) else 0

    def _on_call(self, settings: JobSettings, connection: Connection, message: Message) -> None:
        """Handle the first message of another server, at server 0."""
        messages.CALL.check(message.header, connection.peer, len(message.payload), len(message.memory))
        number = message.header["number"]
        if not 0 < number < settings.servers or number in self.state.shards or connection in self.state.shards.values():
            raise ProtocolError(
                f"{connection.peer} sent 'shard' with number = {number} (expected the number of a server that has not called yet)"
            )
        self.state.shards[number] = connection
        if len(self.state.shards) == settings.servers - 1:
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
        if number not in self.state.live_shards:
            raise ProtocolError("server 0 sent 'orders' before 'setup' (expected 'setup' first)")
        shard = self.state.live_shards[number]
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
        fields, before = {name: message.header[name] for name in messages.FAILURE}, None
        if self.state.coordinator is not None:
            before = self.state.coordinator.on_last_words(connection, fields, self.now())
        self._pass_on({"kind": "failing", **fields})
        connection.send({"kind": "noted", "before": before})

    def _pass_on(self, report: dict[str, Any]) -> None:
        """Send the supervisor a failure report."""
        self._launcher.send(report)

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
        rule = rule_of(ServerRule, header["sync"])
        shard = shard_of(self._number, layout, spec, rule, self._settings, self.now, memory, self._keeper)
        number = header.get("number_of_optimizer", 0)
        if self._settings.resume is not None:
            resumed = Resumed(self._settings.resume)
            saved = partial(resumed.copy_for, number, layout, shard.span, spec)
            shard.restore(saved, resumed.version_at(number, self._number, self._settings))
        if self._settings.checkpoint is not None:
            self.state.files = self.state.files or ShardFiles(
                self._settings.checkpoint.folder, self._number, self._tell_coordinator, self._writer
            )
            shard.save = partial(self.state.files.save, number)
        self.state.live_shards[number] = shard
        early, self.state.early = self.state.early, []
        for connection, waiting in early:
            self._handle(connection, waiting)

    def _serve(self, number: int, connection: Connection, message: Message) -> None:
        """Handle a worker's message at a server other than 0: only copying, and what the coordinator orders."""
        shard = self.state.live_shards[number]
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
                self.state.at[connection] = number
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
        assert self.state.to_coordinator is not None
        about = {"number_of_optimizer": number} if number else {}
        self.state.to_coordinator.send({**header, **about, "shard": self._number})

    def _on_closed(self, connection: Connection, reason: str) -> None:
        if connection is self.state.to_coordinator:
            raise JobError(f"server 0 is gone ({reason}), and what it held with it")
        self.state.early = [(c, m) for c, m in self.state.early if c is not connection]
        if (shard := self.state.live_shards.get(self.state.at.pop(connection, 0))) is not None:
            shard.closed(connection)
        if self.state.coordinator is not None:
            self.state.coordinator.on_closed(connection, reason, self.now())

    def notice(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal ``number``, which tells this process to leave: the supervisor ends the job in order."""
        self._noticed = signal.Signals(number).name
        self._hub.wake()

    def _report_notice(self) -> None:
        """Tell the supervisor of a notice: until that ends this process, or the job, it serves on."""
        if self._noticed is not None:
            self._launcher.send({"kind": "noticed", "signal": self._noticed})
            self._noticed = None

    def _report(self) -> None:
        self._report_notice()
        followed = None if self.state.coordinator is None else self.state.coordinator.journal.followed
        if followed is not None and (batch := followed.due(self._clock())) is not None:
            self._send_records(batch)
        if self.now() - self._status_at >= STATUS_PERIOD_S:
            self._status_at = self.now()
            if self.state.coordinator is None:
                self._launcher.send({"kind": "alive"})
            else:
                self._launcher.send({"kind": "status", "snapshot": self.state.coordinator.tally.summary(brief=True)})

    def _send_records(self, batch: Batch) -> None:
        self._launcher.send({"kind": "records", "first": batch.first, "count": len(batch.lines)}, payload=[batch.payload])

    def _finish(self, ok: bool, reason: str) -> None:
        if self.state.coordinator is not None:
            self._close_journal(self.state.coordinator, ok, reason)
        raise ServingEnded

    def _close_journal(self, coordinator: LiveCoordinators, ok: bool, reason: str) -> None:
        """Close the journal, and send the supervisor the summary even if that fails."""
        try:
            coordinator.close(ok, reason, self.now())
        finally:
            for batch in [] if coordinator.journal.followed is None else coordinator.journal.followed.rest():
                self._send_records(batch)
            self._launcher.send({"kind": "summary", "summary": coordinator.tally.summary()})
