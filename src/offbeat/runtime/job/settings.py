"""Define what the launcher tells the processes of a job: settings as one message, and the environment variables of a worker.

Only a launcher sets these variables. OFFBEAT_HOST (see ``transport/shm.py``) is set by hand in tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from offbeat.core.batch_sizes import VARIABLE
from offbeat.errors import ConfigurationError
from offbeat.runtime.job import environment_block
from offbeat.runtime.job.wire_choice import plane_choice, wire_format
from offbeat.transport.base import Address
from offbeat.types import PlaneChoice, Seconds, Version, WireFormat, WorkerId

TOKEN: Final = "OFFBEAT_TOKEN"
ROLE: Final = "OFFBEAT_ROLE"
"""The variable that makes a process the ``leader`` or the ``standby`` of its server."""
_token: str | None = None
"""The token that this process found in its environment, kept for further optimizers and for the report of a failure."""
ANY: Final = WorkerId(-1)
"""In an `InjectedSlowdown`: a worker drawn anew for each step; with a trace, every worker. In a `Late`: every server."""


@dataclass(frozen=True, kw_only=True)
class ReplayedTrace:
    """Name measured times to replay: worker p waits ``scale`` times the value in column ``column + p``, in the row of its iteration."""

    path: str
    """The file, absolute; each worker reads it on its own machine. `offbeat.traces` reads it."""
    job: str = ""
    """The name of a job in an npz file that has several."""
    column: int = 0
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class InjectedSlowdown:
    """Order ``seconds`` more for each step of ``worker`` while the version is in ``start`` .. ``stop`` (None: no end)."""

    worker: WorkerId
    seconds: Seconds
    start: Version = 0
    stop: Version | None = None
    trace: ReplayedTrace | None = None
    """Not None: each worker's seconds are those of the trace, and ``seconds`` is 0."""

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> InjectedSlowdown:
        """Return the order of which ``data`` is the `asdict`."""
        trace = data.get("trace")
        return cls(**{**data, "trace": None if trace is None else ReplayedTrace(**trace)})


@dataclass(frozen=True, kw_only=True)
class InjectedKill:
    """Order SIGKILL for ``worker`` once the job has reached ``version``."""

    worker: WorkerId
    version: Version


@dataclass(frozen=True, kw_only=True)
class Late:
    """Order that a block that ``server`` publishes (-1: any) reaches a worker ``seconds`` later, in ``share`` of the cases."""

    server: int
    seconds: Seconds
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class CheckpointOrder:
    """Order checkpoints of the job in ``folder``: every so many seconds or versions, of which the newest ``keep`` are kept."""

    folder: str
    every_s: Seconds | None = None
    every_versions: int | None = None
    keep: int = 2


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What servers and workers both know of a job before its script runs."""

    workers: int
    """The highest number of workers."""
    sync: str | None = None
    """The rule that overrides the script's; None: the script's."""
    wire: WireFormat | None = None
    """The wire format that overrides the script's; None: the script's."""
    batch: str | None = None
    """The batch sizes that override the script's, see `core.batch_sizes.BatchOrder`; None: the script's."""
    seed: int = 0
    timeout_s: Seconds = 10.0
    """Silence after which a worker is dead. Workers send a heartbeat ten times as often."""
    phases: bool = True
    """True if workers account for their time by phases."""
    plane: PlaneChoice = "host"
    slow: tuple[InjectedSlowdown, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JobSettings(CommonSettings):
    """Everything about a job that is known before its script runs."""

    least: int = 0
    """Number of workers with which the job begins; others are awaited. 0: it begins with all."""
    servers: int = 1
    progress_timeout_s: Seconds = 1800.0
    """Seconds that a worker's script may neither call the library nor wait in it before its process is killed; 0: for ever."""
    torchrun_env: bool = True
    """True if workers have torchrun's variables, for the script's own process group."""
    script: str = ""
    journal: str | None = None
    follow: tuple[str, ...] = ()
    """Kinds of journal records that server 0 sends the supervisor, for the processes that follow the job; ``*``: every kind."""
    kill: tuple[InjectedKill, ...] = ()
    late: tuple[Late, ...] = ()
    checkpoint: CheckpointOrder | None = None
    """None: the job makes no checkpoints."""
    resume: str | None = None
    """The checkpoint from which the job resumes; None: it begins anew."""
    replicas: int = 0
    """1: each server has a standby."""

    @property
    def begins(self) -> int:
        """The number of workers with which the job begins."""
        return self.least or self.workers

    @property
    def checkpoints(self) -> bool:
        """True if workers have to know of checkpoints: the job makes some, or resumes from one."""
        return self.checkpoint is not None or self.resume is not None

    def to_wire(self) -> dict[str, Any]:
        """Return the settings as plain data for a message."""
        return asdict(self)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> JobSettings:
        """Return the settings that `to_wire` was called on."""
        plain = dict(data)
        plain["follow"] = tuple(plain.get("follow", ()))
        plain["slow"] = tuple(map(InjectedSlowdown.from_plain, plain["slow"]))
        plain["kill"] = tuple(InjectedKill(**item) for item in plain["kill"])
        plain["late"] = tuple(Late(**item) for item in plain["late"])
        if plain.get("checkpoint") is not None:
            plain["checkpoint"] = CheckpointOrder(**plain["checkpoint"])
        return cls(**plain)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(CommonSettings):
    """What one worker process finds in its environment."""

    worker: WorkerId
    token: str = field(repr=False)
    servers: tuple[Address, ...]
    servers_return: bool = False
    """True if a server that dies may come back in a new process."""
    standbys: tuple[Address | None, ...] | None = None
    """Where the standbys of the servers listen, None for each that has none at present; None: the job has no replicas."""

    def to_environment(self) -> dict[str, str]:
        """Return the variables that `from_environment` reads."""
        return {
            "OFFBEAT_WORKER": str(self.worker),
            "OFFBEAT_WORKERS": str(self.workers),
            "OFFBEAT_TOKEN": self.token,
            "OFFBEAT_SERVERS": json.dumps(self.servers),
            "OFFBEAT_SEED": str(self.seed),
            "OFFBEAT_TIMEOUT": repr(self.timeout_s),
            "OFFBEAT_SLOW": json.dumps([asdict(slow) for slow in self.slow]),
            "OFFBEAT_SYNC": self.sync or "",
            "OFFBEAT_WIRE": self.wire or "",
            VARIABLE: self.batch or "",
            "OFFBEAT_SERVERS_RETURN": "1" if self.servers_return else "",
            "OFFBEAT_PHASES": "1" if self.phases else "",
            "OFFBEAT_PLANE": self.plane,
            "OFFBEAT_STANDBYS": "" if self.standbys is None else json.dumps(self.standbys),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> WorkerSettings | None:
        """Return the settings of this process; None if no launcher has started it.

        Raises:
            ConfigurationError: a variable is missing or cannot be read.
        """
        if "OFFBEAT_SERVERS" not in environment:
            return None
        try:
            return cls(
                worker=WorkerId(int(environment["OFFBEAT_WORKER"])),
                workers=int(environment["OFFBEAT_WORKERS"]),
                token=take_token() if environment is os.environ else environment["OFFBEAT_TOKEN"],
                servers=read_addresses(environment["OFFBEAT_SERVERS"]),
                seed=int(environment.get("OFFBEAT_SEED", "0")),
                timeout_s=float(environment.get("OFFBEAT_TIMEOUT", "10")),
                slow=tuple(map(InjectedSlowdown.from_plain, json.loads(environment.get("OFFBEAT_SLOW", "[]")))),
                sync=environment.get("OFFBEAT_SYNC") or None,
                wire=wire_format(wire) if (wire := environment.get("OFFBEAT_WIRE")) else None,
                batch=environment.get(VARIABLE) or None,
                servers_return=bool(environment.get("OFFBEAT_SERVERS_RETURN")),
                phases=bool(environment.get("OFFBEAT_PHASES")),
                plane=plane_choice(environment.get("OFFBEAT_PLANE", "host")),
                standbys=_read_standbys(environment.get("OFFBEAT_STANDBYS", "")),
            )
        except KeyError as error:
            if error.args[0] == TOKEN and environment is os.environ:
                raise ConfigurationError(
                    "OFFBEAT_SERVERS is set but OFFBEAT_TOKEN is not, as in a process that a worker has started: only the worker "
                    "itself has the token. Make the offbeat.DistributedOptimizer there, or unset OFFBEAT_SERVERS to train without the job"
                ) from None
            raise ConfigurationError(
                f"OFFBEAT_SERVERS is set but {error.args[0]} is not: start the script with 'offbeat run', or unset OFFBEAT_SERVERS"
            ) from None
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"an OFFBEAT_ variable cannot be read ({error}): start the script with 'offbeat run'") from None


def take_token() -> str:
    """Return the job's token, and remove it from ``os.environ``, so that neither child processes nor logs of the environment get it.

    On Linux it is also erased from what ``ps e`` and ``/proc/<pid>/environ`` show of this process and of its forks.

    Raises:
        KeyError: this process has never had a token.
    """
    global _token
    if TOKEN in os.environ:
        _token = os.environ.pop(TOKEN)
        environment_block.erase(TOKEN)
    if _token is None:
        raise KeyError(TOKEN)
    return _token


def known_token() -> str | None:
    """Return the token that this process found in its environment; None if there was none."""
    try:
        return take_token()
    except KeyError:
        return None


def read_addresses(text: str) -> tuple[Address, ...]:
    """Return addresses from their JSON form."""
    return tuple(_address(*one) for one in json.loads(text))


def _read_standbys(text: str) -> tuple[Address | None, ...] | None:
    return tuple(None if one is None else _address(*one) for one in json.loads(text)) if text else None


def _address(host: str, tcp: Sequence[Any], local: str) -> Address:
    return Address(host, (tcp[0], int(tcp[1])), local)
