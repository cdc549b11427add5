"""`SteppedJob` whose servers are led by the fleet and the runner of a live supervisor; only the processes are stubs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from tests.sim.stepped import MOST_STEPS, SteppedJob
from tests.sim.stepped_network import TOKEN, SteppedHub, SteppedNetwork
from tests.sim.stub_process import StubProcess

from offbeat.core.fleet import State
from offbeat.launch.engine import Engine
from offbeat.launch.output import Output
from offbeat.launch.server_fleet import ServerFleet
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.worker.links import Links
from offbeat.transport.base import Address, Arrivals, Closed, Connection
from offbeat.transport.link import Link
from offbeat.types import Seconds, WorkerId


@dataclass(eq=False)
class ServerProcess:
    """One process of a server, which the runner takes for a child."""

    pid: int
    number: int
    server: Any
    hub: SteppedHub
    awaited: bool = False
    """True once it is to look whether a gradient that it lacks has come in time."""
    status: int | None = None
    lost: None = None

    @property
    def where(self) -> str:
        return f"pid {self.pid}"

    def ended(self) -> int | None:
        return self.status

    def strike(self) -> None:
        if self.status is None:
            self.hub.receive = lambda item: None  # type: ignore[method-assign]
            self.hub.close()
            self.status = -9


class WithFleet(SteppedJob):
    """One live run. The fleet is made by `make_fleet`, once the settings of the job are known."""

    fleet: ServerFleet

    def make_fleet(self, settings: JobSettings) -> None:
        def fail(reason: str) -> None:
            raise AssertionError(f"the job fails: {reason}")

        def note(text: str) -> None:
            assert not text.startswith("the standby of"), text

        self._pids, start = itertools.count(1), self._start_process
        engine = SimpleNamespace(
            workers_elsewhere=False,
            servers_return=lambda servers: True,
            start_server=lambda number, token, role: start(number, False, 0),
            restart_server=lambda number, token, earlier: start(number, False, earlier.tcp[1]),
            start_standby=lambda number, token, leader, leader_at: start(number, True, 0),
            prepare_returns=lambda: None,
            returns_soon=lambda: False,
        )
        output = SimpleNamespace(attach=lambda role, number, child: None, drain=lambda: None)
        self.fleet = ServerFleet(
            settings,
            cast(Engine, engine),
            token=TOKEN,
            max_restarts=MOST_STEPS,
            now=self._now,
            output=cast(Output, output),
            note=note,
            record=lambda *_: None,
            fail=fail,
            leave=lambda: fail("a server was told to leave"),
        )

    def make_server(self, number: int, hub: SteppedHub, supervisor: Connection, *, stands_by: bool) -> Any:
        """Return the server of a new process."""
        raise NotImplementedError

    def turn_of(self, process: ServerProcess) -> None:
        """Let a process handle what has come."""
        raise NotImplementedError

    def process_of(self, number: int) -> ServerProcess:
        """Return the process that leads a server, or that has led it last."""
        return cast(ServerProcess, self.fleet.leaders()[number])

    def goes_on(self, number: int) -> bool:
        """Whether the process that leads a server has taken up the messages of the one before."""
        fleet = self.fleet.fleet
        return fleet.processes[fleet.servers[number].leader].state is State.LEADING

    def process(self, number: WorkerId, iteration: int) -> Any:
        process = super().process(number, iteration)
        on_links(process, self.fleet.links[0])
        return process

    def dies(self, process: ServerProcess) -> None:
        """End a process: what it had not read is gone, its connections close, and the fleet decides what becomes of its server."""
        self.network.deliver_to(self._supervisor)
        process.strike()
        self.fleet.look_for_ends(lambda: True)
        self._now_led()

    def _now_led(self) -> None:
        self.addresses[:] = self.fleet.addresses()
        self._hubs = [cast(ServerProcess, child).hub for child in [*self.fleet.leaders(), *self.fleet.standbys()]]

    def _start_process(self, number: int, stands_by: bool, port: int) -> ServerProcess:
        hub = SteppedHub(self.network, lambda: self.turn_of(process))
        pid = next(self._pids)
        hub.name = f"process {pid} of this host"
        self.network.is_server(hub, number)
        supervisor, address = hub.connect(self._at), hub.listen(port=port)
        process = ServerProcess(pid, number, self.make_server(number, hub, supervisor, stands_by=stands_by), hub)
        supervisor.send({"kind": "listening", "number": number, "address": address, "role": "standby" if stands_by else "leader"})
        return process

    def _open(self) -> None:
        self._at = self._supervisor.listen()
        self.fleet.begin()
        while self.network.deliver():
            pass
        assert self.fleet.fleet.all_listen()
        self._now_led()
        self._links = list(self.fleet.links.values())
        self.fleet.begin_job()
        self.settle()
        assert self.fleet.fleet.all_follow()

    def _supervise(self) -> None:
        for connection, item in self._supervisor.poll(0.0):
            if isinstance(item, Closed):
                self.fleet.on_closed(connection)
            elif (message := self.fleet.on_message(connection, item)) is not None:
                assert message.header["kind"] != "failed", f"the server fails: {message.header}"
                self.summary = message.header.get("summary", self.summary)


def on_links(process: StubProcess, coordinator: Link) -> None:
    """Let a worker's process use links, and the supervisor tell the coordinator of the process's end."""
    assert isinstance(process.hub, LinkedHub)
    process.hub.process, end = process, process.end

    def ends(reason: str) -> None:
        end(reason)
        told = {"kind": "ended"} if reason == "end of stream" else {"kind": "lost", "reason": reason}
        coordinator.send({**told, "worker": process.number})

    process.end = ends  # type: ignore[method-assign]


class LinkedHub(SteppedHub):
    """The hub of a worker's process, whose connections outlive the servers' processes."""

    def __init__(self, network: SteppedNetwork, turn: Callable[[], None], worker: WorkerId) -> None:
        super().__init__(network, turn, worker)
        self.links = Links(_Plain(self))  # type: ignore[arg-type]
        self.process: StubProcess | None = None

    def connect(self, address: Address) -> Connection:
        return self.links.connect(address, lasting=True, anywhere=True)

    def plain(self, address: Address) -> Connection:
        """Return a connection to whoever listens there now."""
        return super().connect(address)

    def poll(self, timeout_s: Seconds | None) -> Arrivals:
        if self.process is not None and self.process.gone:
            return super().poll(0.0)
        arrived = self.links.poll(0.0)
        while self.links._cut:  # its server is there again, at the same instant
            arrived += self.links.poll(0.0)
        return arrived


class _Plain:
    """The hub below the links."""

    def __init__(self, hub: LinkedHub) -> None:
        self._hub = hub

    def connect(self, address: Address) -> Connection:
        return self._hub.plain(address)

    def poll(self, timeout_s: Seconds | None) -> Arrivals:
        return SteppedHub.poll(self._hub, timeout_s)
