"""Run the plane of a job with servers: which pushes have arrived at every shard, and which workers have the parameters.

Each worker describes its push to server 0; the other servers report that they have it too. Under rules of shard scope each arrival at a
shard is an event of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.effects import Effect
from offbeat.core.events import Event, Initialised, Joined, Left, Lost, PullWanted, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.runtime.coordination.arrivals import Schedules, ShardArrivals, pushed
from offbeat.runtime.coordination.notifier import Notifier
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.coordination.plane import Plane
from offbeat.runtime.job.job_spec import JobSpec
from offbeat.runtime.job.numbered import Numbered
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.parameter_server.dispatch import Dispatcher
from offbeat.runtime.parameter_server.per_shard import shard_of
from offbeat.runtime.parameter_server.per_shard_dispatch import PerShardDispatcher
from offbeat.runtime.parameter_server.shard import half_nbytes, unusable_in
from offbeat.runtime.recovery.survival import NOBODY, Survival
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import check_changed
from offbeat.tensors.shard import SquaredNorms
from offbeat.tensors.whole import ShardCopy
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.transport.schema import shown
from offbeat.types import NO_CAUSE, RecordId, Seconds, WorkerId


class ServerPlane(Plane):
    """Hold server 0's shard, and exchange orders and reports with the other shards, which are set up here.

    Args:
        policy: the job's rule.
        job_spec: the job's layout and optimizer.
        settings: the job as the launcher knows it.
        coordinator: knows which workers are alive, and is told of arrivals.
        shards: the other servers, by number.
        peers, notifier: as in `Dispatcher`.
        feed: journals an event, passes it to the coordinator, and performs the effects.
        perform: journals and performs effects.
        now: the job's clock.
        in_place: under rules that fold nothing while a worker computes, workers may read the parameters where they are folded. False if a
            worker may wait with another optimizer in the middle of a computation.
        survival: see `LiveShard`.
        gpu: the UUID of the GPU where the first worker has its gradients; None: they are on the host.

    Raises:
        ConfigurationError: there is not enough memory.
    """

    follows = False

    def __init__(
        self,
        policy: ServerRule,
        job_spec: JobSpec,
        settings: JobSettings,
        coordinator: Coordinator,
        shards: Mapping[int, Numbered],
        peers: Peers,
        notifier: Notifier,
        feed: Callable[[Event, Seconds], RecordId],
        perform: Callable[[list[Effect], Seconds, RecordId], None],
        now: Callable[[], Seconds],
        *,
        in_place: bool = True,
        survival: Survival = NOBODY,
        gpu: str | None = None,
    ) -> None:
        layout = job_spec.layout
        self._policy, self._spec, self._coordinator, self._settings = policy, job_spec.spec, coordinator, settings
        self._shards, self._peers = shards, peers
        self._feed, self._perform = feed, perform
        self._common: SharedMemory | None = None
        """Block in which all workers of this host read the parameters in place; None: each has a copy."""
        together = all(shard.shares_memory for shard in shards.values())
        if gpu is None and in_place and not survival.follows and policy.lockstep and together:
            self._common = _common(layout, survival)
        self.shard = shard_of(0, layout, job_spec.spec, policy, settings, now, self._common, survival, gpu)
        header = {"layout": layout.to_wire(), "optimizer": job_spec.spec.to_wire(), "sync": policy.spelling, "servers": settings.servers}
        header |= {"gpu": gpu} if gpu is not None else {}
        for shard in shards.values():
            shard.send({"kind": "setup", **header}, memory=(self._common,) if self._common is not None else ())
        self._arrivals = ShardArrivals(1 + len(shards))
        self._fragments = policy.scope == "shard" and policy.averaging is not None
        self._postponed: dict[WorkerId, PullWanted] = {}
        """Pulls of workers whose loaded parameters have not arrived at every shard yet."""
        self._schedules = Schedules()
        dispatcher = Dispatcher if policy.scope == "job" else PerShardDispatcher
        self._dispatcher = dispatcher(policy, coordinator, self.shard, shards, peers, notifier, self._schedules)

    @property
    def has_backlog(self) -> bool:
        """True if a shard has not got a fragment yet of which server 0 knows: what the worker asks for must not overtake it."""
        return self._fragments and bool(self._arrivals.awaited)

    @property
    def notified_late(self) -> bool:
        """True under rules of shard scope, where workers go on without the coordinator."""
        return self._policy.scope == "shard"

    @property
    def servers_step(self) -> bool:
        """True if the servers make the optimizer's steps; False under averaging rules."""
        return self._policy.averaging is None

    def welcome(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Attach the memory that a worker's process brings with its hello, and send the welcome."""
        # A worker that joins a running job gets a copy: its script may load an old checkpoint into its model, which would overwrite
        # the shared parameters.
        common = self._common if connection.shares_memory and not self._coordinator.start.begun else None
        in_place = common is not None
        self.shard.attach(worker, connection, message, in_place=in_place)
        self._peers[worker].keeps_feedback = message.header.get("wire") == "int8"
        memory = (common,) if common is not None else ()
        welcome = {"kind": "welcome", "in_place": in_place, "sync": self._policy.spelling, "checkpoints": self._settings.checkpoints}
        if (unusable := unusable_in(message)) is not None:
            welcome["unusable"] = unusable
        connection.send(welcome, memory=memory)

    def follow(self, now: Seconds) -> None:
        """Send blocks whose injected delay is over."""
        self.shard.tick(now)

    def wake_at(self) -> Seconds | None:
        return self.shard.wake_at()

    def wake(self, now: Seconds) -> None:
        self._perform(self._coordinator.wake(now), now, NO_CAUSE)

    # Messages and events.

    def check(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """Check that a worker's process brings the memory that it must. Raises `ProtocolError` otherwise."""
        self.shard.check_memory(worker, connection, message)

    def closed(self, connection: Connection) -> None:
        """Forget the worker of a connection."""
        self.shard.closed(connection)

    def may_request(self, worker: WorkerId) -> bool:
        """True if the worker has been admitted."""
        return self._coordinator.waiting.admitted(worker)

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """Count a worker's process in."""
        self._dispatcher.enter(worker)
        self._feed(Joined(worker), now)

    def initial(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """Handle a worker's push of the initial parameters, or its message that it has them from elsewhere."""
        if not message.header["provided"] and self._coordinator.version == 0:
            self.shard.provide(self._peers[worker].connection)
        self._complete(worker, message.header["number"], 0, now, Initialised(worker))

    def pull(self, event: PullWanted, now: Seconds) -> None:
        """Give a worker the newest parameters, once every shard has the parameters that it has loaded.

        Otherwise a slow shard would answer with older parameters, and would take the worker's next gradient, which uses the same memory,
        for the loaded ones.
        """
        self.exact(event.worker)
        if event.worker in self._arrivals.awaited:
            self._postponed[event.worker] = event
        else:
            self._feed(event, now)

    def exact(self, worker: WorkerId) -> None:
        """Send this worker's next parameters as float32, whatever its wire format, and whatever it has."""
        self._dispatcher.next_is_exact(worker, anew=True)

    def check_push(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Check that a push fits the present state.

        Raises:
            ProtocolError: it names a version that does not exist, or settings that the optimizer does not have.
        """
        push, servers = header["push"], 1 + len(self._shards)
        if self._policy.scope == "shard":
            if self._fragments != push.get("alone", False) or not 0 <= push.get("shard", 0) < servers:
                seen, expected = shown(push.get("shard")), f"0 to {servers - 1}" if self._fragments else "none"
                raise ProtocolError(f"worker {worker} sent 'push' with push.shard = {seen} (expected {expected}, under this rule)")
            if len(push.get("held", ())) != servers:
                held = len(push.get("held", ()))
                raise ProtocolError(
                    f"worker {worker} sent 'push' with {held} versions in push.held (expected {servers}, one for each server)"
                )
        elif push["version"] > self._coordinator.version:
            newest = self._coordinator.version
            raise ProtocolError(f"worker {worker} sent 'push' with push.version = {push['version']} (expected at most {newest})")
        if "hyper" in header and self._policy.averaging is None:  # with averaging, an optimizer of any class steps in the worker
            try:
                check_changed(self._spec, header["hyper"])
            except ProtocolError as error:
                raise ProtocolError(f"worker {worker} sent 'push' with settings that do not fit: {error}") from None

    def discard(self, shard: int, header: Mapping[str, Any]) -> None:
        """Have another server drop a gradient whose description breaks the protocol."""
        if "push" in header:
            discarded = {"do": "discard", "worker": header["worker"], "number": header["number"]}
            self._shards[shard].send({"kind": "orders", "orders": [discarded]})

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """Handle a worker's push and its description."""
        header, connection = message.header, self._peers[worker].connection
        self.shard.decode(connection)
        if self._fragments:
            shard = header["push"]["shard"]
            if shard == 0:
                self.shard.take(connection, header["number"], message.payload)
            self._schedules.note(worker, header)
            self._complete(worker, header["number"], 0, now, pushed(worker, header["push"], shard))
            return
        if self._policy.scope == "shard":
            self.shard.take(connection, header["number"], message.payload)
            self._arrived({**header, "worker": worker}, 0, now)
            return
        self._schedules.note(worker, header)
        self._complete(worker, header["number"], 0, now, pushed(worker, header["push"]))

    def state(self, worker: WorkerId) -> None:
        """Let every shard send this worker its optimizer state, after the orders so far."""
        self._dispatcher.order([{"do": "state", "worker": worker}])

    def save(self, order: Mapping[str, Any], own: Callable[[Callable[[], ShardCopy]], None]) -> int:
        """Have every shard copied, after the orders so far. ``own`` gets what copies server 0's. Returns the number of the others."""
        self._dispatcher.order([dict(order)])
        own(self.shard.copy)
        return len(self._shards)

    def from_shard(self, header: Mapping[str, Any], shard: int, now: Seconds) -> None:
        """Handle another server's report: a push or initial parameters have arrived, or a fold was measured."""
        if header["kind"] == "measured":
            parts, total, difference = header["norms"]
            self._dispatcher.measurements.note(header["version"], SquaredNorms(tuple(parts), total, difference))
            self.pass_on(now)
        elif "push" in header:
            self._arrived(header, shard, now)
        else:
            self._complete(header["worker"], header["number"], shard, now)

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        if isinstance(event, Lost):
            self._arrivals.forget(event.worker)
            self._postponed.pop(event.worker, None)
        self._feed(event, now)

    def _arrived(self, header: Mapping[str, Any], shard: int, now: Seconds) -> None:
        """Feed the arrival of a gradient at one shard, under rules of shard scope."""
        event = pushed(header["worker"], header["push"], shard)
        if not isinstance(self._dispatcher, PerShardDispatcher):
            raise ProtocolError(
                f"worker {event.worker} sent 'push' with its description to server {shard} (expected at server 0 only, under this rule)"
            )
        self._dispatcher.arriving(event, header["number"])
        self._schedules.note(event.worker, header)
        self._feed(event, now)

    def _complete(self, worker: WorkerId, number: int, shard: int, now: Seconds, event: Event | None = None) -> None:
        """Note that one shard has a worker's push or initial parameters, and feed the event once all shards have it."""
        arrived = self._arrivals.at(shard, worker, number, event)
        if arrived is None:
            return
        if isinstance(arrived, Initialised) and not self._coordinator.start.begun:
            # The shards take a worker's parameters only on this order: a worker that froze may answer after others have trained on.
            self._dispatcher.order([{"do": "initialise", "worker": arrived.worker}])
        if isinstance(arrived, Pushed) and isinstance(self._dispatcher, PerShardDispatcher):
            self._dispatcher.arriving(arrived, number)
        self._feed(arrived, now)
        if worker in self._postponed and worker not in self._arrivals.awaited:
            self._feed(self._postponed.pop(worker), now)

    # Effects.

    def perform(self, effects: Sequence[Effect]) -> None:
        self._dispatcher.perform(effects)

    def pass_on(self, now: Seconds) -> None:
        """Feed the folds that every shard has measured."""
        for event in self._dispatcher.measurements.complete():
            self._feed(event, now)

    def close(self) -> None:
        """Do nothing: the memory is freed with this process."""


def _common(layout: Layout, survival: Survival) -> SharedMemory:
    """Return the block in which workers read the parameters: two halves of it if the shards outlive their processes."""
    if survival is not NOBODY and survival.given_up is None:
        try:
            return survival.allocate(half_nbytes(layout) + layout.nbytes, "parameters")
        except ConfigurationError as error:
            survival.give_up(str(error))
    return survival.allocate(layout.nbytes, "parameters")
