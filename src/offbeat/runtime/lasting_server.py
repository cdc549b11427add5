"""Let a server outlive its process: the next process goes on where this one has died, from what the supervisor holds for it.

The process writes down each message, end of a connection and tick before the service handles it. The next process takes the newest
snapshot, and lets its service handle again what was written since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from offbeat.errors import JobError, OffbeatError, ProtocolError
from offbeat.journal.file import Journal
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.recovery.recorder import Recorder, is_bare
from offbeat.runtime.recovery.sessions import SessionLinks
from offbeat.runtime.server_process import STATUS_PERIOD_S, ServerProcess
from offbeat.runtime.serving import checked_order, trusting
from offbeat.transport.base import Closed, Connection, Hub, Message
from offbeat.transport.link import Link
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds

TICK_S: Seconds = 0.05
"""Least seconds between two ticks that a recorder writes down, unless a timer is due."""
RETRY_S: Seconds = 0.02
"""Seconds between two attempts to reach server 0 again."""
RETURN_S: Seconds = 10.0
"""Least seconds that workers have to connect to the new process of a server."""


class Server(ServerProcess):
    """Serve, and go on where an earlier process of the same server has died. Arguments are those of `ServerProcess`."""

    def __init__(self, number: int, hub: Hub, launcher: Connection, **more: Any) -> None:
        super().__init__(number, hub, launcher, **more)
        self._kept: dict[str, MemoryBlock] = {}
        """What an earlier process has left with the supervisor."""
        self._tick_at: Seconds = 0.0
        """When to tick next, if nothing is due before."""
        self._return_until: Seconds | None = None
        """Until when links of an earlier process may come back; None: none is awaited."""

    def run(self) -> None:
        """Serve until the supervisor ends the job. Raises what `Service.handle` raises."""
        try:
            while True:
                self.turn(self._patience())
        except OffbeatError as error:
            self.service.fail(str(error))
            raise
        finally:
            self.service.release()

    # What comes.

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        """Handle what has come over a connection, which may be the present one of a link."""
        service, recorder = self.service, self.service.links
        if recorder is not None and connection in recorder.former:
            return
        if isinstance(item, Message) and item.header.get("kind") == "resume":
            self._on_resume(connection, item)
            return
        self._resuming.pop(connection, None)
        link = None if recorder is None else recorder.link_at(connection)
        if recorder is None and connection is self._launcher:
            self._from_supervisor(item)
        elif recorder is None or link is None:
            service.handle(service.now(), connection, item)
        elif isinstance(item, Closed):
            recorder.cut(connection)
            if link is service.supervisor:
                self._from_supervisor(item)
            elif link is not service.state.to_coordinator and link not in service.state.shards.values():
                self._end(recorder, link, item.reason)  # what becomes of a server the supervisor knows
        elif link is service.supervisor and is_bare(item):
            self._from_supervisor(item)
        else:
            self._take(recorder, link, connection, item)

    def _from_supervisor(self, item: Message | Closed) -> None:
        """Handle what the supervisor has sent over no link: an order to this process, or else to the service."""
        if isinstance(item, Message):
            with trusting():
                if self._carry_out(checked_order(item), item):
                    return
        self.service.handle(self.service.now(), self.service.supervisor, item)

    def _on_resume(self, connection: Connection, message: Message) -> None:
        """Let a link go on over a connection, as soon as this server knows its job."""
        if self.service.links is None and self.service.settings is None:
            self._resuming[connection] = message
            return
        try:
            if self.service.links is None:
                raise ProtocolError(f"{connection.peer} sent 'resume' to a server that does not outlive its process (expected 'hello')")
            self.service.links.on_resume(connection, message)
        except ProtocolError as error:
            self.service.refused.add(connection)
            refuse(connection, error)

    def _take(self, recorder: SessionLinks, link: Link, connection: Connection, item: Message) -> None:
        try:
            message = link.take(item)
        except ProtocolError as error:
            recorder.cut(connection)
            self._end(recorder, link, f"it broke the protocol: {refuse(connection, error)}")
            return
        if message is not None:
            self._taken(recorder, link, message)

    def _taken(self, recorder: SessionLinks, link: Link, message: Message) -> None:
        """Write down a message that has come over a link, and handle it. One that came with a refused message is dropped."""
        if not recorder.knows(link):
            return
        now = self.service.now()
        self.service.handle(now, link, recorder.message(now, link, message))
        if isinstance(recorder, Recorder) and recorder.survival.snapshot_due:
            self._save(recorder)

    def _stood_still(self, seconds: Seconds) -> None:
        self.service.record(["stood still", self.service.now(), seconds])

    def _end(self, recorder: SessionLinks, link: Link, reason: str) -> None:
        """Handle the end of a link, unless this server has ended it."""
        if recorder.knows(link):
            self.service.record(["closed", self.service.now(), link.session, reason])

    # What is due.

    def tick(self) -> None:
        """Do what is due by now."""
        service, recorder = self.service, self.service.links
        now = service.now()
        if recorder is not None:
            self._await_return(recorder, now)
        for result in service.writer.results():
            service.record(["written", now, list(result)])
        if recorder is None or now >= self._tick_at or ((due := service.wake_at()) is not None and now >= due):
            self._tick_at = now + TICK_S
            service.record(["tick", now, [] if recorder is None else recorder.stirred()])
        self._report()
        if isinstance(recorder, Recorder):
            self._save(recorder)

    def _patience(self) -> Seconds:
        if self._cut_off:
            return RETRY_S
        due = self.wake_at()
        return STATUS_PERIOD_S if due is None else min(STATUS_PERIOD_S, max(0.0, due - self.service.now()))

    def _report(self) -> None:
        job = self.service.state.job
        followed = None if job is None else job.journal.followed
        if followed is not None and (batch := followed.due(self._clock())) is not None:
            self.service.send_records(batch)
        super()._report()

    def _status(self) -> dict[str, Any]:
        if self.service.state.job is None:
            return super()._status()
        return {"kind": "status", "snapshot": self.service.state.job.tally.summary(brief=True)}

    # Other processes of this server.

    def _carry_out(self, kind: str, message: Message) -> bool:
        """Carry out an order of the supervisor, if it is one to this process."""
        if kind == "kept":
            block = message.memory[0] if message.memory else None
            if isinstance(block, MemoryBlock):
                self._kept[message.header["name"]] = block
        elif kind == "job" and message.header.get("outlives", False):
            self._outlive(message.header)
        else:
            return False
        return True

    def _outlive(self, header: Mapping[str, Any]) -> None:
        """Begin a job that outlives this process, or go on with it where an earlier process has died."""
        service, told_at = self.service, self._clock()
        settings, servers = service.job_of(header)
        self._launcher.send({"kind": "loading"})
        recorder = Recorder(self._launcher, self._kept)
        recorder.survival.elsewhere = header.get("elsewhere", False)
        service.links = recorder
        journal: list[Journal] = []

        def parts() -> Mapping[str, Any]:
            journal.append(service.journal_of(settings, goes_on=True))
            return service.parts_with(settings, journal[0])

        state = recorder.restore(parts)
        if state is not None:
            service.settings, service.servers = settings, servers
            service.take_over(state, journal[0])
        returns = state is not None
        service.writer.replays = True
        for record in recorder.records():
            returns = True
            service.follow(record)
        service.writer.replays = False
        if returns:
            self._has_returned(header.get("away_s", 0.0) + self._clock() - told_at)
        else:
            self._begin(header)
        recorder.join(recorder.supervisor, self._launcher)
        self._kept = {}
        self._go_on_with_waiting()

    def _begin(self, header: Mapping[str, Any]) -> None:
        """Begin the job that an order of the supervisor describes."""
        state = self.service.state
        self.service.record(["begin", state.began, state.started, header["settings"], header["servers"]])

    def _has_returned(self, away_s: Seconds) -> None:
        """Go on where another process has stopped, which was so long ago."""
        service = self.service
        service.record(["returned", service.now(), away_s])
        self._return_until = service.now() + max(RETURN_S, service.settings.timeout_s if service.settings is not None else 0.0)

    def _go_on_with_waiting(self) -> None:
        """Let the links go on that have come before this server knew its job."""
        waiting, self._resuming = self._resuming, {}
        for connection, message in waiting.items():
            self._on_resume(connection, message)

    def _save(self, recorder: Recorder) -> None:
        recorder.save(lambda: self.service.handed_on(journal=False), lambda: self.service.parts)

    @property
    def _cut_off(self) -> bool:
        link = self.service.state.to_coordinator
        return isinstance(link, Link) and link.socket is None

    def _await_return(self, recorder: SessionLinks, now: Seconds) -> None:
        """Connect to server 0 again, and end the links that have not come back in time."""
        if self._cut_off:
            link = self.service.state.to_coordinator
            assert isinstance(link, Link)
            with contextlib.suppress(JobError):
                connection = self._hub.connect(self.service.servers[0])
                if connection.shares_memory == link.shares_memory:
                    recorder.join(link, connection)
                else:
                    connection.close()
        if self._return_until is not None and now >= self._return_until:
            self._return_until = None
            for link in recorder.gone():
                if link not in self.service.state.shards.values():
                    self._end(recorder, link, "it has not come back to the new process of this server")
