"""Judge the readings of the network: of one machine, and of pairs of machines. Pure; nothing is read here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from offbeat.doctor.findings import Finding, good, note, problem
from offbeat.doctor.readings import Interface, Machine, Name, Pair
from offbeat.transport.addresses import is_loopback
from offbeat.transport.schema import readable
from offbeat.types import Seconds

SLOW_NAME_S: Final[Seconds] = 1.0
SLOW_ADDRESS_S: Final[Seconds] = 1.0
"""Seconds for an attempt to connect, above which it counts as one that holds up the others."""
CLOCK_S: Final[Seconds] = 0.5
"""Difference between clocks above which the times of logs and journals of two machines cannot be compared."""
SHARED_BYTES_PER_S: Final = 500e6
LOOPBACK_BYTES_PER_S: Final = 100e6
NETWORK_BYTES_PER_S: Final = 50e6
"""Below these, more is wrong than that the machine is old."""
EXAMPLE_NBYTES: Final = 100e6
"""A model of 25 million parameters."""
DAY_S: Final[Seconds] = 86400.0
SOON_DAYS: Final = 14
_VIRTUAL: Final = ("docker", "br-", "virbr", "veth", "cni", "flannel", "lxc", "podman")
"""What the names of interfaces begin with that lead to this machine's own containers, and to no other machine."""


def check_network(machine: Machine) -> list[Finding]:
    """Return what is to be said of one machine's network."""
    return [
        _loopback(machine),
        *_ports(machine),
        _address(machine),
        _own_name(machine),
        *([_tls(machine)] if machine.tls is not None else []),
    ]


def _loopback(machine: Machine) -> Finding:
    if machine.loopback_failure:
        return problem("loopback", machine.loopback_failure, "ip link set lo up, as root")
    where = machine.localhost
    seen = f"a port can be had at {machine.loopback}; localhost is {', '.join(where.addresses) or 'not known'}"
    if where.failure or not where.addresses or not all(map(is_loopback, where.addresses)):
        why = where.failure or "scripts that connect to localhost leave this machine"
        return note("loopback", f"{seen} ({why})", "write into /etc/hosts: 127.0.0.1 localhost", addresses=list(where.addresses))
    return good("loopback", seen, addresses=list(where.addresses))


def _ports(machine: Machine) -> list[Finding]:
    if not machine.ports:
        return []
    first, last = machine.ports[0].number, machine.ports[-1].number
    taken = [port for port in machine.ports if port.failure]
    figures = {"ports": [port.number for port in machine.ports], "taken": [port.number for port in taken]}
    if not taken:
        return [good("ports", f"{first} to {last} are free, for the supervisor and {len(machine.ports) - 1} server(s)", **figures)]
    seen = "; ".join(f"{port.failure} ({port.purpose})" for port in taken)
    remedy = "look who has it (ss -ltnp), or choose another range: offbeat agent --port N. Jobs on one machine take any free port"
    return [(problem if taken[0].asked else note)("ports", seen, remedy, **figures)]


def interface_of(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Return the interface that has an address; None: it is not known."""
    plain = address.removeprefix("::ffff:")
    return next((one for one in interfaces if plain in one.addresses), None)


def described(address: str, interfaces: Sequence[Interface]) -> str:
    """Return an address with its interface, in words.

    >>> described("10.0.0.1", [Interface(name="eth0", addresses=("10.0.0.1",), mtu=1500, speed_mbit=10_000)])
    '10.0.0.1 (eth0, MTU 1500, 10000 Mbit/s)'
    """
    found = interface_of(address, interfaces)
    if found is None:
        return address
    more = [f"MTU {found.mtu}"] * (found.mtu is not None) + [f"{found.speed_mbit} Mbit/s"] * (found.speed_mbit is not None)
    return f"{address} ({', '.join([found.name, *more])})"


def own_address(machine: Machine) -> str:
    """Return the address by which others most likely reach this machine; that of loopback if it has no other."""
    if machine.outgoing and not is_loopback(machine.outgoing):
        return machine.outgoing
    addresses = (address for one in machine.interfaces for address in one.addresses)
    return next((address for address in addresses if not is_loopback(address)), machine.loopback)


def _address(machine: Machine) -> Finding:
    others = [
        f"{address} ({one.name})"
        for one in machine.interfaces
        for address in one.addresses
        if address != machine.outgoing and not is_loopback(address)
    ]
    figures = {"address": machine.outgoing, "interfaces": {one.name: list(one.addresses) for one in machine.interfaces}}
    if is_loopback(machine.outgoing) or not machine.outgoing:
        if not others:
            return note(
                "address", "this machine has no address for others", "only jobs on this machine work; else look at ip link", **figures
            )
        seen = f"no route leads beyond this machine's own networks: {', '.join(others)}"
        return note("address", seen, "name the address to use: offbeat agent --advertise ADDRESS; or add a default route", **figures)
    seen = f"to others: {described(machine.outgoing, machine.interfaces)}" + (f"; also {', '.join(others)}" if others else "")
    chosen = interface_of(machine.outgoing, machine.interfaces)
    if chosen is not None and chosen.name.startswith(_VIRTUAL):
        remedy = "if other machines cannot reach it, name the right address: offbeat agent --advertise ADDRESS"
        return note("address", f"{seen}; {chosen.name} leads to containers of this machine", remedy, **figures)
    return good("address", seen, **figures)


def _own_name(machine: Machine) -> Finding:
    host = machine.host
    figures = {"name": host.name, "addresses": list(host.addresses), "took_s": host.took_s}
    if host.failure or not host.addresses:
        seen = f"{host.name} cannot be resolved: {host.failure or 'it has no address'}"
        return note("own name", seen, f"add {host.name} to /etc/hosts or DNS: torch.distributed and others look it up", **figures)
    seen = f"{host.name} is {', '.join(host.addresses)}"
    if host.took_s > SLOW_NAME_S:
        return note("own name", f"{seen}; to find it took {host.took_s:.1f} s", "mend DNS, or add it to /etc/hosts", **figures)
    own = own_address(machine)
    if all(map(is_loopback, host.addresses)) and not is_loopback(own):
        remedy = (
            f"for jobs on several machines give {host.name} its address in /etc/hosts ({own} {host.name}), or set "
            "GLOO_SOCKET_IFNAME: torch.distributed finds its interface by this name"
        )
        return note("own name", f"{seen}, which only this machine reaches", remedy, **figures)
    return good("own name", seen, **figures)


def _tls(machine: Machine) -> Finding:
    tls = machine.tls
    assert tls is not None
    if not tls.files:
        if tls.failure:
            return problem("TLS", f"no certificate can be made: {tls.failure}", "pip install --force-reinstall cryptography, or --no-tls")
        return good("TLS", "each process makes a certificate for itself, and a handshake succeeds")
    left_s = None if tls.ends_s is None else tls.ends_s - machine.now_s
    figures = {"file": tls.files, "ends_s": tls.ends_s, "begins_s": tls.begins_s}
    if left_s is not None and left_s <= 0.0:
        return problem(
            "TLS", f"{tls.files} is valid no more, for {-left_s / DAY_S:.1f} days", "have it signed anew; look at the clock", **figures
        )
    if tls.begins_s is not None and tls.begins_s > machine.now_s:
        wait_s = tls.begins_s - machine.now_s
        return problem("TLS", f"{tls.files} is not valid yet, for {wait_s / DAY_S:.2f} days", "set this machine's clock (date)", **figures)
    if tls.failure:
        return problem(
            "TLS", tls.failure, "name a certificate for servers and clients, its key, and the authority that signed it", **figures
        )
    if tls.key_mode is not None and tls.key_mode & 0o077:
        return note("TLS", f"others may read the key of {tls.files} (mode {tls.key_mode:o})", "chmod 600 the file with the key", **figures)
    seen = tls.files + ("" if left_s is None else f" is valid for {left_s / DAY_S:.0f} more days")
    if left_s is not None and left_s < SOON_DAYS * DAY_S:
        return note("TLS", seen, "have it signed anew before a job outlives it", **figures)
    return good("TLS", f"{seen}, and a handshake succeeds", **figures)


def check_pair(pair: Pair, machine: Machine | None, versions: Sequence[str]) -> list[Finding]:
    """Return what is to be said of the way from one machine to another.

    Args:
        pair: what was measured.
        machine: the one from which it was measured; None: another one has measured it.
        versions: what must be equal on all machines.
    """
    interfaces = machine.interfaces if machine is not None else ()
    found = [] if pair.name is None else _resolved(pair.name, pair)
    if pair.name is not None and pair.name.failure:
        return found
    if pair.flow.failure:
        remedy = "start offbeat doctor --serve there, with the same token and --tls options; open the port in the firewall"
        if not pair.here:
            return [problem("processes", f"two processes of this machine do not reach each other: {pair.flow.failure}", "look at loopback")]
        return [*found, problem(f"{pair.here} to {pair.there}", pair.flow.failure, remedy)]
    return [
        *found,
        _throughput(pair, interfaces),
        *([_clock(pair)] if pair.here else []),
        *([_software(pair, versions)] if pair.versions and tuple(pair.versions) != tuple(versions) else []),
        *_of_the_other(pair),
    ]


def _resolved(name: Name, pair: Pair) -> list[Finding]:
    about = f"name {name.name}"
    if name.failure or not name.addresses:
        return [
            problem(
                about,
                f"cannot be resolved: {name.failure or 'no address'}",
                "add it to DNS or /etc/hosts of this machine, or give an address",
            )
        ]
    seen = f"is {', '.join(name.addresses)}"
    figures = {"addresses": list(name.addresses), "took_s": name.took_s}
    if any(map(is_loopback, name.addresses)) and name.name not in ("localhost", *name.addresses):
        remedy = f"give {name.name} the address of its machine in /etc/hosts: here it leads back to this machine"
        return [problem(about, f"{seen} here, which is this machine itself", remedy, **figures)]
    dead = [one for one in pair.attempts if one.failure]
    alive = [one for one in pair.attempts if not one.failure]
    if dead and alive:
        lost_s = sum(one.took_s for one in pair.attempts[: pair.attempts.index(alive[0])])
        failures = ", ".join(f"{one.address} {one.failure} after {one.took_s:.1f} s" for one in dead)
        remedy = f"use {alive[0].address} in place of the name (--rdzv-endpoint, --advertise), or remove the others from /etc/hosts or DNS"
        before = f"; each connection by this name waits {lost_s:.1f} s for it first" if lost_s > SLOW_ADDRESS_S else ""
        return [note(about, f"{seen}; {failures}{before}", remedy, **figures)]
    if name.took_s > SLOW_NAME_S:
        return [note(about, f"{seen}; to find it took {name.took_s:.1f} s", "mend DNS, or add it to /etc/hosts", **figures)]
    return [good(about, seen, **figures)] if (name.name,) != name.addresses else []


def _throughput(pair: Pair, interfaces: Sequence[Interface]) -> Finding:
    flow = pair.flow
    slower = min(flow.there_bytes_per_s, flow.back_bytes_per_s)
    shared, near = not flow.interface, bool(flow.interface) and is_loopback(flow.interface)
    least = SHARED_BYTES_PER_S if shared else LOOPBACK_BYTES_PER_S if near else NETWORK_BYTES_PER_S
    seen = (
        f"{rate(flow.there_bytes_per_s)} there, {rate(flow.back_bytes_per_s)} back, round trip "
        f"{flow.round_trip_s * 1e3:.2f} ms; 100 MB of gradients take {EXAMPLE_NBYTES / max(slower, 1.0):.2g} s"
    )
    figures = {
        "there_bytes_per_s": round(flow.there_bytes_per_s),
        "back_bytes_per_s": round(flow.back_bytes_per_s),
        "round_trip_s": flow.round_trip_s,
        "interface": flow.interface,
    }
    name = f"{pair.here} to {pair.there}" if pair.here else flow.way
    if pair.here:
        seen = f"{flow.way} from {described(flow.interface, interfaces)}: {seen}"
    if slower >= least:
        return good(name, seen, **figures)
    if shared or near:
        return note(name, seen, "the processor is taken by others, or throttled: look at top, and at the line on cores", **figures)
    remedy = "look at the interface above: is it the fast one? Else --wire bf16 or int8, or a rule that exchanges rarely (ensemble)"
    return note(name, seen, remedy, **figures)


def rate(bytes_per_s: float) -> str:
    """Return a rate in words.

    >>> rate(2.5e9), rate(117e6), rate(900e3)
    ('2.5 GB/s', '117 MB/s', '0.9 MB/s')
    """
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.1f} GB/s"
    return f"{bytes_per_s / 1e6:.0f} MB/s" if bytes_per_s >= 10e6 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _clock(pair: Pair) -> Finding:
    ahead, error = pair.flow.clock_s, pair.flow.clock_error_s
    figures = {"ahead_s": ahead, "error_s": error}
    name = f"clock of {pair.there}"
    if abs(ahead) - error <= CLOCK_S:
        return good(name, f"within {abs(ahead) + error:.2g} s of that of {pair.here}", **figures)
    seen = f"{abs(ahead):.2f} s {'ahead of' if ahead > 0 else 'behind'} that of {pair.here} (+- {error:.2g} s): times in their logs differ"
    return note(
        name, seen, "synchronize both: timedatectl set-ntp true, or chronyc makestep. Training itself uses no wall clock", **figures
    )


def _software(pair: Pair, versions: Sequence[str]) -> Finding:
    there, here = ", ".join(map(readable, pair.versions)), ", ".join(versions)
    return problem(
        f"versions of {pair.there}", f"{there}; here {here}", "install the same versions everywhere: an agent is refused otherwise"
    )


def _of_the_other(pair: Pair) -> list[Finding]:
    """Return what the other machine has found about itself, but for what is good there."""
    found = []
    for one in pair.findings:
        make = {"note": note, "problem": problem}.get(one["state"])
        if make is not None:
            found.append(make(f"{pair.there}: {readable(one['name'])}", readable(one["seen"]), readable(one["remedy"])))
    return found
