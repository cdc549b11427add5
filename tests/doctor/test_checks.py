"""Bad machines and bad networks: each is found, with its state and with what to do; a good one is good throughout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offbeat.doctor.findings import Finding, lines, tally
from offbeat.doctor.machine_checks import check_machine
from offbeat.doctor.network_checks import check_network, check_pair
from offbeat.doctor.readings import (
    Attempt,
    Certificate,
    Driver,
    Flow,
    Folder,
    Gpu,
    Interface,
    Limits,
    Machine,
    Name,
    Package,
    Pair,
    Port,
    Torch,
)

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


VERSIONS = ("offbeat 0.1.0", "torch 2.13.0")
DAY_S = 86400.0


def test_all_is_well() -> None:
    assert {one.state for one in findings().values()} == {"good"}
    assert {one.state for one in check_pair(pair(), GOOD, VERSIONS)} == {"good"}


BAD: list[tuple[dict[str, Any], str, str, str, str]] = [
    ({"python": (3, 10, 2)}, "Python", "problem", "3.10.2", "Python 3.11"),
    ({"system": "Darwin 23.1"}, "Python", "note", "Darwin", "use Linux"),
    (
        {"packages": (Package(name="numpy", least="1.26", version="1.24.0"), Package(name="rich", least="13", version=None))},
        "packages",
        "problem",
        "numpy 1.24.0, 1.26 or newer is needed; rich is not installed",
        "pip install 'numpy>=1.26' 'rich>=13'",
    ),
    ({"packages": ()}, "packages", "note", "not installed as a package", "pip install ."),
    (
        {"packages": (*GOOD.packages, Package(name="ray", least="2.60", version="2.9", extras=("ray",)))},
        "extras",
        "note",
        "ray 2.9, 2.60 or newer is needed",
        "offbeat[ray]",
    ),
    ({"torch": Torch(failure="libc10.so: cannot open")}, "PyTorch", "problem", "libc10.so", "pip install"),
    ({"limits": Limits(cpus=0.5)}, "cores", "note", "0.5 of 16 by the control group", "OMP_NUM_THREADS: at most 1"),
    ({"affinity": 2}, "cores", "note", "2 of 16 by affinity", "taskset"),
    ({"limits": Limits(memory_nbytes=256 << 20, used_nbytes=100 << 20)}, "memory", "problem", "156 MiB are free", "raise the container's"),
    ({"available_nbytes": 100 << 20}, "memory", "problem", "100 MiB are free of 65,536", "the machine's memory"),
    ({"limits": Limits(memory_nbytes=GIB // 2, used_nbytes=None)}, "memory", "note", "512 MiB are free", "few workers"),
    ({"memory_nbytes": None, "available_nbytes": None}, "memory", "note", "neither", "mount /proc"),
    ({"memfd_failure": "Operation not permitted"}, "shared memory", "problem", "Operation not permitted", "OFFBEAT_HOST=apart"),
    ({"shm": Folder(nbytes=64 << 20, free_nbytes=64 << 20)}, "/dev/shm", "note", "64 of 64 MiB", "--shm-size"),
    ({"shm": Folder(nbytes=8 * GIB, free_nbytes=1 << 20)}, "/dev/shm", "note", "1 of 8,192 MiB", "remove what"),
    ({"shm": None}, "/dev/shm", "note", "there is none", "mount a tmpfs"),
    ({"files": 256, "files_hard": 1 << 20}, "open files", "note", "at most 256 a process", "ulimit -n 65536"),
    ({"files": 256, "files_hard": 256}, "open files", "note", "room for about 24 workers", "as root"),
    ({"files": 64, "files_hard": None}, "open files", "problem", "about 0 workers", "ulimit -n 65536"),
    ({"loopback_failure": "this machine has no address 127.0.0.1"}, "loopback", "problem", "no address 127.0.0.1", "ip link set lo up"),
    ({"localhost": Name(name="localhost", addresses=("10.9.9.9",))}, "loopback", "note", "10.9.9.9", "/etc/hosts"),
    ({"localhost": Name(name="localhost", failure="unknown")}, "loopback", "note", "unknown", "/etc/hosts"),
    ({"ports": (Port(number=29400, purpose="the supervisor", failure="port 29400 is taken"),)}, "ports", "note", "taken", "--port"),
    ({"ports": (Port(number=7, purpose="the supervisor", failure="is taken", asked=True),)}, "ports", "problem", "taken", "ss -ltnp"),
    ({"outgoing": "127.0.0.1"}, "address", "note", "own networks: 10.0.0.5 (eth0)", "--advertise"),
    (
        {"outgoing": "172.17.0.1", "interfaces": (*GOOD.interfaces, Interface(name="docker0", addresses=("172.17.0.1",)))},
        "address",
        "note",
        "docker0 leads to containers",
        "--advertise",
    ),
    ({"host": Name(name="node1", addresses=("127.0.1.1",))}, "own name", "note", "127.0.1.1, which only", "GLOO_SOCKET_IFNAME"),
    ({"host": Name(name="node1", failure="not known")}, "own name", "note", "cannot be resolved: not known", "/etc/hosts"),
    ({"host": Name(name="node1", addresses=("10.0.0.5",), took_s=5.0)}, "own name", "note", "took 5.0 s", "DNS"),
    ({"tls": Certificate(failure="no cryptography")}, "TLS", "problem", "no cryptography", "--no-tls"),
    ({"tls": Certificate(files="a.pem", ends_s=GOOD.now_s - DAY_S)}, "TLS", "problem", "valid no more, for 1.0 days", "signed anew"),
    ({"tls": Certificate(files="a.pem", begins_s=GOOD.now_s + DAY_S)}, "TLS", "problem", "not valid yet", "clock"),
    ({"tls": Certificate(files="a.pem", ends_s=GOOD.now_s + 3 * DAY_S)}, "TLS", "note", "for 3 more days", "signed anew"),
    ({"tls": Certificate(files="a.pem", key_mode=0o644)}, "TLS", "note", "mode 644", "chmod 600"),
    ({"tls": Certificate(files="a.pem", failure="unsuitable purpose")}, "TLS", "problem", "unsuitable purpose", "servers and clients"),
    ({"driver": Driver(version="550.1")}, "GPU", "note", "built without CUDA", "pytorch.org"),
    (
        {"driver": Driver(version="550.1", gpus=(Gpu(name="H100", nbytes=80 * GIB, free_nbytes=9 * GIB),))},
        "GPU 0",
        "note",
        "other processes use it",
        "nvidia",
    ),
    (
        {"driver": Driver(version="550.1", gpus=(Gpu(name="H100", nbytes=GIB, free_nbytes=GIB, throttled="heat"),))},
        "GPU 0",
        "note",
        "reduced: heat",
        "nvidia-smi",
    ),
]


@pytest.mark.parametrize(("changes", "name", "state", "seen", "remedy"), BAD, ids=[f"{name}: {seen}" for _, name, _, seen, _ in BAD])
def test_a_bad_machine_is_found(changes: dict[str, Any], name: str, state: str, seen: str, remedy: str) -> None:
    found = findings(**changes)[name]
    assert (found.state, seen in found.seen, remedy in found.remedy) == (state, True, True), found
    others = {one.name for one in findings(**changes).values() if one.state != "good"}
    assert others <= {name, "GPU"}, "nothing else is wrong with it"


def test_devices_are_good_where_pytorch_can_use_them() -> None:
    torch = Torch(version="2.13.0", cuda="12.8", devices=("H100",))
    gpus = (Gpu(name="H100", nbytes=80 * GIB, free_nbytes=79 * GIB, temperature_c=40),)
    found = findings(torch=torch, driver=Driver(version="550.1", gpus=gpus))
    assert found["GPU"].state == found["GPU 0"].state == "good"
    assert "40 degrees C" in found["GPU 0"].seen
    without_library = findings(torch=torch, driver=Driver(version="550.1", failure="nvidia-ml-py is not installed"))
    assert without_library["GPU"].remedy == "pip install nvidia-ml-py"


TWO = Name(name="node2", addresses=("fd00::6", "10.0.0.6"))
ATTEMPTS = (Attempt(address="fd00::6", took_s=3.0, failure="does not answer"), Attempt(address="10.0.0.6", took_s=0.01))
UNREACHED = Flow(failure="nobody listens")
NEAR = replace(FAST, way="TCP", interface="127.0.0.1", there_bytes_per_s=1e6)
WORSE = (
    {"name": "cores\x1b[2J", "state": "note", "seen": "half", "remedy": "more"},
    {"name": "x", "state": "good", "seen": "", "remedy": ""},
)
CLOCK, NAME, WAY = "clock of node2:29400", "name node2", "node1 to node2:29400"
PAIRS: list[tuple[Pair, str, str, str, str]] = [
    (pair(replace(FAST, clock_s=3.0, clock_error_s=0.1)), CLOCK, "note", "3.00 s ahead of that of node1", "timedatectl"),
    (pair(replace(FAST, clock_s=-3.0)), CLOCK, "note", "behind", "timedatectl"),
    (pair(replace(FAST, clock_s=3.0, clock_error_s=3.0)), CLOCK, "good", "within 6 s", ""),
    (pair(name=Name(name="node2", addresses=("127.0.1.1",))), NAME, "problem", "which is this machine itself", "/etc/hosts"),
    (pair(name=TWO, attempts=ATTEMPTS), NAME, "note", "waits 3.0 s for it first", "use 10.0.0.6"),
    (pair(name=TWO, attempts=ATTEMPTS[::-1]), NAME, "note", "fd00::6 does not answer after 3.0 s", "use 10.0.0.6"),
    (pair(UNREACHED, name=None), WAY, "problem", "nobody listens", "doctor --serve"),
    (pair(UNREACHED, name=Name(name="node2", failure="not known")), NAME, "problem", "not known", "/etc/hosts"),
    (Pair(here="", there="", flow=UNREACHED), "processes", "problem", "nobody listens", "loopback"),
    (pair(replace(FAST, back_bytes_per_s=1e6)), WAY, "note", "10.0.0.5 (eth0, MTU 1500, 10000 Mbit/s): 1.0 GB/s there, 1.0 MB/s back", ""),
    (Pair(here="", there="", flow=NEAR), "TCP", "note", "1.0 MB/s there", "processor"),
    (pair(versions=("offbeat 0.2.0", "torch 2.13.0")), "versions of node2:29400", "problem", "offbeat 0.2.0", "same versions"),
    (pair(findings=WORSE), "node2:29400: cores?[2J", "note", "half", "more"),
]


@pytest.mark.parametrize(("seen_pair", "name", "state", "seen", "remedy"), PAIRS)
def test_a_bad_way_to_another_machine_is_found(seen_pair: Pair, name: str, state: str, seen: str, remedy: str) -> None:
    found = check_pair(seen_pair, GOOD, VERSIONS)
    (one,) = [finding for finding in found if finding.name == name]
    assert (one.state, seen in one.seen, remedy in one.remedy) == (state, True, True), one
    assert not any(finding.state != "good" for finding in found if finding is not one), "nothing else is wrong with it"
    assert len(found) == 1 or not seen_pair.flow.failure, "a failure is said once"
    assert ("waits" in one.seen) == (seen_pair.attempts == ATTEMPTS), "the dead address is tried first"
    assert not any(finding.name.endswith(": x") for finding in found), "what is good there is not repeated"


@pytest.mark.parametrize("width", [10, 48, 80, 120])
def test_lines_fit_and_are_plain_ascii(width: int) -> None:
    everything = [finding for changes, *_ in BAD for finding in findings(**changes).values()]
    everything += check_pair(pair(name=Name(name="n\xf6de" * 30, addresses=("127.0.0.1",))), GOOD, VERSIONS)
    shown = [line for _, line in lines(everything, width)]
    assert all(line.isascii() for line in shown)
    long = [line for line in shown if len(line) > max(width, 48) and len(line.split()[-1]) < 20]
    assert long == []
    assert tally(everything).startswith(f"{sum(one.state == 'problem' for one in everything)} problems")
