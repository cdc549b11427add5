"""Gossip across hosts, with a network carried by hand: ranks die and return at any moment, and each message waits for as long as it may."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import malformed
from tests.runtime.gossip.gossiping import NUMEL, STEPS, lockstep, moved

from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.rank_log import Fenced
from offbeat.errors import ProtocolError
from offbeat.policies import ADPSGD, DPSGD, SGP
from offbeat.runtime.allreduce.multi_host import connections
from offbeat.runtime.allreduce.multi_host.messages import SEQUENCER
from offbeat.runtime.gossip.exchange import Waiting
from offbeat.runtime.gossip.multi_host import MultiHostGossip
from offbeat.runtime.gossip.sequenced import SequencedGossip
from offbeat.transport.base import Message
from offbeat.types import WorkerId

RULES = (DPSGD(), SGP(), SGP(out_degree=2, overlap=1), SGP(graph="bipartite_exponential"), ADPSGD())
ENDED = None
"""The end of a connection, as a message."""


class Line:
    """What stands for `PeerConnections` at a rank, and for a `Connection` at server 0."""

    failure, ended = None, False

    def __init__(self, network: Network, rank: WorkerId) -> None:
        self.network, self.rank, self.peer = network, rank, rank

    def send(self, *words: Any, lent: bool = False) -> None:
        if isinstance(words[0], int):  # a rank's
            peer, header, *content = words
            payload = memoryview(content[0].clone().numpy()).cast("B") if content and content[0] is not None else memoryview(b"")
            self.network.put(self.rank, peer, header, payload)
        else:
            self.network.put(SEQUENCER, self.rank, words[0], memoryview(b""))

    def expect(self, peers: set[WorkerId]) -> None:
        """Everybody is connected."""

    def is_connected(self, peer: WorkerId) -> bool:
        return True

    def drop(self, peer: WorkerId) -> None:
        """Nothing more comes."""

    def close(self) -> None:
        """What was sent still comes."""


class Network:
    """Server 0 and the ranks, of which the first three take part from the beginning."""

    def __init__(self, rule: GossipRule, ranks: int, draws: Random) -> None:
        self.rule, self.draws, self.count = rule, draws, ranks
        self.queues: dict[tuple[int, int], deque[Message | None]] = {}
        self.server = SequencedGossip(rule, ranks, lambda: 0.0, 3)
        self.ranks: dict[WorkerId, MultiHostGossip] = {}
        self.work: dict[WorkerId, Waiting[tuple[WorkerId, ...]]] = {}
        self.unnoticed: list[WorkerId] = []
        self.made = dict.fromkeys(range(ranks), 0)
        self.server.begin({WorkerId(rank): f"host {rank}" for rank in range(ranks)})
        for rank in range(ranks):
            self.start(WorkerId(rank))

    def start(self, rank: WorkerId) -> None:
        gossip = MultiHostGossip(self.rule, self.count, NUMEL, rank=rank, hub=cast(Any, None), call=cast(Any, None), dtype=torch.float64)
        gossip._connections = cast(Any, Line(self, rank))
        for other in self.ranks:
            with self.ranks[other].lock:
                self.ranks[other].on_connected(rank)
        self.ranks[rank] = gossip
        self.server.expect(rank, f"host {rank}")
        self.server.connect(rank, cast(Any, Line(self, rank)))

    def begin(self, rank: WorkerId, parameters: torch.Tensor) -> None:
        """The messages of a rank's beginning do not wait."""
        gossip = self.ranks[rank]
        gossip._sleep = lambda told: self.deliver_all()  # type: ignore[method-assign]
        gossip.begin(parameters)
        gossip.resume()

    def put(self, source: int, to: int, header: Mapping[str, Any], payload: memoryview) -> None:
        if to == SEQUENCER or to in self.ranks:
            self.queues.setdefault((source, to), deque()).append(Message(dict(header), payload, ()))

    def deliver(self, *, vectors: bool = True) -> bool:
        """Deliver the first message of one of the queues. Returns False if there is none. ``vectors``: also of those between ranks."""
        waiting = sorted(key for key, queue in self.queues.items() if queue and (vectors or SEQUENCER in key))
        if not waiting:
            return False
        source, to = self.draws.choice(waiting)
        message = self.queues[source, to].popleft()
        if to == SEQUENCER:
            assert message is not None
            if self.server.has(WorkerId(source), self.server._connections.get(WorkerId(source), cast(Any, None))):
                self.server.on_message(WorkerId(source), message)
        elif to in self.ranks:
            with self.ranks[WorkerId(to)].lock:
                self.ranks[WorkerId(to)].on_message(WorkerId(source), message)
        return True

    def deliver_all(self) -> None:
        while self.deliver():
            pass

    def step(self, rank: WorkerId, change: torch.Tensor | None = None) -> None:
        """Let a rank go as far as it can."""
        if rank not in self.work:
            self.work[rank] = self.ranks[rank].stepping(change)
        try:
            next(self.work[rank])
        except StopIteration:
            del self.work[rank]
            self.made[rank] += 1

    def goes_on(self) -> bool:
        """Whether all that live can make steps."""
        before = dict(self.made)
        for _ in range(40):
            for rank in self.ranks:
                self.step(rank)
            self.deliver_all()
        return all(self.made[rank] > before[rank] + 5 for rank in self.ranks)

    def kill(self, rank: WorkerId) -> None:
        """Its messages to other ranks come up to some point; what it has asked server 0 for may be lost."""
        del self.ranks[rank]
        self.work.pop(rank, None)
        for (source, to), queue in self.queues.items():
            if to == rank:
                queue.clear()
            elif source == rank:
                for _ in range(self.draws.randint(0, len(queue))):
                    queue.pop()
        for other in self.ranks:
            self.queues.setdefault((rank, other), deque()).append(ENDED)
        self.unnoticed.append(rank)

    def notice(self, rank: WorkerId) -> None:
        self.unnoticed.remove(rank)
        self.queues.pop((rank, SEQUENCER), None)
        self.server.order(rank, "leave")

    def come_back(self, rank: WorkerId, source: WorkerId) -> None:
        self.deliver_all()  # the end of its former connections
        self.start(rank)
        self.ranks[source].admit(rank, self.server.ticket(rank))
        self.deliver_all()
        assert self.server.admitted(rank) and self.server.present(rank)
        self.begin(rank, self.ranks[source].model)


@pytest.fixture(autouse=True)
def _no_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PeerConnections", lambda *parts: None)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.exchange != "pair"], ids=lambda rule: rule.spelling)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_ranks_come_to_what_the_pure_machine_says(rule: GossipRule, count: int) -> None:
    network = Network(rule, count, Random(1))
    for rank in range(count):
        network.begin(WorkerId(rank), torch.full((NUMEL,), float(rank), dtype=torch.float64))
    while min(network.made.values()) < STEPS:
        for rank in range(count):
            if network.made[rank] < STEPS:
                network.step(WorkerId(rank), moved(rank, network.made[rank] + 1))
        network.deliver()
    models = torch.stack([network.ranks[WorkerId(rank)].model for rank in range(count)])
    torch.testing.assert_close(models, lockstep(rule, count), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", [DPSGD(), SGP(overlap=1), SGP(out_degree=2, overlap=1)], ids=lambda rule: rule.spelling)
def test_parameters_travel_while_ranks_compute(rule: GossipRule) -> None:
    """Within a step a rank hears of server 0 alone: what it mixes is there before."""
    network = Network(rule, 5, Random(1))
    for rank in network.ranks:
        network.begin(rank, torch.full((NUMEL,), float(rank), dtype=torch.float64))
    for made in range(1, STEPS + 1):
        network.deliver_all()  # all compute
        for _ in range(4):
            for rank in [rank for rank in network.ranks if network.made[rank] < made]:
                network.step(rank, moved(rank, made))
            while network.deliver(vectors=False):
                pass
        assert set(network.made.values()) == {made}
    models = torch.stack([network.ranks[WorkerId(rank)].model for rank in range(5)])
    torch.testing.assert_close(models, lockstep(rule, 5), rtol=1e-9, atol=1e-9)


def test_nothing_is_asked_for_ahead_that_would_delay_what_a_step_waits_for() -> None:
    network = Network(SGP(overlap=1), 2, Random(1))
    for rank in network.ranks:
        network.begin(rank, torch.zeros(NUMEL, dtype=torch.float64))
    asked = []
    for _ in range(2):
        for _ in range(4):  # then the next step waits for parameters as of the step before, and those as of this step are made already
            for rank in network.ranks:
                network.step(rank)
            while network.deliver(vectors=False):
                pass
        asked.append([message.header["n"] for message in network.queues[0, 1] if message and message.header["k"] == "want"])
        network.deliver_all()
    assert asked == [[1], [2]]


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 32), rule=st.sampled_from(RULES), count=st.integers(2, 5), deaths=st.integers(0, 4))
def test_whoever_dies_nobody_waits_and_what_is_lost_biases_nothing(seed: int, rule: GossipRule, count: int, deaths: int) -> None:
    """All begin with ones and make no change: any weight or mass that is not accounted for would show in the models."""
    draws = Random(seed)
    network, ones = Network(rule, count, draws), torch.ones(NUMEL, dtype=torch.float64)
    for number in range(count):
        network.begin(WorkerId(number), ones)
    table = network.server.table
    for _ in range(300):
        alive, absent = sorted(network.ranks), sorted(set(range(count)).difference(network.ranks, network.unnoticed))
        chance = draws.random()
        if chance < 0.02 and deaths and len(alive) > 1:
            deaths -= 1
            network.kill(draws.choice(alive))
        elif chance < 0.06 and network.unnoticed:
            network.notice(draws.choice(network.unnoticed))
        elif chance < 0.08 and absent:
            network.come_back(WorkerId(draws.choice(absent)), draws.choice(alive))
        elif chance < 0.5:
            network.step(draws.choice(alive))
        else:
            network.deliver()
        for gossip in network.ranks.values():
            assert float((gossip.model - 1.0).abs().max()) < 1e-9
        masses = sum(map(table.gossip.mass, table.gossip.present)) + table.gossip.in_flight() + table.gossip.lost
        assert abs(masses - table.gossip.entered) < 1e-9
    for rank in list(network.unnoticed):
        network.notice(rank)
    assert network.goes_on()


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), rule=st.sampled_from(RULES))
def test_whatever_a_rank_says_the_others_go_on_without_it(seed: int, rule: GossipRule) -> None:
    """Rank 2 sends mutations of every message. What server 0 refuses has changed nothing, and no process comes to an end with it."""
    draws = Random(seed)
    network, intruder = Network(rule, 3, draws), WorkerId(2)
    for rank in range(3):
        network.begin(WorkerId(rank), torch.ones(NUMEL, dtype=torch.float64))
    examples = {**malformed.TO_TABLE, **malformed.FROM_TABLE, **malformed.BETWEEN_GOSSIPS}
    refused = 0
    while refused < 20:
        network.step(WorkerId(draws.randrange(2)))
        network.deliver()
        kind = draws.choice(list(examples))
        header = malformed.mutated({"k": kind, **examples[kind]}, draw=draws, times=draws.choice([1, 1, 2]))
        message = Message(header, memoryview(bytearray(draws.choice([0, 0, 8, 8 * NUMEL]))), ())
        at, before = draws.choice([SEQUENCER, WorkerId(0), WorkerId(1)]), network.server.table.words()
        try:
            if at == SEQUENCER:
                network.server.on_message(intruder, message)
            else:
                with network.ranks[at].lock:
                    network.ranks[at].on_message(intruder, message)
        except ProtocolError:
            assert network.server.table.words() == before
            refused += 1
    network.kill(intruder)
    network.notice(intruder)
    assert network.goes_on()


def test_who_breaks_the_protocol_is_told_so_and_who_is_out_is_fenced() -> None:
    network = Network(SGP(), 2, Random(0))
    for rank in range(2):
        network.begin(WorkerId(rank), torch.zeros(NUMEL, dtype=torch.float64))
    server = network.server
    server.on_message(WorkerId(0), Message({"k": "step", "gradient": True}, memoryview(b""), ()))
    with pytest.raises(ProtocolError, match="rank 0 sent 'rest' before the answer to its last request"):
        server.on_message(WorkerId(0), Message({"k": "rest"}, memoryview(b""), ()))
    took = Message({"k": "took", "got": [[1, 7]]}, memoryview(b""), ())
    with pytest.raises(ProtocolError, match="rank 0 sent 'took' with nothing to take"):
        server.on_message(WorkerId(0), took)
    server.on_message(WorkerId(1), Message({"k": "step", "gradient": True}, memoryview(b""), ()))
    with pytest.raises(ProtocolError, match="rank 0 sent 'took' with got"):
        server.on_message(WorkerId(0), took)
    asked = network.ranks[WorkerId(1)]
    with asked.lock:
        for steps in range(2, 65):  # it has asked for step 1 ahead
            asked.on_message(WorkerId(0), Message({"k": "want", "n": steps}, memoryview(b""), ()))
        with pytest.raises(ProtocolError, match="rank 0 wants the parameters of more than 64 steps"):
            asked.on_message(WorkerId(0), Message({"k": "want", "n": 65}, memoryview(b""), ()))
        with pytest.raises(ProtocolError, match="sent 'vector' with 8 bytes"):
            asked.on_message(WorkerId(0), Message({"k": "vector", "n": 1}, memoryview(bytes(8)), ()))
    server.order(WorkerId(1), "leave")
    network.deliver_all()
    with pytest.raises(Fenced, match="declared dead"):
        network.ranks[WorkerId(1)].step(None)
