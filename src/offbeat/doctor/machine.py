"""Read this machine. Nothing is judged here, and nothing here raises: `machine_checks` and `network_checks` judge."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import time

from offbeat import __version__
from offbeat.doctor import limits, network, software
from offbeat.doctor.readings import Certificate, Machine
from offbeat.launch.environment import free_port
from offbeat.transport.addresses import loopback, outgoing
from offbeat.transport.shm import AVAILABLE, MemoryBlock
from offbeat.transport.tls import AwaitsPeerError, Identity, Tls

_TRIAL_NBYTES = 1 << 20
_HANDSHAKE_TURNS = 20


def read(*, tls: Tls | None, port: int | None, servers: int) -> Machine:
    """Return all readings of this machine. Takes as long as PyTorch takes to be imported.

    Args:
        tls: how the job's connections are encrypted; None: not at all.
        port: where the job's supervisor listens; None: at the usual port.
        servers: how many servers the job has.
    """
    memory, available = limits.memory()
    files, files_hard = limits.open_files()
    here = loopback()
    return Machine(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.release()}",
        offbeat=__version__,
        packages=software.packages(),
        torch=software.torch(),
        driver=software.driver(),
        cores=os.cpu_count() or 1,
        affinity=limits.affinity(),
        limits=limits.limits(),
        memory_nbytes=memory,
        available_nbytes=available,
        shm=limits.shm(),
        memfd_failure=network.failure(_share_memory) if AVAILABLE else f"{sys.platform} has no memfd_create",
        files=files,
        files_hard=files_hard,
        ports=network.ports(port, servers),
        loopback=here,
        loopback_failure=network.failure(free_port, here),
        outgoing=outgoing(),
        interfaces=network.interfaces(),
        host=network.name(socket.gethostname()),
        localhost=network.name("localhost"),
        tls=None if tls is None else certificate(tls),
        now_s=time.time(),
    )


def _share_memory() -> None:
    MemoryBlock.allocate(_TRIAL_NBYTES, "doctor").close()


def certificate(tls: Tls) -> Certificate:
    """Return what becomes of a TLS handshake of this machine with itself, and the dates of its certificate."""
    begins_s, ends_s = _dates(tls.certificate) if tls.certificate else (None, None)
    mode = None
    if key := tls.key or tls.certificate:
        with contextlib.suppress(OSError):
            mode = os.stat(key).st_mode & 0o777
    failure = network.failure(_shake_hands, tls)
    return Certificate(files=tls.certificate, failure=failure, begins_s=begins_s, ends_s=ends_s, key_mode=mode)


def _shake_hands(tls: Tls) -> None:
    """Make a TLS connection within this process: the chain, the dates and the purposes of the certificate are checked by both ends.

    Raises:
        ConfigurationError: the certificate cannot be used.
        RefusedError: one end does not accept the other.
    """
    identity = Identity(tls)
    pair = socket.socketpair()
    for raw in pair:
        raw.setblocking(False)
    ends = [identity.wrap(raw, server=server) for raw, server in zip(pair, (True, False), strict=True)]
    try:
        for _ in range(_HANDSHAKE_TURNS):
            established = 0
            for end in ends:
                end.begin_turn(1)
                try:
                    end.establish()
                    established += 1
                except (AwaitsPeerError, BlockingIOError):
                    pass
            if established == len(ends):
                return
    finally:
        for end in ends:
            end.close()


def _dates(path: str) -> tuple[float | None, float | None]:
    with contextlib.suppress(OSError, ValueError, ImportError):
        from cryptography import x509

        with open(path, "rb") as file:
            found = x509.load_pem_x509_certificate(file.read())
        return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    return None, None
