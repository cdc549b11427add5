"""Run a job: have an engine start servers and workers, restart workers that died, pass signals on, and clean up.

The supervisor decides nothing about training: the coordinator in server 0 does, and sends the figures to show. One thread, one loop.
"""

from __future__ import annotations

import resource
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from offbeat.errors import BY_SIGNAL, FAILED, MISTAKE, JobError, OffbeatError, ProtocolError
from offbeat.journal.file import seal
from offbeat.launch.checkpointing import Results
from offbeat.launch.engine import Child, Engine
from offbeat.launch.followers import END_S as FOLLOWERS_END_S
from offbeat.launch.followers import Followers, FollowerSpec
from offbeat.launch.hangs import LivedClock
from offbeat.launch.lack import lack_of
from offbeat.launch.leadership import StoreClient
from offbeat.launch.missing import Missing
from offbeat.launch.notice import NoticeCommand
from offbeat.launch.outcome import Display, Outcome, Sheltered, verdict
from offbeat.launch.output import Output
from offbeat.launch.server_fleet import ServerFleet
from offbeat.launch.stop_signals import StopSignals
from offbeat.launch.watchers import Watchers
from offbeat.launch.workers import Workers
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Connection, Message
from offbeat.transport.hub import SocketHub
from offbeat.types import Seconds

__all__ = ["Outcome", "Supervisor"]

GRACE_S = 5.0
"""Seconds that processes have to end after a last signal before they are killed."""
CHECKPOINT_SHARE = 0.6
"""Share of ``--grace`` that a last checkpoint may take."""
END_S = 600.0
"""Longest wait for the checkpoint of a finished job, in seconds."""
NEWS_S = 2.0
"""Seconds to wait for the status of a worker that may have joined just before its end."""
POLL_S = 0.1
"""Longest wait of the loop, in seconds: the end of a process without a connection wakes nothing."""


class Supervisor:
    """Run one job.

    Args:
        settings: the job.
        engine: starts the processes.
        token: authenticates the processes of the job to each other.
        max_restarts: how often each worker may be restarted. A return after the loss of its machine does not count.
        return_s: seconds to wait for a machine once no worker's process is left.
        grace_s: seconds that scripts have to end after Ctrl-C or SIGTERM; processes have ten times as long after their goodbye.
        notice: detects that this machine is about to be taken away, which ends the job as SIGTERM does; None: only signals do.
        log_dir: folder for the raw output of each worker and server; None: no files.
        followers: processes that follow the job, on which nothing depends; `settings` names the records that they read.
        store: records which supervisor leads the job, and which process each server; None: there is no store.
        display: shows the job to the user.

    Raises:
        ConfigurationError: a server could not start, for example because its port is taken, or the store cannot be reached.
    """

    def __init__(
        self,
        settings: JobSettings,
        engine: Engine,
        *,
        token: str,
        max_restarts: int,
        return_s: Seconds = 0.0,
        grace_s: Seconds = 30.0,
        notice: NoticeCommand | None = None,
        log_dir: Path | None = None,
        followers: Sequence[FollowerSpec] = (),
        store: StoreClient | None = None,
        display: Display,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._grace_s = grace_s
        self._notice = notice
        self._store = store
        display = self._display = Sheltered(display)
        self._missing = Missing()
        self._output = Output(display, log_dir, self._missing)
        tell = lambda text: display.lines([text], error=True)  # noqa: E731
        self._followers = Followers(followers, display.note, self._missing, tell)
        self._token = token
        self._hub = SocketHub(token, maps=False)
        self.checkpoints = Results()
        """Results of the job's checkpoints so far."""
        self._began_at = time.time()
        self._summary: dict[str, Any] | None = None
        self._failure: tuple[str, bool] | None = None
        self._told = StopSignals()
        """Signals to this process; a notice to end the job, from a server or `notice`, is noted as SIGTERM."""
        self._ending = False
        self._clock = LivedClock()
        self._servers = ServerFleet(
            settings,
            engine,
            max_restarts=max_restarts,
            now=self._clock.now,
            output=self._output,
            note=display.note,
            fail=self._fail,
            leave=partial(self._told.note, signal.SIGTERM),
            store=store,
        )
        self._workers = Workers(
            settings,
            engine,
            self._servers,
            token=token,
            max_restarts=max_restarts,
            return_s=return_s,
            grace_s=grace_s,
            clock=self._clock,
            output=self._output,
            note=display.event,
        )
        self._watchers = Watchers(settings, token, said=display.said, ask=self._workers.print_stacks, collect=self._output.stacks)

    def run(self) -> Outcome:
        """Run the job to its end. When this returns or raises, every process of the job on this machine is gone."""
        with self._told.heeded(self._on_signal):
            try:
                self._start()
                return self._watch()
            except OffbeatError:
                raise
            except Exception as error:
                return self._after(error)
            finally:
                _kill(self._children())
                self._followers.kill()
                self._watchers.close()
                self._engine.close()
                self._hub.close()
                self._output.close()
                if self._notice is not None:
                    self._notice.close()
                if self._store is not None:
                    self._store.close()

    def _on_signal(self) -> None:
        self._hub.wake()
        if self._told.insists:
            for child in self._children():
                child.strike()
            self._followers.strike()
            self._engine.strike()

    # Start.

    def _start(self) -> None:
        if self._store is not None:
            self._store.begin()
        self._watchers.publish(self._engine.begin(self._settings, self._hub, self._token, self._display.note))
        if (helper := self._engine.helper) is not None:
            self._output.attach("forkserver", 0, helper)
        for ready, begin in (
            (self._engine.ready_for_servers, self._servers.begin),
            (self._servers.fleet.all_listen, self._servers.begin_job),
            # The servers import meanwhile.
            (lambda: self._servers.fleet.all_follow() and self._engine.ready_for_workers(), self._workers.start),
        ):
            if not self._wait_for_start(ready):
                return
            begin()

    def _wait_for_start(self, ready: Callable[[], bool]) -> bool:
        """Wait until ``ready`` returns True, and return True; False: something has happened first that ends the job."""
        while not ready():
            self._serve(POLL_S)
            self._servers.check(self._listens)
            self._failure = self._failure or self._engine.failure
            if self._failure is not None or self._told.number is not None:
                return False
        self._failure = self._failure or self._engine.failure
        return self._failure is None

    def _after(self, error: Exception) -> Outcome:
        """End the job in order after an error in the supervisor itself: with a last checkpoint, the journal's end, and a summary."""
        lack = lack_of(error) if isinstance(error, OSError) else None
        reason = f"the supervisor cannot go on: {lack or f'{type(error).__name__}: {error}'}"
        if not self._servers.reachable(0) or self._ending:
            if lack is None:
                raise error
            raise JobError(reason) from error
        if lack is None:
            self._display.lines("".join(traceback.format_exception(error)).splitlines(), error=True)
        self._last_checkpoint("error")
        return self._end(FAILED, reason)

    # The main loop.

    def _watch(self) -> Outcome:
        while True:
            self._serve(POLL_S)
            self._servers.check(self._listens)
            self._told.look(self._notice, self._clock.now(), self._display.note)
            self._heed_notices()
            if self._failure is not None:
                reason, mistake = self._failure
                return self._end(MISTAKE if mistake else FAILED, reason)
            if (number := self._told.number) is not None:
                return self._stop(number)
            if self._servers.away:
                continue  # a worker's end can be judged once the server has come back
            self._workers.check(self._listens)
            self._workers.take_in()  # after the ends of earlier processes of the same workers
            self._workers.check_hangs(loading=self._servers.loading(0))
            if self._workers.bug is not None:
                return self._end(1, self._workers.bug)
            if self._workers.all_done():
                return self._conclude()

    def _serve(self, timeout_s: Seconds) -> None:
        for connection, item in self._hub.poll(timeout_s, [*self._output.pipes(), *self._followers.pipes()]):
            if isinstance(item, Message):
                if self._watchers.on_message(connection, item):
                    continue
                if not self._engine.on_message(connection, item):
                    self._on_message(connection, item)
            elif not self._watchers.on_closed(connection):
                self._engine.on_closed(connection, item.reason)
                self._servers.on_closed(connection)
        self._engine.tick(self._clock.now())
        self._failure = self._failure or self._engine.failure
        self._output.drain()
        self._followers.tick()
        self._watchers.tick()

    def _serve_until(self, ready: Callable[[], bool], limit_s: Seconds) -> None:
        deadline = time.monotonic() + limit_s
        while not ready() and time.monotonic() < deadline:
            self._serve(POLL_S)

    def _on_message(self, connection: Connection, message: Message) -> None:
        try:
            taken = self._servers.on_message(connection, message)
        except ProtocolError as error:
            self._refuse(connection, error)
            return
        if taken is None:
            return
        header = taken.header
        match header["kind"]:
            case "status":
                self._workers.snapshot = header["snapshot"]
                self._watchers.on_status(header["snapshot"])
                self._followers.on_status(header["snapshot"])
                self._display.update(header["snapshot"], time.monotonic())
            case "records":
                self._followers.on_records(header["first"], header["count"], taken.payload)
                connection.send({"kind": "records_taken"})
            case "standing":
                self._workers.on_standing(header)
            case "journal_failed":
                self._missing.report("the journal is not complete", header["reason"])
                self._display.note(f"the journal cannot be written any more, and training goes on without it: {header['reason']}")
            case "summary":
                self._summary = header["summary"]
                self._display.update(header["summary"], time.monotonic())
                self._followers.on_status(header["summary"], last=True)
            case "failed":
                self._failure = self._failure or (header["reason"], header["mistake"])
                connection.send({"kind": "noted"})
            case "failing":
                self._workers.on_failing(header)
            case "checkpoint":
                self._on_checkpoint(header)
            case "kill":
                self._workers.on_kill(header["worker"])

    def _on_checkpoint(self, header: Mapping[str, Any]) -> None:
        """Note a checkpoint that server 0 has made, or that has failed."""
        version, missing = header["version"], header["missing"]
        self.checkpoints.add(version, header["failed"], last=header.get("last", False))
        if header["failed"] is not None:
            self._display.note(f"there is no checkpoint of version {version}: {header['failed']}")
        elif missing:
            names = ", ".join(map(str, missing))
            self._display.note(f"the checkpoint of version {version} lacks the random generators and schedulers of worker {names}")

    def _refuse(self, connection: Connection, error: ProtocolError) -> None:
        """Close the connection of a peer that has broken the protocol. If it is a server, the job fails."""
        connection.close()
        number = self._servers.server_of(connection)
        if number is None:
            self._display.note(f"{error}: its connection is closed")
        else:
            self._servers.on_closed(connection)
            self._fail(f"server {number} broke the protocol: {error}")

    def _fail(self, reason: str) -> None:
        """Make the job fail for this reason, unless it fails already."""
        self._failure = self._failure or (reason, False)

    def _heed_notices(self) -> None:
        """Act on notices to single processes, once it is clear that they were not meant for the whole job."""
        if self._told.number is None:
            self._servers.heed()
        if self._told.number is None:
            self._workers.dismiss()

    def _listens(self) -> bool:
        """Handle messages that have arrived. Returns False if the job fails."""
        self._serve(0.0)
        return self._failure is None

    # End.

    def _conclude(self) -> Outcome:
        """Return the outcome, after every worker has ended for good."""
        ends = self._workers.ends()
        if any(end.status == 0 for end in ends.values()):
            self._serve_until(lambda: self._workers.any_joined or not self._servers.reachable(0), NEWS_S)
        status, reason = verdict(ends, joined=self._workers.any_joined, script=self._settings.script)
        if status == 0:
            self._save_end()
        return self._end(status, reason)

    def _save_end(self) -> None:
        """Have a checkpoint of the finished job made, if it makes checkpoints. A signal ends the wait."""
        if self._settings.checkpoint is None or not self._servers.reachable(0):
            return
        if not self._save(END_S, lambda: self._told.number is not None, last=True):
            self.checkpoints.add(-1, "it was not complete when the job ended")

    def _save(self, limit_s: Seconds, cut_off: Callable[[], bool], **how: bool) -> bool:
        """Have a checkpoint made, and wait for it until the time is over or ``cut_off()``. Returns True if its result has come.

        ``how``: further fields of the order.
        """
        self._servers.tell("checkpoint", within_s=limit_s, **how)
        self._serve_until(lambda: self.checkpoints.ended or self._fails() or cut_off(), limit_s)
        return self.checkpoints.ended

    def _fails(self) -> bool:
        """Look after the servers. Returns True if the job fails."""
        self._servers.check(self._listens)
        return self._failure is not None

    def _stop(self, number: int) -> Outcome:
        """End the job on a signal: ask the workers to leave, and give them ``grace_s`` seconds.

        Ctrl-C becomes a `KeyboardInterrupt` in each script, which may catch it and save. Any other signal makes workers leave after the
        step.
        """
        name = signal.Signals(number).name
        grace_s = self._grace_s - self._last_checkpoint(name)
        self._display.note(f"{name}: stopping the workers (again: at once)")
        self._workers.ask_to_leave(gently=number == signal.SIGINT)
        if not self._all_leave(grace_s) and self._failure is None and number == signal.SIGINT and not self._told.insists:
            self._display.note(f"not all scripts have ended within {self._grace_s:g} s of Ctrl-C (--grace): SIGTERM")
            self._workers.ask_to_leave(gently=False)
            self._all_leave(GRACE_S)
        return self._end(BY_SIGNAL + number, f"stopped by {name}")

    def _last_checkpoint(self, name: str) -> Seconds:
        """Have a last checkpoint made, if the job makes any, before the workers leave. Returns the seconds that it took."""
        if self._settings.checkpoint is None or not self._workers.any_joined:
            return 0.0
        began, limit_s = time.monotonic(), CHECKPOINT_SHARE * self._grace_s
        self._display.note(f"{name}: making a last checkpoint, for at most {limit_s:g} s")
        if not self._save(limit_s, lambda: self._told.insists or self._workers.all_have_ended()):
            self._missing.report("there is no last checkpoint", f"it was not complete within {time.monotonic() - began:.1f} s")
        return time.monotonic() - began

    def _all_leave(self, limit_s: Seconds) -> bool:
        """Wait for the ends of all workers, without restarts. Returns False if some have not ended within ``limit_s`` seconds."""

        def over() -> bool:
            self._workers.note_ends()
            return self._fails() or self._workers.none_runs() or self._told.insists

        self._serve_until(over, limit_s)
        return self._workers.none_runs()

    def _end(self, status: int, reason: str) -> Outcome:
        """Have the coordinator close the journal, stop the servers and followers, and return the outcome."""
        self._ending = True
        _kill(self._workers.children())
        self._output.drain()
        self._servers.tell("finish", ok=status == 0, reason=reason)
        self._serve_until(lambda: self._summary is not None or not self._servers.reachable(0), GRACE_S)
        self._servers.finish(ok=status == 0, reason=reason)
        self._serve_until(lambda: all(child.ended() is not None for child in self._servers.standbys()), GRACE_S)
        if self._summary is None and self._settings.journal is not None:
            _kill(self._servers.leaders())  # a stopped server 0 must not continue to write later
            _may_open_more()
            seal(self._settings.journal, reason, self._began_at)
        self._followers.close()
        limit_s = FOLLOWERS_END_S if self._told.number is None else GRACE_S
        self._serve_until(lambda: self._followers.all_over() or self._told.insists, limit_s)
        self._followers.end()
        if (lack := self.checkpoints.missing()) is not None:
            self._missing.report(lack)
        status, reason = self._missing.outcome(status, reason)
        _kill(self._servers.leaders())
        self._serve_until(lambda: self._engine.over(status, reason), GRACE_S)
        return Outcome(status, reason, self._summary or self._workers.snapshot, self._missing)

    def _children(self) -> list[Child]:
        return [*self._workers.children(), *self._servers.leaders(), *self._servers.standbys()]


def _may_open_more() -> None:
    """Raise this process's limit of open files to its maximum: connections may have used all, and the journal has to be opened."""
    with suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _kill(children: Sequence[Child]) -> None:
    """Kill all processes, and then wait for the end of each."""
    for child in children:
        child.strike()
    for child in children:
        child.kill()
