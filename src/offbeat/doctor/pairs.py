"""Measure all pairs: two processes of this machine, or this machine and all that run ``offbeat doctor --serve``."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from typing import Final

from offbeat.doctor import network, probe
from offbeat.doctor.readings import Attempt, Flow, Pair
from offbeat.errors import ConfigurationError
from offbeat.launch.tasks import target
from offbeat.runtime.job.settings import TOKEN, read_addresses
from offbeat.transport.addresses import is_loopback, spelled
from offbeat.transport.base import Address
from offbeat.transport.hub import SocketHub
from offbeat.transport.tls import Tls
from offbeat.types import Seconds

TRY_S: Final[Seconds] = 3.0
"""Seconds for one attempt to reach one address of a name."""
PEER_S: Final[Seconds] = 30.0
"""Seconds that the second process of this machine has to end."""
MACHINES_MAX: Final = 64
Target = tuple[str, int]


def targets(texts: Sequence[str]) -> list[Target]:
    """Return the machines that ``--connect`` names: HOST or HOST:PORT, several separated by commas.

    Raises:
        ConfigurationError: a port is no number, a host is missing, or there are too many.

    >>> targets(["node1,node2:29500", "[fd88::1]:7"])
    [('node1', 29400), ('node2', 29500), ('fd88::1', 7)]
    """
    found = list(dict.fromkeys(target(one, "; several with commas") for text in texts for one in text.split(",")))
    if len(found) > MACHINES_MAX:
        raise ConfigurationError(f"--connect names {len(found)} machines: at most {MACHINES_MAX} are measured at once")
    return found


def within_this_machine(token: str, seconds: Seconds) -> list[Pair]:
    """Return what two processes of this machine measure: through shared memory, if they can share it, and over TCP."""
    environment = {**os.environ, TOKEN: token}
    command = [sys.executable, "-m", "offbeat.doctor.peer"]
    try:
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    except OSError as error:
        return [Pair(here="", there="", flow=Flow(failure=f"no second process can be started: {error.strerror}"))]
    assert peer.stdout is not None and peer.stdin is not None and peer.stderr is not None
    with peer:
        try:
            line = peer.stdout.readline()
            if not line:
                why = (peer.stderr.read().strip().splitlines() or ["without a word"])[-1]
                return [Pair(here="", there="", flow=Flow(failure=f"the second process has ended: {why}"))]
            address = read_addresses(f"[{line}]")[0]
            flows = [_measured(token, address, seconds, local=True)]
            if flows[0].interface == "":
                flows.append(_measured(token, address._replace(host="", local=""), seconds, local=False))
            return [Pair(here="", there="", flow=flow) for flow in flows]
        finally:
            peer.stdin.close()
            try:
                peer.wait(PEER_S)
            except subprocess.TimeoutExpired:
                peer.kill()


def _measured(token: str, address: Address, seconds: Seconds, *, local: bool) -> Flow:
    with contextlib.closing(SocketHub(token, local=local)) as hub:
        return probe.measure(hub, address, seconds)[0]


def between_machines(hub: SocketHub, here: str, machines: Sequence[Target], tls: Tls | None, seconds: Seconds) -> list[Pair]:
    """Return what all pairs of machines measure, this one with each first.

    Pairs without a common machine are measured at the same time, so that no measurement disturbs another, and n machines take about
    n - 1 times as long as two.

    Args:
        hub: of this process, which does not listen.
        here: this machine's name.
        machines: where the others serve.
        tls: how connections are encrypted, as the hub does it.
        seconds: for each pair.
    """
    names = [network.name(host) for host, _ in machines]
    found: dict[tuple[int, int], Pair] = {}
    labels = [here, *(spelled(*machine) for machine in machines)]

    def one(pair: tuple[int, int]) -> None:
        first, second = pair
        target = machines[second - 1]
        with contextlib.closing(hub.another()) as own:
            if first == 0:
                name = names[second - 1]
                attempts = tuple(_attempt(address, target[1]) for address in name.addresses) if len(name.addresses) > 1 else ()
                flow, visit = probe.measure(own, Address("", target, ""), seconds)
                found[pair] = Pair(
                    here=labels[0],
                    there=labels[second],
                    name=name,
                    attempts=attempts,
                    flow=_named(flow, tls),
                    versions=visit.versions,
                    findings=visit.findings,
                )
            else:
                asked = Address("", machines[first - 1], "")
                flow = probe.ask_to_measure(own, asked, target, seconds)
                back = Flow() if flow.failure else probe.ask_to_measure(own, Address("", target, ""), machines[first - 1], 0.0)
                found[pair] = Pair(here=labels[first], there=labels[second], flow=_named(flow, tls))
                if back.failure:
                    found[second, first] = Pair(here=labels[second], there=labels[first], flow=back)

    with ThreadPoolExecutor(max_workers=max(1, len(labels) // 2)) as pool:
        for turn in turns(len(labels)):
            reached = [pair for pair in turn if all(_reached(found, number) for number in pair)]
            list(pool.map(one, reached))
    return [found[pair] for pair in sorted(found)]


def _reached(found: dict[tuple[int, int], Pair], number: int) -> bool:
    """Return False for a machine that this one could not reach: to ask it for others would only repeat the failure."""
    direct = found.get((0, number))
    return direct is None or not direct.flow.failure


def turns(machines: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of machines, in turns in which each machine has at most one; machine 0 meets all others first.

    >>> turns(4)
    [[(0, 1)], [(0, 2)], [(0, 3)], [(1, 2)], [(1, 3)], [(2, 3)]]
    >>> [len(turns(n)) for n in (2, 3, 9)]
    [1, 3, 15]
    """
    left = list(combinations(range(1, machines), 2))
    found = [[(0, number)] for number in range(1, machines)]
    while left:
        busy: set[int] = set()
        turn = []
        for pair in left:
            if not busy.intersection(pair):
                turn.append(pair)
                busy.update(pair)
        left = [pair for pair in left if pair not in turn]
        found.append(turn)
    return found


def _named(flow: Flow, tls: Tls | None) -> Flow:
    """Return what was measured, with the encryption in the name of the way."""
    encrypted = tls is not None and flow.interface and (tls.everywhere or not is_loopback(flow.interface))
    return replace(flow, way="TCP with TLS") if encrypted else flow


def _attempt(address: str, port: int) -> Attempt:
    """Return whether anybody answers at one address of a name."""
    began = time.monotonic()
    failure = ""
    try:
        socket.create_connection((address, port), TRY_S).close()
    except OSError as error:
        failure = "does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return Attempt(address=address, took_s=time.monotonic() - began, failure=failure)
