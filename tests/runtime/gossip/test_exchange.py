"""Gossip in shared memory: the sums of the pure machine, by threads and by processes of which some are killed."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection

import pytest
import torch
from tests.core.mixing import Replicas
from tests.rank_processes import Ranks, open_block, until
from tests.runtime.gossip.gossiping import NUMEL, STEPS, lockstep, moved
from tests.support.threads import together

from offbeat.core.effects import Release, WrittenOff
from offbeat.core.events import Pushed
from offbeat.core.gossip.ledger import GossipLedger
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.rank_log import EntryKind, Fenced
from offbeat.errors import ConfigurationError, ProtocolError
from offbeat.policies import ADPSGD, DPSGD, SGP, rule
from offbeat.runtime.gossip.one_host import GossipMemory, GossipState, OneHostGossip
from offbeat.runtime.gossip.plane import GossipGroup
from offbeat.transport.shm import AVAILABLE, MemoryBlock

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="shared memory is Linux's")

RULES = (DPSGD(), SGP(), SGP(out_degree=2, overlap=1), SGP(graph="ring"), SGP(graph="bipartite_exponential"), ADPSGD())


def job(policy: GossipRule, ranks: int) -> tuple[GossipGroup, list[OneHostGossip]]:
    host = GossipGroup([GossipMemory.create(policy, ranks, NUMEL, dtype=torch.float64, seed=3)])
    mine = [OneHostGossip(host.memory[0], rank) for rank in range(ranks)]
    host.begin(range(ranks))
    for number, rank in enumerate(mine):
        rank.begin(torch.full((NUMEL,), float(number), dtype=torch.float64))
    return host, mine


def masses(host: GossipGroup) -> tuple[float, float, float, float]:
    """Of all ranks, of messages under way, what is lost, and what has entered."""

    def read(state: GossipState) -> tuple[float, float, float, float]:
        gossip = state.gossip
        return sum(map(gossip.mass, gossip.present)), gossip.in_flight(), gossip.lost, gossip.entered

    found: tuple[float, float, float, float] = host._first.read(read)
    return found


def waits(rank: OneHostGossip) -> bool:
    """Let a rank begin a step, and return whether it has to wait in it."""
    return next(rank.stepping(None), None) is not None


@pytest.mark.parametrize("policy", RULES, ids=lambda policy: policy.spelling)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_threads_come_to_what_the_pure_machine_says(policy: GossipRule, count: int) -> None:
    host, ranks = job(policy, count)
    barrier = threading.Barrier(count)

    def work(rank: int) -> None:
        for step in range(1, STEPS + 1):
            ranks[rank].step(moved(rank, step))
        barrier.wait(timeout=30.0)

    together(count, work)
    produced = sum(rank + sum(float(moved(rank, step)[0]) for step in range(1, STEPS + 1)) for rank in range(count))
    if policy.exchange == "pair":
        vectors = torch.stack([ranks[rank]._memory.vector(rank, 0) for rank in range(count)])
        assert vectors.sum(dim=0) == pytest.approx(torch.full((NUMEL,), produced, dtype=torch.float64), rel=1e-12)
        return
    models = torch.stack([rank.model.clone() for rank in ranks])
    torch.testing.assert_close(models, lockstep(policy, count), rtol=1e-9, atol=1e-9)
    there, flying, lost, entered = masses(host)
    assert there + flying == pytest.approx(count) and (lost, entered) == (0.0, count)
    for number, rank in enumerate(ranks):
        host.pause(number)
        rank.catch_up()
    there, flying, lost, entered = masses(host)
    assert there == pytest.approx(count) and (policy.exchange != "push" or flying == 0.0)
    total = torch.stack([rank._own for rank in ranks]).sum(dim=0)
    assert total.tolist() == pytest.approx([produced] * NUMEL)


@pytest.mark.parametrize("policy", RULES, ids=lambda policy: policy.spelling)
def test_a_follower_comes_to_the_same_decisions(policy: GossipRule) -> None:
    host, ranks = job(policy, 5)
    # What is sent while somebody leaves may be mixed in a step sooner or later than the follower thinks; so nobody leaves there.
    leaves = policy.exchange != "push"

    def work(rank: int) -> None:
        for step in range(1, STEPS + 1 if rank != 3 or not leaves else 11):
            ranks[rank].step(moved(rank, step))
        if rank == 3 and leaves:
            host.leave(3, 1)

    together(5, work)
    entries = host.follow(0)
    assert [entry.seq for entry in entries] == list(range(len(entries))) and host.follow(len(entries)) == []
    ledger, replicas, versions = GossipLedger(policy, seed=3), Replicas(policy.exchange), dict.fromkeys(range(5), 0)
    for entry in entries:
        if entry.kind is EntryKind.ENTER:
            effects = ledger.enter(entry.rank, 1, 0.0)
        elif entry.kind is EntryKind.LEAVE:
            replicas.gone(entry.rank)
            effects = ledger.leave(entry.rank, 0.0)
        else:
            assert entry.kind is EntryKind.ARRIVE
            effects = ledger.push(Pushed(entry.rank, 1, versions[entry.rank], 1, 0.0), 0.0)
            assert ledger.gossip.steps(entry.rank) == entry.version
        replicas.follow(effects)
        versions.update({effect.worker: effect.version for effect in effects if isinstance(effect, Release)})
    assert ledger.version == 4 * STEPS + (10 if leaves else STEPS) and not ledger.waiting
    assert ledger.gossip.words() == pytest.approx(host._first.read(lambda state: state.gossip.words()))


def test_nobody_gets_further_ahead_than_there_are_slots() -> None:
    host, ranks = job(SGP(graph="ring"), 6)
    for rank, steps in ((3, 0), (4, 1), (5, 2)):  # rank 2 stands still: each waits for the one before
        for _ in range(steps):
            ranks[rank].step(None)
        assert waits(ranks[rank]), rank
    for _ in range(3):
        ranks[0].step(None)
        ranks[1].step(None)
    assert host._first.read(lambda state: state.blocked(1, "step")) == "neighbours to read what it has sent"
    assert waits(ranks[1]) and ranks[2].step(None) == (1,)


def test_the_dead_are_waited_for_no_more_and_may_come_back() -> None:
    host, ranks = job(SGP(), 3)

    def work(rank: int) -> None:
        for step in range(1, STEPS + 1 if rank < 2 else 2):
            ranks[rank].step(moved(rank, step))
        if rank == 2:
            (lost,) = host.leave(2, 1)
            assert isinstance(lost, WrittenOff) and lost.mass > 0.0 and host.leave(2, 1) == ()

    together(3, work)
    there, flying, lost, entered = masses(host)
    assert there + flying + lost == pytest.approx(entered) and lost > 0.0
    with pytest.raises(Fenced, match="declared dead"):
        ranks[2].step(None)
    again = OneHostGossip(host.memory[0], 2)
    with pytest.raises(Fenced, match="rank 2 does not take part"):
        again.begin(ranks[0].model)
    host.enter(2, 0)
    again.begin(ranks[0].model)
    assert masses(host)[3] == 4.0 and torch.equal(again.model, ranks[0].model)
    with pytest.raises(Fenced):
        ranks[2].step(None)


def test_who_is_idle_is_no_neighbour() -> None:
    host, ranks = job(DPSGD(), 3)
    host.pause(1)
    assert ranks[0].step(None) == (2,), "a ring of two"
    assert waits(ranks[0])
    ranks[2].step(None)
    ranks[1].resume()
    assert set(ranks[1].step(None)) == {0, 2}
    assert host._first.read(lambda state: state.gossip.steps(1)) == 2, "it was set forward to the slowest"


@pytest.mark.parametrize("policy", RULES, ids=lambda policy: policy.spelling)
def test_others_let_a_rank_rest_and_it_mixes_what_was_on_its_way(policy: GossipRule) -> None:
    host, ranks = job(policy, 3)
    together(3, lambda rank: [ranks[rank].step(moved(rank, step)) for step in range(1, 4)])
    host.pause(1)
    assert host._first.read(lambda state: state.gossip.active) == (0, 2)
    ranks[1].catch_up()
    there, flying, _, _ = masses(host)
    assert there + flying == pytest.approx(3.0)
    together(3, lambda rank: [ranks[rank].step(None) for _ in range(0 if rank == 1 else 5)])
    assert host._first.read(lambda state: state.gossip.pending(1).messages) == ()
    host.resume(1)
    together(3, lambda rank: [ranks[rank].step(None) for _ in range(5)])
    assert host._first.read(lambda state: state.gossip.active) == (0, 1, 2) and ranks[0].steps == 3 * 3 + 2 * 5 + 3 * 5


@pytest.mark.parametrize("policy", [DPSGD(), ADPSGD()], ids=lambda policy: policy.spelling)
def test_nobody_mixes_with_one_that_has_entered_and_not_begun(policy: GossipRule) -> None:
    memory = GossipMemory.create(policy, 2, NUMEL, dtype=torch.float64)
    mine = OneHostGossip(memory.block, 1)
    memory.enter(0)
    memory.enter(1)
    mine.begin(torch.ones(NUMEL, dtype=torch.float64))
    if policy.exchange == "pair":
        assert mine.step(None) == ()
        return
    stepping = mine.stepping(None)
    next(stepping)  # it waits for the parameters of rank 0
    OneHostGossip(memory.block, 0).begin(torch.zeros(NUMEL, dtype=torch.float64))
    assert mine._run(stepping) == (0,)


def test_what_does_not_belong_here_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.float16 cannot be used for gossip"):
        GossipMemory.create(SGP(), 2, 3, dtype=torch.float16)
    with pytest.raises(ProtocolError, match="a block for gossip begins with"):
        GossipMemory(MemoryBlock.allocate(4096, "nothing"))
    assert GossipMemory(GossipMemory.create(SGP(), 2, 3).block).rule == SGP()


def go_on(rank: int, where: str, pipe: Connection) -> None:
    """Make steps until killed."""
    gossip = OneHostGossip(open_block(where), rank)
    gossip.begin(torch.zeros(NUMEL))
    while True:
        gossip.step(-0.1 * (gossip.model - rank))


@pytest.mark.parametrize("sync", ["dpsgd", "sgp(out_degree=2, overlap=1)", "adpsgd"])
def test_a_killed_process_stops_nobody(sync: str) -> None:
    policy = rule(sync)
    assert isinstance(policy, GossipRule)
    memory = GossipMemory.create(policy, 3, NUMEL, seed=1)
    host, block = GossipGroup([memory]), memory.block
    assert isinstance(block, MemoryBlock)
    host.begin(range(3))

    def steps(rank: int) -> int:
        return int(host._first.read(lambda state: state.gossip.steps(rank) if rank in state.gossip.present else -1))

    with Ranks(block, go_on, ranks=range(3)) as ranks:
        until(lambda: min(map(steps, range(3))) > 20)
        ranks.kill(1)
        host.leave(1, 1)
        before = steps(0), steps(2)
        until(lambda: steps(0) > before[0] + 3 and steps(2) > before[1] + 3, timeout_s=1.0)
        host.enter(1, 0)
        ranks.start(1)
        until(lambda: steps(1) > before[0] + 20)
        there, flying, lost, entered = masses(host)
        assert entered == 4.0 and (policy.exchange != "push" or there + flying + lost == pytest.approx(entered))
