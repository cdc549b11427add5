"""All coordinators of one job, in server 0: one for each optimizer that the workers' scripts make, with one journal and one tally.

Optimizers are numbered in the order in which a script makes them. Each worker has connections of its own for each, and says its number in
its hello; the coordinator of a number begins with the first hello of that number. What happens to a process is told to all of them, and
`core.job.several_optimizers` says what they have to tell each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from offbeat.core.events import Lost
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.job.several_optimizers import Several
from offbeat.errors import JobError, ProtocolError
from offbeat.journal.records import Journal, PartOfJournal, end_record, process_record
from offbeat.journal.summary import Tally
from offbeat.runtime.coordinator import LiveCoordinator
from offbeat.runtime.job import messages
from offbeat.runtime.job.numbered import Numbered
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Connection, Hub, Message, SharedMemory
from offbeat.types import Seconds, WorkerId

MOST = 64
"""Optimizers in one job."""
PATIENCE_S: Seconds = 0.05
"""How long every worker has to wait before somebody is set aside, where they decide for themselves when to go on and are heard of late."""


class LiveCoordinators:
    """Runs the `Coordinator` of each optimizer. Arguments and errors are those of `LiveCoordinator`."""

    def __init__(
        self,
        settings: JobSettings,
        shards: Mapping[int, Connection],
        supervisor: Connection,
        hub: Hub,
        allocate: Callable[[int, str], SharedMemory],
        started: str,
        now: Callable[[], Seconds],
    ) -> None:
        self.tally = Tally()
        self._settings, self._shards = settings, dict(shards)
        self._parts = supervisor, hub, allocate, started, now
        self._journal = Journal(settings.journal, now=now, listeners=(self.tally.add,))
        self.first = LiveCoordinator(settings, self._shards, *self._parts, self._journal)
        self._hosts = [self.first]
        self._lines: list[Mapping[int, Connection]] = [self._shards]
        """By optimizer: the other servers' connections, as its coordinator knows them."""
        self._at: WeakKeyDictionary[Connection, LiveCoordinator] = WeakKeyDictionary()
        """Which optimizer the worker at the other end of a connection speaks of."""
        self._coordinators: dict[int, Coordinator] = {}
        self._several = Several(self._coordinators)

    # What comes in.

    def on_message(self, connection: Connection, message: Message, now: Seconds) -> None:
        """Handle a message of a worker or of another server. Raises what `LiveCoordinator.on_message` raises."""
        server = next((number for number, shard in self._shards.items() if shard is connection), None)
        if server is not None:
            about = message.header.get("number_of_optimizer", 0)
            if not isinstance(about, int) or not 0 <= about < len(self._hosts):
                raise JobError(f"server {server} broke the protocol: optimizer {about!r}, of {len(self._hosts)}")
            self._hosts[about].on_message(self._lines[about][server], message, now)
        else:
            if message.header.get("kind") == "hello" and connection not in self._at:
                messages.FROM_WORKER.check(message.header, connection.peer, len(message.payload), len(message.memory))
                self._at[connection] = self._greeted(message.header.get("number_of_optimizer", 0))
            self._at.get(connection, self.first).on_message(connection, message, now)
        self._settle(now)

    def _greeted(self, number: Any) -> LiveCoordinator:
        """The host of an optimizer that a worker has made; the first worker to make one of this number begins it."""
        if not isinstance(number, int) or not 0 <= number <= min(len(self._hosts), MOST - 1):
            raise ProtocolError(f"optimizer {number!r}, and this job has had {len(self._hosts)} so far, of at most {MOST}")
        if number == len(self._hosts):
            lines = {server: Numbered(connection, number) for server, connection in self._shards.items()}
            self._lines.append(lines)
            journal = PartOfJournal(self._journal, number)
            self._hosts.append(LiveCoordinator(self._settings, lines, *self._parts, journal, number, self.first.gone()))
        return self._hosts[number]

    def on_closed(self, connection: Connection, reason: str, now: Seconds) -> None:
        """A connection of a worker or of another server is gone."""
        for number, shard in self._shards.items():
            if shard is connection:
                raise JobError(f"server {number} is gone ({reason}), and its part of the parameters with it")
        self._at.pop(connection, self.first).on_closed(connection, reason, now)
        self._settle(now)

    def on_last_words(self, connection: Connection, worker: WorkerId, reason: str) -> None:
        """A worker's script has failed. Raises what `LiveCoordinator.on_last_words` raises."""
        self._at.get(connection, self.first).on_last_words(connection, worker, reason)

    def on_lost(self, worker: WorkerId, reason: str, now: Seconds) -> None:
        """A worker's process has ended: one event for the jobs of all its optimizers."""
        for host in self._hosts:
            host.on_lost(worker, reason, now)
        self._settle(now)

    def on_ended(self, worker: WorkerId, now: Seconds) -> None:
        """A worker's script has come to its end."""
        for host in self._hosts:
            host.on_ended(worker, now)
        self._settle(now)

    def on_process(self, fields: Mapping[str, Any], now: Seconds) -> None:
        """The supervisor has started or lost a process: for the journal."""
        for host in self._hosts:
            host.catch_up(now)
        self._journal.write(process_record(now, **fields))

    def tick(self, now: Seconds) -> None:
        """Time has passed."""
        for host in self._hosts:
            host.tick(now)
        self._settle(now)
        flush_at = self._journal.wake_at()
        if flush_at is not None and now >= flush_at:
            self._journal.flush()
        self._look_at_journal()

    def wake_at(self) -> Seconds | None:
        """When to call `tick` at the latest."""
        times = [self._journal.wake_at(), self._several.wake_at(), *(host.wake_at() for host in self._hosts)]
        return min((t for t in times if t is not None), default=None)

    def _settle(self, now: Seconds) -> None:
        """Let the coordinators hear of each other's workers, until there is no more to tell."""
        if len(self._hosts) == 1:
            return
        for number, host in enumerate(self._hosts):
            if number not in self._coordinators and host.coordinator is not None:
                self._coordinators[number] = host.coordinator
        for host in self._hosts:
            host.catch_up(now)
        if any(host.behind for host in self._hosts):
            return  # what is not known yet comes with the next tick
        self._several.patience_s = PATIENCE_S if any(host.hears_late for host in self._hosts) else 0.0
        while (found := self._several.next(now)) is not None:
            number, event = found
            if isinstance(event, Lost):
                self._hosts[number].on_lost(event.worker, event.reason, now)
            else:
                self._hosts[number].feed(event, now)

    # The end.

    def close(self, ok: bool, reason: str, now: Seconds) -> None:
        """The job is over."""
        try:
            for host in self._hosts:
                host.close(now)
        finally:
            self._journal.write(end_record(now, ok, reason))
            self._journal.close()
            self._look_at_journal()

    def _look_at_journal(self) -> None:
        """Say at once that the journal cannot be written any more."""
        if self._journal.failure is not None and self.tally.journal_failure is None:
            self.tally.journal_failure = self._journal.failure
            supervisor, *_ = self._parts
            supervisor.send({"kind": "journal_failed", "reason": self._journal.failure})

    def let_go(self) -> None:
        """The last thing, however the job has ended: let go of what its workers have had in common."""
        for host in self._hosts:
            host.let_go()
