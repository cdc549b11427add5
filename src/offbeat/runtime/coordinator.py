"""Run the coordinator of one optimizer in server 0: messages become timed events, effects become messages, and the journal records both.

This class decides only what the pure core cannot see: whether a joining worker's model is the job's, whether all ranks have said hello, and
the mean of the BatchNorm buffers at the end of an epoch. What differs between jobs with and without servers is in their `Backend`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from offbeat.core.effects import Effect, StateChanged
from offbeat.core.events import Abandoned, EpochWanted, Event, Heard, LeaseWanted, Left, Lost, PullWanted, Stands
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.leases import checked_ranges
from offbeat.core.policy import ServerRule
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.journal.causes import Causes
from offbeat.journal.records import Journal, PartOfJournal, fault_record, job_record, metrics_record, optimizer_record, warning_record
from offbeat.runtime.coordination.backend import Backend
from offbeat.runtime.coordination.fault_injection import Kills, announced
from offbeat.runtime.coordination.notifier import Notifier
from offbeat.runtime.coordination.peers import Peer, Peers, refuse
from offbeat.runtime.coordination.save_points import Checkpoints
from offbeat.runtime.coordination.standings import Standings
from offbeat.runtime.job import messages
from offbeat.runtime.job.first_steps import FirstStepsWatch
from offbeat.runtime.job.job_spec import JobSpec
from offbeat.runtime.job.loading import Loaded
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.parameter_server.coordinator_side import ServerCoordinatorSide
from offbeat.runtime.ranks.coordinator_side import RankCoordinatorSide
from offbeat.runtime.sides import checked_vector, ranks_of, side_of
from offbeat.transport.base import Connection, Hub, Message, SharedMemory
from offbeat.types import NO_CAUSE, Incarnation, RecordId, Seconds, WorkerId, WorkerState

INCARNATION_FIELD: Final = {
    "push": "push",
    "abandoned": "work",
    "samples": "want",
    "epoch": "want",
    "heard": "",
    "stands": "",
    "outside": "",
    "pull": "",
    "place": "",
    "left": "",
}
"""By kind of message, the header field that holds the sender's incarnation; "": the header itself."""

STALLED_S: Seconds = 1.0
"""Longest gap between two ticks, in seconds, that is not taken as a stop of this process. Ticks are due every 0.2 s; on a loaded machine
they come late.
"""


class LiveCoordinator:
    """Run the `Coordinator` of one optimizer.

    Args:
        settings: the job as the launcher knows it.
        shards: connections to the other servers, by number.
        supervisor: connection for status and failures.
        hub: the listening hub of this process; gives the network interface on which ranks of several hosts meet.
        allocate: makes a block that every process of this host can map, or raises `ConfigurationError`.
        started: the wall-clock time of the start, for the journal's first line.
        now: the job's clock, in seconds.
        journal: records events and effects.
        number: number of the optimizer; each worker's script makes them in the same order.
        missing: workers whose process ended before this coordinator was made, with the reason.
    """

    def __init__(
        self,
        settings: JobSettings,
        shards: Mapping[int, Connection],
        supervisor: Connection,
        hub: Hub,
        allocate: Callable[[int, str], SharedMemory],
        started: str,
        now: Callable[[], Seconds],
        journal: Journal | PartOfJournal,
        number: int = 0,
        missing: Mapping[WorkerId, str] = {},
    ) -> None:
        self.settings = settings
        self._journal, self._number = journal, number
        self._causes = Causes()
        self._shards = dict(shards)
        self._supervisor = supervisor
        self._hub = hub
        self._allocate = allocate
        self._started, self._now = started, now
        self.coordinator: Coordinator | None = None
        """None until the first worker has said hello."""
        self._spec: JobSpec | None = None
        self._side: Backend | None = None
        """None until the first worker has said hello; without servers, until the hosts of all ranks are known."""
        self._ticked_at: Seconds = now()
        self._awaiting_welcome: dict[WorkerId, None] = {}
        """Ranks that have said hello and wait until ``_side`` exists."""
        self._vector: Mapping[str, Any] = {}
        """The header of the first rank's hello, which describes its gradients."""
        self._deferred: deque[tuple[Connection, Message]] = deque()
        """Requests for samples and the like that wait until all earlier events are known."""
        self._peers = Peers()
        self._peers.missing.update(missing)
        self._notifier = Notifier(self._peers)
        self._standings = Standings(settings, self._peers, supervisor if number == 0 else None)
        self._kills = Kills(settings.kill if number == 0 else ())  # each ordered kill happens once, not once for each optimizer
        self._loaded = Loaded()
        self._checkpoints = Checkpoints()
        self._first_steps = FirstStepsWatch(settings.workers)
        self._handlers: dict[str, Callable[[Peer, Message, Seconds], object]] = {
            "ready": self._ready,
            "push": self._push,
            "place": self._place,
            "part": lambda peer, message, now: self._checkpoints.hand_in(peer.worker, message),
            "parts": self._parts,
            "got": lambda peer, message, now: self.served.shard.got(peer.connection),
            "abandoned": self._abandoned,
            "initial": lambda peer, message, now: self.side.initial(peer.worker, message, now),
            "buffers": self._take_buffers,
            "metrics": self._metrics,
            "heard": self._heard,
            "stands": lambda peer, message, now: self.feed(
                Stands(peer.worker, message.header["incarnation"], message.header["still"]), now
            ),
            "met": lambda peer, message, now: self.ranks.met(peer.worker),
            "outside": lambda peer, message, now: self.ranks.outside(
                peer.worker, message.header["incarnation"], message.header["reason"], now
            ),
            "voided": lambda peer, message, now: self.ranks.voided(message.header["number"], now),
            "leaving": lambda peer, message, now: self.ranks.joiners.on_leaving(peer.worker),
            "donation": lambda peer, message, now: self.ranks.joiners.on_donation(peer.worker, message),
            "pull": self._pull,
            "samples": self._wants,
            "epoch": self._wants,
            "left": lambda peer, message, now: self._gone(Left(peer.worker, message.header["incarnation"], message.header["noticed"]), now),
            "abort": self._abort,
            "state": lambda peer, message, now: self.served.shard.answer_state(peer.connection, message),
        }

    @property
    def side(self) -> Backend:
        """Return the backend. It exists once workers have been welcomed."""
        assert self._side is not None, "no worker has been welcomed yet: the backend is chosen after hello"
        return self._side

    @property
    def served(self) -> ServerCoordinatorSide:
        """Return the backend of a job with servers. Raises `ProtocolError` if the job has none."""
        side = self.side
        if not isinstance(side, ServerCoordinatorSide):
            raise ProtocolError("the peer sent a message that is for jobs with servers, and this job has none")
        return side

    @property
    def ranks(self) -> RankCoordinatorSide:
        """Return the backend of a job without servers. Raises `ProtocolError` if the job has servers."""
        side = self.side
        if not isinstance(side, RankCoordinatorSide):
            raise ProtocolError("the peer sent a message that is for jobs without servers, and this job has servers")
        return side

    @property
    def spec(self) -> JobSpec:
        """Return what all workers of the job have in common. It is known once the first worker has said hello."""
        assert self._spec is not None
        return self._spec

    # Messages and events.

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> None:
        """Handle a message of a worker or of another server.

        Raises:
            ProtocolError: the message breaks the protocol; the caller closes the peer's connection.
            JobError: the job cannot go on.
        """
        self._follow(now)
        if (shard := self._shard_at(connection)) is not None:
            self._from_shard(shard, message, now)
        else:
            self._from_worker(connection, message, now)
        self._follow(now)

    def _from_worker(self, connection: Connection, message: Message, now: Seconds) -> None:
        peer = self._peers.at(connection)
        name = connection.peer if peer is None else f"worker {peer.worker}"
        kind = messages.FROM_WORKER.check(message.header, name, len(message.payload), len(message.memory))
        if kind == "hello":
            if peer is not None:
                raise ProtocolError(f"{name} sent 'hello' a second time (expected once for each connection)")
            self._hello(connection, message, now)
        elif peer is None:
            raise ProtocolError(f"{name} sent {kind!r} before it said hello (expected 'hello')")
        elif not peer.welcomed and kind not in ("heard", "left", "abort", "metrics"):
            raise ProtocolError(f"{name} sent {kind!r} before the job accepted it (expected to wait for 'welcome')")
        else:
            self._check_incarnation(peer, kind, message.header)
            if kind in ("samples", "epoch", "place") and self._side is not None and self._side.has_backlog_for(peer.worker):
                self._deferred.append((connection, message))
            else:
                self._handlers[kind](peer, message, now)

    def _check_incarnation(self, peer: Peer, kind: str, header: Mapping[str, Any]) -> None:
        """Refuse an incarnation that the worker cannot have been given yet. An earlier one is allowed: the worker may not know of its
        death."""
        if (part := INCARNATION_FIELD.get(kind)) is None:
            return
        seen = header[part]["incarnation"] if part else header["incarnation"]
        if seen > peer.incarnation:
            raise ProtocolError(f"worker {peer.worker} sent {kind!r} with incarnation = {seen} (expected at most {peer.incarnation})")

    def _shard_at(self, connection: Connection) -> int | None:
        return next((number for number, shard in self._shards.items() if shard is connection), None)

    def _from_shard(self, shard: int, message: Message, now: Seconds) -> None:
        messages.FROM_SHARD.check(message.header, f"server {shard}", len(message.payload), len(message.memory))
        try:
            if "push" in message.header:
                self._check_push(message.header["worker"], message.header)
            self.served.from_shard(message.header, shard, now)
        except ProtocolError as error:
            # The other server passes on what a worker has sent to it: the worker is to blame, if it is known.
            worker = message.header.get("worker")
            connection = self._peers.predecessor(worker) if isinstance(worker, int) else None
            if connection is None:
                raise JobError(f"server {shard} broke the protocol: {error}") from error
            self.served.discard(shard, message.header)
            refuse(connection, error)
            self.on_closed(connection, f"it broke the protocol: {error}", now)

    def on_closed(self, connection: Connection, reason: str, now: Seconds) -> None:
        """Handle the end of a connection to a worker or to another server. Raises `JobError` for a server."""
        if (number := self._shard_at(connection)) is not None:
            raise JobError(f"server {number} is gone ({reason}), and its part of the parameters with it")
        if self._side is not None:
            self._side.closed(connection)
        peer = self._peers.close(connection)
        if peer is not None:
            why = f"connection closed: {reason}" if peer.last_words is None else f"its script failed: {peer.last_words}"
            self.on_lost(peer.worker, why, now, peer.incarnation)

    def on_last_words(self, connection: Connection, worker: WorkerId, reason: str) -> None:
        """Keep the reason for which a worker's script has failed. The worker counts as dead when its connection closes, not before.

        Raises:
            ProtocolError: the connection belongs to another worker.
        """
        peer = self._peers.at(connection)
        if peer is not None and peer.worker == worker:
            peer.last_words = reason
        elif peer is not None or self._peers.predecessor(worker) is not None:
            raise ProtocolError(f"{connection.peer} sent 'failing' with worker = {worker} (expected the number of its own worker)")

    def on_lost(self, worker: WorkerId, reason: str, now: Seconds, incarnation: Incarnation | None = None) -> None:
        """Handle the loss of a worker whose process has ended or cannot be reached any more."""
        self._follow(now)
        if self.coordinator is not None:
            self._gone(Lost(worker, reason, incarnation), now)
        else:
            self._peers.missing[worker] = reason

    def on_ended(self, worker: WorkerId, now: Seconds) -> None:
        """Handle the normal end of a worker's script: a worker that never joined is not waited for any more."""
        if self.coordinator is None or self.coordinator.membership[worker].state is WorkerState.EXPECTED:
            self.on_lost(worker, "its script ended without joining", now)

    def catch_up(self, now: Seconds) -> None:
        """Process everything that has happened elsewhere, so that it is journaled before what comes next."""
        self._follow(now)

    def gone(self) -> dict[WorkerId, str]:
        """Return the workers that have ended, with the reason; other optimizers' coordinators must not wait for them."""
        ended = dict(self._peers.missing)
        if self.coordinator is not None:
            for worker in self.coordinator.membership.in_state(WorkerState.DEAD, WorkerState.FINISHED):
                ended[worker] = "it has left the job before it made this optimizer"
        return ended

    def tick(self, now: Seconds) -> None:
        """Look at heartbeats, timeouts and timers. Bytes of an unfinished message count as a heartbeat."""
        self._follow(now)
        # If this process was stopped or busy, it has read nothing: the silence of workers proves nothing then.
        stalled = now - self._ticked_at > max(self.settings.timeout_s / 2, STALLED_S)
        self._ticked_at = now
        for peer in self._peers:
            if peer.stirred() or (stalled and peer.incarnation > 0):
                self.feed(Heard(peer.worker, peer.incarnation), now)
        for worker, reason in self._standings.silent(now):
            self.on_lost(worker, reason, now)
        due = self.coordinator.wake_at() if self.coordinator is not None else None
        if self.coordinator is not None and due is not None and now >= due:
            if self._side is not None:
                self._side.wake(now)
            else:
                self._perform(self.coordinator.wake(now), now)

    def wake_at(self) -> Seconds | None:
        """Return when to call `tick` next at the latest; None if no timer is set."""
        times = [part.wake_at() for part in (self.coordinator, self._side) if part is not None]
        return min((t for t in times if t is not None), default=None)

    @property
    def notified_late(self) -> bool:
        """True if workers decide among themselves when to go on, so that the coordinator learns of it late."""
        return self._side is not None and self._side.notified_late

    @property
    def has_backlog(self) -> bool:
        """True if something has happened that is not fully known yet."""
        return self._side is not None and self._side.has_backlog

    def close(self, now: Seconds) -> None:
        """Journal the end of the job."""
        self._follow(now)
        if self.coordinator is not None:
            self._perform(self.coordinator.close(now, "the job has ended"), now)
        if self._spec is None:
            self._write_header(self.settings.sync or "", now)

    def release_memory(self) -> None:
        """Release the memory that the workers share. The last call, also after a failure."""
        if self._side is not None:
            self._side.close()

    # Workers' processes that join.

    def _hello(self, connection: Connection, message: Message, now: Seconds) -> None:
        worker = message.header["worker"]
        if worker >= self.settings.workers:
            raise ProtocolError(
                f"worker {worker} is not one of this job's {self.settings.workers} workers (expected 0 to {self.settings.workers - 1})"
            )
        self._peers.missing.pop(worker, None)
        try:
            self._check_spec(worker, message.header, now)
            if not isinstance(self._side, ServerCoordinatorSide):
                vector = checked_vector(message.header)
                self._vector = self._vector or vector
            if self._side is not None:
                self._side.check(worker, connection, message)
        except ConfigurationError as error:
            connection.send({"kind": "refused", "reason": str(error)})
            if self.coordinator is None or not self.coordinator.start.begun:
                raise JobError(str(error)) from None
            return
        predecessor = self._peers.predecessor(worker)
        if predecessor is not None:
            self.on_closed(predecessor, "a new process has taken its place", now)
            predecessor.close()
        missing, self._peers.missing = self._peers.missing, {}
        for other, reason in missing.items():
            self.feed(Lost(other, reason), now)
        self._peers.enter(worker, connection, message.header["pid"])
        self._standings.came(worker)
        if isinstance(self._side, ServerCoordinatorSide):
            self._side.welcome(worker, connection, message)
            self._peers[worker].welcomed = True
        else:
            self._awaiting_welcome[worker] = None
            self._welcome_ranks()

    def _welcome_ranks(self) -> None:
        """Welcome the ranks that have said hello, once no other rank is expected.

        The backend of a job without servers depends on whether all ranks share memory, so it can only be chosen then.
        """
        assert self.coordinator is not None
        if self._side is None:
            if any(worker not in self._awaiting_welcome for worker in self.coordinator.membership.in_state(WorkerState.EXPECTED)):
                return
            together = all(self._peers[worker].connection.shares_memory for worker in self._awaiting_welcome)
            parts = (self.coordinator, self._peers, self._notifier, self.feed, self._perform, self._now)
            ranks = ranks_of(self._vector, self.settings.workers, self.settings.seed, together=together)
            try:
                self._side = side_of(self.spec.policy, ranks, self._hub, parts)
            except ConfigurationError as error:
                for worker in self._awaiting_welcome:
                    self._peers[worker].connection.send({"kind": "refused", "reason": str(error)})
                raise JobError(str(error)) from None
        for worker in self._awaiting_welcome:
            sync = self.spec.policy.spelling
            welcome = {"kind": "welcome", "in_place": False, "sync": sync, "backend": self.ranks.backend, **self.ranks.welcome}
            self._peers[worker].connection.send(welcome, memory=self.ranks.memory)
            self._peers[worker].welcomed = True
        self._awaiting_welcome.clear()

    def _check_spec(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """Take the first worker's job spec as the job's, or compare a later worker's with it."""
        if self._spec is None:
            self._supervisor.send({"kind": "loading"})  # importing the optimizer's modules may take long
        spec = JobSpec.of(header, self.settings.sync)
        if self._spec is not None:
            self._spec.check(worker, spec)
        else:
            self._set_up(spec, header)
            self._spec = spec
            self._write_header(spec.policy.spelling, now)

    def _set_up(self, spec: JobSpec, header: Mapping[str, Any]) -> None:
        """Create the coordinator and, with servers, the backend.

        Only when this has succeeded is the worker's spec the job's: after a refused worker another one may bring a different spec.
        """
        settings, policy, shards = self.settings, spec.policy, self.settings.servers
        coordinator = Coordinator(policy, settings.workers, settings.timeout_s, shards, seed=settings.seed, follows=True)
        if isinstance(policy, ServerRule):
            parts = (self._peers, self._notifier, self._allocate, self.feed, self._perform, self._now)
            self._side = ServerCoordinatorSide(policy, spec, settings, coordinator, self._shards, *parts, in_place=self._number == 0)
        else:
            if shards > 1:
                raise ConfigurationError(
                    f"--servers {shards}: {policy.spelling} has no servers that could share the parameters; leave --servers out"
                )
            checked_vector(header)
        self.coordinator = coordinator

    def _ready(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._notifier.send_buffers(peer.worker)  # before the parameters, since those let the worker go on
        self.side.ready(peer.worker, message.header, now)

    def _push(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._check_push(peer.worker, message.header)
        loaded = message.header.get("loaded")
        if loaded is not None:
            self._loaded.note(peer.worker, loaded)
        self._checkpoints.stepped(peer.worker, message.header["steps"])
        for warned in self._first_steps.note(peer.worker, message.header.get("first", ())):
            self._journal.write(warning_record(now, warned.about, warned.workers, warned.step, warned.detail))
        self.side.push(peer.worker, message, now)

    def _check_push(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Check the fields of a push against this job and its present state."""
        leases = header["push"].get("leases", ())
        if len(set(leases)) < len(leases):
            raise ProtocolError(f"worker {worker} sent 'push' with a lease named twice in push.leases (expected each lease once)")
        self.side.check_push(worker, header)

    def _heard(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Handle a heartbeat. For a process that does not take part yet, only the bytes received count."""
        if message.header["incarnation"]:
            self.feed(Heard(peer.worker, message.header["incarnation"]), now)
        self._standings.progress(peer, message.header["stuck_s"])

    def _place(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Tell a worker that writes a checkpoint the samplers' places.

        If the worker pulls, no event may come between the pull and the reply, so that parameters, optimizer state and places are of one
        version.
        """
        assert self.coordinator is not None
        serial = peer.serial
        if message.header["pull"]:
            self.feed(PullWanted(peer.worker, message.header["incarnation"]), now)
        released = peer.serial > serial
        if released:
            self.served.state(peer.worker)
        places = list(self.coordinator.epochs.places().items())
        peer.connection.send({"kind": "place", "released": released, "version": self.coordinator.version, "places": places})

    def _parts(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Send the worker that writes a checkpoint the parts that other workers have handed in."""
        assert self.coordinator is not None
        job = self.coordinator
        others = [worker for worker in job.membership.in_state(WorkerState.ALIVE) if worker != peer.worker]
        steps = message.header["steps"]
        computing = [worker for worker in others if not job.epochs.waits(worker)]
        awaited = self._checkpoints.awaited(computing, steps) if self.spec.policy.in_step else []
        parts, payload = self._checkpoints.parts(peer.worker, steps)
        peer.connection.send({"kind": "parts", "awaited": awaited, "parts": parts}, payload=payload)

    def _abandoned(self, peer: Peer, message: Message, now: Seconds) -> None:
        work = message.header["work"]
        leases = tuple(work.get("leases", ()))
        assert self.served is self._side
        self.feed(Abandoned(peer.worker, work["incarnation"], work["version"], work["compute_s"], leases), now)

    def _pull(self, peer: Peer, message: Message, now: Seconds) -> None:
        self.served.pull(PullWanted(peer.worker, message.header["incarnation"]), now)

    def _wants(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Handle a request for samples or for the end of an epoch."""
        want, kind = message.header["want"], message.header["kind"]
        assert self.coordinator is not None
        member = self.coordinator.membership[peer.worker]
        current = member.state is WorkerState.ALIVE and want["incarnation"] == member.incarnation
        if current and not self.side.may_request(peer.worker):
            raise ProtocolError(f"worker {peer.worker} sent {kind!r} before the job let it go on (expected to wait for 'parameters')")
        try:
            rest = checked_ranges(want["rest"], want["size"]) if "rest" in want else None
        except ValueError as error:
            raise ProtocolError(f"worker {peer.worker} sent {kind!r}: {error}") from None
        fields = want["incarnation"], want["pool"], want["epoch"], want["size"]
        wanted = LeaseWanted(peer.worker, *fields, want["batch"], rest) if kind == "samples" else EpochWanted(peer.worker, *fields)
        self.feed(wanted, now)

    # Effects.

    def feed(self, event: Event, now: Seconds) -> RecordId:
        """Journal an event, pass it to the coordinator, and perform the effects. Returns the event's number in the journal."""
        assert self.coordinator is not None
        number = self._journal.log(event, now, self._causes.of(event))
        self._perform(self.coordinator.on(event, now), now, number)
        return number

    def _perform(self, effects: list[Effect], now: Seconds, cause: RecordId = NO_CAUSE) -> None:
        """Journal effects and carry them out; ``cause``: the event they follow from, none where they follow from the time."""
        for effect in effects:
            self._causes.told(effect, self._journal.log(effect, now, cause))
            if isinstance(effect, StateChanged):
                self._standings.changed(effect)
        if self._side is not None:  # None: ranks are still expected, and no message is due
            self._side.perform(effects)
            self._inject_kills(now)
            self._side.pass_on(now)

    def _follow(self, now: Seconds) -> None:
        """Process what has happened elsewhere, such as among ranks, and then answer deferred requests."""
        if self._side is None:
            return
        self._side.follow(now)
        for worker in self._side.too_late():
            self._standings.too_late(worker)
        while (found := next(filter(self._may_answer, self._deferred), None)) is not None:
            self._deferred.remove(found)
            connection, message = found
            if (peer := self._peers.at(connection)) is not None:
                self._handlers[message.header["kind"]](peer, message, now)
                self._side.follow(now)

    def _may_answer(self, deferred: tuple[Connection, Message]) -> bool:
        """True if everything that happened before a deferred request is known, or its sender is gone."""
        peer = self._peers.at(deferred[0])
        return self._side is None or peer is None or not self._side.has_backlog_for(peer.worker)

    def _gone(self, event: Lost | Left, now: Seconds) -> None:
        if self._side is not None:
            self._side.gone(event, now)
        else:
            self.feed(event, now)
            self._awaiting_welcome.pop(event.worker, None)
            if self._awaiting_welcome:
                self._welcome_ranks()

    def _inject_kills(self, now: Seconds) -> None:
        """Have the supervisor kill the workers for which ``--kill`` orders it at this version."""
        assert self.coordinator is not None
        for worker in self._kills.due(self.coordinator.version):
            self._journal.write(fault_record(now, worker, "kill", f"at version {self.coordinator.version}"))
            self._supervisor.send({"kind": "kill", "worker": worker})

    # Other messages.

    def _take_buffers(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._notifier.buffers.put(peer.worker, message.header["layout"], message.payload)

    def _metrics(self, peer: Peer, message: Message, now: Seconds) -> None:
        version = self.coordinator.version if self.coordinator is not None else 0
        self._journal.write(metrics_record(now, peer.worker, version, message.header["values"]))

    def _abort(self, peer: Peer, message: Message, now: Seconds) -> None:
        raise JobError(f"worker {peer.worker} stopped the job: {message.header['reason']}")

    def _write_header(self, sync: str, now: Seconds) -> None:
        if self._number:
            self._journal.write(optimizer_record(now, sync=sync))
            return
        settings = self.settings
        job = {"workers": settings.workers, "servers": settings.servers, "seed": settings.seed}
        self._journal.write(job_record(sync=sync, started=self._started, script=settings.script, **job))
        for entry in announced(settings, now):
            self._journal.write(entry)
