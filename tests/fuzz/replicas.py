"""The two processes of a server with a standby, each attacked by the other end."""

from __future__ import annotations

import json

from tests import malformed
from tests.fuzz.receiver import Finding, Outcome, Receiver, checked
from tests.support.memory_network import MemoryConnection, MemoryHub, MemoryNetwork

from offbeat.errors import JobError, ProtocolError
from offbeat.runtime.job.settings import JobSettings
from offbeat.runtime.leading_server import LeadingServer
from offbeat.runtime.serving import ServingEnded
from offbeat.runtime.standby_server import StandbyServer
from offbeat.transport.base import Closed, Connection, Message
from offbeat.transport.wire import EMPTY

JOB = {"settings": json.loads(json.dumps(JobSettings(workers=3, replicas=1).to_wire())), "key": "c4"}


class ReplicaReceiver(Receiver):
    """One of the two processes."""

    stands_by: bool

    def begin(self) -> None:
        network = MemoryNetwork(shares_memory=False)
        self.hub, self.peers, supervisor = (MemoryHub(network, "token") for _ in range(3))
        self.address, others = self.hub.listen(), self.peers.listen()
        process = StandbyServer if self.stands_by else LeadingServer
        self.server = process(0, self.hub, self.hub.connect(supervisor.listen()))
        leader = others if self.stands_by else self.address
        order = {**JOB, "kind": "job", "servers": json.dumps([leader])}
        if self.stands_by:
            order |= {"kind": "stand_by", "address": json.dumps([self.address]), "runs": False}
        self.server._arrived(self.server._launcher, Message(order, EMPTY, ()))
        self.line: Connection = self.enter()

    def enter(self) -> Connection:
        """Return the connection of the attacker, at the server's end."""
        raise NotImplementedError

    def connect(self) -> Connection:
        other = self.peers.connect(self.address)
        assert isinstance(other, MemoryConnection) and other.other is not None
        return other.other

    def receive(self, message: Message) -> Outcome:
        try:
            self.server._arrived(self.line, message)
            self.server.tick()
        except ServingEnded:
            return Outcome.ENDED
        except JobError as error:
            checked(error)
            if not self.stands_by:
                raise Finding(f"the job has ended: {error}") from error
            return Outcome.REFUSED
        except ProtocolError as error:
            checked(error)
            if not self.stands_by:
                raise Finding(f"the leader has ended: {error}") from error
            return Outcome.REFUSED
        finally:
            self.hub.inbox.clear()
            self.peers.inbox.clear()
        return Outcome.REFUSED if getattr(self.line, "closed", False) else Outcome.TAKEN

    def again(self) -> None:
        self.close()

    def end(self) -> None:
        if self.server.service.state.job is not None:
            self.server.service.state.job.release_memory()
        self.hub.close()
        self.peers.close()


class FromLeader(ReplicaReceiver):
    """A standby, attacked by its leader, without which it is of no use."""

    name = "from-leader"
    stands_by = True

    def enter(self) -> Connection:
        assert isinstance(self.server, StandbyServer) and self.server._leader is not None
        return self.server._leader


class FromStandby(ReplicaReceiver):
    """A leader, attacked by its standby, or by a peer that wants to be one."""

    name = "from-standby"
    stands_by = False

    def enter(self) -> Connection:
        line = self.connect()
        if self.draw.random() < 0.7:
            self.server._arrived(line, self.follow())
            if self.draw.random() < 0.4:  # a later standby, which gets the state
                self.server._arrived(line, Closed("end of stream"))
                self.server._arrived(self.server._launcher, Message({"kind": "alone"}, EMPTY, ()))
                line = self.connect()
                self.server._arrived(line, self.follow())
        return line

    @staticmethod
    def follow() -> Message:
        return Message({"kind": "follow", **malformed.FROM_STANDBY["follow"]}, EMPTY, ())
