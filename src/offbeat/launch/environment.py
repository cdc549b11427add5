"""Set the environment variables of servers and workers: their numbers, addresses, and their share of the machine.

Variables that the user has set are kept, except those by which a process joins this job, and OMP_WAIT_POLICY of servers that are new
processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import socket
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple

from offbeat.core.fleet import Role
from offbeat.errors import ConfigurationError
from offbeat.runtime.job.settings import ROLE, TOKEN, CommonSettings, JobSettings, WorkerSettings
from offbeat.transport.addresses import family_of, loopback
from offbeat.transport.base import Address
from offbeat.transport.tcp import why_not_listening
from offbeat.types import FIRST_WORKER, WorkerId

THREADS = "OMP_NUM_THREADS"
MMAP_THRESHOLD_BYTES = 1 << 30
OLD_MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 4 << 30
LOWEST_PORT, TRIES = 10_000, 20
"""The lowest port that `free_port` chooses (below are ports of well-known services), and the number of ports that it tries."""
_AGENT_STORE = ("TORCHELASTIC_USE_AGENT_STORE",)
"""Variables that make a process group use the store of the outer torchrun, which listens at another port."""


class Place(NamedTuple):
    """A worker's place, in torchrun's terms, for the script's own process group."""

    node: int
    local_rank: int
    """Number of the worker among the workers of its machine."""
    local_size: int
    """Number of workers on its machine."""
    address: str
    """Address of worker 0's machine, as the other machines reach it."""
    port: int
    """Port for the process group, free on worker 0's machine."""


def server_environment(servers: int, *, token: str, supervisor: Address, user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that all servers of this machine share.

    Args:
        servers: number of servers on this machine.
        token: authenticates the processes of the job to each other.
        supervisor: the supervisor's address.
        user: the variables that the job was started with.
    """
    return {
        **_defaults({THREADS: str(share_of_cores(servers))}, user),
        TOKEN: token,
        "OFFBEAT_SUPERVISOR": json.dumps([supervisor]),
        "OMP_WAIT_POLICY": "PASSIVE",  # a server's idle threads must not spin: the cores are the workers'
    }


def server_variables(number: int, role: Role, job: JobSettings, *, port: int, listen: str = "", local: str = "") -> dict[str, str]:
    """Return the variables by which a server's process knows which one it is. It has these beside `server_environment`.

    Args:
        number: the server.
        role: why the process is started.
        job: the job.
        port: the server's port; 0: the system chooses.
        listen: the address of this machine at which the server listens; "": loopback.
        local: the name of the local socket at which an earlier process of this server listened; "": a new one.
    """
    return {
        "OFFBEAT_SERVER": str(number),
        "OFFBEAT_PORT": str(port),
        ROLE: role if job.replicas else "",
        "OFFBEAT_LOCAL": local,
        "OFFBEAT_LISTEN": listen,
    }


def common_environment(workers: int, user: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that all workers of this machine share.

    Args:
        workers: number of workers on this machine.
        user: the variables that the job was started with. Variables of an outer torchrun are left out.
    """
    rest = {name: value for name, value in user.items() if name not in (*TORCHRUN, *_AGENT_STORE)}
    return _defaults({THREADS: str(share_of_cores(workers)), **_keep_memory(*platform.libc_ver())}, rest)


def torchrun_variables(worker: WorkerId, workers: int, place: Place) -> dict[str, str]:
    """Return the variables that torchrun would set, from which a script makes its own process group beside the job, or splits its data.

    Args:
        worker: the worker.
        workers: number of workers.
        place: the worker's place.
    """
    # Without TORCHELASTIC_RUN_ID: libraries such as Lightning take it as a sign of torchrun, and start a process group.
    return {
        "RANK": str(worker),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }


TORCHRUN: Final = frozenset(torchrun_variables(FIRST_WORKER, 1, Place(0, 0, 1, "", 0)))
"""The names of these variables."""


def free_port(host: str | None = None) -> int:
    """Return a port that is free, and below the range from which the kernel gives ports to connections, so that it stays free until use.

    Args:
        host: the address of the interface; "": all interfaces; None: loopback.

    Raises:
        ConfigurationError: no interface has this address.
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
    """Return the first port that the kernel may give to a connection; 32768, as on most systems, if that is unknown or too low."""
    with contextlib.suppress(OSError, ValueError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        if first >= LOWEST_PORT + TRIES:
            return first
    return 32768


def worker_settings(job: JobSettings, **own: Any) -> WorkerSettings:
    """Return what a worker's process knows of a job. ``own``: the other fields of `WorkerSettings`, which are not of every process."""
    return WorkerSettings(**{known.name: getattr(job, known.name) for known in fields(CommonSettings)}, **own)


def worker_variables(settings: WorkerSettings, place: Place | None) -> dict[str, str]:
    """Return the variables by which a worker's process joins its job. It has these beside `common_environment`.

    Args:
        settings: what the process knows of the job.
        place: the worker's place, for the script's own process group; None: do not set torchrun's variables.
    """
    group = {} if place is None else torchrun_variables(settings.worker, settings.workers, place)
    return {**group, **settings.to_environment()}


def _defaults(ours: Mapping[str, str], user: Mapping[str, str]) -> dict[str, str]:
    """Return the user's variables, and those of ``ours`` that the user has not set."""
    return {**user, **{name: value for name, value in ours.items() if name not in user}}


def _keep_memory(library: str, version: str) -> dict[str, str]:
    """Return variables that make glibc keep freed memory, since each backward pass allocates the gradients of large layers again.

    glibc 2.34 and older reject a threshold above 32 MiB, and would map every block above 128 KiB anew; 2.36 accepts any threshold.

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
