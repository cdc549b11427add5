"""Read and choose addresses of machines, IPv4 or IPv6: what is loopback, what others can reach, how an address is spelled with a port."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import socket

WILDCARDS = {"", "0.0.0.0", "::"}
"""Every address of this machine."""
_MAPPED = "::ffff:"
# Addresses set aside for documentation (RFC 5737, RFC 3849): a datagram socket that connects to them sends nothing.
_PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@functools.cache
def loopback() -> str:
    """Return the address at which processes of this machine reach each other: 127.0.0.1, or ::1 where there is no IPv4."""
    return "127.0.0.1" if bindable("127.0.0.1") or not bindable("::1") else "::1"


def bindable(host: str) -> bool:
    """Return True if a socket of this machine can listen at one of the addresses of a name."""
    return bool(addresses_here(host))


def addresses_here(host: str) -> list[str]:
    """Return those addresses of a name at which this machine can listen."""
    found = []
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                found.append(str(address[0]))
    return found


def is_loopback(address: str) -> bool:
    """Return True for an address that only its own machine reaches.

    >>> is_loopback("127.0.1.1"), is_loopback("::ffff:127.0.0.1"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, True, False)
    """
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(plain(address).partition("%")[0]).is_loopback
    return False


def plain(address: str) -> str:
    """Return an IPv4 address that a socket for both families shows as IPv6, as what it is.

    >>> plain("::ffff:10.0.0.1"), plain("fd88::1")
    ('10.0.0.1', 'fd88::1')
    """
    return address.removeprefix(_MAPPED) if address.startswith(_MAPPED) and "." in address else address


def outgoing() -> str:
    """Return the address from which this machine would send to others; that of `loopback` if there is none."""
    for family, elsewhere in _PROBES:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            if not is_link_local(address := str(probe.getsockname()[0])):
                return address
    return loopback()


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address, or of a socket that listens at every address of this machine ("").

    >>> family_of("10.0.0.1").name, family_of("fd88::1").name
    ('AF_INET', 'AF_INET6')
    """
    return socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET


def split_port(text: str) -> tuple[str, str]:
    """Return the host and the port, "" if there is none, of HOST, HOST:PORT, an IPv6 address, or [ADDRESS]:PORT.

    >>> split_port("node0:29400"), split_port("fd88::1"), split_port("[fd88::1]:29400"), split_port("[fd88::1]")
    (('node0', '29400'), ('fd88::1', ''), ('fd88::1', '29400'), ('fd88::1', ''))
    """
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":")
    if text.count(":") != 1:
        return text, ""
    host, _, port = text.partition(":")
    return host, port


def spelled(host: str, port: int) -> str:
    """Return an address and a port as a user writes them.

    >>> spelled("node0", 29400), spelled("fd88::1", 29400)
    ('node0:29400', '[fd88::1]:29400')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_link_local(address: str) -> bool:
    """Return True for an IPv6 address that means something only together with an interface of this machine."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        return found.version == 6 and found.is_link_local
    return False
