"""Define what is read from a machine and from a pair of machines, as plain data. None stands for what could not be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.types import Seconds


@dataclass(frozen=True, kw_only=True)
class Package:
    """One distribution that offbeat needs, or can use."""

    name: str
    least: str
    """The oldest version that offbeat works with; "": any."""
    version: str | None
    """None: it is not installed."""
    extras: tuple[str, ...] = ()
    """The extras of offbeat that install it; (): offbeat always needs it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the control groups of a process leave of the machine; None: no limit, or it cannot be read."""

    cpus: float | None = None
    """Cores' worth of processor time."""
    memory_nbytes: int | None = None
    used_nbytes: int | None = None
    """Of ``memory_nbytes``, without pages of files that the kernel can drop."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The size of a file system in memory."""

    nbytes: int
    free_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Torch:
    """What a child process has found by importing PyTorch."""

    failure: str = ""
    """Why PyTorch cannot be imported; "": it can."""
    version: str = ""
    import_s: Seconds = 0.0
    resident_nbytes: int = 0
    """The memory of a process that has imported PyTorch."""
    cuda: str | None = None
    """The CUDA version of this build; None: it is for processors only."""
    devices: tuple[str, ...] = ()
    """The names of the devices that PyTorch can use."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One device, as NVIDIA's driver shows it."""

    name: str
    nbytes: int
    free_nbytes: int
    temperature_c: int | None = None
    throttled: str = ""
    """Why its clock is reduced at present; "": it is not."""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """NVIDIA's driver."""

    version: str | None = None
    """None: there is none."""
    gpus: tuple[Gpu, ...] = ()
    failure: str = ""
    """Why the driver could not be asked; "": it was."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One network interface that is up."""

    name: str
    addresses: tuple[str, ...]
    mtu: int | None = None
    speed_mbit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Name:
    """What a name resolves to."""

    name: str
    addresses: tuple[str, ...] = ()
    """In the order in which connections try them."""
    took_s: Seconds = 0.0
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port that a job needs."""

    number: int
    purpose: str
    failure: str = ""
    """Why no process can listen there; "": one can."""
    asked: bool = False
    """True if the user has named this port."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The TLS material of a job."""

    files: str = ""
    """The file of the certificate; "": each process makes a certificate for itself."""
    failure: str = ""
    """Why it cannot be used; "": a handshake with itself has succeeded."""
    begins_s: float | None = None
    """When it becomes valid, in seconds since 1970; None: unknown, or made for the job."""
    ends_s: float | None = None
    key_mode: int | None = None
    """Permission bits of the file with the key."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All that is read from this machine."""

    python: tuple[int, int, int]
    system: str
    """The kernel's name and release."""
    offbeat: str
    packages: tuple[Package, ...]
    torch: Torch
    driver: Driver = Driver()
    cores: int
    affinity: int | None = None
    """How many of them this process may use."""
    limits: Limits = Limits()
    memory_nbytes: int | None = None
    available_nbytes: int | None = None
    shm: Folder | None = None
    """/dev/shm; None: there is none."""
    memfd_failure: str = ""
    """Why memory cannot be shared between processes; "": it can."""
    files: int | None = None
    """Most open files of a process; None: no limit."""
    files_hard: int | None = None
    """The limit up to which the user may raise it."""
    ports: tuple[Port, ...] = ()
    loopback: str = "127.0.0.1"
    loopback_failure: str = ""
    """Why no process can listen at ``loopback``; "": one can."""
    outgoing: str = ""
    """The address from which this machine sends to others; that of loopback if there is none."""
    interfaces: tuple[Interface, ...] = ()
    host: Name
    """This machine's own name."""
    localhost: Name
    tls: Certificate | None = None
    """None: the job does not use TLS."""
    now_s: float = 0.0
    """The wall clock, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt to reach one address of a machine."""

    address: str
    took_s: Seconds
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The measured data plane between two processes, seen from the one that has connected."""

    way: str = ""
    """What carried the bytes: shared memory, TCP, or TCP with TLS."""
    there_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0
    round_trip_s: Seconds = 0.0
    """The shortest of several."""
    clock_s: Seconds = 0.0
    """How far the other machine's wall clock is ahead of this one's."""
    clock_error_s: Seconds = 0.0
    """At most so far is ``clock_s`` from the truth."""
    interface: str = ""
    """This end's address; "": the ends share memory."""
    failure: str = ""
    """Why nothing was measured; "": it was."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What was found between two machines."""

    here: str
    """"": both ends are processes of one machine."""
    there: str
    """As the user names it."""
    name: Name | None = None
    """What the host of ``there`` resolves to; None: seen by another machine."""
    attempts: tuple[Attempt, ...] = ()
    flow: Flow
    versions: tuple[str, ...] = ()
    """Of the software that all machines of a job must have alike, on the other machine."""
    findings: tuple[Mapping[str, Any], ...] = ()
    """What the other machine has found about itself."""
