"""The servers of a job as receivers: each is a real `Server`, whose messages are handed to it one by one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests import malformed
from tests.fuzz.receiver import Finding, Outcome, Receiver, checked
from tests.support.memory_network import MemoryConnection, MemoryHub, MemoryNetwork

from offbeat.errors import JobError
from offbeat.policies import rule
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.lasting_server import Server
from offbeat.runtime.serving import ServingEnded
from offbeat.transport.base import Connection, Message
from offbeat.transport.shm import MemoryBlock

RULES = ("asp", "bsp", "ssp(staleness=2)", "psp(c=1)", "solo", "dpsgd", "ensemble(steps=2)", "dbw")
EMPTY = memoryview(b"")
NBYTES = malformed.LAYOUT["nbytes"]


class ServerReceiver(Receiver):
    """A job of three workers with one server under attack."""

    number = 0
    servers = 1
    rules: tuple[str, ...] = RULES

    def begin(self) -> None:
        self.sync = self.draw.choice(self.rules)
        self.ranks = rule(self.sync).family != "server"
        network = MemoryNetwork(shares_memory=self.ranks)
        self.hub, self.peers = MemoryHub(network, "token"), MemoryHub(network, "token")
        supervisor = MemoryHub(network, "token")
        at = supervisor.listen()
        self.blocks: list[MemoryBlock] = []
        self.server = Server(self.number, self.hub, self.hub.connect(at), clock=self.clock(), computed=self.clock())
        self.address = self.hub.listen()
        self.others = MemoryHub(network, "token")
        addresses = [list(self.others.listen() if number != self.number else self.address) for number in range(self.servers)]
        settings = JobSettings(workers=3, servers=self.servers)
        job = {"kind": "job", "settings": json.loads(json.dumps(settings.to_wire())), "servers": json.dumps(addresses)}
        self.tell(self.server.service.supervisor, job)
        self.line = self.enter()

    def clock(self) -> Callable[[], float]:
        """A hundredth of a second goes by between two looks at it."""
        now = [0.0]

        def look() -> float:
            now[0] += 0.01
            return now[0]

        return look

    def tell(self, connection: Connection, header: dict[str, Any], *, memory: bool = False) -> None:
        blocks = [MemoryBlock.allocate(NBYTES, "fuzz") for _ in range(2)] if memory and self.ranks else []
        self.blocks += blocks
        self.server._arrived(connection, Message(header, EMPTY, tuple(blocks)))

    def connect(self) -> MemoryConnection:
        """A connection of a peer, at the server's end."""
        other = self.peers.connect(self.address)
        assert isinstance(other, MemoryConnection) and other.other is not None
        return other.other

    def enter(self) -> MemoryConnection:
        """Bring the job to where the attacked messages belong, and return the connection of the attacker at the server's end."""
        raise NotImplementedError

    def receive(self, message: Message) -> Outcome:
        try:
            self.server._arrived(self.line, message)
            self.server.tick()
        except ServingEnded:
            return Outcome.ENDED
        except JobError as error:
            checked(error)
            if not self.may_end(message, str(error)):
                raise Finding(f"the job has ended: {error}") from error
            return Outcome.ENDED
        finally:
            self.hub.inbox.clear()
            self.peers.inbox.clear()
            self.others.inbox.clear()
        return Outcome.REFUSED if self.line.closed else Outcome.TAKEN

    def may_end(self, message: Message, reason: str) -> bool:
        """Return True if the job may end by this message."""
        return False

    def again(self) -> None:
        """Let another process of the same worker come to the same job, where that can go on without the first."""
        try:
            self.line = self.come()
        except (JobError, NotImplementedError):
            self.close()

    def come(self) -> MemoryConnection:
        """A connection of the attacker, as an honest process has it after it has come."""
        raise NotImplementedError

    def end(self) -> None:
        if self.server.service.state.job is not None:
            self.server.service.state.job.release_memory()
        self.hub.close()
        self.peers.close()
        self.others.close()
        for block in self.blocks:
            block.close()
        del self.server, self.line, self.blocks  # the memory of the job goes with them

    def worker(self, number: int, *, provides: bool = False) -> MemoryConnection:
        """A worker that has joined at server 0."""
        line = self.connect()
        hello = {"kind": "hello", **malformed.HELLO, "worker": number, "pid": number + 1, "sync": self.sync}
        if self.ranks:
            hello["vector"] = {"dtype": "float32", "numel": 8, "size": 5}
        self.tell(line, hello, memory=True)
        self.tell(line, {"kind": "ready"})
        if provides and not self.ranks:
            self.tell(line, {"kind": "initial", "number": 1, "provided": True})
        return line


class FromWorker(ServerReceiver):
    """Server 0, attacked by a worker."""

    name = "from-worker"

    def enter(self) -> MemoryConnection:
        self.worker(1)
        self.worker(0, provides=True)
        return self.come()

    def come(self) -> MemoryConnection:
        return self.worker(2) if self.draw.random() < 0.8 else self.connect()

    def may_end(self, message: Message, reason: str) -> bool:
        kind = message.header.get("kind")
        misfit = (kind == "hello" and not self.begun) or "every worker must load the same file" in reason  # workers that differ
        return kind == "abort" or misfit or "nobody is left to copy" in reason

    @property
    def begun(self) -> bool:
        """True once a worker trains."""
        live = self.server.service.state.job
        return live is not None and live.first.driver.coordinator is not None and live.first.driver.coordinator.start.begun


class FromWorkerToShard(ServerReceiver):
    """Server 1, attacked by a worker."""

    name = "to-shard"
    number, servers = 1, 2
    rules = ("asp", "bsp", "psp(c=1)", "diloco(steps=2)")

    def enter(self) -> MemoryConnection:
        self.set_up()
        return FromWorkerToShard.come(self)

    def come(self) -> MemoryConnection:
        line = self.connect()
        if self.draw.random() < 0.8:
            wire = {"wire": self.draw.choice(["bf16", "int8"])} if self.draw.random() < 0.5 else {}
            self.tell(line, {"kind": "attach", "worker": 2, "in_place": False, **wire})
            self.tell(self.of_server_0, {"kind": "orders", "orders": [{"do": "enter", "worker": 2}]})
        return line

    def set_up(self) -> None:
        assert self.server.service.state.to_coordinator is not None
        self.of_server_0 = self.server.service.state.to_coordinator
        self.tell(self.of_server_0, {"kind": "setup", **malformed.FROM_SERVER_0["setup"], "sync": self.sync})


class FromServer0(FromWorkerToShard):
    """Server 1, attacked by server 0, without which it cannot live."""

    name = "from-server-0"

    def enter(self) -> MemoryConnection:
        if self.draw.random() < 0.8:
            super().enter()
        assert isinstance(self.server.service.state.to_coordinator, MemoryConnection)
        return self.server.service.state.to_coordinator

    def come(self) -> MemoryConnection:
        raise NotImplementedError

    def may_end(self, message: Message, reason: str) -> bool:
        return reason.startswith(("server 0 is gone", "server 1 could not do what the job has decided: KeyError"))


class FromShard(ServerReceiver):
    """Server 0, attacked by server 1, without which it cannot live."""

    name = "from-shard"
    servers = 2
    rules = ("asp", "bsp", "psp(c=1)", "dbw")

    def enter(self) -> MemoryConnection:
        line = self.connect()
        if self.draw.random() < 0.9:
            self.tell(line, {"kind": "shard", "number": 1})
            self.worker(1)
            self.worker(0, provides=True)
            self.worker(2)
            self.tell(line, {"kind": "initialised", "worker": 0, "number": 1, "shard": 1})
        return line

    def may_end(self, message: Message, reason: str) -> bool:
        return reason.startswith(("server 1 is gone", "server 1 broke the protocol"))


class FromSupervisor(ServerReceiver):
    """A server, attacked by the process that has started it, without which it cannot live."""

    name = "from-supervisor"

    def enter(self) -> MemoryConnection:
        if self.draw.random() < 0.5:
            self.worker(0)
        supervisor = self.server.service.supervisor
        assert isinstance(supervisor, MemoryConnection)
        return supervisor

    def may_end(self, message: Message, reason: str) -> bool:
        return "does not outlive" in reason
