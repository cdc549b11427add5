"""Decide what becomes of a server whose process has ended or stands still: its standby leads, another process goes on, or the job fails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from offbeat.launch.engine import Engine
from offbeat.launch.hangs import LivedClock
from offbeat.launch.lack import Backoff, lack_of
from offbeat.launch.output import Output
from offbeat.launch.servers import Servers
from offbeat.launch.standbys import Standbys
from offbeat.runtime.job.settings import JobSettings
from offbeat.transport.base import Connection


class ServerEnds:
    """What a supervisor does about the ends of its servers' processes.

    Args:
        servers: of the job.
        standbys: of these; None: the job has no replicas.
        settings: the job.
        engine: starts the processes.
        token: authenticates the processes of the job to each other.
        max_restarts: how often each server may be started again.
        clock: the supervisor's.
        output: takes what the processes print.
        note: shows a line to the user.
        record: writes a line on a process to the journal: its role, number, what happened to it, and details.
    """

    def __init__(
        self,
        servers: Servers,
        standbys: Standbys | None,
        settings: JobSettings,
        engine: Engine,
        *,
        token: str,
        max_restarts: int,
        clock: LivedClock,
        output: Output,
        note: Callable[[str], None],
        record: Callable[[str, int, str, str], None],
    ) -> None:
        self._servers, self._standbys, self._settings, self._engine = servers, standbys, settings, engine
        self._token, self._max_restarts, self._clock = token, max_restarts, clock
        self._output, self._note, self._record = output, note, record
        self._backoffs: defaultdict[int, Backoff] = defaultdict(Backoff)

    def after_end(self, number: int, how: str) -> str | None:
        """Let a server go on whose process has ended, at once or later. Returns why the job fails; None: the server goes on."""
        if self._taken_over(number, how):
            return None
        gone = f"server {number} {how}, and what it held is gone with it"
        if not self._may_return(number):
            return f"{gone}{self._why_not_returned(number)}"
        lasting = self._servers.lasting[number]
        lasting.returning = True
        self._servers.watch.heard(number, self._clock.now(), loading=True)
        if self._engine.returns_soon():
            return None
        backoff = self._backoffs[number]
        if not backoff.due(self._clock.now()):
            return None
        try:
            child = self._engine.restart_server(number, self._token, self._servers.addresses.get(number))
        except OSError as error:
            if (lack := lack_of(error)) is None:
                raise
            if backoff.hopeless(self._clock.now()):
                return f"{gone} (it could not be started again: {lack})"
            if not backoff.failing:
                self._note(f"server {number} {how}: it cannot be started again yet, and is tried again: {lack}")
            backoff.failed(self._clock.now())
            return None
        del self._backoffs[number]
        if child is None:
            return f"{gone} (no agent is left on this machine that could start it again)"
        lasting.returns(self._clock.now())
        count = f"{lasting.restarts} of {self._max_restarts}"
        self._record("server", number, "exited", how)
        self._output.drain()
        self._note(f"server {number} {how}: it goes on in a new process ({count})")
        self._servers.connections.pop(number, None)
        self._servers.children[number] = child
        self._output.attach("server", number, child)
        self._record("server", number, "restarted", f"{count}, {child.where}")
        return None

    def after_silence(self) -> str | None:
        """Leave a server that does not report, if there is one. Returns why the job fails; None: there is none, or the server goes on."""
        alone = () if self._standbys is None else self._standbys.lacking()
        frozen = self._servers.watch.frozen(self._clock.now(), alone=alone)
        if frozen is None:
            return None
        number, why = frozen
        if self._taken_over(number, why):
            return None
        if not self._may_return(number):
            return f"server {number} {why}{self._why_not_returned(number)}"
        self._note(f"server {number} {why}: it is killed")
        self._servers.children[number].kill()
        self._servers.watch.heard(number, self._clock.now(), loading=True)  # an agent may need some time for that
        return None

    def awaits(self, number: int, connection: Connection) -> bool:
        """Return True if a process of this server is awaited. What an earlier one has left is for the process that was started, alone."""
        if number not in self._servers.children or number in self._servers.connections:
            return False
        returning = number in self._servers.lasting and self._servers.lasting[number].job_sent
        return not returning or connection.peer == f"process {self._servers.children[number].pid} of this host"

    def _taken_over(self, number: int, how: str) -> bool:
        """Let the standby of a server lead, after what has happened to its leader. Returns False if there is none that could."""
        return self._standbys is not None and self._standbys.take_over(number, how, self._clock.now())

    def _may_return(self, number: int) -> bool:
        if self._standbys is not None:
            return False
        return number in self._servers.lasting and self._servers.lasting[number].why_mortal(self._max_restarts) is None

    def _why_not_returned(self, number: int) -> str:
        why = self._servers.lasting[number].why_mortal(self._max_restarts) if number in self._servers.lasting else None
        if self._standbys is not None:
            why = "its standby could not lead yet" if self._standbys.has_one(number) else "it had no standby any more"
        elif why is None and not self._max_restarts:
            why = "--max-restarts is 0"
        said = "" if why is None else f" ({why})"
        order = self._settings.checkpoint
        return said if order is None else f"{said}; offbeat run --resume {order.folder} goes on from the newest checkpoint"
