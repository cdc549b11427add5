"""The rounds of one host, several ranks in one process: what a rank is told, what is kept for it, and what the log says of it."""

from __future__ import annotations

import gc
import os
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.allreduce.one_host.processes import RANKS, SMALL, create, eager, ramp, replayed, seen, worth
from tests.runtime.allreduce.one_step import step
from tests.tiers import examples

from offbeat.core.allreduce.policy import ABSENT
from offbeat.core.rank_log import Entry, EntryKind, Fenced, TooOld
from offbeat.errors import ConfigurationError, JobError, ProtocolError
from offbeat.runtime.allreduce.one_host.rounds import OneHostRounds
from offbeat.transport.shm import MemoryBlock


def entered(host: OneHostRounds) -> list[OneHostRounds]:
    """All ranks, taking part from version 0 on."""
    ranks = [OneHostRounds.attach(host.block, rank) for rank in range(host.ranks)]
    for number, rank in enumerate(ranks):
        rank.enter(number, 0)
    return ranks


def values(results: list[tuple[int, torch.Tensor]]) -> list[tuple[int, float]]:
    return [(number, float(result[0])) for number, result in results]


def test_who_waits_does_not_arrive_again() -> None:
    ranks = entered(create("full", SMALL))
    ranks[0].arrive()
    with pytest.raises(AssertionError, match="while it waits"):
        ranks[0].arrive()


def test_large_vectors_are_summed_in_slices() -> None:
    numel = 150_001
    host = create("quorum(q=2)", numel)
    ranks = entered(host)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(2)]
    ranks[3].send().copy_(gradients[0])
    ranks[3].arrive()
    ranks[0].send().copy_(gradients[1])
    ranks[0].arrive()
    assert ranks[0].wait(0.0) and ranks[3].wait(0.0)
    ((_, result),) = ranks[0].results()
    assert torch.equal(result, (gradients[1] + gradients[0]) / RANKS), "in the order of the ranks"


def test_only_a_late_gradient_is_clipped() -> None:
    ranks = entered(create("solo", SMALL))
    ranks[0].send().fill_(10.0)
    ranks[0].arrive(clip=1.0)
    assert values(ranks[0].results()) == [] and ranks[0].wait() and values(ranks[0].results()) == [(0, 2.5)]
    ranks[1].send().fill_(10.0)
    assert ranks[1].arrive(clip=2.0).late
    ranks[0].send().zero_()
    ranks[0].arrive()
    ranks[0].wait()
    ((_, result),) = ranks[0].results()
    assert float(torch.linalg.vector_norm(result)) == pytest.approx(2.0 / RANKS)


def test_the_absent_are_fenced_and_may_come_back() -> None:
    host = create("solo", SMALL)
    ranks = entered(host)
    host.leave(1)
    assert host.state(1) == ABSENT
    for call in (ranks[1].send, ranks[1].arrive, ranks[1].catch_up):
        with pytest.raises(Fenced, match="rank 1 does not take part"):
            call()
    step(ranks[0], torch.ones(SMALL))
    with pytest.raises(Fenced):
        ranks[1].send()
    again = OneHostRounds.attach(host.block, 1)
    host.enter(1, host.done)
    assert step(again, torch.ones(SMALL)).included


def test_a_rank_has_one_process() -> None:
    host = create("solo", SMALL)
    ranks = entered(host)
    again = OneHostRounds.attach(host.block, 2)
    with pytest.raises(Fenced, match="another process is rank 2 now"):
        ranks[2].arrive()
    assert step(again, torch.ones(SMALL)).included


def test_whoever_waits_and_is_thought_dead_is_fenced() -> None:
    host = create("full", SMALL)
    ranks = entered(host)
    ranks[1].arrive()
    host.leave(1)
    with pytest.raises(Fenced):
        ranks[1].wait()


def test_who_reads_slowly_and_is_thought_dead_hears_that_what_it_read_may_be_of_a_later_round() -> None:
    host = create("solo", SMALL)
    ranks = entered(host)
    for absent in range(2, RANKS):
        host.leave(absent)
    ((_, result),) = step(ranks[1], torch.full((SMALL,), 8.0)).results
    assert float(result[0]) == 4.0
    host.leave(1)
    while float(result[0]) == 4.0:
        assert host.done <= host.slots, "its place was not used again"
        step(ranks[0], torch.ones(SMALL))
    with pytest.raises(Fenced, match="rank 1 does not take part"):
        ranks[1].read()


def test_who_comes_later_gets_the_results_from_its_version_on() -> None:
    host = create("solo", SMALL)
    ranks = [OneHostRounds.attach(host.block, rank) for rank in range(RANKS)]
    ranks[0].enter(0, 0)
    for value in (1.0, 2.0, 3.0):
        step(ranks[0], torch.full((SMALL,), value))
        ranks[0].read()
    ranks[1].enter(1, 2)
    assert values(ranks[1].catch_up()) == [(2, 3.0)]
    assert host.slots > 3
    host = create("solo", SMALL, slots=2)
    ranks = [OneHostRounds.attach(host.block, rank) for rank in range(RANKS)]
    ranks[0].enter(0, 0)
    for value in (1.0, 2.0, 3.0):
        step(ranks[0], torch.full((SMALL,), value))
        ranks[0].read()
    with pytest.raises(TooOld, match=r"rank 1 cannot enter with version 0: the result of round 0 is no longer kept, and 3 rounds are done"):
        ranks[1].enter(1, 0)
    assert host.state(1) == ABSENT, "nothing has changed"


def test_the_log_is_followed_and_waits_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.runtime.shared_memory.layout.LOG_ENTRIES", 128)
    host = create("quorum(q=1)", SMALL, followed=True)
    ranks = entered(host)
    read: list[Entry] = []
    for _ in range(40):
        step(ranks[0], torch.ones(SMALL))
        read += host.follow(len(read))
    assert [entry.seq for entry in read] == list(range(RANKS + 40 * 2))
    assert [entry.kind for entry in read[RANKS : RANKS + 2]] == [EntryKind.ARRIVE, EntryKind.FOLD_DONE]
    assert all(earlier.at_ns <= later.at_ns for earlier, later in pairwise(read))

    def go_on() -> None:
        for _ in range(40):
            step(ranks[0], torch.ones(SMALL))

    def over() -> None:
        raise JobError("the job is over")

    ranks[0].meanwhile = over
    with pytest.raises(JobError, match="the job is over"):
        go_on()
    assert host.follow(len(read))
    host.follow(len(read) + len(host.follow(len(read))))
    step(ranks[0], torch.ones(SMALL))


def test_blocks_are_checked() -> None:
    with pytest.raises(ProtocolError, match="a block for rounds begins with"):
        OneHostRounds.attach(MemoryBlock.allocate(1 << 16, "zeros"))
    with pytest.raises(ConfigurationError, match=r"torch.float16 cannot be used for rounds"):
        OneHostRounds.create(eager("solo"), 2, 4, dtype=torch.float16)
    with pytest.raises(ConfigurationError, match="are available"):
        OneHostRounds.create(eager("solo"), 2, 1 << 50)
    host = create("first_of(m=2)", SMALL)
    assert OneHostRounds.attach(host.block).rule == eager("first_of(m=2)")


def test_only_what_is_touched_takes_memory() -> None:
    host = create("full", 1 << 18)
    assert isinstance(host.block, MemoryBlock)
    ranks = entered(host)
    for _ in range(5):
        for rank in ranks:
            rank.send().fill_(1.0)
            rank.arrive()
        for rank in ranks:
            assert rank.wait(0.0)
            rank.read()
    resident = os.fstat(host.block.descriptor).st_blocks * 512
    assert host.block.nbytes > 100 * (1 << 21)
    assert resident < 14 * (1 << 21), "two buffers for each rank, and a few results"


def test_memory_is_given_back() -> None:
    def open_blocks() -> int:
        return sum("offbeat-rounds" in line for line in open("/proc/self/maps"))

    gc.collect()
    before = open_blocks()
    host = create("solo", SMALL)
    rank = OneHostRounds.attach(MemoryBlock.receive(os.dup(host.block.descriptor)), 0)  # type: ignore[attr-defined]
    assert open_blocks() == before + 2
    rank.close()
    host.close()
    del rank, host
    gc.collect()
    assert open_blocks() == before


RULES = ("solo", "solo(staleness=2)", "majority", "majority(staleness=3)", "first_of(m=2)", "all_of(m=2)", "quorum(q=3)", "full")


@examples(300)
@given(
    word=st.sampled_from(RULES),
    seed=st.integers(0, 5),
    slots=st.integers(2, 12),
    numel=st.sampled_from([SMALL, 70_000]),
    moves=st.lists(st.tuples(st.integers(0, RANKS - 1), st.sampled_from("ssssssseelpr")), max_size=60),
)
def test_whatever_happens_the_log_explains_it(word: str, seed: int, slots: int, numel: int, moves: list[tuple[int, str]]) -> None:
    host = create(word, numel, seed=seed, slots=slots)
    ranks = [OneHostRounds.attach(host.block, rank) for rank in range(RANKS)]
    counts, waiting = [0] * RANKS, [False] * RANKS
    got: list[list[list[tuple[int, float, bool]]]] = [[] for _ in range(RANKS)]
    vector = ramp(numel)

    def collect(rank: int) -> None:
        if waiting[rank] and ranks[rank].wait(0.0):
            got[rank][-1] += seen(ranks[rank])
            waiting[rank] = False

    for rank, move in moves:
        there, mine = host.state(rank) != ABSENT, ranks[rank]
        if there:
            collect(rank)
        if move == "e" and not there:
            ranks[rank] = OneHostRounds.attach(host.block, rank)
            host.enter(rank, host.done)
            got[rank].append([])
        elif move == "l" and there:
            host.leave(rank)
            waiting[rank] = False
        elif not there or waiting[rank]:
            continue
        elif move == "s":
            torch.mul(vector, worth(rank, counts[rank]), out=mine.send())
            counts[rank] += 1
            mine.arrive()
            waiting[rank] = True
        elif move == "p":
            host.pause(rank)
            mine.catch_up()
            got[rank][-1] += seen(mine)
        elif move == "r":
            host.resume(rank)
    for rank in range(RANKS):
        host.pause(rank) if host.state(rank) != ABSENT else None
    there_still = [rank for rank in range(RANKS) if host.state(rank) != ABSENT]
    for _ in range(RANKS):  # one's round may wait for the room that results take which another has not read
        for rank in there_still:
            collect(rank)
            if not waiting[rank]:
                ranks[rank].catch_up()
                got[rank][-1] += seen(ranks[rank])
    assert not any(waiting[rank] for rank in there_still)
    expected = replayed(host.follow(0), host, word, seed)
    for lives in got:
        for results in lives:
            assert [fits for _, _, fits in results] == [True] * len(results)
            assert [first for _, first, _ in results] == [expected[number] for number, _, _ in results]
    if there_still:
        assert host.number == host.done, "everything is folded in the end"
