"""Set the environment variables of servers and workers of a local job: their numbers, the addresses, and their share of the machine.

Variables that the user has set are kept, except those with which a process joins this job, and OMP_WAIT_POLICY on servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.settings import JobSettings, WorkerSettings
from offbeat.transport.addresses import family_of, loopback
from offbeat.transport.base import Address
from offbeat.transport.tcp import why_not_listening
from offbeat.types import FIRST_WORKER, WorkerId

THREADS = "OMP_NUM_THREADS"
MMAP_THRESHOLD_BYTES = 1 << 30
OLD_MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 4 << 30
LOWEST_PORT, TRIES = 10_000, 20
"""Below the first are ports of well-known services; and how many ports `free_port` looks at."""
_AGENT_STORE = ("TORCHELASTIC_USE_AGENT_STORE",)
"""With this variable a process group would use the store of the outer torchrun, which listens at another port."""


class Place(NamedTuple):
    """Where a worker runs, in the words of torchrun, for the script's own process group."""

    node: int
    local_rank: int
    """The number of the worker among those of its machine."""
    local_size: int
    """The number of workers on its machine."""
    address: str
    """Of the machine of worker 0, as the others reach it."""
    port: int
    """Free on the machine of worker 0; its process group listens there."""


def server_environment(
    number: int,
    servers: int,
    *,
    token: str,
    supervisor: Address,
    port: int,
    listen: str = "",
    local: str = "",
    user: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return all variables of a server's process.

    Args:
        number: which server.
        servers: how many there are on this machine.
        token: authenticates the processes of the job to each other.
        supervisor: where the server reports.
        port: where the server listens; 0: the system chooses.
        listen: the address of this machine at which it listens; "": loopback.
        local: the name of the local socket at which an earlier process of this server has listened; "": a new one.
        user: the variables that the job was started with.
    """
    return {
        **_defaults({THREADS: str(share_of_cores(servers))}, user),
        "OFFBEAT_SERVER": str(number),
        "OFFBEAT_TOKEN": token,
        "OFFBEAT_SUPERVISOR": json.dumps([supervisor]),
        "OFFBEAT_PORT": str(port),
        "OFFBEAT_LISTEN": listen,
        "OFFBEAT_LOCAL": local,
        "OMP_WAIT_POLICY": "PASSIVE",  # a server's idle threads must not spin: the cores are the workers'
    }


def common_environment(workers: int, user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that are the same for all workers of this machine.

    Args:
        workers: how many there are on this machine.
        user: the variables that the job was started with. Variables of an outer torchrun are removed.
    """
    outer = {*torchrun_variables(FIRST_WORKER, 1, Place(0, 0, 1, "", 0)), *_AGENT_STORE}
    rest = {name: value for name, value in user.items() if name not in outer}
    return _defaults({THREADS: str(share_of_cores(workers)), **_keep_memory(*platform.libc_ver())}, rest)


def torchrun_variables(worker: WorkerId, workers: int, place: Place) -> dict[str, str]:
    """Return what torchrun would set, with which a script makes its own process group beside the job, and splits data.

    TORCHELASTIC_RUN_ID is not set: libraries such as Lightning take it as a sign of torchrun, and start a process group.

    Args:
        worker: which worker.
        workers: the number of workers.
        place: where it runs.
    """
    return {
        "RANK": str(worker),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }


def free_port(host: str | None = None) -> int:
    """Return a port that is free now, and that will not be given to a connection before it is used.

    From its range of local ports the kernel takes one for each connection that a process makes. So the port is one below that range.

    Args:
        host: the address of the interface; "": of all, None: loopback.

    Raises:
        ConfigurationError: the interface has no such address.
    """
    host = loopback() if host is None else host
    for port in random.SystemRandom().sample(range(LOWEST_PORT, _local_ports_begin()), TRIES):
        with socket.socket(family_of(host)) as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    with socket.socket(family_of(host)) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigurationError(why_not_listening(host, 0, error)) from error
        return int(probe.getsockname()[1])


def _local_ports_begin() -> int:
    """Return the first port that the kernel may choose itself, or the first of most systems."""
    with contextlib.suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if first >= LOWEST_PORT + TRIES:
            return first
    return 32768


def worker_environment(
    worker: WorkerId,
    job: JobSettings,
    *,
    token: str,
    servers: tuple[Address, ...],
    place: Place | None = None,
    servers_return: bool = False,
    standbys: tuple[Address | None, ...] | None = None,
    user: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return all variables of a worker's process in a job whose workers are all on this machine.

    Args:
        worker: which worker.
        job: its job.
        token: authenticates the processes of the job to each other.
        servers: where they listen, server 0 first.
        place: for the script's own process group; None: do not set torchrun's variables.
        servers_return: True if a server that dies may come back in a new process.
        standbys: where those of the servers listen, None for each that has none; None: the job has no replicas.
        user: the variables that the job was started with.
    """
    variables = worker_variables(worker, job, token=token, servers=servers, place=place, servers_return=servers_return, standbys=standbys)
    return {**common_environment(job.workers, user), **variables}


def worker_variables(
    worker: WorkerId,
    job: JobSettings,
    *,
    token: str,
    servers: tuple[Address, ...],
    place: Place | None = None,
    servers_return: bool = False,
    standbys: tuple[Address | None, ...] | None = None,
) -> dict[str, str]:
    """Return the variables with which a worker's process joins its job, to be added to those of `common_environment`. See above."""
    settings = WorkerSettings(
        worker=worker,
        workers=job.workers,
        token=token,
        servers=servers,
        seed=job.seed,
        timeout_s=job.timeout_s,
        slow=job.slow,
        sync=job.sync,
        wire=job.wire,
        phases=job.phases,
        batch=job.batch,
        servers_return=servers_return,
        standbys=standbys,
    )
    group = {} if place is None else torchrun_variables(worker, job.workers, place)
    return {**group, **settings.to_environment()}


def _defaults(ours: Mapping[str, str], user: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables, and ours where the user has set none."""
    return {**user, **{name: value for name, value in ours.items() if name not in user}}


def _keep_memory(library: str, version: str) -> dict[str, str]:
    """Return settings that make glibc keep freed memory: each backward pass allocates the gradients of large layers again.

    glibc 2.34 and older refuse a threshold above 32 MiB, and would then map every block above 128 KiB anew (2.36 takes any).

    >>> _keep_memory("glibc", "2.36")
    {'MALLOC_MMAP_THRESHOLD_': '1073741824', 'MALLOC_TRIM_THRESHOLD_': '4294967296'}
    >>> _keep_memory("glibc", "2.28")["MALLOC_MMAP_THRESHOLD_"]
    '33554432'
    """
    if library != "glibc":
        return {}
    recent = tuple(int(part) for part in version.split(".")[:2]) >= (2, 36)
    threshold = MMAP_THRESHOLD_BYTES if recent else OLD_MMAP_THRESHOLD_BYTES
    return {"MALLOC_MMAP_THRESHOLD_": str(threshold), "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD_BYTES)}


def share_of_cores(processes: int) -> int:
    """Return this machine's cores divided by the number of processes that compute at the same time, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
