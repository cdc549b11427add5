"""Run one of the two processes of a server with a standby: the leader, or the standby that does what the leader has done.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import JobError, OffbeatError, ProtocolError
from offbeat.journal.file import Journal
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job import messages
from offbeat.runtime.job.settings import JobSettings, read_addresses
from offbeat.runtime.lasting_server import RETURN_S
from offbeat.runtime.leading_server import IMPORTING, LeadingServer
from offbeat.runtime.recovery.recorder import Recorder
from offbeat.runtime.recovery.replica import StreamRecorder
from offbeat.runtime.recovery.replica_messages import FROM_LEADER
from offbeat.runtime.serving import STATUS_PERIOD_S, ServingEnded
from offbeat.transport.base import Closed, Connection, Hub, Message
from offbeat.types import Seconds

log = logging.getLogger(__name__)

AHEAD_MAX = 16
"""Most records that a standby has acknowledged and not handled: the leader may not be further ahead."""


class ReplicatedServer(LeadingServer):
    """Lead, or stand by until the supervisor says to lead. Arguments are those of `Server`.

    Args:
        stands_by: True for the standby.
    """

    def __init__(self, number: int, hub: Hub, supervisor: Connection, *, stands_by: bool, **clocks: Callable[[], Seconds]) -> None:
        super().__init__(number, hub, supervisor, **clocks)
        self._stands_by = self._again_told = stands_by
        self._leader: Connection | None = None
        """The connection to the leader; None: this process leads, or the leader is gone."""
        self._queue: deque[tuple[int, list[int], memoryview]] = deque()
        """Records that have come and are not handled."""
        self._acknowledged = 0
        self._heard: tuple[Seconds, Seconds] = 0.0, 0.0
        """The leader's time of the newest record, and this process's own then."""
        self._journal: tuple[str, str] | None = None
        """Where the standby's journal is, and the place of the job's."""
        self._address = ""
        """Where the standby listens, in JSON."""
        self._own_settings: JobSettings | None = None
        """The job at the standby, with the place of its own journal."""

    def run(self) -> None:
        try:
            super().run()
        finally:
            if self._journal is not None:
                with contextlib.suppress(OSError):
                    os.unlink(self._journal[0])

    # Messages.

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        if self._leader is not None and connection is self._leader:
            self._from_leader(item)
        elif self._stands_by and connection is self._launcher:
            self._on_order(item)
        elif not self._stands_by or connection in self._awaiting or _kind(item) == "await":
            super()._arrived(connection, item)
        elif isinstance(item, Closed):
            self._resuming.pop(connection, None)
        elif item.header.get("kind") == "resume":
            self._resuming[connection] = item  # the worker knows of the takeover, of which this process has not been told
        else:
            refuse(connection, ProtocolError(f"{connection.peer} sent a message to a standby (expected 'await')"))

    def _say_leading(self) -> None:
        if not self._stands_by:
            super()._say_leading()

    def _on_order(self, item: Message | Closed) -> None:
        """Carry out an order of the supervisor to the standby."""
        if isinstance(item, Closed):
            raise JobError("the supervisor is gone")
        header = item.header
        kind = messages.FROM_SUPERVISOR.check(header, "the supervisor", len(item.payload), len(item.memory))
        match kind:
            case "stand_by" if self._stream is None:
                self._key, self._address = header["key"], header["address"]
                self._stand_by(header)
            case "lead" if self._stream is not None and self._settings is not None:
                self._lead(self._stream, self._settings, header)
            case "moved":
                self._servers = read_addresses(header["servers"])
            case "finish":
                raise ServingEnded
            case _:
                raise JobError(f"the supervisor sent {kind!r} to the standby of server {self._number}, which cannot do that now")

    def _from_leader(self, item: Message | Closed) -> None:
        assert self._stream is not None
        if isinstance(item, Closed):
            self._leader = None  # what becomes of it the supervisor knows
            return
        kind = FROM_LEADER.check(item.header, "the leader", len(item.payload), len(item.memory))
        if kind == "bytes":
            self._stream.keeper.on_bytes(item)
        elif kind == "state":
            self._join(self._stream, item.header)
        else:
            self._queue.append((item.header["at"], item.header["done"], item.payload))
            self._acknowledge(self._stream)

    # Standing by.

    def _stand_by(self, header: Mapping[str, Any]) -> None:
        """Connect to the leader."""
        settings, self._servers = self._job_of(header)
        if settings.journal is not None and self._number == 0:
            path = Path(settings.journal)
            self._journal = str(path.with_name(f"standby-{path.name}")), settings.journal
        if header["runs"]:
            # The leader keeps its records for this process from now on, and this process must not import for seconds meanwhile.
            self._launcher.send({"kind": "loading"})
            import offbeat.runtime.coordinators
            import offbeat.runtime.recovery.plain_graph  # noqa: F401
        self._own_settings = self._with_own_journal(settings)
        self._writer.held = True  # the leader writes the files of checkpoints
        stream = self._recorder = self._stream = StreamRecorder(self._launcher, replays=True)
        self._supervisor = stream.supervisor
        self._leader = self._hub.connect(self._servers[self._number])
        self._leader.place_with(stream.keeper.place)
        self._leader.send({"kind": "follow", "number": self._number, "key": self._key, "address": self._address})

    def _join(self, stream: StreamRecorder, header: Mapping[str, Any]) -> None:
        """Take over the state of a server that has served for some time."""
        if stream.commit.position != 1 or self._settings is not None:
            raise JobError(f"the leader sent 'state' to the standby of server {self._number} in the middle of its records")
        assert self._own_settings is not None
        settings = self._own_settings
        self._launcher.send({"kind": "loading"})  # a large state takes long
        try:
            path, follow = (settings.journal, settings.follow) if self._number == 0 else (None, ())
            journal = Journal(path, now=self.now, follow=follow)
            self._take_over(stream.joined(header, self._parts_with(settings, journal)), journal)
        except (OffbeatError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise JobError(f"the standby of server {self._number} cannot take over the state of its leader: {error}") from error
        self._settings, self._supervisor = settings, stream.supervisor
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

    def _catch_up(self, stream: StreamRecorder) -> None:
        """Handle the records that have come."""
        while self._queue:
            at, done, payload = self._queue.popleft()
            try:
                for record in stream.received(at, payload):
                    self._again(stream, record)
                stream.handled(done)
            except OffbeatError as error:
                raise JobError(f"the standby of server {self._number} cannot follow its leader: {error}") from error
            except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
                log.error("the standby of server %d could not handle record %d: %r", self._number, at, error)
                why = f"record {at} caused {type(error).__name__}"
                raise JobError(f"the standby of server {self._number} cannot follow its leader: {why}") from error
            self._acknowledge(stream)
            if self._stands_by:
                self.hear(0.0)

    def _again(self, recorder: Recorder | StreamRecorder, record: list[Any]) -> None:
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
        super()._again(recorder, record)

    def _stood_still(self, seconds: Seconds) -> None:
        if not self._stands_by:  # else the leader says so, if it stood still, too
            super()._stood_still(seconds)

    def tick(self) -> None:
        if not self._stands_by:
            super().tick()
            return
        if self._stream is not None:
            self._catch_up(self._stream)
        self._report()

    def _patience(self) -> Seconds:
        if self._stands_by:
            return 0.0 if self._queue else STATUS_PERIOD_S
        return super()._patience()

    def _report(self) -> None:
        if not self._stands_by:
            super()._report()
            return
        self._report_notice()
        now = self._clock()
        if now - self._status_at >= STATUS_PERIOD_S:
            self._status_at = now
            self._launcher.send({"kind": "alive"})

    # Taking over.

    def _lead(self, stream: StreamRecorder, settings: JobSettings, header: Mapping[str, Any]) -> None:
        """Go on where the leader has stopped."""
        if self._leader is not None:
            stream.former.add(self._leader)
            self._leader.close()
            self._leader = None
        self._stands_by, self._term = False, header["term"]
        self._catch_up(stream)
        self._again_told = self._writer.held = False
        stream.lead()
        then, at = self._heard
        self.state.began = at - then
        self._status_at = 0.0
        self._servers = read_addresses(header["servers"])
        self._lead_journal(settings)
        stream.returned(self.now())
        self._has_returned()
        self._return_until = self.now() + max(RETURN_S, settings.timeout_s)
        stream.join(stream.supervisor, self._launcher)
        self._say_leading()
        self._go_on_with_waiting()
        self._settle()

    def _lead_journal(self, settings: JobSettings) -> None:
        """Put this process's journal, which is complete, in place of the leader's, which is not."""
        if self._journal is None:
            return
        if self.state.coordinator is not None:
            self.state.coordinator.move_journal(self._journal[1])
        else:
            self._settings = dataclasses.replace(settings, journal=self._journal[1])
        self._journal = None


def _kind(item: Message | Closed) -> Any:
    """Return the kind of a message; None: it is the end of a connection."""
    return item.header.get("kind") if isinstance(item, Message) else None
