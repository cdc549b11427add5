"""Processes that talk to each other as receivers: ranks of several hosts, a worker of a server, and the processes of one worker."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import torch
from tests import malformed
from tests.fuzz.receiver import Mute, Outcome, Receiver
from tests.runtime.allreduce.multi_host.network import Network
from tests.support.hand_driven_coordinator import Mailbox

from offbeat.errors import RefusedError
from offbeat.runtime.allreduce.multi_host.connections import PeerConnections
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.group import messages as group
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.transport.base import Address, Message
from offbeat.types import WorkerId

INTRUDER = WorkerId(2)


class BetweenRanks(Receiver):
    """A rank or the sequencer, attacked by a rank in rounds that are under way."""

    name = "between-ranks"
    lasts = 60
    at: tuple[int, ...] = (SEQUENCER, 0, 1)
    sender = INTRUDER

    def begin(self) -> None:
        hosts = self.draw.choice([["a", "b", "c"], ["a", "b", "b"], ["a", "a", "a"]])
        self.network = Network(self.draw.choice(["solo", "majority", "full"]), hosts, 100, 4)
        for number in (0, 1, 2):
            if self.draw.random() < 0.7:
                self.network.push(WorkerId(number))
        for _ in range(self.draw.randrange(8)):
            if self.network.waiting():
                self.network.deliver(self.draw.choice(self.network.waiting()))
        self.again()

    def receive(self, message: Message) -> Outcome:
        if self.attacked == SEQUENCER:
            self.network.seat.on_message(self.sender, message)
            return Outcome.TAKEN
        node = self.network.nodes[self.attacked]
        content = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8) if len(message.payload) else torch.empty(0)
        node.executor.place(self.sender, message.header, len(message.payload))  # asked before the header is checked
        node.on_message(self.sender, message.header, content if self.draw.random() < 0.5 else message.payload)
        return Outcome.TAKEN

    def again(self) -> None:
        """Attack the same rounds: what is refused has changed nothing."""
        self.attacked = WorkerId(self.draw.choice(self.at))


class FromSequencer(BetweenRanks):
    """A rank, attacked by the sequencer."""

    name = "from-sequencer"
    at = (0, 1)
    sender = SEQUENCER


class FirstOfRank(Receiver):
    """A process of rounds across hosts, attacked before it knows who the peer is."""

    name = "first-of-rank"

    def begin(self) -> None:
        nothing = SimpleNamespace(**dict.fromkeys(("on_message", "on_connected", "on_cut", "place"), lambda *_: None))
        nothing.lock = threading.Condition()
        self.connections = PeerConnections(WorkerId(0), Mailbox(), cast(Any, nothing))

    def receive(self, message: Message) -> Outcome:
        line = Mute("a peer")
        self.connections._receive(line, message)
        self.connections.drop(self.connections._names[line])
        return Outcome.TAKEN


class ToWorker(Receiver):
    """A worker, attacked by server 0. What it hands to its session is dropped."""

    name = "to-worker"

    def begin(self) -> None:
        kinds = (
            "parameters",
            "block",
            "provide",
            "buffers",
            "interrupt",
            "unused",
            "goes_on",
            "job_over",
            "donate",
            "meet",
            "chief",
            "checkpoint",
            "resume_part",
        )
        at_once: Any = dict.fromkeys(kinds, lambda message: None)
        address = Address("memory", ("127.0.0.1", 1), "")
        self.connection = WorkerConnection(Mailbox(), WorkerId(2), [address], [(0, malformed.LAYOUT["nbytes"])], at_once, 1.0)

    def receive(self, message: Message) -> Outcome:
        try:
            self.connection._sort(self.connection.coordinator, message)
        except RefusedError:
            return Outcome.ENDED
        return Outcome.TAKEN


class WithinWorker(Receiver):
    """The processes of one worker, each attacked by another. What they send each other is msgpack without a frame."""

    name = "within-worker"
    CHECKS = (group.CALL, group.RESULT, group.PIECES)

    def begin(self) -> None:
        """Nothing is kept."""

    def receive(self, message: Message) -> Outcome:
        """In the corpus each message is the payload of a frame."""
        group.unpacked(bytes(message.payload), "process 1 of this worker", self.draw.choice(self.CHECKS))
        return Outcome.TAKEN
