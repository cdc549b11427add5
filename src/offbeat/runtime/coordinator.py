"""Run the coordinator of one optimizer in server 0: messages become timed events, effects become messages, and the journal records both.

What is handed to whom:

    a hello                       Admission        runtime/admission.py
    another message of a worker   WorkerRequests   runtime/worker_requests.py
    a message of another server   ServerPlane      runtime/parameter_server/plane.py
    each event that comes of it   Driver           runtime/driver.py, which holds the pure Coordinator, the journal and the plane
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from offbeat.core.events import Heard, Left, Lost, Withdrawn
from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.admission import Admission
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.driver import Driver
from offbeat.runtime.job import messages
from offbeat.runtime.job.numbered import Numbered
from offbeat.runtime.parameter_server.plane import ServerPlane
from offbeat.runtime.recovery.survival import Survival
from offbeat.runtime.worker_requests import WorkerRequests
from offbeat.transport.base import Connection, Hub, Message
from offbeat.types import Incarnation, Seconds, WorkerId, WorkerState

STALLED_S: Seconds = 1.0
"""Longest gap between two ticks, in seconds, that is not taken as a stop of this process. Ticks are due every 0.2 s; on a loaded machine
they come late.
"""


class LiveCoordinator:
    """Run the `Coordinator` of one optimizer.

    Args:
        driver: the coordinator and what surrounds it.
        shards, hub, survival, now: as in `Admission`.
    """

    def __init__(self, driver: Driver, shards: Mapping[int, Numbered], hub: Hub, survival: Survival, now: Callable[[], Seconds]) -> None:
        self.driver, self._shards = driver, shards
        self._admission = Admission(driver, self._shards, hub, survival, now)
        self._requests = WorkerRequests(self.driver, self._gone)
        self._ticked_at: Seconds = now()
        self.returned = False
        """True if an earlier process of this server has died."""

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> None:
        """Handle a message of a worker.

        Raises:
            ProtocolError: the message breaks the protocol; the caller closes the peer's connection.
            JobError: the job cannot go on.
        """
        self.catch_up(now)
        if self.driver.plane is None or not self.driver.plane.on_rounds(connection, message):
            peer = self.driver.peers.at(connection)
            name = connection.peer if peer is None else f"worker {peer.worker}"
            kind = messages.FROM_WORKER.check(message.header, name, len(message.payload), len(message.memory))
            if peer is not None and kind != "hello":
                self._requests.handle(peer, kind, message, now)
            elif peer is not None:
                raise ProtocolError(f"{name} sent 'hello' a second time (expected once for each connection)")
            elif kind == "hello":
                self._hello(connection, message, now)
            else:
                raise ProtocolError(f"{name} sent {kind!r} before it said hello (expected 'hello')")
        self.catch_up(now)

    def on_server(self, shard: int, message: Message, now: Seconds) -> None:
        """Handle a message of another server. Raises `JobError` if the job cannot go on."""
        messages.FROM_SHARD.check(message.header, f"server {shard}", len(message.payload), len(message.memory))
        if not isinstance(self.driver.plane, ServerPlane):
            raise ProtocolError(f"server {shard} sent {message.header['kind']!r} before a worker has joined (expected after that)")
        if message.header["kind"] == "saved":
            if self.driver.checkpoints is None:
                raise JobError(f"server {shard} broke the protocol: it sent 'saved', and this job makes no checkpoints")
            header = message.header
            self.driver.checkpoints.on_saved(self.driver.number, shard, header["version"], header["failed"], cut_off=header["cut_off"])
            return
        try:
            if "push" in message.header:
                self._requests.check_push(message.header["worker"], message.header)
            self.driver.served.from_shard(message.header, shard, now)
        except ProtocolError as error:
            # The other server passes on what a worker has sent to it: the worker is to blame, if it is known.
            worker = message.header.get("worker")
            connection = self.driver.peers.predecessor(WorkerId(worker)) if isinstance(worker, int) else None
            if connection is None:
                raise JobError(f"server {shard} broke the protocol: {error}") from error
            self.driver.served.discard(shard, message.header)
            refuse(connection, error)
            self.on_closed(connection, f"it broke the protocol: {error}", now)

    def catch_up(self, now: Seconds) -> None:
        """Process everything that has happened elsewhere, so that it is journaled before what comes next."""
        if self.driver.plane is not None and self.driver.plane.follows:
            self.driver.follow(now)
            self._requests.answer_deferred(now)

    def on_closed(self, connection: Connection, reason: str, now: Seconds) -> None:
        """Handle the end of a connection to a worker."""
        if self.driver.plane is not None:
            self.driver.plane.closed(connection)
        peer = self.driver.peers.close(connection)
        if peer is not None:
            why = f"connection closed: {reason}" if peer.last_words is None else f"its script failed: {peer.last_words}"
            self.on_lost(peer.worker, why, now, peer.incarnation)

    def on_last_words(self, connection: Connection, worker: WorkerId, reason: str) -> None:
        """Keep the reason for which a worker's script has failed. The worker counts as dead when its connection closes, not before.

        Raises:
            ProtocolError: the connection belongs to another worker.
        """
        peer = self.driver.peers.at(connection)
        if peer is not None and peer.worker == worker:
            peer.last_words = reason
        elif peer is not None or self.driver.peers.predecessor(worker) is not None:
            raise ProtocolError(f"{connection.peer} sent 'failing' with worker = {worker} (expected the number of its own worker)")

    def on_lost(self, worker: WorkerId, reason: str, now: Seconds, incarnation: Incarnation | None = None) -> None:
        """Handle the loss of a worker whose process has ended or cannot be reached any more."""
        self.catch_up(now)
        if self.driver.coordinator is not None:
            self._gone(Lost(worker, reason, incarnation), now)
        else:
            self.driver.peers.missing[worker] = reason

    def on_withdrawn(self, connection: Connection, now: Seconds) -> None:
        """Drop a worker's push that is in no version yet: its gradient is lost with the former leader of this server."""
        peer = self.driver.peers.at(connection)
        if peer is None or self.driver.coordinator is None:
            return
        self.catch_up(now)
        if peer.worker in self.driver.core.ledger.unsettled:
            self.driver.feed(Withdrawn(peer.worker, self.driver.core.version), now)
        if self._shards:  # another server may yet say that it has its part of this gradient, which then must not count as arrived
            self.on_lost(peer.worker, "its gradient was lost with the server's former leader", now, peer.incarnation)

    def on_ended(self, worker: WorkerId, now: Seconds) -> None:
        """Handle the normal end of a worker's script: a worker that never joined is not waited for any more."""
        if self.driver.coordinator is None or self.driver.coordinator.membership[worker].state is WorkerState.EXPECTED:
            self.on_lost(worker, "its script ended without joining", now)
        elif self.returned and self.driver.coordinator.membership[worker].state is WorkerState.ALIVE:
            # Its farewell may have gone with an earlier process of this server, which had received it and not handled it.
            self._gone(Left(worker, self.driver.coordinator.membership[worker].incarnation), now)
        elif (member := self.driver.coordinator.membership[worker]).goes_on:
            self.driver.feed(Left(worker, member.incarnation), now)

    def gone(self) -> dict[WorkerId, str]:
        """Return the workers that have ended, with the reason; other optimizers' coordinators must not wait for them."""
        ended = dict(self.driver.peers.missing)
        if self.driver.coordinator is not None:
            members = self.driver.coordinator.membership
            for worker in (one for one in members.in_state(WorkerState.DEAD, WorkerState.FINISHED) if not members[one].goes_on):
                ended[worker] = "it has left the job before it made this optimizer"
        return ended

    def tick(self, now: Seconds) -> None:
        """Look at heartbeats, timeouts and timers. Bytes of an unfinished message count as a heartbeat."""
        self.driver.follow(now)
        self._requests.answer_deferred(now)
        # If this process was stopped or busy, it has read nothing: the silence of workers proves nothing then.
        stalled = now - self._ticked_at > max(self.driver.settings.timeout_s / 2, STALLED_S)
        self._ticked_at = now
        for peer in self.driver.peers:
            if peer.stirred() or (stalled and peer.takes_part):
                self.driver.feed(Heard(peer.worker, peer.incarnation), now)
        for worker, reason in self.driver.standings.silent(now):
            self.on_lost(worker, reason, now)
        self.driver.wake(now)

    @property
    def notified_late(self) -> bool:
        """True if workers decide among themselves when to go on, so that the coordinator learns of it late."""
        return self.driver.plane is not None and self.driver.plane.notified_late

    def close(self, now: Seconds) -> None:
        """Journal the end of the job."""
        self.catch_up(now)
        self.driver.close(now)

    def release_memory(self) -> None:
        """Release the memory that the workers share. The last call, also after a failure."""
        if self.driver.plane is not None:
            self.driver.plane.close()

    def _hello(self, connection: Connection, message: Message, now: Seconds) -> None:
        worker, peers = message.header["worker"], self.driver.peers
        if not self._admission.accepts(connection, message, now):
            return
        predecessor = peers.predecessor(worker)
        if predecessor is not None:
            self.on_closed(predecessor, "a new process has taken its place", now)
            predecessor.close()
        missing, peers.missing = peers.missing, {}
        for other, reason in missing.items():
            self.driver.feed(Lost(other, reason), now)
        peers.enter(worker, connection, message.header["pid"])
        self.driver.standings.report(worker, "hello")
        self._admission.welcome(worker, connection, message)

    def _gone(self, event: Lost | Left, now: Seconds) -> None:
        if self.driver.plane is not None:
            self.driver.plane.gone(event, now)
        else:
            self.driver.feed(event, now)
            self._admission.lost(event.worker)
