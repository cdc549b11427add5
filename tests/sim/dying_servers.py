"""`SteppedJob` and `SteppedRanks` in which servers' processes die again and again, at any point, and are made anew from what is left.

What is left is what the supervisor holds: the log of each server and its memory, and that of the workers or ranks. A point is each record
of a log, each change of memory and each message, before and after it. The servers and their logs, the links and the memory are the real
ones; the death is an exception that nobody catches. What a process had not read is lost with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

from tests.sim.stepped import SteppedJob, Timings
from tests.sim.stepped_network import SteppedHub, SteppedNetwork
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.stub_process import StubProcess

from offbeat.journal.records import Record
from offbeat.launch.lasting import LastingServer
from offbeat.runtime.lasting_server import Server
from offbeat.runtime.recovery import input_log, keeper, recorder
from offbeat.runtime.recovery.answers import Answers
from offbeat.runtime.recovery.input_log import InputLog
from offbeat.runtime.recovery.keeper import Keeper
from offbeat.runtime.recovery.recorder import Recorder
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.runtime.worker.links import Links
from offbeat.tensors.halves import Halves
from offbeat.tensors.shard_memory import ShardMemory
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Message
from offbeat.transport.link import Link
from offbeat.types import Seconds, WorkerId

POINTS: Final = {"append": InputLog, "begin": InputLog, "change": SharedState, "send": Link, "note_lost": Answers}
"""A record, a snapshot, a change of the ranks' memory, a message; and what is lost with a rank, noted in the middle of a change."""
OF_SERVERS: Final = {
    "append": InputLog,
    "begin": InputLog,
    "once": ShardMemory,
    "turn": Halves,
    "adopt": ShardMemory,
    "keep": Keeper,
    "send": Link,
}
"""A record, a snapshot, a change of a shard's memory, the turn before it, the state of each block, a block of memory that outlives the
process, a message."""


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


def on_links(process: StubProcess, coordinator: LastingServer) -> None:
    """Let a worker's process use links, and the supervisor tell the coordinator of the process's end."""
    assert isinstance(process.hub, LinkedHub)
    process.hub.process, end = process, process.end

    def ends(reason: str) -> None:
        end(reason)
        told = {"kind": "ended"} if reason == "end of stream" else {"kind": "lost", "reason": reason}
        coordinator.link.send({**told, "worker": process.number})

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


def let_go(server: Server) -> None:
    """Close the descriptors of a process that is gone, as the kernel does."""
    if server._recorder is not None:
        assert isinstance(server._recorder, Recorder)
        for block in server._recorder.keeper._blocks.values():
            block.close()
    if server.state.coordinator is not None:
        server.state.coordinator._journal._release()


class Mortal:
    """A server's process, as the job drives it: it may die in whatever it does."""

    def __init__(self, job: DyingServers, number: int) -> None:
        self._job, self._number = job, number

    @property
    def server(self) -> Server:
        return self._job.processes[self._number]

    def hear(self, timeout_s: Seconds) -> None:
        self._job.lives(self._number, lambda server: server.hear(timeout_s))

    def tick(self) -> None:
        self._job.lives(self._number, lambda server: server.tick())

    def wake_at(self) -> Seconds | None:
        return self.server.wake_at()


class DyingServers(SteppedJob):
    """One live run.

    Args:
        script, journal: as for `SteppedJob`.
        deaths: of what kind, and at the how manieth point of this kind since the last death, a server's process dies, whichever it is: one
            of `points`. None dies after the last of them.
        records: after how many records a snapshot is due.
        apart: more bytes than so many are kept in a block of their own.
    """

    points: ClassVar[Mapping[str, Any]] = OF_SERVERS

    def __init__(
        self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]], records: int = 20, apart: int = keeper.APART_NBYTES
    ) -> None:
        super().__init__(script, journal)
        self.network.as_sent = True
        self._deaths, self._records, self._apart = list(deaths), records, apart
        self._passed: Counter[str] = Counter()
        """Points since the last death, by kind."""
        self._lives = False
        """True while a server's process does something."""
        self.died: Counter[str] = Counter()
        """How often one has died, by what it was about to do, or had done."""
        self.died_at: Counter[int] = Counter()
        """How often one has died, by server."""
        self.processes: dict[int, Server] = {}
        self._lasting = [LastingServer(number) for number in range(script.cluster.servers)]
        self._callers: dict[Connection, int] = {}
        """The server at the other end of a connection to the supervisor."""

    def run(self) -> list[Record]:
        try:
            with self._deadly():
                return super().run()
        finally:
            for server in self.processes.values():
                let_go(server)
            for block in (block for lasting in self._lasting for block in lasting.kept.values()):
                block.close()

    def hub(self, turn: Callable[[], None], worker: WorkerId) -> SteppedHub:
        return LinkedHub(self.network, turn, worker)

    def process(self, number: WorkerId, iteration: int) -> Any:
        process = super().process(number, iteration)
        on_links(process, self._lasting[0])
        return process

    def settle(self) -> None:
        super().settle()
        while any(self._reaches_again(number) for number in range(1, len(self.processes))):
            super().settle()

    def _reaches_again(self, number: int) -> bool:
        """Let a server connect to server 0 again, if it is cut off."""
        if not self.processes[number]._cut_off or self._lasting[number].returning:
            return False
        self._servers[number].tick()
        return True

    # The servers' processes.

    def lives(self, number: int, does: Callable[[Server], None]) -> None:
        """Let a server's process do something, which may be the last."""
        before, self._lives = self._lives, True
        try:
            does(self.processes[number])
        except Death:
            self._lives = False
            self.died_at[number] += 1
            self._begin_anew(number)
        finally:
            self._lives = before

    def point(self, kind: str) -> None:
        """A server's process may die here."""
        if not self._lives:
            return
        self._passed[kind] += 1
        if self._deaths and (kind, self._passed[kind]) == self._deaths[0]:
            self._passed.clear()
            del self._deaths[0]
            self.died[kind] += 1
            raise Death

    def _begin_anew(self, number: int) -> None:
        """The process is dead: what it had not read is gone, its connections close, and the next process begins."""
        old = self._hubs[number]
        old.receive = lambda item: None  # type: ignore[method-assign]
        old.close()
        let_go(self.processes[number])
        self._lasting[number].returns(self.now)
        self._hubs[number] = self._start_server(number, self.addresses[number].tcp[1])

    def _start_server(self, number: int, port: int = 0) -> SteppedHub:
        hub = SteppedHub(self.network, partial(self._turn, number))
        self.network.is_server(hub, number)
        supervisor = hub.connect(self._at)
        address = hub.listen(port=port)
        self.addresses[number : number + 1] = [address]
        self.processes[number] = Server(number, hub, supervisor, clock=self._now, computed=self._now)
        supervisor.send({"kind": "listening", "number": number})
        return hub

    # The supervisor's part.

    def _open(self) -> None:
        self._at = self._supervisor.listen()
        self._servers = [Mortal(self, number) for number in range(len(self._lasting))]  # type: ignore[misc]
        self._links = [lasting.link for lasting in self._lasting]
        self._hubs = [self._start_server(number) for number in range(len(self._lasting))]
        self.settle()

    def _supervise(self) -> None:
        for connection, item in self._supervisor.poll(0.0):
            if isinstance(item, Closed):
                if (number := self._callers.pop(connection, None)) is not None:
                    self._lasting[number].cut(connection)
                continue
            if item.header["kind"] == "listening":
                self._callers[connection] = item.header["number"]
            lasting = self._lasting[self._callers[connection]]
            if (message := lasting.take(connection, item)) is not None:
                self._on_message(lasting, connection, message)

    def _on_message(self, lasting: LastingServer, connection: Connection, message: Message) -> None:
        header = message.header
        assert header["kind"] not in ("failed", "mortal"), f"the server fails: {header}"
        if header["kind"] == "listening":
            for name, block in lasting.kept.items():
                connection.send({"kind": "kept", "name": name}, memory=(block,))
            job = {"settings": self._settings().to_wire(), "servers": json.dumps(self.addresses), "outlives": True}
            connection.send({"kind": "job", **job})
        lasting.on_message(header["kind"], message)
        self.summary = header.get("summary", self.summary)

    @contextmanager
    def _deadly(self) -> Iterator[None]:
        """Let a process die before and after each point."""
        with ExitStack() as stack:
            stack.enter_context(deadly(self.points, self.point))
            stack.enter_context(patch.object(input_log, "RECORDS_MAX", self._records))
            stack.enter_context(patch.object(keeper, "APART_NBYTES", self._apart))
            stack.enter_context(patch.object(recorder, "APART_NBYTES", self._apart))
            stack.enter_context(patch.object(keeper, "APART_MAX_NBYTES", 20 * self._apart))
            yield


class DyingCoordinator(DyingServers, SteppedRanks):
    """One live run of a job without servers, whose coordinator's process dies. Arguments as for `DyingServers`."""

    points = POINTS
