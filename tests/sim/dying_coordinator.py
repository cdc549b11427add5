"""`SteppedRanks` in which the coordinator's process dies again and again, at any point of what it does, and is made anew from what is left.

What is left is what the supervisor holds: the log of the server, and the memory of the ranks. A point is each record of the log, each
change of the ranks' memory and each message, before and after it. The server and its log, the links and the memory are the real ones; the
death is an exception that nobody catches. What a process had not read is lost with it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from tests.sim.stepped import Timings
from tests.sim.stepped_network import SteppedHub, SteppedNetwork
from tests.sim.stepped_ranks import SteppedRanks
from tests.sim.stub_ranks import StubRank

from offbeat.journal.records import Record
from offbeat.launch.lasting import LastingServer
from offbeat.runtime.lasting_server import Server
from offbeat.runtime.recovery import input_log
from offbeat.runtime.recovery.answers import Answers
from offbeat.runtime.recovery.input_log import InputLog
from offbeat.runtime.serving import JobEnded
from offbeat.runtime.shared_memory.state import SharedState
from offbeat.runtime.worker.links import Links
from offbeat.transport.base import Address, Arrivals, Closed, Connection, Message
from offbeat.transport.link import Link
from offbeat.types import Seconds, WorkerId

POINTS: Final = {"append": InputLog, "begin": InputLog, "change": SharedState, "send": Link, "note_lost": Answers}
"""A record, a snapshot, a change of the ranks' memory, a message; and what is lost with a rank, noted in the middle of a change."""


class Death(BaseException):
    """Ends the coordinator's process."""


class LinkedHub(SteppedHub):
    """The hub of a rank, whose connection to the server outlives the server's process."""

    def __init__(self, network: SteppedNetwork, turn: Callable[[], None], worker: WorkerId) -> None:
        super().__init__(network, turn, worker)
        self.links = Links(_Plain(self))  # type: ignore[arg-type]
        self.rank: StubRank | None = None

    def connect(self, address: Address) -> Connection:
        return self.links.connect(address, lasting=True, anywhere=True)

    def plain(self, address: Address) -> Connection:
        """Return a connection to whoever listens there now."""
        return super().connect(address)

    def poll(self, timeout_s: Seconds | None) -> Arrivals:
        if self.rank is not None and self.rank.gone:
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


class Mortal:
    """The coordinator's process, as the job drives it: it may die in whatever it does."""

    def __init__(self, job: DyingCoordinator) -> None:
        self._job = job

    def hear(self, timeout_s: Seconds) -> None:
        self._job.lives(lambda server: server.hear(timeout_s))

    def tick(self) -> None:
        self._job.lives(lambda server: server.tick())

    def wake_at(self) -> Seconds | None:
        return self._job.server.wake_at()


class DyingCoordinator(SteppedRanks):
    """One live run.

    Args:
        script, journal: as for `SteppedJob`.
        deaths: of what kind, and at the how manieth point of this kind in its life, each process of the coordinator dies: one of `POINTS`.
            None dies after the last of them.
        records: after how many records a snapshot is due.
    """

    def __init__(self, script: Timings, journal: Path, deaths: Sequence[tuple[str, int]], records: int = 20) -> None:
        super().__init__(script, journal)
        self._deaths, self._records = list(deaths), records
        self._points: Counter[str] = Counter()
        """Points in the life of the present process, by kind."""
        self._lives = False
        """True while the coordinator's process does something."""
        self.died: Counter[str] = Counter()
        """How often it has died, by what it was about to do, or had done."""
        self.server: Server
        self._lasting = LastingServer(0)

    def run(self) -> list[Record]:
        with self._deadly():
            return super().run()

    def hub(self, turn: Callable[[], None], worker: WorkerId) -> SteppedHub:
        return LinkedHub(self.network, turn, worker)

    def process(self, number: WorkerId, iteration: int) -> StubRank:
        rank = super().process(number, iteration)
        end = rank.end
        assert isinstance(rank.hub, LinkedHub)
        rank.hub.rank = rank

        def ends(reason: str) -> None:
            """The supervisor sees the end of a process, and says so."""
            end(reason)
            told = {"kind": "ended"} if reason == "end of stream" else {"kind": "lost", "reason": reason}
            self._lasting.link.send({**told, "worker": number})

        rank.end = ends  # type: ignore[method-assign]
        return rank

    # The coordinator's process.

    def lives(self, does: Callable[[Server], None]) -> None:
        """Let the coordinator's process do something, which may be the last."""
        before, self._lives = self._lives, True
        try:
            does(self.server)
        except Death:
            self._lives = False
            self._begin_anew()
        finally:
            self._lives = before

    def point(self, kind: str) -> None:
        """The coordinator's process may die here."""
        if not self._lives:
            return
        self._points[kind] += 1
        if self._deaths and (kind, self._points[kind]) == self._deaths[0]:
            self._points.clear()
            del self._deaths[0]
            self.died[kind] += 1
            raise Death

    def _begin_anew(self) -> None:
        """The process is dead: what it had not read is gone, its connections close, and the next process begins."""
        old = self._hubs.pop()
        old.receive = lambda item: None  # type: ignore[method-assign]
        old.close()
        self._lasting.returns(self.now)
        self._start_server(self.addresses[0].tcp[1])

    def _start_server(self, port: int = 0) -> None:
        hub = SteppedHub(self.network, lambda: self._turn(0))
        self.network.is_server(hub, 0)
        supervisor = hub.connect(self._at)
        self.addresses = [hub.listen(port=port)]
        self._hubs.append(hub)
        self.server = Server(0, hub, supervisor, lambda: self.agenda.now)
        supervisor.send({"kind": "listening", "number": 0})

    def _turn(self, number: int) -> None:
        try:
            self._servers[0].hear(0.0)
        except JobEnded:
            self._ended.add(0)

    # The supervisor's part.

    def _open(self) -> None:
        self._at = self._supervisor.listen()
        self._servers = [Mortal(self)]  # type: ignore[list-item]
        self._links = [self._lasting.link]
        self._start_server()
        self.settle()

    def _supervise(self) -> None:
        for connection, item in self._supervisor.poll(0.0):
            if isinstance(item, Closed):
                self._lasting.cut(connection)
            elif (message := self._lasting.take(connection, item)) is not None:
                self._on_message(connection, message)

    def _on_message(self, connection: Connection, message: Message) -> None:
        header = message.header
        assert header["kind"] not in ("failed", "mortal"), f"the server fails: {header}"
        if header["kind"] == "listening":
            for name, block in self._lasting.kept.items():
                connection.send({"kind": "kept", "name": name}, memory=(block,))
            job = {"settings": self._settings().to_wire(), "servers": json.dumps(self.addresses), "outlives": True}
            connection.send({"kind": "job", **job})
        self._lasting.on_message(header["kind"], message)
        self.summary = header.get("summary", self.summary)

    @contextmanager
    def _deadly(self) -> Iterator[None]:
        """Let the process die before and after each record, change and message."""

        def around(owner: Any, name: str) -> Any:
            plain: Callable[..., Any] = getattr(owner, name)

            def changed(one: Any, *arguments: Any, **named: Any) -> Any:
                self.point(name)
                result = plain(one, *arguments, **named)
                self.point(name)
                return result

            return patch.object(owner, name, changed)

        with ExitStack() as stack:
            for name, owner in POINTS.items():
                stack.enter_context(around(owner, name))
            stack.enter_context(patch.object(input_log, "RECORDS_MAX", self._records))
            yield
