"""Write down what a server handles, so that the next process of the server goes on where this one has died."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.errors import JobError, ProtocolError
from offbeat.journal.file import Journal
from offbeat.runtime.coordination.file_writer import Written
from offbeat.runtime.coordination.peers import refuse
from offbeat.runtime.job.checkpoint_folder import CheckpointFolder
from offbeat.runtime.job.settings import JobSettings, read_addresses
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.runtime.recovery.recorder import Recorder, is_bare
from offbeat.runtime.recovery.replica import Replica, StreamRecorder
from offbeat.runtime.recovery.sessions import SERVER, SessionLinks
from offbeat.runtime.serving import ServerState, Serving
from offbeat.transport.base import Address, Closed, Connection, Hub, Message
from offbeat.transport.link import Link
from offbeat.transport.shm import MemoryBlock
from offbeat.types import Seconds

TICK_S: Seconds = 0.05
"""Least seconds between two ticks that a recorder writes down, unless a timer is due."""
RETRY_S: Seconds = 0.02
"""Seconds between two attempts to reach server 0 again."""
RETURN_S: Seconds = 10.0
"""Least seconds that workers have to connect to the new process of a server."""


class Server(Serving):
    """Serve, and go on where an earlier process of the same server has died. Arguments are those of `Serving`."""

    def __init__(self, number: int, hub: Hub, supervisor: Connection, **clocks: Callable[[], Seconds]) -> None:
        super().__init__(number, hub, supervisor, **clocks)
        self._recorder: Recorder | StreamRecorder | None = None
        """Writes down the messages of this server, for its next process; None: the death of this process ends the job."""
        self._kept: dict[str, MemoryBlock] = {}
        """What an earlier process has left with the supervisor."""
        self._resuming: dict[Connection, Message] = {}
        """By connection: the first message of a link that has come before this server knows its job."""
        self._moment: Seconds | None = None
        """While something is handled: when it came, which is when the next process takes it to have come."""
        self._again_told = False
        """True while this process handles the messages that an earlier process of this server has handled."""
        self._tick_at: Seconds = 0.0
        """When to tick next, if nothing is due before."""
        self._return_until: Seconds | None = None
        """Until when links of an earlier process may come back; None: none is awaited."""

    def now(self) -> Seconds:
        """Return the seconds since this server began; while something is handled, the time at which it came."""
        return self._clock() - self.state.began if self._moment is None else self._moment

    def _arrived(self, connection: Connection, item: Message | Closed) -> None:
        """Handle what has come over a connection, which may be the present one of a link."""
        recorder = self._recorder
        if recorder is not None and connection in recorder.former:
            return
        if isinstance(item, Message) and item.header.get("kind") == "resume":
            self._on_resume(connection, item)
            return
        self._resuming.pop(connection, None)
        link = None if recorder is None else recorder.link_at(connection)
        if recorder is None or link is None:
            self._handle(connection, item)
        elif isinstance(item, Closed):
            recorder.cut(connection)
            if link is self._supervisor:
                self._handle(link, item)
            elif (
                link is not self.state.to_coordinator and link not in self.state.shards.values()
            ):  # what becomes of a server the supervisor knows
                self._end(recorder, link, item.reason)
        elif link is self._supervisor and is_bare(item):
            self._handle(link, item)
        else:
            self._take(recorder, link, connection, item)

    def _on_resume(self, connection: Connection, message: Message) -> None:
        """Let a link go on over a connection, as soon as this server knows its job."""
        if self._recorder is None and self._settings is None:
            self._resuming[connection] = message
            return
        try:
            if self._recorder is None:
                raise ProtocolError(f"{connection.peer} sent 'resume' to a server that does not outlive its process (expected 'hello')")
            self._recorder.on_resume(connection, message)
        except ProtocolError as error:
            self._refused.add(connection)
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
        """Write down a message that has come over a link, and handle it."""
        now = self.now()
        message = recorder.message(now, link, message) or message
        self._at_moment(now, self._handle, link, message)
        if isinstance(recorder, Recorder) and recorder.keeper.snapshot_due:
            recorder.save(self._handed_on, self._parts)

    def _stood_still(self, seconds: Seconds) -> None:
        now = self.now()
        if self._recorder is not None:
            self._recorder.stood_still(now, seconds)
        self._at_moment(now, super()._stood_still, seconds)

    def _end(self, recorder: SessionLinks, link: Link, reason: str) -> None:
        """Handle the end of a link."""
        now = self.now()
        recorder.closed(now, link, reason)
        recorder.end(link)
        link.close()
        self._at_moment(now, self._handle, link, Closed(reason))

    def _at_moment(self, now: Seconds, do: Callable[..., None], *arguments: Any) -> None:
        """Do something at a time that the next process will know."""
        self._moment = now
        try:
            do(*arguments)
        finally:
            self._moment = None

    def _dropped(self, connection: Connection) -> None:
        if isinstance(connection, Link) and self._recorder is not None:
            self._recorder.end(connection)

    def tick(self) -> None:
        """Do what is due by now."""
        now, recorder = self.now(), self._recorder
        if recorder is not None:
            self._await_return(recorder, now)
        for result in self._writer.results():
            if recorder is not None:
                recorder.written(now, result)
            self._at_moment(now, self._on_written, result)
        if recorder is None or now >= self._tick_at or ((due := self.wake_at()) is not None and now >= due):
            self._tick_at = now + TICK_S
            if recorder is not None:
                recorder.tick(now)
            self._at_moment(now, self._tick)
        self._report()
        if isinstance(recorder, Recorder):
            recorder.save(self._handed_on, self._parts)

    def _patience(self) -> Seconds:
        if self._cut_off:
            return RETRY_S
        return super()._patience()

    def _carry_out(self, kind: str, message: Message) -> None:
        if kind == "kept":
            block = message.memory[0] if message.memory else None
            if isinstance(block, MemoryBlock):
                self._kept[message.header["name"]] = block
        elif kind == "job" and message.header.get("outlives", False):
            self._job_of(message.header)  # raises if it cannot be read
            self._outlive(message.header)
        else:
            super()._carry_out(kind, message)

    def _call(self, coordinator: Address) -> Connection:
        if self._recorder is None:
            return super()._call(coordinator)
        return self._recorder.make(f"{SERVER} {self._number}", "server 0")  # goes over a socket from the next tick on

    @property
    def _keeper(self) -> Keeper | Replica | None:
        return None if self._recorder is None else self._recorder.keeper

    def _pass_on(self, report: dict[str, Any]) -> None:
        if not self._again_told:  # the supervisor knows of what an earlier process has handled
            super()._pass_on(report)

    def _outlive(self, header: Mapping[str, Any]) -> None:
        """Begin a job that outlives this process, or go on with it where an earlier process has died."""
        self._launcher.send({"kind": "loading"})
        recorder = self._recorder = Recorder(self._launcher, self._kept)
        recorder.keeper.elsewhere = header.get("elsewhere", False)
        self._supervisor = recorder.supervisor
        settings, servers = self._job_of(header)
        journal: list[Journal] = []

        def parts() -> Mapping[str, Any]:
            path, follow = (settings.journal, settings.follow) if self._number == 0 else (None, ())
            journal.append(Journal(path, now=self.now, goes_on=True, follow=follow))
            return self._parts_with(settings, journal[0])

        state = recorder.restore(parts)
        if state is not None:
            self._supervisor = recorder.supervisor
            self._settings, self._servers = settings, servers
            self._take_over(state, journal[0])
        returns = state is not None
        self._again_told = self._writer.held = True
        for record in recorder.records():
            returns = True
            self._again(recorder, record)
        self._again_told = self._writer.held = False
        if returns:
            recorder.returned(self.now())
            self._has_returned()
            self._return_until = self.now() + max(RETURN_S, self._settings.timeout_s if self._settings is not None else 0.0)
        else:
            recorder.begun(self.state.began, self.state.started, header["settings"], header["servers"])
            self._begin(*self._job_of(header))
        recorder.join(recorder.supervisor, self._launcher)
        self._kept = {}
        self._go_on_with_waiting()

    def _go_on_with_waiting(self) -> None:
        """Let the links go on that have come before this server knew its job."""
        waiting, self._resuming = self._resuming, {}
        for connection, message in waiting.items():
            self._on_resume(connection, message)

    def _again(self, recorder: Recorder | StreamRecorder, record: list[Any]) -> None:
        """Do again what an earlier process has done, or was about to do, when it was told this."""
        match record:
            case ["begin", began, started, settings, servers]:
                self.state.began, self.state.started = began, started
                self._begin(JobSettings.from_wire(settings), read_addresses(servers))
            case ["open", session, peer, beside, shares_memory]:
                recorder.open(session, peer, beside=beside, shares_memory=shares_memory)
            case ["message", now, *_]:
                self._at_moment(now, self._handle, *recorder.again(record))
            case ["closed", now, session, reason]:
                link = recorder.sessions[session]
                recorder.end(link)
                link.close()
                self._at_moment(now, self._handle, link, Closed(reason))
            case ["tick", now, stirred]:
                for session, nbytes in stirred:
                    recorder.sessions[session].bytes_received = nbytes
                self._at_moment(now, self._tick)
            case ["written", now, result]:
                self._at_moment(now, self._on_written, Written(*result))
            case ["stood still", now, seconds]:
                self._at_moment(now, super()._stood_still, seconds)
            case ["returned", _]:
                self._has_returned()
            case ["withdrawn", now, session]:
                self._at_moment(now, self._on_withdrawn, recorder.sessions[session])

    def _has_returned(self) -> None:
        if self.state.coordinator is not None:
            self.state.coordinator.has_returned()

    def _on_withdrawn(self, link: Link) -> None:
        """Handle the loss of a gradient that had come to the former leader."""
        link.release_carried()
        if self.state.coordinator is not None:
            self.state.coordinator.on_withdrawn(link, self.now())

    def _handed_on(self) -> ServerState:
        """Return the state as it is now, for another process."""
        state = self.state
        state.writes = self._writer.open
        if state.coordinator is not None:
            state.coordinator.flush()
            state.journal = self._place_of(state.coordinator.journal)
        return state

    def _place_of(self, journal: Journal) -> Any:
        return journal.place(content=False)

    def _take_over(self, state: ServerState, journal: Journal) -> None:
        """Go on with what another process has handed on, and with this process's journal."""
        self._writer.follow(state.writes)
        self.state = state
        if state.coordinator is None:
            journal.close()
        else:
            journal.go_on(state.journal, (state.coordinator.tally.add,))

    @property
    def _parts(self) -> dict[str, Any]:
        """Return what each process has of its own and the state refers to, by name."""
        keeps = self.state.files if self.state.coordinator is None else self.state.coordinator.checkpoints
        parts = {"server": self, "hub": self._hub, "settings": self._settings, "writer": self._writer}
        if self.state.coordinator is not None:
            parts["journal"] = self.state.coordinator.journal
        return parts if keeps is None else {**parts, "folder": keeps.folder}

    def _parts_with(self, settings: JobSettings, journal: Journal) -> dict[str, Any]:
        """Return the same for a process that takes over a state."""
        parts = {**self._parts, "settings": settings, "journal": journal}
        return parts if settings.checkpoint is None else {**parts, "folder": CheckpointFolder(settings.checkpoint.folder)}

    @property
    def _cut_off(self) -> bool:
        return isinstance(self.state.to_coordinator, Link) and self.state.to_coordinator.socket is None

    def _await_return(self, recorder: SessionLinks, now: Seconds) -> None:
        """Connect to server 0 again, and end the links that have not come back in time."""
        if self._cut_off:
            assert isinstance(self.state.to_coordinator, Link)
            with contextlib.suppress(JobError):
                connection = self._hub.connect(self._servers[0])
                if connection.shares_memory == self.state.to_coordinator.shares_memory:
                    recorder.join(self.state.to_coordinator, connection)
                else:
                    connection.close()
        if self._return_until is not None and now >= self._return_until:
            self._return_until = None
            for link in recorder.gone():
                if link not in self.state.shards.values():
                    self._end(recorder, link, "it has not come back to the new process of this server")
