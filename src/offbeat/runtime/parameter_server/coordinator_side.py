"""The coordinator's side of a job with servers: what has arrived at every shard, and who has the parameters.

Each worker says of its push to server 0 what it is; the other servers say that they have it too. Under rules whose shards fold one by one
each arrival is an event of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offbeat.core.effects import Effect
from offbeat.core.events import Event, Initialised, Joined, Left, Lost, PullWanted
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import ServerRule
from offbeat.errors import ProtocolError
from offbeat.runtime.coordination.arrivals import Schedules, ShardArrivals, pushed
from offbeat.runtime.coordination.notifier import Notifier
from offbeat.runtime.coordination.peers import Peers
from offbeat.runtime.job.job_spec import JobSpec
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.parameter_server.dispatch import Dispatcher
from offbeat.runtime.parameter_server.per_shard import shard_of
from offbeat.runtime.parameter_server.per_shard_dispatch import PerShardDispatcher
from offbeat.tensors.optimizers import check_changed
from offbeat.tensors.shard import SquaredNorms
from offbeat.transport.base import Connection, Message, SharedMemory
from offbeat.types import Seconds, WorkerId


class ServerCoordinatorSide:
    """The shards of one job, and what goes to them and comes from them. Server 0's own begins with this, and the others are set up.

    Args:
        policy: the job's rule.
        terms: the job's layout and optimizer.
        settings: the job as the launcher knows it.
        coordinator: asked who is alive, and told what has arrived.
        shards: connections to the other servers, by number.
        roster, announcer: as in `Dispatcher`.
        allocate: makes a block that every process of this host can map.
        feed: journals an event, hands it to the coordinator, and has the effects performed.
        perform: journals effects and has them performed.
        now: the job's clock.
        in_place: workers may read the parameters where they are folded, under rules that fold nothing while a worker computes. Not where
            somebody may wait with another optimizer in the middle of a computation.

    Raises:
        ConfigurationError: there is not enough memory.
    """

    has_backlog = False

    def __init__(
        self,
        policy: ServerRule,
        job_spec: JobSpec,
        settings: JobSettings,
        coordinator: Coordinator,
        shards: Mapping[int, Connection],
        peers: Peers,
        notifier: Notifier,
        allocate: Callable[[int, str], SharedMemory],
        feed: Callable[[Event, Seconds], None],
        perform: Callable[[list[Effect], Seconds], None],
        now: Callable[[], Seconds],
        *,
        in_place: bool = True,
    ) -> None:
        layout = job_spec.layout
        self._policy, self._spec, self._coordinator = policy, job_spec.spec, coordinator
        self._shards = shards
        self._feed, self._perform = feed, perform
        self._common: SharedMemory | None = None
        """Where everybody on this host reads the parameters in place."""
        if in_place and policy.lockstep and all(shard.shares_memory for shard in shards.values()):
            self._common = allocate(layout.nbytes, "parameters")
        self.shard = shard_of(0, layout, job_spec.spec, policy, settings, now, self._common)
        header = {"layout": layout.to_wire(), "optimizer": job_spec.spec.to_wire(), "sync": policy.spelling, "servers": settings.servers}
        for shard in shards.values():
            shard.send({"kind": "setup", **header}, memory=(self._common,) if self._common is not None else ())
        self._arrivals = ShardArrivals(1 + len(shards))
        self._postponed: dict[WorkerId, PullWanted] = {}
        """Workers that want the newest parameters, and have loaded others that some shard does not have yet."""
        self._schedules = Schedules()
        performer = Dispatcher if policy.scope == "job" else PerShardDispatcher
        self._performer = performer(policy, coordinator, self.shard, shards, peers, notifier, self._schedules)

    @property
    def notified_late(self) -> bool:
        """Under rules of shard scope workers go on by themselves."""
        return self._policy.scope == "shard"

    def has_backlog_for(self, worker: WorkerId) -> bool:
        """Everything is known: all that happens passes here."""
        return False

    def welcome(self, worker: WorkerId, connection: Connection, message: Message) -> None:
        """A worker's process has said hello, and brings its memory."""
        # Who comes to a running job reads a copy: its script may go on to load an old checkpoint into its model, and so into everybody's.
        common = self._common if connection.shares_memory and not self._coordinator.start.begun else None
        in_place = common is not None
        self.shard.attach(worker, connection, message, in_place=in_place)
        memory = (common,) if common is not None else ()
        connection.send({"kind": "welcome", "in_place": in_place, "sync": self._policy.spelling}, memory=memory)

    def follow(self, now: Seconds) -> None:
        """Send what has been late for long enough. All else is said to this server."""
        self.shard.tick(now)

    def wake_at(self) -> Seconds | None:
        """When to `follow` at the latest."""
        return self.shard.wake_at()

    def wake(self, now: Seconds) -> None:
        """It is the time at which the coordinator wanted to look around."""
        self._perform(self._coordinator.wake(now), now)

    # What comes in.

    def ready(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """A worker's process asks to be counted."""
        self._performer.enter(worker)
        self._feed(Joined(worker), now)

    def initial(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """A worker has pushed the initial parameters, or says that it has them from elsewhere."""
        if not message.header["provided"] and self._coordinator.version == 0:
            self.shard.initialise(worker)
        self._complete(worker, message.header["number"], 0, now, Initialised(worker))

    def pull(self, event: PullWanted, now: Seconds) -> None:
        """Let a worker have the newest parameters: after every shard has those that it has loaded.

        Else a shard that is late would answer with the parameters from before, and take the worker's next gradient, which comes into the
        same memory, for what it has loaded.
        """
        if self._arrivals.open(event.worker):
            self._postponed[event.worker] = event
        else:
            self._feed(event, now)

    def check_push(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Whether this can be said of a push now.

        Raises:
            ProtocolError: it names a version that does not exist, or settings that the optimizer does not have.
        """
        push, servers = header["push"], 1 + len(self._shards)
        if self._policy.scope == "shard":
            if len(push.get("held", ())) != servers:
                held = len(push.get("held", ()))
                raise ProtocolError(
                    f"worker {worker} sent 'push' with {held} versions in push.held (expected {servers}, one for each server)"
                )
        elif push["version"] > self._coordinator.version:
            newest = self._coordinator.version
            raise ProtocolError(f"worker {worker} sent 'push' with push.version = {push['version']} (expected at most {newest})")
        if "hyper" in header and self._policy.averaging is None:  # else an optimizer of any class steps in the worker
            try:
                check_changed(self._spec, header["hyper"])
            except ProtocolError as error:
                raise ProtocolError(f"worker {worker} sent 'push' with settings that do not fit: {error}") from None

    def discard(self, shard: int, header: Mapping[str, Any]) -> None:
        """A gradient that another server has kept is not used: what its worker says of it breaks the protocol."""
        if "push" in header:
            discarded = {"do": "discard", "worker": header["worker"], "number": header["number"]}
            self._shards[shard].send({"kind": "orders", "orders": [discarded]})

    def push(self, worker: WorkerId, message: Message, now: Seconds) -> None:
        """A worker has pushed a gradient, and says what it is of."""
        header = message.header
        if self._policy.scope == "shard":
            self.shard.take(worker, header["number"], message.payload)
            self._arrived({**header, "worker": worker}, 0, now)
            return
        self._schedules.note(worker, header)
        self._complete(worker, header["number"], 0, now, pushed(worker, header["push"]))

    def state(self, worker: WorkerId) -> None:
        """Let every shard send this worker its optimizer state, as of the orders before."""
        self._performer.order([{"do": "state", "worker": worker}])

    def from_shard(self, header: Mapping[str, Any], shard: int, now: Seconds) -> None:
        """Another server has something of a worker's, or has measured a fold."""
        if header["kind"] == "measured":
            parts, total, difference = header["norms"]
            self._performer.measured(header["version"], SquaredNorms(tuple(parts), total, difference))
            self.pass_on(now)
        elif "push" in header:
            self._arrived(header, shard, now)
        else:
            self._complete(header["worker"], header["number"], shard, now)

    def gone(self, event: Lost | Left, now: Seconds) -> None:
        """A worker's process has ended, or is about to."""
        if isinstance(event, Lost):
            self._arrivals.forget(event.worker)
            self._postponed.pop(event.worker, None)
        self._feed(event, now)

    def _arrived(self, header: Mapping[str, Any], shard: int, now: Seconds) -> None:
        """One shard has a worker's gradient: an event of its own, in rules of shard scope."""
        event = pushed(header["worker"], header["push"], shard)
        assert isinstance(self._performer, PerShardDispatcher)
        self._performer.arriving(event, header["number"])
        self._schedules.note(event.worker, header)
        self._feed(event, now)

    def _complete(self, worker: WorkerId, number: int, shard: int, now: Seconds, event: Event | None = None) -> None:
        """One shard has a worker's push, or its initial parameters."""
        arrived = self._arrivals.at(shard, worker, number, event)
        if arrived is None:
            return
        if isinstance(arrived, Initialised) and not self._coordinator.start.begun:
            # Only an order makes what a worker provides the parameters: one that froze over it may answer when others have trained on.
            self._performer.order([{"do": "initialise", "worker": arrived.worker}])
        self._feed(arrived, now)
        if worker in self._postponed and not self._arrivals.open(worker):
            self._feed(self._postponed.pop(worker), now)

    # What is to be done.

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out what the coordinator has decided."""
        self._performer.perform(effects)

    def pass_on(self, now: Seconds) -> None:
        """Tell the coordinator of the folds that every shard has measured."""
        for event in self._performer.complete():
            self._feed(event, now)

    def close(self) -> None:
        """The parameters go with this process."""
