"""Nodes of a job across hosts with a network carried by hand: every message waits until it is told to go on, in order between two nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import torch

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.rank_log import EntryKind
from offbeat.policies import rule
from offbeat.runtime.allreduce.multi_host.connections import PeerConnections
from offbeat.runtime.allreduce.multi_host.memory import HostMemory
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.allreduce.multi_host.node import Node
from offbeat.runtime.allreduce.multi_host.sequenced_rounds import SequencedRounds
from offbeat.transport.base import Message
from offbeat.types import Version, WorkerId

NOTHING = torch.empty(0)

_Queue: TypeAlias = deque[tuple[dict[str, Any], torch.Tensor | None]]


class Rank:
    """What a rank's process does with its node: one gradient after another."""

    def __init__(self, number: WorkerId, node: Node, version: Version) -> None:
        self.number, self.node, self.version = number, node, version
        self.asked = self.idle = self.parting = self.may_leave = False
        self.entering = False
        self.donor: Rank | None = None
        """Who lets it in."""
        self.given = True
        """Whether it has the parameters of its donor: they go through the coordinator, and the donor's admission does not."""
        self.admitted: Callable[[], bool] = lambda: True
        """Whether its last donor's admission has come: the coordinator keeps the parameters until then."""
        self.begins = False
        """Whether it has the parameters of its last donor, and has asked for the answer with which it begins."""
        self.through: Version | None = None
        self.results: dict[Version, torch.Tensor] = {}

    @property
    def free(self) -> bool:
        return not self.asked and self.through is None

    def look(self) -> None:
        """Take the answer, and the results, if they are there. Who is about to leave takes also those before, for others may wait for
        their room."""
        if self.entering and self.donor is not None and not self.begins and self.given and self.admitted():
            self.begins = True
            self.node.notify({"k": "catch", "n": 0})
        if self.asked and self.node.answers:
            self.through = self.node.answers.pop(0).through
            self.asked = self.entering = False
            self.may_leave = self.parting
        if self.through is not None and self.node.executor.upto >= self.through:
            self.take(self.through)
            self.through = None
        if self.parting and not (self.may_leave and self.free) and self.version < self.node.executor.upto:
            self.take(self.node.executor.upto)
            self.node.notify({"k": "read", "n": self.version})

    def take(self, through: Version) -> None:
        """The results up to this version are there."""
        for number in range(self.version, through):
            self.results[number] = self.node.executor.results[number].clone()
        self.version = max(self.version, through)


class _Line:
    """The sequencer's end of its connection to a rank."""

    def __init__(self, queue: _Queue) -> None:
        self._queue = queue

    def send(self, header: Mapping[str, Any]) -> None:
        self._queue.append((dict(header), None))

    def close(self) -> None:
        """What was sent still arrives."""


def carried(send: Callable[..., None], leave_memory: Callable[[], None] = lambda: None) -> PeerConnections:
    """What a node does with its connections, with these functions in their place."""
    found = SimpleNamespace(send=send, leave_memory=leave_memory, expect=lambda ranks, anew=False: None, recycle=lambda peer, content: None)
    return cast(PeerConnections, found)


class Network:
    """All of them.

    Args:
        spelled: the rule.
        hosts: of each rank.
        numel: of a vector; each gradient is 1 at a place of its own.
        slots: results that are kept.
    """

    def __init__(self, spelled: str, hosts: Sequence[str], numel: int, slots: int) -> None:
        self.hosts, self.numel, self.slots = list(hosts), numel, slots
        found = rule(spelled)
        assert isinstance(found, RoundRule)
        self.seat = SequencedRounds(found, len(hosts), slots, lambda: 0.0, seed=3)
        self.seat.begin(dict(enumerate(hosts)))
        self.sequencer = self.seat.sequencer
        self.queues: dict[tuple[WorkerId, WorkerId], _Queue] = {}
        self.memories: dict[str, HostMemory] = {}
        self.nodes: dict[WorkerId, Node] = {}
        self.ranks: dict[WorkerId, Rank] = {}
        self.left: list[Rank] = []
        """In peace."""
        self.deaths = 0
        self.made = self.given_anew = 0
        for number in range(len(hosts)):
            self.add(number)

    def add(self, number: WorkerId, version: Version = 0) -> None:
        """A process begins."""
        host = self.hosts[number]
        if all(self.hosts[other] != host for other in self.ranks):
            self.memories[host] = HostMemory(len(self.hosts), self.numel, torch.float32, self.slots)

        def send(peer: WorkerId, header: Mapping[str, Any], content: torch.Tensor | None = None, *_: Any, lent: bool = False) -> None:
            if (peer == SEQUENCER or peer in self.nodes) and self.nodes[number] is node:
                kept = content if lent or content is None else content.clone()
                self.queues.setdefault((number, peer), deque()).append((dict(header), kept))

        def leave_memory() -> None:
            for (sender, _), queue in self.queues.items():
                if sender == number:
                    queue.extend([(header, None if content is None else content.clone()) for header, content in _taken(queue)])

        node = Node(number, self.memories[host], carried(send, leave_memory))
        self.nodes[number] = node
        self.seat.expect(number, host)
        self.seat.connect(number, cast(Any, _Line(self.queues.setdefault((SEQUENCER, number), deque()))))
        self.ranks[number] = Rank(number, node, version)
        local_peers = [other for other in self.ranks if self.hosts[other] == host]
        for local_peer in local_peers:
            self.nodes[local_peer].local_peers = {other for other in local_peers if other != local_peer}

    def hear(self, at: WorkerId, sender: WorkerId, header: Mapping[str, Any], content: torch.Tensor | None = None) -> None:
        """A process, a rank's or the sequencer's, handles a message."""
        if at == SEQUENCER:
            self.seat.on_message(sender, Message(dict(header), memoryview(b"" if content is None else bytes(content.nbytes)), ()))
        else:
            self.nodes[at].on_message(sender, header, NOTHING if content is None else content)

    def waiting(self) -> list[tuple[WorkerId, WorkerId]]:
        """The pairs between which something is on its way."""
        return sorted(pair for pair, queue in self.queues.items() if queue)

    def deliver_all(self) -> None:
        """Also what is sent in answer."""
        while pairs := self.waiting():
            self.deliver(pairs[0])

    def deliver(self, pair: tuple[WorkerId, WorkerId]) -> None:
        """The oldest message of a pair."""
        header, content = self.queues[pair].popleft()
        self.hear(pair[1], pair[0], header, content)
        for rank in list(self.ranks.values()) if pair[1] == SEQUENCER else [self.ranks[pair[1]]]:
            rank.look()

    def push(self, number: WorkerId) -> None:
        """A rank arrives with a new gradient, if a buffer is free."""
        rank = self.ranks[number]
        buffer = rank.node.buffer()
        if buffer is not None:
            vector = rank.node.memory.buffer(number, buffer)
            vector.zero_()
            vector[self.made] = 1.0
            self.made += 1
            rank.node.arrive(buffer, 1.0)
            rank.asked, rank.idle = True, False

    def can_give(self, number: WorkerId) -> bool:
        """Whether a newcomer can have what this rank has: while it waits to leave there may be more to come."""
        rank = self.ranks[number]
        return not rank.entering and (not rank.parting or self.may_leave(number))

    def part(self, number: WorkerId) -> None:
        """A rank has come to the end of its script."""
        rank = self.ranks[number]
        rank.node.notify({"k": "part"})
        rank.asked = rank.idle = rank.parting = True
        rank.look()

    def may_leave(self, number: WorkerId) -> bool:
        """Whether it has heard that the others can do without it."""
        return self.ranks[number].may_leave and self.ranks[number].free

    def leave(self, number: WorkerId) -> None:
        """It may go, and goes."""
        rank = self.ranks[number]
        before = len(self.seat.log.follow(0))
        self.left.append(rank)
        for other in self.ranks.values():
            other.given = other.given or other.donor is rank
        self._end(number, 99)
        entries = self.seat.log.follow(0)[before:]
        # With its last messages it may let a newcomer in, who takes over the buffers of the one before.
        taken_over = {entry.rank for entry in entries if entry.kind is EntryKind.ENTER}
        lost = [entry for entry in entries if entry.kind is EntryKind.LOST and entry.rank not in taken_over]
        assert self.deaths or not lost, f"rank {number} has left in peace, and with it went {lost}"

    def die(self, number: WorkerId, delivered: int) -> None:
        """A process is killed. So many of the messages that it has sent to each still arrive."""
        self.deaths += 1
        self._end(number, delivered)

    def _end(self, number: WorkerId, delivered: int) -> None:
        del self.nodes[number]
        self.seat.forget(number)
        dead = self.ranks.pop(number)
        for pair in [pair for pair in self.queues if pair[1] == number]:
            del self.queues[pair]
        for pair in [pair for pair in self.queues if pair[0] == number]:
            queue = self.queues.pop(pair)
            for header, content in list(queue)[:delivered]:
                self.hear(pair[1], number, header, content)
        for node in self.nodes.values():
            node.local_peers.discard(number)
        self.seat.order(number, "leave")
        for rank in self.ranks.values():
            rank.look()
        assert dead.node not in self.nodes.values()

    def enter(self, number: WorkerId, like: WorkerId) -> None:
        """A new process is this rank, with what another one has now, which admits it."""
        model = self.ranks[like]
        self.add(number, model.version)
        newcomer = self.ranks[number]
        newcomer.asked = newcomer.entering = True
        parted, model.may_leave, model.parting = model.may_leave, False, False
        newcomer.idle, newcomer.given = True, False
        newcomer.admitted = lambda: self.seat.admitted(number)
        self._admit(newcomer, model)
        if parted:
            self.part(like)

    def _admit(self, newcomer: Rank, model: Rank) -> None:
        newcomer.donor, newcomer.version, newcomer.results = model, model.version, dict(model.results)
        ticket = self.seat.ticket(newcomer.number)
        model.node.notify({"k": "let", "rank": newcomer.number, "version": model.version, "ticket": ticket, "pause": True})

    def give(self, number: WorkerId, others: Sequence[WorkerId] = ()) -> None:
        """A joiner gets the parameters of its donor. If that is dead, one of the others, the first, is its donor from now on."""
        newcomer = self.ranks[number]
        if not self._is_orphan(newcomer):
            newcomer.given = True
        elif others:
            newcomer.given = False
            self.given_anew += 1
            self._admit(newcomer, self.ranks[others[0]])
        newcomer.look()

    def outside(self) -> list[WorkerId]:
        """Those that cannot go on, and end: who is fenced."""
        return [number for number, rank in self.ranks.items() if rank.node.fenced is not None]

    def orphans(self) -> list[WorkerId]:
        """Joiners whose donor is dead: they need another."""
        return [number for number, rank in self.ranks.items() if self._is_orphan(rank)]

    def _is_orphan(self, rank: Rank) -> bool:
        donor = rank.donor
        return donor is not None and rank.entering and self.ranks.get(donor.number) is not donor and not rank.begins

    def finish(self) -> None:
        """Everybody stops, everything arrives, and everybody catches up; what must be so then is checked."""
        for _ in range(10 + len(self.ranks)):
            for rank in self.ranks.values():
                self.give(rank.number)
                if rank.free and rank.node.fenced is None:
                    rank.node.notify({"k": "read", "n": rank.version})
                if rank.free and not rank.idle and rank.node.fenced is None:
                    self.seat.order(rank.number, "pause")
                    rank.idle = True
            self.deliver_all()
            for rank in self.ranks.values():
                if rank.free and rank.idle and rank.node.fenced is None:
                    rank.node.notify({"k": "catch"})
                    rank.asked = True
            self.deliver_all()
        self._check()

    def _check(self) -> None:
        """What must be so at the end."""
        there = [rank for rank in self.ranks.values() if rank.node.fenced is None]
        assert all(rank.free and rank.idle for rank in there), "somebody waits for ever"
        assert all(rank.version == self.sequencer.number for rank in there)
        results: dict[Version, torch.Tensor] = {}
        # Where all are killed to whom one has left what it had, the others cannot have it.
        for rank in there if self.deaths else [*there, *self.left]:
            for number, result in rank.results.items():
                assert torch.equal(results.setdefault(number, result), result), f"replicas differ in round {number}"
        included = torch.zeros(self.numel)
        for result in results.values():
            values = result[result != 0].unique()
            assert len(values) <= 1, "a gradient is in a round twice, or was torn"
            assert all(value in [torch.tensor(1.0) / living for living in range(1, len(self.hosts) + 1)] for value in values)
            included += result != 0
        assert included.max() <= 1.0, "a gradient is in two rounds"
        arrived = sum(entry.kind is EntryKind.ARRIVE and entry.buffer is not None for entry in self.seat.log.follow(0))
        if there:
            lost = sum(entry.kind is EntryKind.LOST for entry in self.seat.log.follow(0))
            assert int(included.sum()) + lost == arrived


def _taken(queue: _Queue) -> list[tuple[dict[str, Any], torch.Tensor | None]]:
    """All that is in a queue, which is empty then."""
    taken = list(queue)
    queue.clear()
    return taken
