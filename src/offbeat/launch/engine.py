"""Define the interface that starts, watches and ends a job's processes: `Engine`, and `Child`, one such process.

`local.LocalEngine` starts them on this machine. `agents.AgentEngine` has agents start them, on any machine: one agent for each task of
torchrun, Slurm or MPI, each pod of Kubernetes, each actor of Ray, or each machine. The supervisor has the same loop for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from offbeat.core.fleet import Role
from offbeat.journal.worker_summary import NO_MACHINE
from offbeat.launch.environment import server_environment
from offbeat.transport.base import Address, Connection, Hub, Message
from offbeat.types import Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.launch.starter import Starter
    from offbeat.runtime.job.settings import JobSettings, WorkerSettings


class Child(ABC):
    """One process of the job, on this or on another machine."""

    lost: str | None = None
    """The reason for which the process's machine is gone, and the process with it; None: it is not gone."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process number on its machine; 0 while it is not known."""

    @property
    def where(self) -> str:
        """A name for this process in the journal."""
        return f"pid {self.pid}"

    @property
    @abstractmethod
    def drained(self) -> bool:
        """True if the process has ended and all its output was read."""

    @abstractmethod
    def pipes(self) -> list[int]:
        """Return the file descriptors, on this machine, of the process's output."""

    @abstractmethod
    def read(self) -> list[tuple[bool, bytes]]:
        """Read the output since the last call, as pairs of (from stderr, bytes); after the process's end, all of it."""

    @abstractmethod
    def ended(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs. After the end, kills the processes left in its session."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its children. SIGTERM and SIGINT become orders, see `runtime.job.notices`."""

    @abstractmethod
    def print_stacks(self) -> str | None:
        """Make the process print its Python stacks to its stderr. Returns the reason if it cannot; None: it does."""

    @abstractmethod
    def strike(self) -> None:
        """Kill the process and everything in its session, without waiting for their ends. For signal handlers."""

    @abstractmethod
    def kill(self) -> None:
        """Kill as `strike` does, even a stopped process, and wait for its end if it is on this machine."""


class Engine(ABC):
    """Start the processes of one job."""

    failure: tuple[str, bool] | None = None
    """The reason for which the job cannot begin or go on, and True if it is a mistake of the user; None: the job can."""

    def __init__(self) -> None:
        self._starter: Starter | None = None
        """Starts processes on this machine; None: before `begin`, or where agents start all."""
        self._settings: JobSettings
        self._token: str
        self._note: Callable[[str], None]
        self._address: Address

    @abstractmethod
    def begin(self, settings: JobSettings, hub: Hub, token: str, note: Callable[[str], None]) -> Address:
        """Listen at an address that servers and agents can reach, and prepare to start processes. Returns the address.

        Args:
            settings: the job.
            hub: listens.
            token: authenticates the processes of the job to each other.
            note: shows the user a line.

        Raises:
            ConfigurationError: the address is not one of this machine, or its port is taken.
        """

    @abstractmethod
    def ready_for_servers(self) -> bool:
        """Return True if servers can be started."""

    @abstractmethod
    def ready_for_workers(self) -> bool:
        """Return True if workers can be started."""

    awaits = NO_MACHINE
    """The reason for which an awaited worker is not there, one of `NOT_COME`."""
    returns = "it returns with its machine"
    """Text on the return of a worker whose machine is lost."""

    workers_elsewhere = False
    """True if workers may be on other machines than the servers."""

    @abstractmethod
    def servers_return(self, servers: int) -> bool:
        """Return True if a server of a job with so many servers can be restarted after its death: all are on this machine."""

    @abstractmethod
    def start_server(self, number: int, role: Role, leader: Child | None, leader_at: Address | None) -> Child | None:
        """Start a process of a server.

        Args:
            number: the server.
            role: "leader": the server's first process; "again": the next one, on this machine, where a process without a standby has died;
                "standby": a standby, if possible on another machine than the leader.
            leader: the process that leads the server, or did; None: there is none yet.
            leader_at: the leader's address; None: not known yet.

        Returns:
            The process; None: no machine is left that could start it.
        """

    @abstractmethod
    def start_worker(self, settings: WorkerSettings) -> Child | None:
        """Start a worker's process; None: its machine is not there. ``settings``: what the process knows of the job."""

    def arrived(self) -> list[WorkerId]:
        """Return the workers whose machine has come since the last call; to be called after `ready_for_workers` is True."""
        return []

    def left(self, worker: WorkerId, *, finished: bool) -> None:  # noqa: B027 - only engines with joiners give seats away
        """Note that a worker has ended for good, or is lost. ``finished``: True if its script has ended, so that no other is needed."""

    def _start_here(self, starter: Starter, variables: Mapping[str, str]) -> Child:
        """Start a server's process on this machine. ``variables``: which server it is, from `server_variables`."""
        shared = server_environment(self._settings.servers, token=self._token, supervisor=self._address)
        return starter.start_server({**shared, **variables})

    @property
    def helper(self) -> Child | None:
        """The process that imports for servers and workers, which are its forks; None: there is none on this side."""
        return None if self._starter is None else self._starter.base

    def on_message(self, connection: Connection, message: Message) -> bool:
        """Handle an agent's message. Returns False if the message is not for the engine."""
        return False

    def on_closed(self, connection: Connection, reason: str) -> None:  # noqa: B027 - only engines with agents have connections
        """Handle the end of a connection."""

    def tick(self, now: Seconds) -> None:  # noqa: B027 - only engines with agents watch them
        """Do periodic work. ``now``: the seconds during which the supervisor was running."""

    def over(self, status: int, reason: str) -> bool:
        """Send every machine the end of the job. Returns True once all have received it; until then, call it again."""
        return True

    def strike(self) -> None:
        """Kill the helper without waiting. For signal handlers."""
        if (helper := self.helper) is not None:
            helper.strike()

    def close(self) -> None:
        """End the helper and its forks."""
        if self._starter is not None:
            self._starter.close()
