"""The coordinator's shell, in server 0: messages become events with a time, effects become messages, and both go into the journal.

Nothing is decided here but what the pure core cannot see: whether a joining worker's model is the job's, when a push has
arrived at every shard, whose learning rate counts, and what the epoch's mean of the BatchNorm buffers is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.policies import rule
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.effects import Effect, EpochEnded, Fence, Fold, Grant, Initialise, NoMore, Release, StateChanged
from offbeat.protocol.events import EpochWanted, Event, Heard, Initialised, Joined, LeaseWanted, Left, Lost, PullWanted, Pushed
from offbeat.protocol.policy import Policy
from offbeat.report.tally import Tally
from offbeat.runtime.buffers import BufferBook
from offbeat.runtime.journal import Journal, end_record, fault_record, job_record, metrics_record, process_record
from offbeat.runtime.settings import JobSettings
from offbeat.runtime.shard_host import ShardHost
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.types import Incarnation, Seconds, WorkerId, WorkerState


@dataclass(slots=True)
class _Peer:
    """A worker's process, as long as its connection lasts."""

    worker: WorkerId
    connection: Connection
    incarnation: Incarnation = 0
    serial: int = 0
    """Counts its releases; every shard's parameters message carries it."""
    bytes_received: int = 0
    last_words: str | None = None
    """Why its script has failed; its process is about to end."""


@dataclass(slots=True)
class _Arrival:
    """A push on its way: complete when every shard has it."""

    event: Event | None = None
    """None: another shard has it already, server 0 does not."""
    shards: set[int] = field(default_factory=set)


class CoordinatorHost:
    """Runs one job's `Coordinator`.

    Args:
        settings: the job as the launcher knows it.
        shards: connections to the other servers, by number.
        supervisor: where status and failures go.
        allocate: makes a block that every process of this host can map, or raises `ConfigurationError`.
        started: the wall-clock time of the start, for the journal's first line.
        now: the job's clock, in seconds.

    Raises:
        ConfigurationError: the journal cannot be written.
    """

    def __init__(
        self,
        settings: JobSettings,
        shards: Mapping[int, Connection],
        supervisor: Connection,
        allocate: Callable[[int, str], SharedMemory],
        started: str,
        now: Callable[[], Seconds],
    ) -> None:
        self.settings = settings
        self.tally = Tally()
        self._journal = Journal(settings.journal, now=now, listeners=(self.tally.add,))
        self._shards = dict(shards)
        self._supervisor = supervisor
        self._allocate = allocate
        self._started = started
        self._coordinator: Coordinator | None = None
        self._policy: Policy | None = None
        self._layout: Layout | None = None
        self._spec: OptimizerSpec | None = None
        self._common: SharedMemory | None = None
        self._host: ShardHost | None = None
        self._peers: dict[Connection, _Peer] = {}
        self._current: dict[WorkerId, _Peer] = {}
        self._gone: set[WorkerId] = set()
        self._missing: dict[WorkerId, str] = {}
        """Whose process ended before anybody said hello, and how: nobody shall wait for them."""
        self._arrivals: dict[tuple[WorkerId, int], _Arrival] = {}
        self._schedules: dict[WorkerId, tuple[int, Any]] = {}
        self._buffers = BufferBook()
        self._ended: dict[int, tuple[dict[str, Any], bytes | None]] = {}
        """Of each pool, the last epoch's report and mean buffers: for those whose pushes have ended it and who ask only afterwards."""
        self._kills = list(settings.kill)
        self._handlers: dict[str, Callable[[_Peer, Message, Seconds], None]] = {
            "ready": self._ready,
            "push": self._push,
            "initial": self._initial,
            "buffers": self._take_buffers,
            "metrics": self._metrics,
            "heard": lambda peer, message, now: self._feed(Heard(peer.worker, message.header["incarnation"]), now),
            "pull": lambda peer, message, now: self._feed(PullWanted(peer.worker, message.header["incarnation"]), now),
            "samples": lambda peer, message, now: self._feed(LeaseWanted(peer.worker, **message.header["want"]), now),
            "epoch": lambda peer, message, now: self._feed(EpochWanted(peer.worker, **message.header["want"]), now),
            "left": lambda peer, message, now: self._feed(Left(peer.worker, message.header["incarnation"]), now),
            "abort": self._abort,
            "state": self._state,
        }

    @property
    def host(self) -> ShardHost:
        """The shard of server 0; exists once the first worker has said hello."""
        assert self._host is not None
        return self._host

    # What comes in.

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> None:
        """Handle a message of a worker or of another server."""
        kind = message.header.get("kind")
        if kind == "hello":
            self._hello(connection, message, now)
        elif kind in ("arrived", "initialised"):
            self._complete(message.header["worker"], message.header["number"], message.header["shard"], now)
        elif (peer := self._peers.get(connection)) is None or kind not in self._handlers:
            raise ProtocolError(f"{connection.peer} sent {kind!r} before it said hello")
        else:
            peer.bytes_received = connection.bytes_received
            self._handlers[kind](peer, message, now)

    def on_closed(self, connection: Connection, reason: str, now: Seconds) -> None:
        """A connection of a worker or of another server is gone."""
        for number, shard in self._shards.items():
            if shard is connection:
                raise JobError(f"server {number} is gone ({reason}), and its part of the parameters with it")
        peer = self._peers.pop(connection, None)
        if peer is not None and self._current.get(peer.worker) is peer:
            self._gone.add(peer.worker)
            why = f"connection closed: {reason}" if peer.last_words is None else f"its script failed: {peer.last_words}"
            self.on_lost(peer.worker, why, now, peer.incarnation)

    def on_last_words(self, connection: Connection, reason: str) -> None:
        """A worker's script has failed. The worker is dead when its connection closes, not before: its heart still beats."""
        if (peer := self._peers.get(connection)) is not None:
            peer.last_words = reason

    def on_lost(self, worker: WorkerId, reason: str, now: Seconds, incarnation: Incarnation | None = None) -> None:
        """A worker's process has ended, or can no longer be reached."""
        for key in [key for key in self._arrivals if key[0] == worker]:
            del self._arrivals[key]
        if self._coordinator is not None:
            self._feed(Lost(worker, reason, incarnation), now)
        else:
            self._missing[worker] = reason

    def on_ended(self, worker: WorkerId, now: Seconds) -> None:
        """A worker's script has come to its end. One that took part has said so itself; one that never joined is not waited for."""
        if self._coordinator is None or self._coordinator.membership[worker].state is WorkerState.EXPECTED:
            self.on_lost(worker, "its script ended without joining", now)

    def on_process(self, fields: Mapping[str, Any], now: Seconds) -> None:
        """The supervisor has started or lost a process: for the journal."""
        self._journal.write(process_record(now, **fields))

    def tick(self, now: Seconds) -> None:
        """Time has passed. Bytes of an unfinished message are a sign of life too."""
        for peer in self._current.values():
            if peer.connection.bytes_received != peer.bytes_received and peer.incarnation:
                peer.bytes_received = peer.connection.bytes_received
                self._feed(Heard(peer.worker, peer.incarnation), now)
        due = self._coordinator.wake_at() if self._coordinator is not None else None
        if self._coordinator is not None and due is not None and now >= due:
            self._perform(self._coordinator.wake(now), now)
        flush_at = self._journal.wake_at()
        if flush_at is not None and now >= flush_at:
            self._journal.flush()

    def wake_at(self) -> Seconds | None:
        """When to call `tick` at the latest."""
        times = [self._journal.wake_at(), self._coordinator.wake_at() if self._coordinator is not None else None]
        return min((t for t in times if t is not None), default=None)

    def close(self, ok: bool, reason: str, now: Seconds) -> None:
        """The job is over."""
        if self._coordinator is not None:
            self._perform(self._coordinator.close(now, "the job has ended"), now)
        if self._policy is None:
            self._head(None, now)
        self._journal.write(end_record(now, ok, reason))
        self._journal.close()

    # A worker's process introduces itself.

    def _hello(self, connection: Connection, message: Message, now: Seconds) -> None:
        header = message.header
        worker = header["worker"]
        self._missing.pop(worker, None)
        try:
            if not 0 <= worker < self.settings.workers:
                raise ConfigurationError(f"worker {worker} is not one of this job's {self.settings.workers} workers")
            layout, spec = Layout.from_wire(header["layout"]), OptimizerSpec.from_wire(header["optimizer"])
            self._agree(worker, layout, spec, header["sync"], now)
        except (ConfigurationError, ProtocolError) as error:
            connection.send({"kind": "refused", "reason": str(error)})
            if self._coordinator is None or not self._coordinator.begun:
                raise JobError(str(error)) from None
            return
        assert self._policy is not None
        old = self._current.get(worker)
        if old is not None and old.connection in self._peers:
            self.on_closed(old.connection, "a new process has taken its place", now)
            old.connection.close()
        for missing, reason in self._missing.items():
            self._feed(Lost(missing, reason), now)
        self._missing.clear()
        peer = _Peer(worker, connection)
        self._peers[connection] = self._current[worker] = peer
        self._gone.discard(worker)
        # Who comes to a running job reads a copy: its script may go on to load an old checkpoint into its model, and so into everybody's.
        running = self._coordinator is not None and self._coordinator.begun
        in_place = self._common is not None and connection.shares_memory and not running
        self.host.attach(worker, connection, message, in_place=in_place)
        connection.send(
            {"kind": "welcome", "sync": self._policy.spelling, "in_place": in_place},
            memory=(self._common,) if in_place and self._common is not None else (),
        )

    def _agree(self, worker: WorkerId, layout: Layout, spec: OptimizerSpec, sync: str, now: Seconds) -> None:
        """The first worker's model, optimizer and rule are the job's; the others must have the same."""
        if self._layout is None or self._spec is None or self._policy is None:
            self._set_up(layout, spec, sync, now)
            return
        difference = self._layout.difference(layout)
        if difference is not None:
            raise ConfigurationError(f"worker {worker} has another model than the workers before it: {difference}")
        if spec != self._spec:
            difference = _difference(spec, self._spec)
            raise ConfigurationError(
                f"worker {worker} has another optimizer than the workers before it: {difference}; every worker runs the same script"
            )
        if self.settings.sync is None and rule(sync).spelling != self._policy.spelling:
            raise ConfigurationError(
                f"worker {worker} asks for {sync}, the workers before it for {self._policy.spelling}: "
                "give every worker the same rule, or choose with --sync"
            )

    def _set_up(self, layout: Layout, spec: OptimizerSpec, sync: str, now: Seconds) -> None:
        policy = rule(self.settings.sync or sync)
        self._coordinator = Coordinator(policy, self.settings.workers, self.settings.timeout_s)
        self._policy, self._layout, self._spec = policy, layout, spec
        self._head(policy, now)
        together = all(shard.shares_memory for shard in self._shards.values())
        if policy.lockstep and together:
            self._common = self._allocate(layout.nbytes, "parameters")
        for number, shard in self._shards.items():
            header = {
                "kind": "setup",
                "number": number,
                "layout": layout.to_wire(),
                "optimizer": spec.to_wire(),
                "lockstep": policy.lockstep,
                "servers": self.settings.servers,
            }
            shard.send(header, memory=(self._common,) if self._common is not None else ())
        spans = layout.spans(self.settings.servers, spec.elementwise)
        self._host = ShardHost(0, layout, spans[0], spec, lockstep=policy.lockstep, memory=self._common)

    def _ready(self, peer: _Peer, message: Message, now: Seconds) -> None:
        self._order([{"do": "enter", "worker": peer.worker}])
        # Before the parameters, with which the worker goes on.
        if (mean := self._buffers.mean()) is not None:
            peer.connection.send({"kind": "buffers"}, payload=(mean,))
        self._feed(Joined(peer.worker), now)

    # Contributions.

    def _push(self, peer: _Peer, message: Message, now: Seconds) -> None:
        header = message.header
        if "hyper" in header:
            self._schedules[peer.worker] = (header["steps"], header["hyper"])
        elif peer.worker in self._schedules:
            self._schedules[peer.worker] = (header["steps"], self._schedules[peer.worker][1])
        fields = {**header["push"], "leases": tuple(header["push"]["leases"])}
        self._complete(peer.worker, header["number"], 0, now, Pushed(peer.worker, **fields))

    def _initial(self, peer: _Peer, message: Message, now: Seconds) -> None:
        assert self._coordinator is not None
        if not message.header["provided"] and self._coordinator.version == 0:
            self.host.initialise(peer.worker)
        self._complete(peer.worker, message.header["number"], 0, now, Initialised(peer.worker))

    def _complete(self, worker: WorkerId, number: int, shard: int, now: Seconds, event: Event | None = None) -> None:
        """One shard has the worker's push. The numbers of different processes of a worker differ, so that none completes another's."""
        arrival = self._arrivals.setdefault((worker, number), _Arrival())
        arrival.shards.add(shard)
        arrival.event = arrival.event or event
        if len(arrival.shards) == 1 + len(self._shards) and arrival.event is not None:
            del self._arrivals[worker, number]
            self._accept_initial(arrival.event)
            self._feed(arrival.event, now)

    def _accept_initial(self, event: Event) -> None:
        """Only an order makes what a worker provides the parameters: one that froze over it may answer when others have trained on."""
        assert self._coordinator is not None
        if isinstance(event, Initialised) and not self._coordinator.begun:
            self._order([{"do": "initialise", "worker": event.worker}])

    def _hyperparameters(self) -> Any:
        """Those of the living worker that has made the most steps: learning-rate schedules follow the furthest, not a returning worker."""
        alive = [(steps, -worker, hyper) for worker, (steps, hyper) in self._schedules.items() if worker not in self._gone]
        return max(alive, key=lambda item: item[:2])[2] if alive else None

    # What is to be done.

    def _feed(self, event: Event, now: Seconds) -> None:
        assert self._coordinator is not None
        self._journal.log(event, now)
        self._perform(self._coordinator.on(event, now), now)

    def _perform(self, effects: list[Effect], now: Seconds) -> None:
        orders: list[dict[str, Any]] = []
        for effect in effects:
            self._journal.log(effect, now)
            if isinstance(effect, Fold):
                parts = [(part.worker, part.weight) for part in effect.parts]
                orders.append({"do": "fold", "parts": parts, "hyper": self._hyperparameters()})
            elif isinstance(effect, Release):
                orders.append(self._release_order(effect))
            else:
                self._order(orders)
                orders = []
                self._tell(effect)
        self._order(orders)
        self._forget_the_gone()
        self._rehearse(now)

    def _order(self, orders: list[dict[str, Any]]) -> None:
        """Carry out at every shard; the others first, so that they work while we do."""
        if orders:
            for shard in self._shards.values():
                shard.send({"kind": "orders", "orders": orders})
            self.host.apply(orders)

    def _release_order(self, effect: Release) -> dict[str, Any]:
        assert self._coordinator is not None
        peer = self._current[effect.worker]
        peer.serial += 1
        chief = self._coordinator.membership.in_state(WorkerState.ALIVE)[0]
        return {
            "do": "release",
            "worker": effect.worker,
            "serial": peer.serial,
            "version": effect.version,
            "incarnation": effect.incarnation,
            "chief": chief,
        }

    def _tell(self, effect: Effect) -> None:
        if isinstance(effect, StateChanged) and effect.state is WorkerState.ALIVE:
            peer = self._current[effect.worker]
            peer.incarnation = effect.incarnation
            peer.connection.send({"kind": "joined", "incarnation": effect.incarnation})
        elif isinstance(effect, StateChanged) and effect.state is WorkerState.DEAD:
            self._schedules.pop(effect.worker, None)
            self._buffers.forget(effect.worker)
        elif isinstance(effect, Initialise):
            self._current[effect.worker].connection.send({"kind": "provide"})
        elif isinstance(effect, Fence):
            self._current[effect.worker].connection.send({"kind": "fence", "incarnation": effect.incarnation, "reason": effect.reason})
        elif isinstance(effect, Grant):
            fields = {"lease": effect.lease, "epoch": effect.epoch, "start": effect.start, "stop": effect.stop}
            self._current[effect.worker].connection.send({"kind": "grant", **fields, "refreshed": effect.refreshed})
        elif isinstance(effect, NoMore):
            self._no_more(effect)
        elif isinstance(effect, EpochEnded):
            self._end_epoch(effect)

    def _no_more(self, effect: NoMore) -> None:
        connection = self._current[effect.worker].connection
        report, mean = self._ended.get(effect.pool, (None, None)) if effect.refreshed else (None, None)
        if mean is not None:
            connection.send({"kind": "buffers"}, payload=(mean,))
        connection.send({"kind": "no_more", "epoch": effect.epoch, "refreshed": effect.refreshed, "report": report})

    def _end_epoch(self, effect: EpochEnded) -> None:
        mean = self._buffers.mean()
        self._ended[effect.pool] = effect.report, mean
        for worker in effect.workers:
            connection = self._current[worker].connection
            if mean is not None:
                connection.send({"kind": "buffers"}, payload=(mean,))
            connection.send({"kind": "epoch_ended", "epoch": effect.epoch, "report": effect.report})

    def _forget_the_gone(self) -> None:
        """Free a dead worker's memory, once the gradient in it has a fate."""
        assert self._coordinator is not None
        freed = [worker for worker in self._gone if worker not in self._coordinator.unsettled]
        self._order([{"do": "forget", "worker": worker} for worker in freed])
        for worker in freed:
            self._gone.discard(worker)
            self._schedules.pop(worker, None)
            self._buffers.forget(worker)

    def _rehearse(self, now: Seconds) -> None:
        """Ask for the deaths that the user has ordered, once their version is reached."""
        assert self._coordinator is not None
        due = [kill for kill in self._kills if self._coordinator.version >= kill.version]
        for kill in due:
            self._kills.remove(kill)
            self._journal.write(fault_record(now, kill.worker, "kill", f"at version {self._coordinator.version}"))
            self._supervisor.send({"kind": "kill", "worker": kill.worker})

    # The rest.

    def _take_buffers(self, peer: _Peer, message: Message, now: Seconds) -> None:
        self._buffers.put(peer.worker, message.header["layout"], message.payload)

    def _metrics(self, peer: _Peer, message: Message, now: Seconds) -> None:
        version = self._coordinator.version if self._coordinator is not None else 0
        self._journal.write(metrics_record(now, peer.worker, version, message.header["values"]))

    def _abort(self, peer: _Peer, message: Message, now: Seconds) -> None:
        raise JobError(f"worker {peer.worker} stopped the job: {message.header['reason']}")

    def _state(self, peer: _Peer, message: Message, now: Seconds) -> None:
        answer_state(self.host, peer.connection, message)

    def _head(self, policy: Policy | None, now: Seconds) -> None:
        settings = self.settings
        sync = policy.spelling if policy is not None else settings.sync or ""
        head = job_record(
            sync=sync,
            workers=settings.workers,
            servers=settings.servers,
            seed=settings.seed,
            started=self._started,
            script=settings.script,
        )
        self._journal.write(head)
        for slow in settings.slow:
            who = "one worker, drawn anew each step" if slow.worker < 0 else "each step"
            self._journal.write(fault_record(now, slow.worker, "slow", f"{slow.seconds:g} s, {who}"))


def _difference(one: OptimizerSpec, other: OptimizerSpec) -> str:
    """In what two optimizers differ first."""
    if one.name != other.name:
        return f"{one.name}, not {other.name}"
    for number, (mine, theirs) in enumerate(zip(one.groups, other.groups, strict=False)):
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                return f"{name}={mine.get(name)!r} in parameter group {number}, not {theirs.get(name)!r}"
    return f"{len(one.groups)} parameter groups, not {len(other.groups)}"


def answer_state(host: ShardHost, connection: Connection, message: Message) -> None:
    """Give a worker this shard's optimizer state, or load the state that it brings, unless the shard has folded already."""
    if message.header["do"] == "load":
        if not host.folded:
            host.shard.load_state(message.header["pieces"], message.payload)
        connection.send({"kind": "state", "loaded": not host.folded})
        return
    pieces, payload = host.shard.state()
    connection.send({"kind": "state", "pieces": pieces}, payload=payload)
