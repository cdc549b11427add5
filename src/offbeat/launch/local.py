"""Start a job's processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offbeat.launch.engine import Child, Engine, ServerRole
from offbeat.launch.environment import Place, common_environment, free_port, server_environment, worker_variables
from offbeat.launch.forkserver import POSSIBLE
from offbeat.launch.joining import Seats
from offbeat.launch.preload import NOTHING, Preload
from offbeat.launch.program import Program
from offbeat.launch.starter import Starter
from offbeat.runtime.job.settings import ROLE, JobSettings
from offbeat.transport.addresses import loopback
from offbeat.transport.base import Address, Connection, Hub, Message
from offbeat.types import Seconds, WorkerId


class LocalEngine(Engine):
    """Start servers and workers as children of this process.

    Args:
        program: the program of the workers.
        port: port of server 0; 0: the system chooses.
        preload: modules to import once, in a process that workers are forked from.
        least: number of workers with which the job begins, others may join it; None: all of them.
    """

    returns = "another may join in its place (--join)"

    def __init__(self, program: Program, *, port: int = 0, preload: Preload = NOTHING, least: int | None = None) -> None:
        super().__init__()
        self._least = least
        self._program, self._port, self._preload = program, port, preload
        self._notes += [] if preload.note is None else [preload.note]
        self._settings: JobSettings
        self._seats: Seats
        self._address: Address
        self._group_port = 0

    def begin(self, settings: JobSettings, hub: Hub) -> Address:
        self._settings = settings
        self._seats = Seats(self._least or settings.workers, settings.workers, self._notes.append)
        self._group_port = free_port() if settings.torchrun_env else 0
        self._address = hub.listen()
        self._starter = Starter(self._program, self._preload, common_environment(settings.workers), self._notes.append)
        self._starter.begin()
        return self._address

    def ready_for_servers(self) -> bool:
        return not self._here.imports()

    def ready_for_workers(self) -> bool:
        ready = self._here.ready_for_workers()
        if self._here.failure is not None:
            self.failure = self._here.failure, True
        return ready

    def servers_return(self, servers: int) -> bool:
        return POSSIBLE

    def start_server(self, number: int, token: str, role: ServerRole = "") -> Child:
        port = self._port if number == 0 and role != "standby" else 0
        return self._here.start_server({**self._server_environment(number, token, port, ""), ROLE: role})

    def restart_server(self, number: int, token: str, earlier: Address | None) -> Child:
        if earlier is None:
            return self.start_server(number, token)
        return self._here.start_server(self._server_environment(number, token, earlier.tcp[1], earlier.local))

    def _server_environment(self, number: int, token: str, port: int, local: str) -> dict[str, str]:
        return server_environment(number, self._settings.servers, token=token, supervisor=self._address, port=port, local=local)

    def start_worker(self, worker: WorkerId, servers: Sequence[Address], token: str, **more: Any) -> Child | None:
        if not self._seats.open(worker):
            return None
        job = self._settings
        place = Place(0, worker, job.workers, loopback(), self._group_port) if job.torchrun_env else None
        child = self._here.start_worker(worker_variables(worker, job, token=token, servers=servers, place=place, **more))
        self._seats.started(worker, child)
        return child

    def arrived(self) -> list[WorkerId]:
        return self._seats.arrived()

    def on_message(self, connection: Connection, message: Message) -> bool:
        return self._seats.on_message(connection, message)

    def on_closed(self, connection: Connection, reason: str) -> None:
        self._seats.on_closed(connection)

    def tick(self, now: Seconds) -> None:
        self._seats.tick()

    def over(self, status: int, reason: str) -> bool:
        return self._seats.over(status, reason)

    @property
    def _here(self) -> Starter:
        assert self._starter is not None
        return self._starter
