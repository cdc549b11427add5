"""Readings of a machine on which all is well, to be made worse by tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offbeat.doctor.findings import Finding
from offbeat.doctor.machine_checks import check_machine
from offbeat.doctor.network_checks import check_network
from offbeat.doctor.readings import Certificate, Flow, Folder, Interface, Limits, Machine, Name, Package, Pair, Port, Torch

GIB = 1 << 30
GOOD = Machine(
    python=(3, 12, 3),
    system="Linux 6.8.0",
    offbeat="0.1.0",
    packages=(
        Package(name="torch", least="2.6", version="2.13.0+cpu"),
        Package(name="numpy", least="1.26", version="2.4.6"),
        Package(name="matplotlib", least="3.8", version=None, extras=("plots",)),
    ),
    torch=Torch(version="2.13.0+cpu", import_s=1.0, resident_nbytes=230 << 20),
    cores=16,
    affinity=16,
    limits=Limits(),
    memory_nbytes=64 * GIB,
    available_nbytes=60 * GIB,
    shm=Folder(nbytes=32 * GIB, free_nbytes=32 * GIB),
    files=65536,
    files_hard=65536,
    ports=(Port(number=29400, purpose="the supervisor"), Port(number=29401, purpose="server 0")),
    outgoing="10.0.0.5",
    interfaces=(
        Interface(name="lo", addresses=("127.0.0.1", "::1"), mtu=65536),
        Interface(name="eth0", addresses=("10.0.0.5",), mtu=1500, speed_mbit=10_000),
    ),
    host=Name(name="node1", addresses=("10.0.0.5",)),
    localhost=Name(name="localhost", addresses=("127.0.0.1", "::1")),
    tls=Certificate(),
    now_s=1_000_000.0,
)
FAST = Flow(way="TCP with TLS", there_bytes_per_s=1e9, back_bytes_per_s=9e8, round_trip_s=2e-4, clock_error_s=1e-4, interface="10.0.0.5")


def findings(**changes: Any) -> dict[str, Finding]:
    """Return what is found about the good machine with these changes, by name."""
    machine = replace(GOOD, **changes)
    return {one.name: one for one in [*check_machine(machine), *check_network(machine)]}


def pair(flow: Flow = FAST, **changes: Any) -> Pair:
    """Return a pair of machines on which all is well, with these changes."""
    good: dict[str, Any] = {"name": Name(name="node2", addresses=("10.0.0.6",)), "versions": ("offbeat 0.1.0", "torch 2.13.0")}
    return Pair(here="node1", there="node2:29400", flow=flow, **{**good, **changes})
