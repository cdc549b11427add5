"""Handle the messages of a server: from the supervisor, workers and other servers."""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from offbeat.errors import ConfigurationError, JobError, OffbeatError, ProtocolError
from offbeat.journal.file import Journal
from offbeat.journal.followed import Batch
from offbeat.runtime.coordination.file_writer import FileWriter, Written
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job import messages
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.runtime.job.numbered import Numbered
from offbeat.runtime.job.settings import JobSettings, read_addresses
from offbeat.runtime.recovery.recorder import Recorder
from offbeat.runtime.recovery.replica import StreamRecorder
from offbeat.runtime.recovery.sessions import SERVER
from offbeat.runtime.recovery.survival import NOBODY, Survival
from offbeat.transport.base import Address, Closed, Connection, Hub, Message
from offbeat.transport.link import Link
from offbeat.transport.schema import shown
from offbeat.types import Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.runtime.coordination.shard_files import ShardFiles
    from offbeat.runtime.live_job import LiveJob
    from offbeat.runtime.parameter_server.shard import LiveShard

log = logging.getLogger(__name__)

PASSED_ON: Sequence[str] = ("worker", "number", "steps", "push", "hyper")
"""Fields of a worker's push to another server that are passed on to server 0."""
EARLY_MAX = 16
"""Most messages of one peer that are kept until this server can begin."""


@dataclass(slots=True, eq=False)
class ServerState:
    """All that a server keeps from one message to the next besides its links: its next process goes on with it, and its standby."""

    began: Seconds
    """By the clock of the process."""
    started: str
    shards: dict[int, Connection] = field(default_factory=dict)
    """On server 0: the connections to the other servers, by number."""
    job: LiveJob | None = None
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
    raised: dict[tuple[str, str], WorkerId] = field(default_factory=dict)
    """By an exception's type and line: the worker whose script has raised it first."""
    files: ShardFiles | None = None
    """This server's part of checkpoints; None on server 0, and where there are none."""
    writes: Any = None
    """The files that were being written when the state was handed on."""
    journal: Any = None
    """How far the journal had come then; None: this server has none."""


class ServingEnded(Exception):
    """The supervisor has told this server to end."""


class Service:
    """Do what a server does, message by message; who brings them, and writes them down, is in ``lasting_server.py``.

    Args:
        number: server 0 hosts the coordinator.
        hub: listening already.
        launcher: the connection to the supervisor.
        clock: seconds, monotonic, from any origin.
    """

    def __init__(self, number: int, hub: Hub, launcher: Connection, clock: Callable[[], Seconds]) -> None:
        self.number = number
        self._hub, self._launcher, self._clock = hub, launcher, clock
        self.links: Recorder | StreamRecorder | None = None
        """Writes down the messages of this server, and has its links; None: the death of this process ends the job."""
        self.state = ServerState(clock(), datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
        self.settings: JobSettings | None = None
        self.servers: Sequence[Address] = ()
        """Where each server listens."""
        self.refused: WeakSet[Connection] = WeakSet()
        """Connections that this server has closed; messages that came with the refused one may still be queued."""
        self.writer = FileWriter(hub.wake)
        """Writes this server's files of checkpoints."""
        self._moment: Seconds | None = None
        """While something is handled: when it came, which is when another process that handles it again takes it to have come."""

    def now(self) -> Seconds:
        """Return the seconds since this server began; while something is handled, the time at which it came."""
        return self._clock() - self.state.began if self._moment is None else self._moment

    @property
    def supervisor(self) -> Connection:
        """Return that over which the supervisor's orders come: a link where they are written down, else the connection itself."""
        return self._launcher if self.links is None else self.links.supervisor

    @property
    def _recorder(self) -> Recorder | StreamRecorder:
        assert self.links is not None, "a record names a link only where links are kept"
        return self.links

    @property
    def _survival(self) -> Survival:
        return NOBODY if self.links is None else self.links.survival

    def _at(self, now: Seconds, do: Callable[..., object], *arguments: Any) -> None:
        """Do what follows from something that came at this time."""
        self._moment = now
        try:
            do(*arguments)
        finally:
            self._moment = None

    # Messages and ticks, each at the time of its arrival: another process that handles the same ones does the same.

    def handle(self, now: Seconds, connection: Connection, item: Message | Closed) -> None:
        """Handle a message, or the end of a connection.

        Raises:
            ServingEnded: the supervisor has ended the job.
            JobError: the job cannot go on.
        """
        self._at(now, self._handle, connection, item)

    def _tick(self, now: Seconds) -> None:
        """Do what is due."""
        if self.state.job is not None:
            self.state.job.tick(now)
        for shard in self.state.live_shards.values():
            shard.tick(now)

    def _on_written(self, now: Seconds, result: Written) -> None:
        """Handle the result of writing files of a checkpoint."""
        self.writer.handled(result)
        if self.state.job is not None:
            self.state.job.on_written(result, now)
        elif self.state.files is not None:
            self.state.files.on_written(result)

    def settle(self) -> None:
        """Write into the journal what has happened: now, since the answers to what has come are on their way."""
        if self.state.job is not None:
            self.state.job.journal.settle()

    def record(self, record: list[Any]) -> None:
        """Write a record for the next process, if there can be one, and do what the record says. Raises what `handle` raises."""
        if self.links is not None:
            self.links.write(record)
        self.follow(record)

    def follow(self, record: list[Any]) -> None:
        """Do what a record says: one of this process, or of another that has done this, or was about to do it. Raises what `handle` raises.

        ``begin``: the beginning of the job. ``open``, ``closed``: a link. ``message``: what has come over one. ``tick``: what is due, and
        how many bytes have come over the links that have brought any since the last one. ``written``: the result of writing files.
        ``stood still``: the process was stopped for so many seconds. ``returned``: this server goes on in a new process, after an absence
        of so many seconds. ``served``: the standby sends parameters over a link. ``withdrawn``: the gradient that has come last over a link
        is lost with the former leader.
        """
        match record:
            case ["begin", began, started, settings, servers]:
                self.state.began, self.state.started = began, started
                self.begin(JobSettings.from_wire(settings), read_addresses(servers))
            case ["open", session, peer, beside, shares_memory]:
                self._recorder.open(session, peer, beside=beside, shares_memory=shares_memory)
            case ["message", now, *_]:
                self.handle(now, *self._recorder.again(record))
            case ["closed", now, session, reason]:
                link = self._recorder.named(session)
                self._recorder.end(link)
                link.close()
                self.handle(now, link, Closed(reason))
            case ["tick", now, stirred]:
                for session, nbytes in stirred:
                    self._recorder.sessions[session].bytes_received = nbytes
                self._at(now, self._tick, now)
            case ["written", now, result]:
                self._at(now, self._on_written, now, Written(*result))
            case ["stood still", now, seconds] if self.state.job is not None:
                self.state.job.stood_still(seconds, now)
            case ["returned", now, away_s] if self.state.job is not None:
                self.state.job.has_returned(now, away_s)
            case ["served", session]:
                self._recorder.sessions[session].served = True
            case ["withdrawn", now, session]:
                link = self._recorder.sessions[session]
                link.release_carried()
                if self.state.job is not None:
                    self._at(now, self.state.job.on_withdrawn, link, now)

    def wake_at(self) -> Seconds | None:
        """Return when to call `tick` at the latest, by `now`; None: only for messages and for the regular status."""
        if self.state.job is not None:
            return self.state.job.wake_at()
        return min((at for shard in self.state.live_shards.values() if (at := shard.wake_at()) is not None), default=None)

    # The state that another process takes over.

    def handed_on(self, *, journal: bool) -> ServerState:
        """Return the state as it is now, for another process. ``journal``: with the journal's content, for a process elsewhere."""
        state = self.state
        state.writes = self.writer.open
        if state.job is not None:
            state.job.journal.flush()
            state.journal = state.job.journal.place(content=journal)
        return state

    def take_over(self, state: ServerState, journal: Journal) -> None:
        """Go on with what another process has handed on, and with this process's journal."""
        self.writer.follow(state.writes)
        self.state = state
        if state.job is None:
            journal.close()
        else:
            state.job.goes_on_in(journal, state.journal)

    @property
    def parts(self) -> dict[str, Any]:
        """Return what each process has of its own and the state refers to, by name."""
        keeps = self.state.files if self.state.job is None else self.state.job.checkpoints
        parts = {"server": self, "hub": self._hub, "settings": self.settings, "writer": self.writer}
        if self.state.job is not None:
            parts["journal"] = self.state.job.journal
        return parts if keeps is None else {**parts, "folder": keeps.folder}

    def parts_with(self, settings: JobSettings, journal: Journal) -> dict[str, Any]:
        """Return the same for a process that takes over a state."""
        parts = {**self.parts, "settings": settings, "journal": journal}
        return parts if settings.checkpoint is None else {**parts, "folder": CheckpointFolder(settings.checkpoint.folder)}

    def journal_of(self, settings: JobSettings, *, goes_on: bool) -> Journal:
        """Return the journal with which this process takes over a state; ``goes_on``: in the file of the process before."""
        path, follow = (settings.journal, settings.follow) if self.number == 0 else (None, ())
        return Journal(path, now=self.now, goes_on=goes_on, later=True, follow=follow)

    # The messages.

    def _handle(self, connection: Connection, item: Message | Closed) -> None:
        if connection is self.supervisor:
            if isinstance(item, Closed):
                raise JobError("the supervisor is gone")
            with trusting():
                self._carry_out(item)
        elif isinstance(item, Closed):
            self._on_closed(connection, item.reason)
        elif connection not in self.refused:
            try:
                self._on_message(connection, item)
            except (JobError, ServingEnded):
                raise
            except Exception as error:
                # No message of a peer may end the job. The checks of its fields raise ProtocolError; any other error is a mistake of
                # ours, so it is logged with its traceback.
                if not isinstance(error, OffbeatError):
                    log.exception("server %d could not handle a message of %s, and closes its connection", self.number, connection.peer)
                self.refused.add(connection)
                if self.links is not None and isinstance(connection, Link):
                    self.links.end(connection)
                self._on_closed(connection, f"it broke the protocol: {refuse(connection, error)}")

    def _carry_out(self, message: Message) -> None:
        """Carry out an order of the supervisor."""
        header, job = message.header, self.state.job
        match checked_order(message):
            case "job":
                self.begin(*self.job_of(header))
            case "finish":
                self._finish(header["ok"], header["reason"])
            case "records_taken":
                if job is not None and job.journal.followed is not None:
                    job.journal.followed.answered()
            case _ if job is None:
                self.state.early_orders.append(message)
            case "process":
                job.on_process(header["fields"], self.now())
            case "lost" | "ended" if job.has_replaced(header["worker"], header.get("pid", 0)):
                pass  # the process that has taken its place was heard first, as may happen while this server is away
            case "lost":
                if header.get("dead", False):
                    self.refused.update(job.on_dead(header["worker"]))
                job.on_lost(header["worker"], header["reason"], self.now())
            case "ended":
                job.on_ended(header["worker"], self.now())
            case "checkpoint":
                job.ask_for_checkpoint(header["within_s"], last=header.get("last", False))

    def job_of(self, header: Mapping[str, Any]) -> tuple[JobSettings, Sequence[Address]]:
        """Return the job's settings, and where its servers listen. Raises `ProtocolError` if they cannot be read, or came before."""
        if self.settings is not None:
            raise ProtocolError("the supervisor sent 'job' a second time (expected once)")
        try:
            return JobSettings.from_wire(header["settings"]), read_addresses(header["servers"])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ProtocolError(
                f"the supervisor sent 'job' with settings or servers that cannot be read: {type(error).__name__} (expected those of this "
                "version of offbeat)"
            ) from None

    def begin(self, settings: JobSettings, servers: Sequence[Address]) -> None:
        """Begin after every server listens: server 0 waits for the calls of the others."""
        self.settings, self.servers = settings, servers
        if self.number > 0:
            link = None if self.links is None else self.links.make(f"{SERVER} {self.number}", "server 0")
            self.state.to_coordinator = link or self._hub.connect(servers[0])  # a link goes over a socket from the next tick on
            self.state.to_coordinator.send({"kind": "shard", "number": self.number})
        elif settings.servers == 1:
            self._open()

    def _open(self) -> None:
        """Let workers come: at server 0, once every other server has called."""
        self.supervisor.send({"kind": "loading"})
        from offbeat.runtime.live_job import LiveJob  # imports torch, while workers start

        assert self.settings is not None
        self.state.job = LiveJob(
            self.settings, self.state.shards, self.supervisor, self._hub, self.state.started, self.now, self._survival, self.writer
        )
        early, self.state.early = self.state.early, []
        orders, self.state.early_orders = self.state.early_orders, []
        for message in orders:
            self._carry_out(message)
        for connection, message in early:
            self._handle(connection, message)

    def _on_message(self, connection: Connection, message: Message) -> None:
        kind = message.header.get("kind")
        if self.number > 0 and connection is self.state.to_coordinator:
            self._on_server_0(connection, message)
        elif self.number == 0 and kind == "shard" and self.settings is not None:
            self._on_call(self.settings, connection, message)
        elif self.number == 0 and kind == "failing":
            self._on_failing(connection, message)
        elif self.number == 0 and self.state.job is not None:
            self.state.job.on_message(connection, message, self.now())
        elif self.number > 0 and (number := self._about(connection, message)) in self.state.live_shards:
            self._serve(number, connection, message)
        elif sum(waiting is connection for waiting, _ in self.state.early) < EARLY_MAX:
            self.state.early.append((connection, message))
        else:
            raise ProtocolError(f"{connection.peer} sent {EARLY_MAX} messages before server {self.number} began (expected it to wait)")

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
        for version, norms in shard.apply(message.header["orders"]):
            self._tell_coordinator(number, {"kind": "measured", "version": version, "norms": norms})

    def _on_failing(self, connection: Connection, message: Message) -> None:
        """Pass a worker's failure report on to the supervisor, before the worker's process can end."""
        messages.FAILING.check(message.header, connection.peer, len(message.payload), len(message.memory))
        fields, before = {name: message.header[name] for name in messages.FAILURE}, None
        if self.state.job is not None:
            self.state.job.on_last_words(connection, fields, self.now())
        if fields["place"] is not None:  # the same exception at the same line again is a bug of the script, and no accident
            raised = fields["type"], fields["place"]
            before = self.state.raised.get(raised)
            self.state.raised.setdefault(raised, fields["worker"])
        if not self.writer.replays:  # else the supervisor has it from the process that has handled this
            self._launcher.send({"kind": "failing", **fields, "before": before})
        connection.send({"kind": "noted", "before": before})

    def _set_up(self, message: Message) -> None:
        self.supervisor.send({"kind": "loading"})
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
        assert self.settings is not None
        rule = rule_of(ServerRule, header["sync"])
        shard = shard_of(self.number, layout, spec, rule, self.settings, self.now, memory, self._survival, header.get("gpu"))
        number = header.get("number_of_optimizer", 0)
        if self.settings.resume is not None and (resumed := Resumed(self.settings.resume)).has(number):
            saved = partial(resumed.copy_for, number, layout, shard.span, spec)
            shard.restore(saved, resumed.version_at(number, self.number, self.settings))
        if self.settings.checkpoint is not None:
            self.state.files = self.state.files or ShardFiles(
                self.settings.checkpoint.folder, self.number, self._tell_coordinator, self.writer
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
        assert self.settings is not None
        if kind == "attach":
            if header["worker"] >= self.settings.workers:
                raise ProtocolError(f"worker {header['worker']} is not one of this job's {self.settings.workers} workers")
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
                if ("push" in header) != shard.described_here:
                    expected = "one" if shard.described_here else "none at this server"
                    raise ProtocolError(
                        f"{name} sent 'push' with push = {shown(header.get('push'))} (expected {expected}, under this rule)"
                    )
                shard.decode(connection)
                shard.take(connection, header["number"], message.payload)
                fields = {field: header[field] for field in PASSED_ON if field in header}
                self._tell_coordinator(number, {**fields, "kind": "arrived"})
            case "got":
                shard.got(connection)
            case "initial":
                if not header["provided"]:
                    shard.provide(connection)
                self._tell_coordinator(number, {"kind": "initialised", "worker": header["worker"], "number": header["number"]})
            case "state":
                shard.answer_state(connection, message)

    def _tell_coordinator(self, number: int, header: dict[str, Any]) -> None:
        assert self.state.to_coordinator is not None
        Numbered(self.state.to_coordinator, number).send({**header, "shard": self.number})

    def _on_closed(self, connection: Connection, reason: str) -> None:
        if connection is self.state.to_coordinator:
            raise JobError(f"server 0 is gone ({reason}), and what it held with it")
        self.state.early = [(c, m) for c, m in self.state.early if c is not connection]
        if (shard := self.state.live_shards.get(self.state.at.pop(connection, 0))) is not None:
            shard.closed(connection)
        if self.state.job is not None:
            self.state.job.on_closed(connection, reason, self.now())

    def _finish(self, ok: bool, reason: str) -> None:
        if self.state.job is not None:
            self._close_journal(self.state.job, ok, reason)
        raise ServingEnded

    def fail(self, reason: str) -> None:
        """Write the end of a job that cannot go on."""
        if self.state.job is not None:
            with contextlib.suppress(OffbeatError):
                self._close_journal(self.state.job, False, reason)

    def release(self) -> None:
        """Let go of what the process has opened. The last call, also after a failure."""
        self.writer.close()
        if self.state.job is not None:
            self.state.job.release_memory()

    def _close_journal(self, job: LiveJob, ok: bool, reason: str) -> None:
        """Close the journal, and send the supervisor the summary even if that fails."""
        try:
            job.close(ok, reason, self.now())
        finally:
            for batch in [] if job.journal.followed is None else job.journal.followed.rest():
                self.send_records(batch)
            self._launcher.send({"kind": "summary", "summary": job.tally.summary()})

    def send_records(self, batch: Batch) -> None:
        """Send the supervisor lines of the journal, for those who follow it."""
        self._launcher.send({"kind": "records", "first": batch.first, "count": len(batch.lines)}, payload=[batch.payload])


def checked_order(message: Message) -> str:
    """Return the kind of a message of the supervisor. Raises `ProtocolError` if it is none of its messages."""
    return messages.FROM_SUPERVISOR.check(message.header, "the supervisor", len(message.payload), len(message.memory))


@contextlib.contextmanager
def trusting() -> Iterator[None]:
    """Let a message of the supervisor that breaks the protocol end the job: nobody else could tell this server what to do."""
    try:
        yield
    except ProtocolError as error:
        raise JobError(f"{error}, and a server does not outlive the connection to its supervisor") from error
