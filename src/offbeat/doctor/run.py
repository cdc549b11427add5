"""Run the checks in order, show each block of findings as soon as it is known, and serve other machines."""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.text import Text

from offbeat.doctor import machine as reader
from offbeat.doctor import pairs
from offbeat.doctor.findings import STYLES, Finding, lines, tally
from offbeat.doctor.machine_checks import check_machine
from offbeat.doctor.messages import Visit
from offbeat.doctor.network_checks import check_network, check_pair, own_address
from offbeat.doctor.peer import Peer
from offbeat.doctor.readings import Machine, Pair
from offbeat.errors import FAILED, ConfigurationError
from offbeat.guarded import say
from offbeat.launch.agent_messages import versions
from offbeat.launch.tasks import PORT
from offbeat.launch.token import MAKE_ONE
from offbeat.transport.addresses import WILDCARDS, spelled
from offbeat.transport.hub import SocketHub
from offbeat.transport.tls import Tls
from offbeat.types import Seconds


@dataclass(frozen=True, kw_only=True)
class Order:
    """The options of ``offbeat doctor``, checked."""

    machines: tuple[pairs.Target, ...] = ()
    """Where other machines serve."""
    serve: bool = False
    listen: str = ""
    port: int | None = None
    """Of the job's supervisor, and where this command serves; None: the usual one."""
    servers: int = 1
    seconds: Seconds = 1.0
    """For each pair."""
    token: str | None = None
    tls: Tls | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if (self.serve or self.machines) and self.token is None:
            raise ConfigurationError(
                "--serve and --connect need the secret of the job: type once  "
                f"{MAKE_ONE.format(file='FILE')}  and type on each machine: offbeat doctor ... --token-file FILE (or OFFBEAT_TOKEN_FILE)"
            )


@dataclass
class Report:
    """Findings in blocks, shown as they come; with JSON, all at the end."""

    screen: Console
    as_json: bool
    blocks: dict[str, list[Finding]] = field(default_factory=dict)

    def add(self, title: str, findings: Sequence[Finding]) -> None:
        """Show a block of findings."""
        self.blocks[title] = list(findings)
        if self.as_json or not findings:
            return
        self.screen.print(Text(f"{title}:"), soft_wrap=True)
        for state, line in lines(findings, min(self.screen.width, 120) - 2):
            self.screen.print(Text(f"  {line}", style=STYLES[state] if state != "good" else ""), soft_wrap=True)

    @property
    def all(self) -> list[Finding]:
        """Return all findings so far."""
        return [one for block in self.blocks.values() for one in block]

    def close(self, host: str) -> int:
        """Show the sum. Returns the exit status: that of a failure if a job would stop."""
        ok = all(one.state != "problem" for one in self.all)
        if self.as_json:
            findings = [{"block": title, **asdict(one)} for title, block in self.blocks.items() for one in block]
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self.screen.file.write(json.dumps({"host": host, "time": now, "ok": ok, "findings": findings}, indent=1) + "\n")
            self.screen.file.flush()
        else:
            self.screen.print(Text(tally(self.all)), soft_wrap=True)
        return 0 if ok else FAILED


def run(order: Order, screen: Console) -> int:
    """Look at this machine, then at the way to others, and serve if it is asked for. Returns the exit status."""
    host = socket.gethostname()
    report = Report(screen, order.as_json)
    if not order.as_json:
        screen.print(Text(f"Looking at {host}; to import PyTorch takes some seconds."), soft_wrap=True)
    machine = reader.read(tls=order.tls, port=order.port, servers=order.servers)
    report.add("This machine", [*check_machine(machine), *check_network(machine)])
    own = pairs.within_this_machine(secrets.token_hex(16), order.seconds)
    report.add("Two processes of this machine", _checked(own, machine))
    if order.machines:
        assert order.token is not None
        with contextlib.closing(SocketHub(order.token, local=False, tls=order.tls)) as hub:
            found = pairs.between_machines(hub, host, order.machines, order.tls, order.seconds)
        report.add("Between machines", _checked(found, machine))
    status = report.close(host)
    if order.serve:
        _serve(order, machine, report.all)
    return status


def _checked(found: Sequence[Pair], machine: Machine) -> list[Finding]:
    here = found[0].here if found else ""
    return [one for pair in found for one in check_pair(pair, machine if pair.here == here else None, versions())]


def _serve(order: Order, machine: Machine, findings: Sequence[Finding]) -> None:
    assert order.token is not None
    with contextlib.closing(SocketHub(order.token, local=False, tls=order.tls)) as hub:
        address = hub.listen(order.listen, PORT if order.port is None else order.port)
        at = spelled(own_address(machine) if order.listen in WILDCARDS else address.tcp[0], address.tcp[1])
        say(f"serving at {at} until Ctrl-C; on another machine type: offbeat doctor --connect {at}")
        visit = Visit(versions=tuple(versions()), findings=tuple(map(asdict, findings)))
        Peer(hub, visit, say).serve(lambda: True)
