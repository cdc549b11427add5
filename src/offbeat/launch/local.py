"""Start a job's processes on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offbeat.launch.engine import Child, Engine, ServerRole
from offbeat.launch.environment import Place, common_environment, free_port, server_environment, worker_variables
from offbeat.launch.forkserver import POSSIBLE, Forkserver, fork_or_start, left_to_workers
from offbeat.launch.preload import NOTHING, Preload
from offbeat.launch.program import Program
from offbeat.launch.server_starter import ServerStarter
from offbeat.runtime.job.settings import ROLE, JobSettings
from offbeat.transport.addresses import loopback
from offbeat.transport.base import Address, Hub
from offbeat.types import WorkerId


class LocalEngine(Engine):
    """Start servers and workers as children of this process.

    Args:
        program: the program of the workers.
        port: port of server 0; 0: the system chooses.
        preload: modules to import once, in a process that workers are forked from.
    """

    def __init__(self, program: Program, *, port: int = 0, preload: Preload = NOTHING) -> None:
        super().__init__()
        self._program, self._port, self._preload = program, port, preload
        self._forkserver: Forkserver | None = None
        self._notes += [] if preload.note is None else [preload.note]
        self._servers = ServerStarter()
        self._settings: JobSettings
        self._address: Address
        self._group_port = 0

    def begin(self, settings: JobSettings, hub: Hub) -> Address:
        self._settings = settings
        self._group_port = free_port() if settings.torchrun_env else 0
        self._address = hub.listen()
        if self._preload.modules:
            common = common_environment(settings.workers)
            modules, found, _ = self._preload
            self._forkserver = Forkserver(self._program, modules, common, found)
            self._servers.prepare(self._server_environment(0, "", 0, ""))
        return self._address

    def ready_for_servers(self) -> bool:
        return not self._servers.imports()

    def ready_for_workers(self) -> bool:
        if self._forkserver is None:
            return True
        settled = self._forkserver.settled()
        if self._forkserver.failure is not None:
            self.failure = self._forkserver.failure, True
        elif self._forkserver.over:
            self._notes.append("the --preload process has died: every worker imports for itself")
        elif settled and (left := left_to_workers(self._forkserver)) is not None:
            self._notes.append(left)
        return settled

    def servers_return(self, servers: int) -> bool:
        return POSSIBLE

    def start_server(self, number: int, token: str, role: ServerRole = "") -> Child:
        port = self._port if number == 0 and role != "standby" else 0
        return self._servers.start({**self._server_environment(number, token, port, ""), ROLE: role}, self._notes.append)

    def restart_server(self, number: int, token: str, earlier: Address | None) -> Child:
        if earlier is None:
            return self.start_server(number, token)
        return self._servers.start(self._server_environment(number, token, earlier.tcp[1], earlier.local), self._notes.append)

    def _server_environment(self, number: int, token: str, port: int, local: str) -> dict[str, str]:
        return server_environment(number, self._settings.servers, token=token, supervisor=self._address, port=port, local=local)

    def prepare_returns(self) -> Child | None:
        return self._servers.prepare(self._server_environment(0, "", 0, ""))

    def returns_soon(self) -> bool:
        return self._servers.imports()

    def start_worker(
        self,
        worker: WorkerId,
        servers: Sequence[Address],
        token: str,
        *,
        standbys: Sequence[Address | None] | None = None,
        servers_return: bool = False,
    ) -> Child:
        job = self._settings
        place = Place(0, worker, job.workers, loopback(), self._group_port) if job.torchrun_env else None
        variables = worker_variables(
            worker, job, token=token, servers=servers, place=place, servers_return=servers_return, standbys=standbys
        )
        environment = {**common_environment(job.workers), **variables}
        return fork_or_start(self._forkserver, environment, self._program, self._notes.append)

    def helpers(self) -> Mapping[str, Child]:
        found = {"preload": None if self._forkserver is None else self._forkserver.child, "servers": self._servers.child}
        return {name: child for name, child in found.items() if child is not None}
