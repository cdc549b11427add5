"""The coordinator's shell, in server 0: messages become events with a time, effects become messages, and both go into the journal.

Nothing is decided here but what the pure core cannot see: whether a joining worker's model is the job's, whether all ranks have said hello,
and what the epoch's mean of the BatchNorm buffers is. What differs between jobs with and without servers is the business of their
`Backend`.
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
from offbeat.types import Incarnation, Seconds, WorkerId, WorkerState

SPEAKING: Final = {
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
"""Kinds of messages that name the worker's incarnation, and in which of their fields; empty: in none, beside the kind."""

DEAF_S: Seconds = 1.0
"""A gap between two ticks up to this is no sign that this process was stopped: ticks are due every 0.2 s, and a loaded machine is late."""


class LiveCoordinator:
    """Runs the `Coordinator` of one optimizer.

    Args:
        settings: the job as the launcher knows it.
        shards: connections to the other servers, by number.
        supervisor: where status and failures go.
        hub: of this process, listening: where ranks of other hosts come to, it says where they come to each other.
        allocate: makes a block that every process of this host can map, or raises `ConfigurationError`.
        started: the wall-clock time of the start, for the journal's first line.
        now: the job's clock, in seconds.
        journal: where events and effects are written.
        number: of the optimizer among those of each worker's script, in the order in which it makes them.
        missing: workers whose process ended before this began, and how.
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
        self._shards = dict(shards)
        self._supervisor = supervisor
        self._hub = hub
        self._allocate = allocate
        self._started, self._now = started, now
        self.coordinator: Coordinator | None = None
        """Exists once the first worker has said hello."""
        self._terms: JobSpec | None = None
        self._side: Backend | None = None
        """With servers it exists once the first worker has said hello; without, once it is known where all ranks are."""
        self._ticked_at: Seconds = now()
        self._greeting: dict[WorkerId, None] = {}
        """Ranks that have said hello before that."""
        self._vector: Mapping[str, Any] = {}
        """What the first of them has said of its gradients."""
        self._deferred: deque[tuple[Connection, Message]] = deque()
        """Questions of ranks about samples, which wait until all that has happened before is known."""
        self._roster = Peers()
        self._roster.missing.update(missing)
        self._announcer = Notifier(self._roster)
        self._standings = Standings(settings, self._roster, supervisor if number == 0 else None)
        self._kills = Kills(settings.kill if number == 0 else ())  # a worker is killed once, not once for each optimizer
        self._loaded = Loaded()
        self._checkpoints = Checkpoints()
        self._first_steps = FirstStepsWatch(settings.workers)
        self._handlers: dict[str, Callable[[Peer, Message, Seconds], None]] = {
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
            "leaving": lambda peer, message, now: self.ranks.newcomers.farewell(peer.worker),
            "donation": lambda peer, message, now: self.ranks.newcomers.donated(peer.worker, message),
            "pull": self._pull,
            "samples": self._wants,
            "epoch": self._wants,
            "left": lambda peer, message, now: self._gone(Left(peer.worker, message.header["incarnation"], message.header["noticed"]), now),
            "abort": self._abort,
            "state": lambda peer, message, now: self.served.shard.answer_state(peer.connection, message),
        }

    @property
    def side(self) -> Backend:
        """What carries out effects; exists once workers have been welcomed."""
        assert self._side is not None, "nobody has been welcomed"
        return self._side

    @property
    def served(self) -> ServerCoordinatorSide:
        """The side of a job with servers."""
        side = self.side
        if not isinstance(side, ServerCoordinatorSide):
            raise ProtocolError("the peer sent a message that only workers of servers send, and this job has none")
        return side

    @property
    def ranks(self) -> RankCoordinatorSide:
        """The side of a job without servers."""
        side = self.side
        if not isinstance(side, RankCoordinatorSide):
            raise ProtocolError("the peer sent a message that only ranks send, and this job has servers")
        return side

    @property
    def terms(self) -> JobSpec:
        """What the job's workers have in common; known once the first worker has said hello."""
        assert self._terms is not None
        return self._terms

    # What comes in.

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> None:
        """Handle a message of a worker or of another server.

        Raises:
            ProtocolError: it breaks the protocol; it costs the peer its connection.
            JobError: the job cannot go on.
        """
        self._follow(now)
        if (shard := self._shard_at(connection)) is not None:
            self._from_shard(shard, message, now)
        else:
            self._from_worker(connection, message, now)
        self._follow(now)

    def _from_worker(self, connection: Connection, message: Message, now: Seconds) -> None:
        peer = self._roster.at(connection)
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
            if kind in ("samples", "epoch", "place") and self._side is not None and self._side.lacks(peer.worker):
                self._deferred.append((connection, message))
            else:
                self._handlers[kind](peer, message, now)

    def _check_incarnation(self, peer: Peer, kind: str, header: Mapping[str, Any]) -> None:
        """A worker speaks as the incarnation that it was told, or as an earlier one that it does not know to be dead."""
        if (part := SPEAKING.get(kind)) is None:
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
            # What another server passes on is what a worker has sent it.
            worker = message.header.get("worker")
            connection = self._roster.predecessor(worker) if isinstance(worker, int) else None
            if connection is None:
                raise JobError(f"server {shard} broke the protocol: {error}") from error
            self.served.discard(shard, message.header)
            refuse(connection, error)
            self.on_closed(connection, f"it broke the protocol: {error}", now)

    def on_closed(self, connection: Connection, reason: str, now: Seconds) -> None:
        """A connection of a worker or of another server is gone."""
        if (number := self._shard_at(connection)) is not None:
            raise JobError(f"server {number} is gone ({reason}), and its part of the parameters with it")
        if isinstance(self._side, ServerCoordinatorSide):
            self._side.shard.closed(connection)
        peer = self._roster.close(connection)
        if peer is not None:
            why = f"connection closed: {reason}" if peer.last_words is None else f"its script failed: {peer.last_words}"
            self.on_lost(peer.worker, why, now, peer.incarnation)

    def on_last_words(self, connection: Connection, worker: WorkerId, reason: str) -> None:
        """A worker's script has failed. The worker is dead when its connection closes, not before: its heart still beats.

        Raises:
            ProtocolError: another process speaks for this worker.
        """
        peer = self._roster.at(connection)
        if peer is not None and peer.worker == worker:
            peer.last_words = reason
        elif peer is not None or self._roster.predecessor(worker) is not None:
            raise ProtocolError(f"{connection.peer} sent 'failing' with worker = {worker} (expected the number of its own worker)")

    def on_lost(self, worker: WorkerId, reason: str, now: Seconds, incarnation: Incarnation | None = None) -> None:
        """A worker's process has ended, or can no longer be reached."""
        self._follow(now)
        if self.coordinator is not None:
            self._gone(Lost(worker, reason, incarnation), now)
        else:
            self._roster.missing[worker] = reason

    def on_ended(self, worker: WorkerId, now: Seconds) -> None:
        """A worker's script has come to its end. One that took part has said so itself; one that never joined is not waited for."""
        if self.coordinator is None or self.coordinator.membership[worker].state is WorkerState.EXPECTED:
            self.on_lost(worker, "its script ended without joining", now)

    def catch_up(self, now: Seconds) -> None:
        """Deal with what has happened elsewhere: of what is journaled next it was earlier."""
        self._follow(now)

    def gone(self) -> dict[WorkerId, str]:
        """The workers that have ended, each with a reason: nobody shall wait for them with another optimizer."""
        ended = dict(self._roster.missing)
        if self.coordinator is not None:
            for worker in self.coordinator.membership.in_state(WorkerState.DEAD, WorkerState.FINISHED):
                ended[worker] = "it has left the job before it made this optimizer"
        return ended

    def tick(self, now: Seconds) -> None:
        """Time has passed. Bytes of an unfinished message are a sign of life too."""
        self._follow(now)
        # Whoever has not listened, because this process was stopped or busy, cannot say that others were silent.
        deaf = now - self._ticked_at > max(self.settings.timeout_s / 2, DEAF_S)
        self._ticked_at = now
        for peer in self._roster:
            if peer.stirred() or (deaf and peer.incarnation > 0):
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
        """When to call `tick` at the latest."""
        times = [part.wake_at() for part in (self.coordinator, self._side) if part is not None]
        return min((t for t in times if t is not None), default=None)

    @property
    def hears_late(self) -> bool:
        """Whether workers decide for themselves when to go on, so that this host hears of it late."""
        return self._side is not None and self._side.hears_late

    @property
    def behind(self) -> bool:
        """Whether something has happened of which not everything is known yet."""
        return self._side is not None and self._side.behind

    def close(self, now: Seconds) -> None:
        """The job is over."""
        self._follow(now)
        if self.coordinator is not None:
            self._perform(self.coordinator.close(now, "the job has ended"), now)
        if self._terms is None:
            self._head(self.settings.sync or "", now)

    def let_go(self) -> None:
        """The last thing, however the job has ended: let go of what its workers have had in common."""
        if self._side is not None:
            self._side.close()

    # A worker's process introduces itself.

    def _hello(self, connection: Connection, message: Message, now: Seconds) -> None:
        worker = message.header["worker"]
        if worker >= self.settings.workers:
            raise ProtocolError(f"worker {worker} is not one of this job's {self.settings.workers} workers")
        self._roster.missing.pop(worker, None)
        try:
            self._agree(worker, message.header, now)
            if not isinstance(self._side, ServerCoordinatorSide):
                vector = checked_vector(message.header)
                self._vector = self._vector or vector
            if isinstance(self._side, RankCoordinatorSide):
                self._side.check(worker, connection)
        except ConfigurationError as error:
            connection.send({"kind": "refused", "reason": str(error)})
            if self.coordinator is None or not self.coordinator.start.begun:
                raise JobError(str(error)) from None
            return
        if isinstance(self._side, ServerCoordinatorSide):
            self._side.shard.check_memory(worker, connection, message)
        predecessor = self._roster.predecessor(worker)
        if predecessor is not None:
            self.on_closed(predecessor, "a new process has taken its place", now)
            predecessor.close()
        missing, self._roster.missing = self._roster.missing, {}
        for other, reason in missing.items():
            self.feed(Lost(other, reason), now)
        self._roster.enter(worker, connection, message.header["pid"])
        self._standings.came(worker)
        if isinstance(self._side, ServerCoordinatorSide):
            self._side.welcome(worker, connection, message)
            self._roster[worker].welcomed = True
        else:
            self._greeting[worker] = None
            self._welcome_ranks()

    def _welcome_ranks(self) -> None:
        """Let those go on who have said hello, once nobody is expected who has not: what ranks have in common goes by where they are."""
        assert self.coordinator is not None
        if self._side is None:
            if any(worker not in self._greeting for worker in self.coordinator.membership.in_state(WorkerState.EXPECTED)):
                return
            together = all(self._roster[worker].connection.shares_memory for worker in self._greeting)
            parts = (self.coordinator, self._roster, self._announcer, self.feed, self._perform, self._now)
            ranks = ranks_of(self._vector, self.settings.workers, self.settings.seed, together=together)
            try:
                self._side = side_of(self.terms.policy, ranks, self._hub, parts)
            except ConfigurationError as error:
                for worker in self._greeting:
                    self._roster[worker].connection.send({"kind": "refused", "reason": str(error)})
                raise JobError(str(error)) from None
        for worker in self._greeting:
            sync = self.terms.policy.spelling
            welcome = {"kind": "welcome", "in_place": False, "sync": sync, "backend": self.ranks.backend, **self.ranks.welcome}
            self._roster[worker].connection.send(welcome, memory=self.ranks.memory)
            self._roster[worker].welcomed = True
        self._greeting.clear()

    def _agree(self, worker: WorkerId, header: Mapping[str, Any], now: Seconds) -> None:
        """The first worker's terms are the job's; the others must have the same."""
        if self._terms is None:
            self._supervisor.send({"kind": "loading"})  # what the job's optimizer needs is imported now
        terms = JobSpec.of(header, self.settings.sync)
        if self._terms is not None:
            self._terms.check(worker, terms)
        else:
            self._begin(terms, header)
            self._terms = terms
            self._head(terms.policy.spelling, now)

    def _begin(self, terms: JobSpec, header: Mapping[str, Any]) -> None:
        """Set up what the rule needs, and only then what the job goes by: who comes after a refused worker may bring other terms."""
        settings, policy, shards = self.settings, terms.policy, self.settings.servers
        coordinator = Coordinator(policy, settings.workers, settings.timeout_s, shards, seed=settings.seed, follows=True)
        if isinstance(policy, ServerRule):
            parts = (self._roster, self._announcer, self._allocate, self.feed, self._perform, self._now)
            self._side = ServerCoordinatorSide(policy, terms, settings, coordinator, self._shards, *parts, in_place=self._number == 0)
        else:
            if shards > 1:
                raise ConfigurationError(
                    f"--servers {shards}: {policy.spelling} has no servers that could share the parameters; leave it out"
                )
            checked_vector(header)
        self.coordinator = coordinator

    def _ready(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._announcer.send_buffers(peer.worker)  # before the parameters, with which the worker goes on
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
        """What the fields of a push must be like in this job, at this time."""
        leases = header["push"].get("leases", ())
        if len(set(leases)) < len(leases):
            raise ProtocolError(f"worker {worker} sent 'push' with a lease named twice in push.leases (expected each lease once)")
        if isinstance(self._side, ServerCoordinatorSide):
            self._side.check_push(worker, header)

    def _heard(self, peer: Peer, message: Message, now: Seconds) -> None:
        """A heartbeat; of a process that does not take part yet, its bytes are all that counts."""
        if message.header["incarnation"]:
            self.feed(Heard(peer.worker, message.header["incarnation"]), now)
        self._standings.progress(peer, message.header["stuck_s"])

    def _place(self, peer: Peer, message: Message, now: Seconds) -> None:
        """A worker writes a checkpoint. Where it pulls, parameters, optimizer state and the samplers' places are of one version: nothing is
        ordered between them."""
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
        """The worker that writes a checkpoint asks for what the others have handed in."""
        assert self.coordinator is not None
        job = self.coordinator
        others = [worker for worker in job.membership.in_state(WorkerState.ALIVE) if worker != peer.worker]
        steps = message.header["steps"]
        computing = [worker for worker in others if not job.epochs.waits(worker)]
        awaited = self._checkpoints.awaited(computing, steps) if self.terms.policy.in_step else []
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
        """A worker asks for samples, or for an epoch's end: it has been told to go on, and does not wait for word about a push."""
        want, kind = message.header["want"], message.header["kind"]
        assert self.coordinator is not None
        member = self.coordinator.membership[peer.worker]
        current = member.state is WorkerState.ALIVE and want["incarnation"] == member.incarnation
        served = isinstance(self._side, ServerCoordinatorSide)
        if current and not (self.coordinator.waiting.admitted(peer.worker) if served else self.coordinator.start.begun):
            raise ProtocolError(f"worker {peer.worker} sent {kind!r} before the job let it go on (expected to wait for 'parameters')")
        try:
            rest = checked_ranges(want["rest"], want["size"]) if "rest" in want else None
        except ValueError as error:
            raise ProtocolError(f"worker {peer.worker} sent {kind!r}: {error}") from None
        fields = want["incarnation"], want["pool"], want["epoch"], want["size"]
        wanted = LeaseWanted(peer.worker, *fields, want["batch"], rest) if kind == "samples" else EpochWanted(peer.worker, *fields)
        self.feed(wanted, now)

    # What is to be done.

    def feed(self, event: Event, now: Seconds) -> None:
        """Journal an event, hand it to the coordinator, and do what it says."""
        assert self.coordinator is not None
        self._journal.log(event, now)
        self._perform(self.coordinator.on(event, now), now)

    def _perform(self, effects: list[Effect], now: Seconds) -> None:
        for effect in effects:
            self._journal.log(effect, now)
            if isinstance(effect, StateChanged):
                self._standings.changed(effect)
        if self._side is not None:  # else ranks are still expected, and nobody has been told anything
            self._side.perform(effects)
            self._rehearse(now)
            self._side.pass_on(now)

    def _follow(self, now: Seconds) -> None:
        """Deal with what has happened elsewhere, as where ranks decide among themselves, and then answer who has asked meanwhile."""
        if self._side is None:
            return
        self._side.follow(now)
        if isinstance(self._side, RankCoordinatorSide):
            while self._side.newcomers.too_late:
                self._standings.too_late(self._side.newcomers.too_late.pop())
        while (found := next(filter(self._may_answer, self._deferred), None)) is not None:
            self._deferred.remove(found)
            connection, message = found
            if (peer := self._roster.at(connection)) is not None:
                self._handlers[message.header["kind"]](peer, message, now)
                self._side.follow(now)

    def _may_answer(self, deferred: tuple[Connection, Message]) -> bool:
        """Whether everything is known that happened before a question; also if nobody waits for the answer any more."""
        peer = self._roster.at(deferred[0])
        return self._side is None or peer is None or not self._side.lacks(peer.worker)

    def _gone(self, event: Lost | Left, now: Seconds) -> None:
        if self._side is not None:
            self._side.gone(event, now)
        else:
            self.feed(event, now)
            self._greeting.pop(event.worker, None)
            if self._greeting:
                self._welcome_ranks()

    def _rehearse(self, now: Seconds) -> None:
        """Ask for the deaths that the user has ordered."""
        assert self.coordinator is not None
        for worker in self._kills.due(self.coordinator.version):
            self._journal.write(fault_record(now, worker, "kill", f"at version {self.coordinator.version}"))
            self._supervisor.send({"kind": "kill", "worker": worker})

    # The rest.

    def _take_buffers(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._announcer.buffers.put(peer.worker, message.header["layout"], message.payload)

    def _metrics(self, peer: Peer, message: Message, now: Seconds) -> None:
        version = self.coordinator.version if self.coordinator is not None else 0
        self._journal.write(metrics_record(now, peer.worker, version, message.header["values"]))

    def _abort(self, peer: Peer, message: Message, now: Seconds) -> None:
        raise JobError(f"worker {peer.worker} stopped the job: {message.header['reason']}")

    def _head(self, sync: str, now: Seconds) -> None:
        if self._number:
            self._journal.write(optimizer_record(now, sync=sync))
            return
        settings = self.settings
        job = {"workers": settings.workers, "servers": settings.servers, "seed": settings.seed}
        self._journal.write(job_record(sync=sync, started=self._started, script=settings.script, **job))
        for entry in announced(settings, now):
            self._journal.write(entry)
