"""Listen, connect and accept with TCP sockets and local (Unix, abstract) ones, with settings that suit streams of tensors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import select
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from offbeat.errors import ConfigurationError, JobError
from offbeat.transport.addresses import WILDCARDS, outgoing, plain

CONNECT_TIMEOUT_S = 10.0
BACKLOG = 1024
CONNECTIONS_MAX = 1 << 14
"""Most accepted connections that have proved the token, and fewer where the limit of open files is lower; the next one is refused."""
SPARE_DESCRIPTORS = 64
"""Descriptors that connections leave to the process's own files: journal, checkpoints, memory."""
LOCAL_FAMILY = getattr(socket, "AF_UNIX", None)
LOCAL_BUFFER_NBYTES = 1 << 20
LOOPBACK_BUFFER_NBYTES = 512 << 10
TCP_RTO_MAX_MS = 44
"""An option of Linux 6.15 and later, for which Python has no name yet."""
LONGEST_RETRY_MS = 1000
GIVE_UP_MS = 924_000


def listen_tcp(host: str, port: int, before: Callable[[], object] = lambda: None) -> socket.socket:
    """Return a listening socket.

    Args:
        host: a name or an address of this machine, "" or "::" for all of them, IPv4 and IPv6.
        port: the port; 0: one that the system chooses.
        before: called once the port is this socket's, before anybody can connect to it.

    Raises:
        ConfigurationError: the port is taken or forbidden, or the host is not an address of this machine.
    """
    dual = host in ("", "::") and socket.has_dualstack_ipv6()
    try:
        found = socket.getaddrinfo("::" if dual else host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except (socket.gaierror, OverflowError, UnicodeError) as error:
        raise ConfigurationError(f"cannot listen on {host!r}, port {port}: {error}. Give an address of this machine") from error
    sock = socket.socket(family, kind, protocol)
    try:
        if dual:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        before()
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigurationError(why_not_listening(host, port, error)) from error
    sock.setblocking(False)
    return sock


def why_not_listening(host: str, port: int, error: Exception) -> str:
    """Return why a process cannot listen there, and what to change."""
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.EADDRINUSE:
        return f"port {port} of {host or 'this machine'} is taken by another process: choose another, or 0 to let the system choose"
    if code == errno.EACCES:
        return f"port {port} may not be used by this user: choose one above 1023, or 0 to let the system choose"
    if code == errno.EADDRNOTAVAIL and host == "127.0.0.1":
        return "this machine has no address 127.0.0.1, by which the processes of a job reach each other: ip link set lo up, as root"
    if code == errno.EADDRNOTAVAIL:
        return f"{host!r} is not an address of this machine, so it cannot listen on port {port} there: give one that is, or ::, or 0.0.0.0"
    return f"cannot listen on {host!r}, port {port}: {error}"


def reachable_name(host: str) -> str:
    """Return the name by which others reach this host: itself, or for a wildcard the address from which this machine would send."""
    return outgoing() if host in WILDCARDS else host


def connect_tcp(host: str, port: int, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket:
    """Return a connected socket.

    Raises:
        JobError: no process listens there, or there is no answer within ``timeout_s``.
    """
    try:
        sock = socket.create_connection((host, port), timeout_s)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise JobError(f"nobody listens at {host}, port {port} ({why}): is the server running, and the address right?") from error
    try:
        # If no process listens, a port of the ephemeral range may get connected to itself.
        is_itself = sock.getsockname() == sock.getpeername()
    except OSError:  # the peer has ended since, and the connection was reset
        is_itself = True
    if is_itself:
        sock.close()
        raise JobError(f"nobody listens at {host}, port {port}: is the server running, and the address right?")
    tune_tcp(sock)
    return sock


def tune_tcp(sock: socket.socket) -> None:
    """Set a socket up: small messages leave at once, and reading never blocks."""
    sock.setblocking(False)
    # A peer that has reset the connection has no name, and needs no tuning: reading reports the reset.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sock.getpeername()[0] == sock.getsockname()[0]:
            # Within a machine there is no delay to fill, and bytes are read back while they are still in the cache: 25 to 40 % less
            # processor time than with buffers that grow by themselves. Between machines these must grow.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_NBYTES)
        elif sys.platform == "linux":
            # While a link is down the pauses between two attempts would double up to two minutes, and go on after the link is back.
            sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, LONGEST_RETRY_MS)
            # The number of attempts must not end the connection before the job's own timeout: this is the time that 15 doublings take.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVE_UP_MS)


def listen_local(name: str = "") -> tuple[socket.socket, str]:
    """Return a listening local socket and its name, by default a new one. Abstract names have no file, so none is left behind."""
    name = name or f"offbeat-{secrets.token_hex(8)}"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock, name


def connect_local(name: str, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket | None:
    """Return a connected local socket; None if no process of this user listens under this name, or not within ``timeout_s``.

    A name has no permissions: once the process that listened has ended, any other user can take its name.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(f"\0{name}")
        ours = same_user(sock)
    except OSError:
        ours = False
    if not ours:
        sock.close()
        return None
    tune_local(sock)
    return sock


def tune_local(sock: socket.socket) -> None:
    """Set a socket up: room for a burst of messages, and reading never blocks."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_NBYTES)
    sock.setblocking(False)


def describe_peer(sock: socket.socket) -> str:
    """Return the other end, in words."""
    with contextlib.suppress(OSError):
        if sock.family == socket.AF_UNIX:
            return f"process {_credentials(sock)[0]} of this host"
        host, port = sock.getpeername()[:2]
        return f"{plain(host)}, port {port}"
    return "a peer that is gone"


def same_user(sock: socket.socket) -> bool:
    """Return True if the other end of a local socket runs as this user, or root. Abstract names have no permissions."""
    return peer_user(sock) in {os.getuid(), 0}


def peer_user(sock: socket.socket) -> int:
    """Return the user at the other end of a local socket: of a listening process, when it began to listen."""
    return _credentials(sock)[1]


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end of a local socket."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", packed)
    return process, user


def connections_max() -> int:
    """Return how many accepted connections this process may have at a time."""
    files = _open_files_max()
    return CONNECTIONS_MAX if files is None else max(1, min(CONNECTIONS_MAX, files - SPARE_DESCRIPTORS))


def why_no_more() -> str:
    """Return why `connections_max` is what it is, and the knob, in words."""
    files = _open_files_max()
    if files is None or files - SPARE_DESCRIPTORS >= CONNECTIONS_MAX:
        return f"at most {CONNECTIONS_MAX:,}"
    return f"it may have {files:,} open files, of which {SPARE_DESCRIPTORS} are for its own (raise ulimit -n)"


def _open_files_max() -> int | None:
    """Return this process's limit of open files; None: there is none."""
    with contextlib.suppress(ImportError, OSError):
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return None if files == resource.RLIM_INFINITY else files
    return None


@functools.cache
def _processes() -> str:
    """Return a text that is equal in processes which have numbers of one namespace; "": this system has no such thing."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def process_identity() -> str:
    """Return a text that names this process to others of this machine, see `has_ended`."""
    return f"{_processes()}-{os.getpid()}"


def has_ended(process: str) -> bool | None:
    """Return whether a process has ended, by its `process_identity`; None: this process cannot know.

    >>> has_ended(process_identity()), has_ended("elsewhere-1")
    (False, None)
    """
    namespace, _, number = process.rpartition("-")
    if not namespace or namespace != _processes() or not number.isdecimal():
        return None
    try:
        descriptor = os.pidfd_open(int(number))
    except ProcessLookupError:
        return True
    except (OSError, OverflowError, AttributeError):
        return None
    try:
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        return bool(ended.poll(0))
    finally:
        os.close(descriptor)
