"""Start a job's processes on this machine."""

from __future__ import annotations

from collections.abc import Callable

from offbeat.core.fleet import Role
from offbeat.journal.worker_summary import NO_JOINER
from offbeat.launch.engine import Child
from offbeat.launch.environment import Place, common_environment, free_port, server_variables, worker_variables
from offbeat.launch.joining import SeatedEngine
from offbeat.launch.preload import NOTHING, Preload
from offbeat.launch.program import Program
from offbeat.launch.starter import Starter
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.transport.addresses import loopback
from offbeat.transport.base import Address, Hub


class LocalEngine(SeatedEngine):
    """Start servers and workers as children of this process.

    Args:
        program: the program of the workers.
        port: port of server 0; 0: the system chooses.
        preload: modules to import once, in a process that workers are forked from.
    """

    awaits = NO_JOINER
    returns = "another may join in its place (--join)"

    def __init__(self, program: Program, *, port: int = 0, preload: Preload = NOTHING) -> None:
        super().__init__()
        self._program, self._port, self._preload = program, port, preload
        self._group_port = 0

    def begin(self, settings: JobSettings, hub: Hub, token: str, note: Callable[[str], None]) -> Address:
        self._settings, self._token, self._note = settings, token, note
        if self._preload.note is not None:
            note(self._preload.note)
        self._open_seats(settings.begins, settings.workers)
        self._group_port = free_port() if settings.torchrun_env else 0
        self._address = hub.listen()
        self._starter = Starter(self._program, self._preload, common_environment(settings.workers), self._note)
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
        return True

    def start_server(self, number: int, role: Role, leader: Child | None, leader_at: Address | None) -> Child:
        port, local = self._port if number == 0 and role != "standby" else 0, ""
        if role == "again" and leader_at is not None:
            port, local = leader_at.tcp[1], leader_at.local
        return self._start_here(self._here, server_variables(number, role, self._settings, port=port, local=local))

    def start_worker(self, settings: WorkerSettings) -> Child | None:
        worker = settings.worker
        if not self._is_open(worker):
            return None
        place = Place(0, worker, settings.workers, loopback(), self._group_port) if self._settings.torchrun_env else None
        child = self._here.start_worker(worker_variables(settings, place))
        self._started(worker, child)
        return child

    @property
    def _here(self) -> Starter:
        assert self._starter is not None
        return self._starter
