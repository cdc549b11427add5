"""Read how this machine is connected: interfaces, names, ports."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from offbeat.doctor.readings import Interface, Name, Port
from offbeat.errors import OffbeatError
from offbeat.launch.tasks import PORT
from offbeat.transport.tcp import listen_tcp

_LIST_INTERFACES: Final = 0x8912
"""SIOCGIFCONF of Linux: all interfaces with an IPv4 address, each with each of its addresses."""
_ROOM_NBYTES: Final = 1 << 16
_REQUEST_NBYTES: Final = 40
_LINK_LOCAL_SCOPE: Final = "20"


def interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """Return this machine's interfaces that have addresses; IPv6 addresses of a single link are left out."""
    found: dict[str, list[str]] = {}
    for name, address in [*_ipv4(), *_ipv6(root / "proc" / "net" / "if_inet6")]:
        if address not in found.setdefault(name, []):
            found[name].append(address)
    about = root / "sys" / "class" / "net"
    return tuple(
        Interface(name=name, addresses=tuple(addresses), mtu=_number(about / name / "mtu"), speed_mbit=_number(about / name / "speed"))
        for name, addresses in found.items()
    )


def _ipv4() -> Iterable[tuple[str, str]]:
    if sys.platform != "linux":
        return []
    room = array.array("B", bytes(_ROOM_NBYTES))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, _LIST_INTERFACES, struct.pack("iL", len(room), room.buffer_info()[0]))
        nbytes = struct.unpack("iL", answer)[0]
        data = room.tobytes()[:nbytes]
        requests = [data[at : at + _REQUEST_NBYTES] for at in range(0, nbytes, _REQUEST_NBYTES)]
        return [(one[:16].split(b"\0")[0].decode(errors="replace"), socket.inet_ntoa(one[20:24])) for one in requests]
    return []


def _ipv6(table: Path) -> Iterable[tuple[str, str]]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        rows = [line.split() for line in table.read_text().splitlines()]
        return [(row[5], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))) for row in rows if row[3] != _LINK_LOCAL_SCOPE]
    return []


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        value = int(path.read_text())
        return value if value > 0 else None
    return None


def name(host: str) -> Name:
    """Return what a name resolves to, in the order in which connections try the addresses."""
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Name(name=host, took_s=time.monotonic() - began, failure=why)
    addresses = dict.fromkeys(str(address[0]) for *_, address in found)
    return Name(name=host, addresses=tuple(addresses), took_s=time.monotonic() - began)


def ports(first: int | None, servers: int) -> tuple[Port, ...]:
    """Return whether the ports of a job on several machines can be had here: the supervisor's, and one for each server above it.

    Args:
        first: the supervisor's; None: that of agents where nothing else is said.
        servers: how many servers the job has.
    """
    purposes = ["the supervisor", *(f"server {number}" for number in range(servers))]
    return tuple(
        Port(number=number, purpose=purpose, failure=failure(_listen, number), asked=first is not None)
        for number, purpose in enumerate(purposes, start=PORT if first is None else first)
    )


def _listen(number: int) -> None:
    listen_tcp("", number).close()


def failure(attempt: Callable[..., object], *arguments: Any) -> str:
    """Return why an attempt fails, called with these arguments; "": it does not."""
    try:
        attempt(*arguments)
    except (OffbeatError, OSError, ImportError) as error:
        return str(error)
    return ""
