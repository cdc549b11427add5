"""Run all coordinators of one job in server 0: one for each optimizer that the workers' scripts make, with one journal and one tally.

Optimizers are numbered in the order in which a script makes them. For each optimizer a worker has its own connections, and states the
number in its hello; the first hello with a new number starts that optimizer's coordinator. Events of a process are passed to all
coordinators, and `core.job.several_optimizers` decides what one coordinator has to tell the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from offbeat.core.events import Lost
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.job.several_optimizers import Several
from offbeat.core.policy import ServerRule
from offbeat.errors import JobError, ProtocolError
from offbeat.journal.file import Journal, PartOfJournal
from offbeat.journal.records import end_record, exception_record, process_record, stood_still_record
from offbeat.journal.summary import Tally
from offbeat.runtime.coordination.checkpoint_content import Resumed
from offbeat.runtime.coordination.checkpoints import CheckpointKeeper
from offbeat.runtime.coordination.file_writer import FileWriter, Written
from offbeat.runtime.coordinator import LiveCoordinator
from offbeat.runtime.driver import Driver
from offbeat.runtime.job import messages
from offbeat.runtime.job.numbered import Numbered
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.recovery.survival import NOBODY, Survival
from offbeat.transport.base import Connection, Hub, Message
from offbeat.types import Seconds, WorkerId

log = logging.getLogger(__name__)

OPTIMIZERS_MAX = 64
"""Most optimizers in one job."""
PATIENCE_S: Seconds = 0.05
"""Seconds that every worker must have waited before one is set aside, if workers decide among themselves when to go on."""


class LiveJob:
    """Run the `Coordinator` of each optimizer.

    Args:
        settings: the job as the launcher knows it.
        shards: connections to the other servers, by number.
        hub, survival, now: as in `Admission`.
        supervisor: connection for status and failures.
        started: the wall-clock time of the start, for the journal's first line.
        writer: writes checkpoints.

    Raises:
        ConfigurationError: see `Resumed`.
    """

    def __init__(
        self,
        settings: JobSettings,
        shards: Mapping[int, Connection],
        supervisor: Connection,
        hub: Hub,
        started: str,
        now: Callable[[], Seconds],
        survival: Survival = NOBODY,
        writer: FileWriter | None = None,
    ) -> None:
        self._tally = Tally(audited=False)  # a summary has no place for what an audit finds
        self._settings, self._supervisor, self._started = settings, supervisor, started
        self._servers = {connection: number for number, connection in shards.items()}
        self._parts = hub, survival, now
        self.journal = Journal(settings.journal, now=now, listeners=(self._tally.add,), later=True, follow=settings.follow)
        self.checkpoints: CheckpointKeeper | None = None
        """Makes the job's checkpoints; None: there are none."""
        self._resumed = None if settings.resume is None else Resumed(settings.resume)
        if settings.checkpoint is not None:
            manifest = None if self._resumed is None else self._resumed.checkpoint.manifest
            writer = writer or FileWriter(hub.wake)
            self.checkpoints = CheckpointKeeper(settings, settings.checkpoint, supervisor, self.journal, writer, manifest)
        self.first = self._new_coordinator(0, self.journal)
        self._live = [self.first]
        self._at: WeakKeyDictionary[Connection, LiveCoordinator] = WeakKeyDictionary()
        """By worker's connection: the coordinator of the optimizer that it belongs to."""
        self._coordinators: dict[int, Coordinator] = {}
        self._several = Several(self._coordinators)

    # Messages and events.

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> None:
        """Handle a message of a worker or of another server. Raises what `LiveCoordinator.on_message` raises."""
        if (server := self._servers.get(connection)) is not None:
            about = message.header.get("number_of_optimizer", 0)
            if not isinstance(about, int) or not 0 <= about < len(self._live):
                raise JobError(f"server {server} broke the protocol: number_of_optimizer = {about!r} (expected 0 to {len(self._live) - 1})")
            self._live[about].on_server(server, message, now)
        else:
            kind, number = message.header.get("kind"), message.header.get("number_of_optimizer", 0)
            if kind == "hello" and connection not in self._at:
                messages.FROM_WORKER.check(message.header, connection.peer, len(message.payload), len(message.memory))
                self._at[connection] = self._coordinator_for(number)
            elif kind == "rounds" and connection not in self._at:
                messages.ROUNDS.check(message.header, connection.peer, len(message.payload), len(message.memory))
                if number >= len(self._live):
                    most = len(self._live) - 1
                    raise ProtocolError(f"{connection.peer} sent 'rounds' with number_of_optimizer = {number} (expected at most {most})")
                self._at[connection] = self._live[number]
            self._live_at(connection).on_message(connection, message, now)
        self._settle(now)

    def _live_at(self, connection: Connection) -> LiveCoordinator:
        """Return the coordinator of the optimizer that a worker's connection belongs to; the first one before its hello."""
        return self.first if len(self._live) == 1 else self._at.get(connection, self.first)

    def _coordinator_for(self, number: Any) -> LiveCoordinator:
        """Return the coordinator of an optimizer; make it if the number is the next one."""
        if not isinstance(number, int) or not 0 <= number <= min(len(self._live), OPTIMIZERS_MAX - 1):
            raise ProtocolError(f"number_of_optimizer = {number!r} (expected at most {min(len(self._live), OPTIMIZERS_MAX - 1)})")
        if number == len(self._live):
            made = self._new_coordinator(number, PartOfJournal(self.journal, number))
            made.driver.peers.missing.update(self.first.gone())
            made.returned = self.first.returned
            self._live.append(made)
        return self._live[number]

    def _new_coordinator(self, number: int, journal: Journal | PartOfJournal) -> LiveCoordinator:
        resumed = self._resumed
        if resumed is not None and not resumed.has(number):
            log.warning(
                "optimizer %d of the script is not in the checkpoint: it begins with the parameters that the script gives it", number
            )
            resumed = None
        driver = Driver(self._settings, self._supervisor, journal, self._started, number, self.checkpoints, resumed)
        return LiveCoordinator(driver, {server: Numbered(connection, number) for connection, server in self._servers.items()}, *self._parts)

    def on_closed(self, connection: Connection, reason: str, now: Seconds) -> None:
        """Handle the end of a connection to a worker or to another server. Raises `JobError` for a server."""
        if (server := self._servers.get(connection)) is not None:
            raise JobError(f"server {server} is gone ({reason}), and what it held with it")
        self._at.pop(connection, self.first).on_closed(connection, reason, now)
        self._settle(now)

    def on_withdrawn(self, connection: Connection, now: Seconds) -> None:
        """Handle the loss of a gradient that had come from this worker to the former leader."""
        self._live_at(connection).on_withdrawn(connection, now)
        self._settle(now)

    @property
    def decides(self) -> bool:
        """Return True if this server decides which gradients every server folds. Under rules of shard scope each decides by itself."""
        policies = [live.driver.spec.policy for live in self._live if live.driver.spec is not None]
        return not any(isinstance(policy, ServerRule) and policy.scope == "shard" for policy in policies)

    def connections_of(self, worker: WorkerId) -> list[Connection]:
        """Return the connections of a worker's process, one for each optimizer that it has made."""
        found = [live.driver.peers.predecessor(worker) for live in self._live]
        return [connection for connection in found if connection is not None]

    def on_dead(self, worker: WorkerId) -> list[Connection]:
        """Note that a worker's process has ended. Returns its connections: what is still on its way over them is no sign of life."""
        connections = self.connections_of(worker)
        for live in self._live:
            for connection in connections:
                if (peer := live.driver.peers.at(connection)) is not None:
                    peer.dead = True
        return connections

    def on_last_words(self, connection: Connection, failure: Mapping[str, Any], now: Seconds) -> None:
        """Keep the exception with which a worker's script has failed. Raises what `LiveCoordinator.on_last_words` raises."""
        worker = failure["worker"]
        self._live_at(connection).on_last_words(connection, worker, failure["reason"])
        for live in self._live if connection in self._at else ():  # a process says it once, for all of its optimizers
            live.driver.peers.fails(worker, failure["reason"])
        self.journal.write(exception_record(now, worker, failure["reason"], failure["place"]))

    def has_replaced(self, worker: WorkerId, pid: int) -> bool:
        """Return True if the worker's process of this number has been replaced by another one, which has said hello."""
        return any(live.driver.peers.has_replaced(worker, pid) for live in self._live)

    def on_lost(self, worker: WorkerId, reason: str, now: Seconds) -> None:
        """Handle the end of a worker's process in the coordinators of all optimizers."""
        for live in self._live:
            live.on_lost(worker, reason, now)
        self._settle(now)

    def on_ended(self, worker: WorkerId, now: Seconds) -> None:
        """Handle the normal end of a worker's script."""
        for live in self._live:
            live.on_ended(worker, now)
        self._settle(now)

    def ask_for_checkpoint(self, within_s: Seconds, *, last: bool = False) -> None:
        """Make a checkpoint at the next fold, whatever the interval, if the job makes any; ``last``: now, since every worker has left."""
        if self.checkpoints is not None and last:
            self.checkpoints.ask_for_last()
        elif self.checkpoints is not None:
            self.checkpoints.ask(within_s)

    def on_written(self, result: Written, now: Seconds) -> None:
        """Handle the result of writing a checkpoint."""
        assert self.checkpoints is not None, "without checkpoints nothing is written"
        for live in self._live:  # what ranks have done before is journaled before
            live.catch_up(now)
        self.checkpoints.on_written(result, now)

    def on_process(self, fields: Mapping[str, Any], now: Seconds) -> None:
        """Journal that the supervisor has started or lost a process."""
        for live in self._live:
            live.catch_up(now)
        known = {name: fields[name] for name in ("role", "number", "what", "detail")}  # a newer supervisor may send more
        self.journal.write(process_record(now, **known))

    def stood_still(self, seconds: Seconds, now: Seconds) -> None:
        """Note that this process has stood still for so long until now; if all did, no worker computed meanwhile."""
        self.journal.write(stood_still_record(now, seconds))
        for live in self._live:
            for peer in live.driver.peers:
                peer.stood_still_s += seconds

    def tick(self, now: Seconds) -> None:
        """Look at all timers, and flush the journal when that is due."""
        for live in self._live:
            live.tick(now)
        self._settle(now)
        if self.checkpoints is not None:
            self.checkpoints.tick(now)
        flush_at = self.journal.wake_at()
        if flush_at is not None and now >= flush_at:
            self.journal.flush()
        self._look_at_journal()

    def wake_at(self) -> Seconds | None:
        """Return when to call `tick` next at the latest; None if no timer is set."""
        times = [self.journal.wake_at(), self._several.wake_at(), *(live.driver.wake_at() for live in self._live)]
        return min([t for t in times if t is not None], default=None)

    def _settle(self, now: Seconds) -> None:
        """Pass events between the coordinators until none is left."""
        if len(self._live) == 1:
            return
        for number, live in enumerate(self._live):
            if number not in self._coordinators and live.driver.coordinator is not None:
                self._coordinators[number] = live.driver.coordinator
        for live in self._live:
            live.catch_up(now)
        if any(live.driver.has_backlog for live in self._live):
            return  # the rest is known at the next tick
        self._several.patience_s = PATIENCE_S if any(live.notified_late for live in self._live) else 0.0
        while (found := self._several.next(now)) is not None:
            number, event = found
            if isinstance(event, Lost):
                self._live[number].on_lost(event.worker, event.reason, now)
            else:
                self._live[number].driver.feed(event, now)

    def has_returned(self, now: Seconds, away_s: Seconds) -> None:
        """Note that this server goes on in a new process, and that there was none for ``away_s``, which nobody is to measure."""
        for live in self._live:
            live.returned = True
            if live.driver.coordinator is not None:
                live.driver.coordinator.stand_still(now, away_s)
        if self.checkpoints is not None:
            self.checkpoints.has_returned()

    @property
    def tally(self) -> Tally:
        """Return the counts of all records so far."""
        self.journal.settle()
        return self._tally

    def goes_on_in(self, journal: Journal, place: Mapping[str, Any]) -> None:
        """Count what is recorded in the journal of this process, which goes on where another one was."""
        journal.go_on(place, (self._tally.add,))

    # The end of the job.

    def close(self, ok: bool, reason: str, now: Seconds) -> None:
        """End the job: close all coordinators and the journal."""
        try:
            for live in self._live:
                live.close(now)
            if self.checkpoints is not None:
                self.checkpoints.close(now)
        finally:
            self.journal.write(end_record(now, ok, reason))
            self.journal.close()
            self._look_at_journal()

    def _look_at_journal(self) -> None:
        """Tell the supervisor once if the journal cannot be written any more."""
        if self.journal.failure is not None and self._tally.journal_failure is None:
            self._tally.journal_failure = self.journal.failure
            self._supervisor.send({"kind": "journal_failed", "reason": self.journal.failure})

    def release_memory(self) -> None:
        """Release the memory that the workers share. The last call, also after a failure."""
        for live in self._live:
            live.release_memory()
