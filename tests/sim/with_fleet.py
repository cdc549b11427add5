"""`SteppedJob` whose servers are led by the fleet and the runner of a live supervisor, and die at any point of what they do.

The servers, the workers' sessions, the links and the fleet are the real ones, in one process. A death is an exception that nobody
catches, and what a process had not read is lost with it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import patch

from tests.sim.stepped import MOST_STEPS, SteppedJob, Timings
from tests.sim.stepped_network import SteppedHub

from offbeat.journal.records import Record
from offbeat.launch.engine import Engine
from offbeat.launch.output import Output
from offbeat.launch.server_fleet import ServerFleet
from offbeat.runtime.job.settings import WorkerSettings
from offbeat.runtime.serving import ServingEnded
from offbeat.transport.base import Closed, Connection
from offbeat.types import Seconds, WorkerId


class Death(BaseException):
    """Ends a server's process."""


@contextmanager
def deadly(points: Mapping[str, Any], point: Callable[[str], None]) -> Iterator[None]:
    """Call ``point`` before and after each of these methods: a process may die there. ``points``: the class of each, by name."""

    def around(owner: Any, name: str) -> Any:
        plain: Callable[..., Any] = getattr(owner, name)

        def changed(one: Any, *arguments: Any, **named: Any) -> Any:
            point(name)
            result = plain(one, *arguments, **named)
            point(name)
            return result

        return patch.object(owner, name, changed)

    with ExitStack() as stack:
        for name, owner in points.items():
            stack.enter_context(around(owner, name))
        yield


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


class Led:
    """A server, as the job drives it: the process that leads it may die in whatever it does."""

    def __init__(self, job: WithFleet, number: int) -> None:
        self._job, self._number = job, number

    def tick(self) -> None:
        self._job.ticks(self._job.process_of(self._number))

    def wake_at(self) -> Seconds | None:
        return self._job.wake_at(self._job.process_of(self._number).server)


class _Unrecorded(ServerFleet):
    """The servers of a job whose journal has no records of processes: it is compared with that of another job."""

    def record(self, role: str, number: int, what: str, detail: str = "") -> None: ...


class WithFleet(SteppedJob):
    """One live run.

    Args:
        script, journal: as for `SteppedJob`.
        deaths: of what kind, and at the how manieth point of this kind since the last death, a process dies that leads a server, whichever
            it is: one of `points`. None dies after the last of them.
    """

    points: ClassVar[Mapping[str, Any]]

    def __init__(self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]]) -> None:
        super().__init__(script, journal)
        self.network.as_sent = True
        self._deaths = list(deaths)
        self._passed: Counter[str] = Counter()
        """Points since the last death, by kind."""
        self._living: ServerProcess | None = None
        """The process that does something."""
        self.died: Counter[str] = Counter()
        """How often one has died, by what it was about to do, or had done."""
        self.died_at: Counter[int] = Counter()
        """How often one has died, by server."""
        self._pids = itertools.count(1)
        self.fleet = self._make_fleet()

    def _make_fleet(self) -> ServerFleet:
        def fail(reason: str) -> None:
            raise AssertionError(f"the job fails: {reason}")

        def note(text: str) -> None:
            assert not text.startswith("the standby of"), text

        start = self._start_process
        engine = SimpleNamespace(
            workers_elsewhere=False,
            servers_return=lambda servers: True,
            start_server=lambda number, role, leader, at: start(number, role == "standby", at.tcp[1] if role == "again" else 0),
            ready_for_servers=lambda: True,
        )
        output = SimpleNamespace(attach=lambda role, number, child: None, drain=lambda: None)
        return _Unrecorded(
            self._settings(),
            cast(Engine, engine),
            max_restarts=MOST_STEPS,
            now=self._now,
            output=cast(Output, output),
            note=note,
            fail=fail,
            leave=lambda: fail("a server was told to leave"),
        )

    # What differs between the ways in which servers go on.

    def make_server(self, number: int, hub: SteppedHub, supervisor: Connection, *, stands_by: bool) -> Any:
        """Return the server of a new process."""
        raise NotImplementedError

    def may_die(self, process: ServerProcess) -> bool:
        """Whether this process may die now."""
        return True

    def is_cut_off(self, process: ServerProcess) -> bool:
        """Whether a server has lost its connection to server 0, and may connect again."""
        raise NotImplementedError

    def hears(self, process: ServerProcess) -> None:
        """Let a process handle what has come."""
        process.server.hear(0.0)

    def wake_at(self, server: Any) -> Seconds | None:
        """Return when a server wants to be driven again."""
        due: Seconds | None = server.wake_at()
        return due

    def worker_settings(self, number: WorkerId) -> WorkerSettings:
        return replace(super().worker_settings(number), servers_return=True)

    # The servers' processes.

    @property
    def leaders(self) -> list[ServerProcess]:
        """The process that leads each server, or that has led it last."""
        return cast(list[ServerProcess], self.fleet.leaders())

    def process_of(self, number: int) -> ServerProcess:
        """Return the process that leads a server, or that has led it last."""
        return self.leaders[number]

    def process_ended(self, number: WorkerId, reason: str) -> None:
        told = {"kind": "ended"} if reason == "end of stream" else {"kind": "lost", "reason": reason}
        self.fleet.links[0].send({**told, "worker": number})

    def run(self) -> list[Record]:
        with deadly(self.points, self.point):
            return super().run()

    def settle(self) -> None:
        super().settle()
        while self.deliver() or any(self._reaches_again(process) for process in self.leaders[1:]):
            super().settle()  # what a tick has sent is handled at the same instant, and a tick may have ended its process

    def _reaches_again(self, process: ServerProcess) -> bool:
        """Let a server connect to server 0 again, if it is cut off."""
        if not self.is_cut_off(process):
            return False
        self.ticks(process)
        return True

    def lives(self, process: ServerProcess, does: Callable[[], None]) -> None:
        """Let a process do something, which may be the last."""
        before, self._living = self._living, process
        try:
            does()
        except Death:
            self._living = None
            self.died_at[process.number] += 1
            self.dies(process)
        except ServingEnded:
            self._ended.add(process.number)
        finally:
            self._living = before

    def ticks(self, process: ServerProcess) -> None:
        """Let the server of a process do what is due."""
        self.lives(process, process.server.tick)

    def point(self, kind: str) -> None:
        """A process that leads a server may die here."""
        if self._living is None or not self.may_die(self._living):
            return
        self._passed[kind] += 1
        if self._deaths and (kind, self._passed[kind]) == self._deaths[0]:
            self._passed.clear()
            del self._deaths[0]
            self.died[kind] += 1
            raise Death

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
        hub = SteppedHub(self.network, lambda: self.lives(process, lambda: self.hears(process)))
        pid = next(self._pids)
        hub.name = f"process {pid} of this host"
        self.network.is_server(hub, number)
        supervisor, address = hub.connect(self._at), hub.listen(port=port)
        process = ServerProcess(pid, number, self.make_server(number, hub, supervisor, stands_by=stands_by), hub)
        supervisor.send({"kind": "listening", "number": number, "address": address, "role": "standby" if stands_by else "leader"})
        return process

    def _open(self) -> None:
        self._servers = [Led(self, number) for number in range(self.script.cluster.servers)]  # type: ignore[misc]
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
