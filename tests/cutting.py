"""End connections of a live process from outside, as a firewall, a NAT or a reset on the way would: the process and its peers live on."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Iterator

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def connections(pid: int) -> Iterator[socket.socket]:
    """Duplicates of the connected stream sockets of a process, TCP and local; each is closed when the next is asked for."""
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    continue
                if (descriptor := _libc.syscall(_PIDFD_GETFD, process, int(name), 0)) >= 0:
                    with socket.socket(fileno=descriptor) as sock:
                        sock.getpeername()
                        yield sock
    finally:
        os.close(process)


def cut(pid: int, how: int = socket.SHUT_RDWR) -> int:
    """End the connections of a process to others. Returns how many there were."""
    count = 0
    for sock in connections(pid):
        # Both ends of a pair, as the hub wakes itself by, have no names; so has the end of a local socket that connected.
        if sock.family != socket.AF_UNIX or sock.getpeername() or sock.getsockname():
            sock.shutdown(how)
            count += 1
    return count


def reset(pid: int) -> int:
    """End the connections of a process to others, those over TCP by a reset at both ends. Returns how many there were."""
    count = 0
    for sock in connections(pid):
        if sock.family != socket.AF_UNIX:
            count += _libc.connect(sock.fileno(), bytes(16), 16) == 0  # to AF_UNSPEC: the kernel sends the reset
    return count + cut(pid)
