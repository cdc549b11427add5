"""Where a follower's page or figures are served: the addresses that users write, and the socket that listens there."""

from __future__ import annotations

import errno
import re
import socket
from typing import Final

from offbeat.errors import ConfigurationError

HOST: Final = "127.0.0.1"
EXTRA: Final = "pip install 'offbeat[view]'"
VALUE: Final = re.compile(r"(?:(?P<host>[^\s/:@]+|\[[0-9A-Fa-f:.]+\]):)?(?P<port>[0-9]{1,5})")
"""What may come after ``--dashboard``."""


def host_and_port(text: str, option: str) -> tuple[str, int]:
    """Return the host and the port of an option's value, PORT on this machine alone or HOST:PORT.

    Raises:
        ConfigurationError: it is neither.

    >>> host_and_port("9090", "--metrics"), host_and_port("[::1]:0", "--metrics")
    (('127.0.0.1', 9090), ('::1', 0))
    """
    found = VALUE.fullmatch(text)
    if found is None or int(found["port"]) > 65535:
        raise ConfigurationError(
            f"{option} {text}: must be a port up to 65535 (0: any free one), for instance 7860, or HOST:PORT to be seen from elsewhere"
        )
    return (found["host"] or HOST).strip("[]"), int(found["port"])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def why_not(host: str, port: int, error: OSError) -> str:
    """Return in words why `listen` has failed."""
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use by another program; choose another one, or leave the number out"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no address {host}; use 127.0.0.1, or 0.0.0.0 for all of its addresses"
    return f"cannot listen on port {port} of {host}: {error.strerror}"


def exposed(host: str) -> str | None:
    """Return a warning if other machines reach the page."""
    if host in ("127.0.0.1", "localhost", "::1"):
        return None
    return f"other machines can open this page at {host}, unencrypted: everyone who knows the address can see the job"
