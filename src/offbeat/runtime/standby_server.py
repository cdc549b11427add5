"""Stand by for a server: do what its leader has done, and lead once the supervisor says so.

```
    worker ──message──► leader ──sums, record──► standby
                          │ ◄─────acknowledged──── │
           ◄──answer──────┘                        │
           ◄─ ─ ─ ─ ─leading─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─┘  once the supervisor has told it to lead
```

The supervisor decides which process leads, and numbers the terms. A leader that has lost its standby sends nothing until it gets one of
two orders of the supervisor: to go on alone, or, if the standby leads by now, to end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from offbeat.errors import JobError, OffbeatError, ProtocolError
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job import messages
from offbeat.runtime.job.settings import JobSettings, read_addresses
from offbeat.runtime.leading_server import IMPORTING, LeadingServer
from offbeat.runtime.recovery.replica import StreamRecorder
from offbeat.runtime.recovery.replica_messages import FROM_LEADER
from offbeat.runtime.server_process import STATUS_PERIOD_S, ServerProcess
from offbeat.runtime.serving import ServingEnded
from offbeat.transport.base import Closed, Connection, Hub, Message
from offbeat.transport.link import AWAIT, Link
from offbeat.types import Seconds

log = logging.getLogger(__name__)

AHEAD_MAX = 16
"""Most records that a standby has acknowledged and not handled: the leader may not be further ahead."""


class StandbyServer(ServerProcess):
    """Stand by, until the supervisor says to lead. Arguments are those of `ServerProcess`."""

    def __init__(self, number: int, hub: Hub, launcher: Connection, **more: Any) -> None:
        super().__init__(number, hub, launcher, **more)
        self.leads: LeadingServer | None = None
        """What this process goes on as, once it leads."""
        self._stream: StreamRecorder | None = None
        """Reads the records of the leader; None: the supervisor has not said yet whom to follow."""
        self._leader: Connection | None = None
        """The connection to the leader; None: it is gone."""
        self._queue: deque[tuple[int, list[int], memoryview]] = deque()
        """Records that have come and are not handled."""
        self._acknowledged = 0
        self._heard: tuple[Seconds, Seconds] = 0.0, 0.0
        """The leader's time of the newest record, and this process's own then."""
        self._journal: tuple[str, str] | None = None
        """Where the standby's journal is, and the place of the job's."""
        self._key = self._address = ""
        """What shows the leader that the supervisor has started this process, and where this process listens, in JSON."""
        self._own_settings: JobSettings | None = None
        """The job, with the place of this process's own journal."""
        self._awaiting: dict[Connection, None] = {}
        """Connections over which links will go once this process leads."""
        self._near: dict[Connection, str] = {}
        """Those of workers on this machine, with the name of a link that is not known here yet, or while the leader is on this machine."""
        self._serves: dict[Connection, Link] = {}
        """Those of workers on this machine that get parameters from here: the leader's network has brought the sum of the gradients, and
        need not bring the parameters too."""

    def run(self) -> None:
        """Stand by, and then lead until the supervisor ends the job. Raises what `Service.handle` raises."""
        try:
            while self.leads is None:
                self.turn(0.0 if self._queue else STATUS_PERIOD_S)
        finally:
            if self.leads is None:
                self.service.release()
            if self._journal is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._journal[0])
        self.leads.run()

    def notice(self, number: int, frame: FrameType | None) -> None:
        super().notice(number, frame) if self.leads is None else self.leads.notice(number, frame)

    # What comes.

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        if self.leads is not None:
            self.leads._arrived(connection, item)
        elif connection is self._launcher:
            self._on_order(item)
        elif connection is self._leader:
            self._from_leader(item)
        elif isinstance(item, Closed):
            self._awaiting.pop(connection, None)
            self._near.pop(connection, None)
            if (link := self._serves.pop(connection, None)) is not None:
                link.go_aside(None)  # the worker asks the leader for what has not come
            self._resuming.pop(connection, None)
        elif item.header.get("kind") == "resume":
            self._resuming[connection] = item  # the worker knows of the takeover, of which this process has not been told
        else:
            try:
                AWAIT.check(item.header, connection.peer, len(item.payload), len(item.memory))
                self._awaiting[connection] = None
                if connection.within_host:
                    self._near[connection] = item.header["session"]
                    self._offer()
            except ProtocolError as error:
                refuse(connection, error)

    def _stood_still(self, seconds: Seconds) -> None:
        """Do nothing: the leader writes a record if it stood still, too."""

    def _on_order(self, item: Message | Closed) -> None:
        """Carry out an order of the supervisor."""
        if isinstance(item, Closed):
            raise JobError("the supervisor is gone")
        header = item.header
        kind = messages.FROM_SUPERVISOR.check(header, "the supervisor", len(item.payload), len(item.memory))
        match kind:
            case "stand_by" if self._stream is None:
                self._stand_by(header)
            case "lead" if self._stream is not None and self.service.settings is not None:
                self._lead(self._stream, self.service.settings, header)
            case "moved":
                self.service.servers = read_addresses(header["servers"])
            case "finish":
                raise ServingEnded
            case _:
                raise JobError(f"the supervisor sent {kind!r} to the standby of server {self.service.number}, which cannot do that now")

    def _from_leader(self, item: Message | Closed) -> None:
        assert self._stream is not None
        if isinstance(item, Closed):
            self._leader = None  # what becomes of it the supervisor knows
            return
        kind = FROM_LEADER.check(item.header, "the leader", len(item.payload), len(item.memory))
        if kind == "bytes":
            self._stream.survival.on_bytes(item)
        elif kind == "state":
            self._join(self._stream, item.header)
        else:
            self._queue.append((item.header["at"], item.header["done"], item.payload))
            self._acknowledge(self._stream)

    # Standing by.

    def _stand_by(self, header: Mapping[str, Any]) -> None:
        """Connect to the leader."""
        service, self._key, self._address = self.service, header["key"], header["address"]
        settings, service.servers = service.job_of(header)
        if settings.journal is not None and service.number == 0:
            path = Path(settings.journal)
            self._journal = str(path.with_name(f"standby-{path.name}")), settings.journal
        if header["runs"]:
            # The leader keeps its records for this process from now on, and this process must not import for seconds meanwhile.
            self._launcher.send({"kind": "loading"})
            import offbeat.runtime.live_job
            import offbeat.runtime.recovery.plain_graph  # noqa: F401
        self._own_settings = self._with_own_journal(settings)
        service.writer.replays = True  # the leader writes the files of checkpoints
        stream = self._stream = service.links = StreamRecorder(self._launcher, replays=True)
        self._leader = self._hub.connect(service.servers[service.number])
        self._leader.place_with(stream.survival.place)
        stream.survival.gets_ahead = not self._leader.within_host
        self._leader.send({"kind": "follow", "number": service.number, "key": self._key, "address": self._address})

    def _join(self, stream: StreamRecorder, header: Mapping[str, Any]) -> None:
        """Take over the state of a server that has served for some time."""
        service = self.service
        if stream.commit.position != 1 or service.settings is not None:
            raise JobError(f"the leader sent 'state' to the standby of server {service.number} in the middle of its records")
        assert self._own_settings is not None
        settings = self._own_settings
        self._launcher.send({"kind": "loading"})  # a large state takes long
        try:
            journal = service.journal_of(settings, goes_on=False)
            service.take_over(stream.joined(header, service.parts_with(settings, journal)), journal)
        except (OffbeatError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise JobError(f"the standby of server {service.number} cannot take over the state of its leader: {error}") from error
        service.settings = settings
        self._heard = header["now"], self._clock()
        self._acknowledge(stream)

    def _with_own_journal(self, settings: JobSettings) -> JobSettings:
        return settings if self._journal is None else dataclasses.replace(settings, journal=self._journal[0])

    def _acknowledge(self, stream: StreamRecorder) -> None:
        handled = stream.commit.position - 1
        newest = min(self._queue[-1][0] if self._queue else handled, handled + AHEAD_MAX)
        if newest > self._acknowledged and self._leader is not None:
            self._acknowledged = newest
            self._leader.send({"kind": "acknowledged", "at": newest})

    def tick(self) -> None:
        """Handle the records that have come."""
        if self._stream is not None:
            self._catch_up(self._stream, hears=True)
        if self.leads is None:
            self._report()

    def _catch_up(self, stream: StreamRecorder, *, hears: bool) -> None:
        """Handle the records that have come, and those that come meanwhile if this process still ``hears``."""
        while self._queue:
            at, done, payload = self._queue.popleft()
            with self._following(at):
                for record in stream.received(at, payload):
                    self._follow(record)
                stream.handled(done)
            self._acknowledge(stream)
            self._offer()
            if hears:
                self.hear(0.0)
        if hears:
            with self._following(stream.commit.position):
                stream.survival.fold_ahead()

    @contextlib.contextmanager
    def _following(self, at: int) -> Iterator[None]:
        """Raise `JobError` if the block, which is about this record, fails."""
        number = self.service.number
        try:
            yield
        except OffbeatError as error:
            raise JobError(f"the standby of server {number} cannot follow its leader: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            log.error("the standby of server %d could not handle record %d: %r", number, at, error)
            why = f"record {at} caused {type(error).__name__}"
            raise JobError(f"the standby of server {number} cannot follow its leader: {why}") from error

    def _offer(self) -> None:
        """Offer the leader to send the workers of this machine their parameters, each once its link is known here."""
        leader, stream = self._leader, self._stream
        if not self._near or leader is None or leader.within_host or stream is None:
            return
        for connection, session in list(self._near.items()):
            if (link := stream.sessions.get(session)) is not None:
                del self._near[connection]
                self._serves[connection] = link
                link.go_aside(connection)
                leader.send({"kind": "serves", "session": session})

    def _follow(self, record: list[Any]) -> None:
        """Do what the leader has done."""
        if record[0] == "begin":
            _, began, started, settings, servers = record
            mine = self._with_own_journal(JobSettings.from_wire(settings))
            record = ["begin", began, started, mine.to_wire(), servers]
            self._heard = 0.0, self._clock()
            self._launcher.send({"kind": "loading"})
        elif record[0] in ("message", "tick", "closed"):
            self._heard = record[1], self._clock()
            if record[0] == "message" and record[5].get("kind") in IMPORTING:
                self._launcher.send({"kind": "loading"})
        self.service.follow(record)

    # Taking over.

    def _lead(self, stream: StreamRecorder, settings: JobSettings, header: Mapping[str, Any]) -> None:
        """Go on where the leader has stopped."""
        service, told_at = self.service, self._clock()
        if self._leader is not None:
            stream.former.add(self._leader)
            self._leader.close()
            self._leader = None
        self._catch_up(stream, hears=False)
        service.writer.replays = False
        stream.lead()
        then, at = self._heard
        service.state.began = at - then
        service.servers = read_addresses(header["servers"])
        self._lead_journal(settings)
        leads = LeadingServer(service.number, self._hub, self._launcher, clock=self._clock, computed=self._computed, service=service)
        self.leads = leads
        away_s = header.get("away_s", 0.0) + self._clock() - told_at
        leads.take_over(stream, header["term"], away_s, self._key, self._awaiting, self._resuming)

    def _lead_journal(self, settings: JobSettings) -> None:
        """Put this process's journal, which is complete, in place of the leader's, which is not."""
        if self._journal is None:
            return
        if self.service.state.job is not None:
            self.service.state.job.journal.move(self._journal[1])
        else:
            self.service.settings = dataclasses.replace(settings, journal=self._journal[1])
        self._journal = None
