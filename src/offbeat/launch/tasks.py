"""Read from the environment which task of which engine this process is: torchrun, Slurm, MPI, or pods that Kubernetes numbers.

An engine starts the same command several times. Its variables give each process its number, the number of processes, and (most of them) the
first one's machine. Without an engine, options give these: ``--nnodes``, ``--node-rank`` and ``--rdzv-endpoint``.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from offbeat.errors import ConfigurationError
from offbeat.transport.addresses import is_link_local, split_port

PORT = 29400
"""Default port of the supervisor: torchrun's default for its rendezvous."""
SLURM_PORTS = range(20000, 30000)
BY_HAND = "offbeat agent"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One of the processes that an engine has started with the same command."""

    engine: str
    """The engine's name in messages."""
    rank: int | None
    """Number of this task; None: the supervisor gives it one."""
    size: int
    """Highest number of tasks."""
    local_size: int = 1
    """Number of tasks on this machine."""
    machines: int | None = None
    """Number of machines that must have come before the job begins; None: all tasks must have."""
    host: str = ""
    """Machine of the first task, as the others reach it; "": this machine."""
    port: int = 0
    """Port of the job's supervisor there; 0: a store or a file has it."""
    store: tuple[str, int] | None = None
    """Host and port of torchrun's store; None: there is none."""
    run: str = ""
    """Torchrun's name for the job."""
    job: str = ""
    """A text that all tasks of a job share, and no other job of this machine has."""

    @property
    def least(self) -> int:
        """The number of tasks with which the job begins."""
        return self.size if self.machines is None else min(self.size, self.machines * self.local_size)

    @property
    def never_again(self) -> str:
        """The engine's name if the engine never restarts a task that has ended; "" otherwise."""
        return self.engine if self.engine in ("Slurm", "Open MPI", "MPI") else ""

    @property
    def alone(self) -> bool:
        """True if all tasks are on this machine."""
        return self.size == self.local_size


def task_of(
    *,
    nnodes: str | None = None,
    node_rank: int | None = None,
    endpoint: str | None = None,
    port: int = 0,
    environment: Mapping[str, str] = os.environ,
    hosts_of: Callable[[str], list[str]] | None = None,
) -> Task:
    """Return the task that this process is.

    Args:
        nnodes: ``--nnodes``: ``N`` or ``MIN:MAX`` machines.
        node_rank: ``--node-rank``: the number of this machine.
        endpoint: ``--rdzv-endpoint``: ``HOST`` or ``HOST:PORT`` of the supervisor.
        port: ``--port``: the supervisor's port; 0: the endpoint's or the engine's.
        environment: of this process.
        hosts_of: returns the machines of a Slurm node list; None: ask ``scontrol``.

    Raises:
        ConfigurationError: options contradict the environment or each other, or something is missing.

    >>> ranks = dict(RANK="3", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    >>> task = task_of(environment=dict(ranks, MASTER_ADDR="node0", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="none"))
    >>> task.engine, task.rank, task.size, task.local_size, task.store
    ('torchrun', 3, 4, 2, ('node0', 29500))
    >>> task = task_of(nnodes="2:4", endpoint="10.0.0.1", environment={})
    >>> task.rank, task.size, task.least, task.host, task.port
    (None, 4, 2, '10.0.0.1', 29400)
    """
    least, most = _nodes(nnodes)
    host, at = _endpoint(endpoint, port)
    found = _of_environment(environment, hosts_of or _scontrol)
    if found is None:
        if most is None:
            raise ConfigurationError(
                "no engine has started this process (neither torchrun, srun, mpirun nor a numbered pod): start it with one of them, or "
                "type on each machine: offbeat agent --nnodes=N --rdzv-endpoint=FIRST_MACHINE:PORT train.py"
            )
        if not host and most > 1:
            raise ConfigurationError(f"--nnodes {nnodes}: also say where the first machine is, with --rdzv-endpoint=HOST:PORT")
        job = f"{host}-{at}" if most > 1 else str(os.getpid())
        return Task(engine=BY_HAND, rank=_checked(node_rank, most), size=most, machines=least, host=host, port=at, job=job)
    if node_rank is not None:
        raise ConfigurationError(f"--node-rank {node_rank}: {found.engine} has numbered this task {found.rank} already; leave it out")
    if host:
        found = replace(found, host=host, port=at, store=None)
    elif port and found.port:
        found = replace(found, port=port)  # a task without a port gets the supervisor's address from a store or a file
    if least is not None:
        found = replace(found, machines=least)
    if not found.host and not found.alone:
        raise ConfigurationError(
            f"{found.engine} has started {found.size} tasks, {found.local_size} of them on this machine, but does not say where the first "
            "one is: add --rdzv-endpoint=HOST:PORT with the name or address of the first task's machine"
        )
    return found


def _of_environment(environment: Mapping[str, str], hosts_of: Callable[[str], list[str]]) -> Task | None:
    def number(name: str, default: int | None = None) -> int:
        text = environment.get(name, "")
        if not text.isdecimal():
            if default is None:
                raise ConfigurationError(f"{name}={text!r} in the environment is no number, so this process does not know which task it is")
            return default
        return int(text)

    host, port, run = environment.get("MASTER_ADDR", ""), number("MASTER_PORT", PORT), environment.get("TORCHELASTIC_RUN_ID")
    of_mpi = environment.get("PMIX_NAMESPACE", environment.get("PMI_ID_NAMESPACE", str(os.getppid())))
    # Variables with a task's number, the number of tasks, and that of this machine's; and what no other job of this machine has.
    for engine, rank, size, local, job in (
        ("the environment (RANK, WORLD_SIZE)", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", f"{run}-{host}-{port}"),
        ("Slurm", "SLURM_PROCID", "SLURM_STEP_NODELIST", "", ""),
        ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", of_mpi),
        ("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", of_mpi),
        ("Kubernetes", "JOB_COMPLETION_INDEX", "OFFBEAT_NODES", "", "kubernetes"),
    ):
        if rank not in environment or size not in environment:
            continue
        if engine == "Slurm":
            number_of_job, step = number("SLURM_JOB_ID"), number("SLURM_STEP_ID", 0)
            return Task(
                engine=engine,
                rank=number(rank),
                size=number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS", 1)),
                local_size=_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))[number("SLURM_NODEID", 0)],
                host=hosts_of(environment[size])[0],
                port=SLURM_PORTS[(7 * number_of_job + step) % len(SLURM_PORTS)],
                job=f"slurm-{number_of_job}-{step}",
            )
        task = Task(engine=engine, rank=number(rank), size=number(size), local_size=number(local, 1), host=host, port=port, job=job)
        if rank == "RANK" and run is not None:
            return replace(task, engine="torchrun", port=0, store=(host, port), run=run)
        return replace(task, port=0) if engine.endswith("MPI") and not host else task
    return None


def _nodes(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise ConfigurationError(f"--nnodes {text}: write N or MIN:MAX, for instance 2:4")
    return int(match[1]), int(match[2] or match[1])


def _endpoint(text: str | None, wanted: int) -> tuple[str, int]:
    """Return the supervisor's host and port. ``wanted``: the port of ``--port``; 0: not given."""
    if not text:
        return "", 0
    wanted = wanted if 0 < wanted < 65536 else 0  # `options.check` rejects other numbers
    host, port = split_port(text)
    port = port or str(wanted or PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(f"--rdzv-endpoint {text}: write HOST or HOST:PORT, for instance node0:{PORT} or [fd00::1]:{PORT}")
    if wanted not in (0, int(port)):
        raise ConfigurationError(
            f"--port {wanted}: the other machines would look for the supervisor at port {port}, as --rdzv-endpoint {text} says; "
            "leave one of the two ports out"
        )
    return checked_host(host, "--rdzv-endpoint"), int(port)


def target(text: str, hint: str = "") -> tuple[str, int]:
    """Return the host and the port that ``--connect`` names: HOST or HOST:PORT. ``hint`` ends the error's remedy.

    Raises:
        ConfigurationError: it is neither.

    >>> target("node1"), target("[fd88::1]:7")
    (('node1', 29400), ('fd88::1', 7))
    """
    host, port = split_port(text := text.strip())
    if not host or not (port == "" or (port.isdecimal() and 1 <= int(port) <= 65535)):
        raise ConfigurationError(f"--connect {text!r}: write HOST or HOST:PORT, with a port from 1 to 65535{hint}")
    return host, int(port) if port else PORT


def _checked(node_rank: int | None, most: int) -> int | None:
    if node_rank is not None and not 0 <= node_rank < most:
        raise ConfigurationError(f"--node-rank {node_rank}: machines are numbered 0 to {most - 1} (--nnodes)")
    return node_rank


def _tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node of a Slurm step.

    >>> _tasks_per_node("2(x2),1")
    [2, 2, 1]
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigurationError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read: expected a form such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _scontrol(nodes: str) -> list[str]:
    try:
        result = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=30, check=True)
        return result.stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"scontrol cannot expand the node list {nodes!r} ({error}): add --rdzv-endpoint=HOST:PORT with the machine of task 0"
        ) from None


def checked_host(host: str, option: str) -> str:
    """Return a host from the user, without brackets.

    Raises:
        ConfigurationError: it is a link-local IPv6 address.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if is_link_local(bare):
        raise ConfigurationError(
            f"{option} {host}: a link-local address means something only on one machine, with the name of an interface; give a global "
            "address, a unique local one (fd...), or a name"
        )
    return bare
