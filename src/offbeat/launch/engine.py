"""Define what starts, watches and ends the processes of a job: `Engine`, and `Child`, one such process.

`local.LocalEngine` starts them on this machine. `agents.AgentEngine` has them started by agents, on any machine: one agent for each task
of torchrun, Slurm or MPI, for each pod of Kubernetes, for each actor of Ray, or one for each machine. The supervisor has one loop for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from offbeat.transport.base import Address, Connection, Hub, Message
from offbeat.types import Seconds, WorkerId

if TYPE_CHECKING:
    from offbeat.runtime.job.settings import JobSettings


ServerRole: TypeAlias = Literal["", "leader", "standby"]


class Child(ABC):
    """One process of the job, on this or on another machine."""

    lost: str | None = None
    """Why the machine of the process is gone, and the process with it; None: it is not gone."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Return the number of the process on its machine; 0 while it is not known."""

    @property
    def where(self) -> str:
        """Return which process this is, in words, for the journal."""
        return f"pid {self.pid}"

    @property
    @abstractmethod
    def drained(self) -> bool:
        """Return True if the process has ended and all that it has printed was read."""

    @abstractmethod
    def pipes(self) -> list[int]:
        """Return the file descriptors of this machine that output of the process comes from."""

    @abstractmethod
    def read(self) -> list[tuple[bool, bytes]]:
        """Read what was printed since the last call, as pairs of (from stderr, bytes); after the process's end, all of it."""

    @abstractmethod
    def ended(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs. Processes that it left in its session are killed."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send a signal to the process, not to its children. SIGTERM and SIGINT are orders to it, see `runtime.job.notices`."""

    @abstractmethod
    def print_stacks(self) -> str | None:
        """Make the process print its Python stacks to its stderr. Returns the reason if it cannot; None: it does."""

    @abstractmethod
    def strike(self) -> None:
        """Kill the process and everything in its session, without waiting for the end: for signal handlers."""

    @abstractmethod
    def kill(self) -> None:
        """Kill as `strike` does, and wait for the end where the process is on this machine. Stopped processes die too."""


class Engine(ABC):
    """Start the processes of one job."""

    failure: tuple[str, bool] | None = None
    """Why the job cannot begin or go on, and whether this is a mistake of the user; None: it can."""

    @abstractmethod
    def begin(self, settings: JobSettings, hub: Hub) -> Address:
        """Listen at an address that servers and agents can reach, and prepare to start processes. Returns the address.

        Raises:
            ConfigurationError: the address is not one of this machine, or its port is taken.
        """

    @abstractmethod
    def ready_for_servers(self) -> bool:
        """Return True if servers can be started."""

    @abstractmethod
    def ready_for_workers(self) -> bool:
        """Return True if workers can be started."""

    returns = "it returns with its machine"
    """What becomes of a worker whose machine is lost, in words."""

    workers_elsewhere = False
    """True if workers may be on other machines than the servers."""

    def servers_return(self, servers: int) -> bool:
        """Return True if one of so many servers that has died may be started again: they are on this machine."""
        return False

    @abstractmethod
    def start_server(self, number: int, token: str, role: ServerRole = "") -> Child:
        """Start a process of a server; ``role``: whether it leads or stands by, "" in a job without replicas."""

    def start_standby(self, number: int, token: str, leader: Child, leader_at: Address | None) -> Child | None:
        """Start a standby of a server, where it is not lost with the leader if that is possible; None: there is no machine for it.

        Args:
            number: the server.
            token: authenticates the processes of the job to each other.
            leader: the process that leads it.
            leader_at: where that listens; None: this is not known yet.
        """
        return self.start_server(number, token, "standby")

    def restart_server(self, number: int, token: str, earlier: Address | None) -> Child | None:
        """Start another process of a server whose process has died, on this machine.

        Args:
            number: the server.
            token: authenticates the processes of the job to each other.
            earlier: where the process that has died has listened; None: this was not known yet.

        Returns:
            The process; None: nobody is left here who could start one.
        """
        raise NotImplementedError(f"{type(self).__name__} does not start servers again (expected only where servers_return() is True)")

    def prepare_returns(self) -> Child | None:
        """Have a process ready from which servers can be started again quickly. Returns the process."""
        return None

    def returns_soon(self) -> bool:
        """Return True while this process does not have what it needs: to wait for it takes less than to begin anew."""
        return False

    @abstractmethod
    def start_worker(
        self,
        worker: WorkerId,
        servers: Sequence[Address],
        token: str,
        *,
        standbys: Sequence[Address | None] | None = None,
        servers_return: bool = False,
    ) -> Child | None:
        """Start a process of a worker; None if its machine is not there.

        Args:
            worker: which worker.
            servers: where they listen.
            token: authenticates the processes of the job to each other.
            standbys: where those of the servers listen, None for each that has none; None: the job has no replicas.
            servers_return: True if a server that dies may come back in another process of its machine.
        """

    def arrived(self) -> list[WorkerId]:
        """Return the workers whose machine has come since the last call, after `ready_for_workers`."""
        return []

    def notes(self) -> list[str]:
        """Return what the user should be told since the last call."""
        return []

    def helpers(self) -> Mapping[str, Child]:
        """Return processes that are neither servers nor workers, by name."""
        return {}

    def on_message(self, connection: Connection, message: Message) -> bool:
        """Handle a message of an agent. Returns False if the message is not for the engine."""
        return False

    def on_closed(self, connection: Connection, reason: str) -> None:  # noqa: B027 - only engines with agents have connections
        """Handle the end of a connection."""

    def tick(self, now: Seconds) -> None:  # noqa: B027 - only engines with agents watch them
        """Do what is due. ``now``: seconds during which the supervisor was running."""

    def over(self, status: int, reason: str) -> bool:
        """Tell every machine that the job has ended. Returns True once all of them know; call it again until then."""
        return True

    @abstractmethod
    def strike(self) -> None:
        """Kill the engine's own helpers, from a signal handler."""

    @abstractmethod
    def close(self) -> None:
        """End the engine's own helpers."""
