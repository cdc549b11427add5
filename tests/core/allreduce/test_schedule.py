"""Schedules of the allreduce family: every rank ends with the same exact sum, for any number of ranks, size and order of messages."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.allreduce.played import Played, play
from tests.tiers import examples, marked

from offbeat.core.allreduce.algorithms import doubling, halving, partial_allreduce, ring
from offbeat.core.allreduce.schedule import Action, ElementRange, Operation, OperationKind, Passage, RankProgram, Schedule
from offbeat.tensors.absent import ABSENT, is_absent
from offbeat.tensors.running_sum import RunningSum

RANKS = range(1, 34)
IN_CI = {*range(1, 9), 13, 16, 17, 33}
"""Powers of two, numbers beside one and others: of each kind some; the random examples have all."""
WAYS: dict[str, Callable[[int, int], Schedule]] = {"doubling": doubling, "halving": halving, "ring": ring}


def expected_sum(parts: list[list[torch.Tensor]], numel: int) -> torch.Tensor:
    """Of integer-valued float32 vectors, exact."""
    total = torch.zeros(numel, dtype=torch.float64)
    for part in (part for own in parts for part in own):
        total += part
    return total.float()


def drawn_parts(draws: random.Random, ranks: int, numel: int) -> list[list[torch.Tensor]]:
    """Of each rank none, one or two vectors of whole numbers; all of them null now and then."""
    generator = torch.Generator().manual_seed(draws.randrange(1 << 30))
    most = draws.choice([0, 1, 1, 2])
    return [[torch.randint(-99, 99, (numel,), generator=generator).float() for _ in range(draws.randint(0, most))] for _ in range(ranks)]


def run(schedule: Schedule, parts: list[list[torch.Tensor]], numel: int, draws: random.Random) -> tuple[Played, list[torch.Tensor]]:
    """With random delays, and each rank beginning at a time of its own."""
    ranks = len(schedule)
    vectors = [RunningSum(torch.full((numel,), torch.nan), parts[rank], 1, 1, schedule[rank], rank) for rank in range(ranks)]
    starts = [draws.choice([0.0, draws.random()]) for _ in range(ranks)]
    played = play(schedule, lambda *_: draws.choice([0.0, draws.random(), draws.expovariate(1.0)]), starts=starts, vectors=vectors)
    return played, [vector.out for vector in vectors]


def bits(vector: torch.Tensor) -> bytes:
    return bytes(vector.contiguous().view(torch.uint8).tolist())


@pytest.mark.few(8)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", marked(RANKS, night=[ranks for ranks in RANKS if ranks not in IN_CI]))
def test_every_rank_ends_with_the_sum(way: str, ranks: int) -> None:
    draws = random.Random(ranks)
    for numel in (0, 1, 2, 3, ranks - 1, ranks, ranks + 1, 64, 101):
        parts = drawn_parts(draws, ranks, numel)
        played, results = run(WAYS[way](ranks, numel), parts, numel, draws)
        assert played.waiting == ()
        assert None not in played.done_s
        for result in results:
            assert torch.equal(result, expected_sum(parts, numel))


@examples(300)
@given(ranks=st.integers(1, 33), numel=st.integers(0, 200), way=st.sampled_from(sorted(WAYS)), seed=st.integers(0, 2**30))
def test_all_results_are_equal_bit_by_bit(ranks: int, numel: int, way: str, seed: int) -> None:
    """Rounded sums, which depend on the order of addition; infinities, zeros of both signs and NaN with their bits."""
    draws = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(ranks):
        own = [torch.randn(numel, generator=generator) * 10.0 ** draws.randint(-6, 6) for _ in range(draws.randint(0, 2))]
        for part in own:
            if numel and draws.random() < 0.3:
                part[draws.randrange(numel)] = draws.choice([float("inf"), -float("inf"), float("nan"), -0.0])
            if draws.random() < 0.1:
                part.fill_(-0.0)
        parts.append(own)
    absent = slice(draws.randrange(numel + 1), numel)
    for part in (part for own in parts for part in own):
        part[absent] = ABSENT
    played, results = run(WAYS[way](ranks, numel), parts, numel, draws)
    assert played.waiting == ()
    assert len({bits(result) for result in results}) == 1
    assert absent.start == numel or is_absent(results[0][absent]), "negative zeros are not there where all have them"


@pytest.mark.few(8)
@pytest.mark.parametrize("ranks", RANKS)
def test_messages_elements_and_steps(ranks: int) -> None:
    """Counted, and one second for each message."""
    numel = 64 * ranks
    steps = ranks.bit_length() - 1
    inner, outer = 1 << steps, ranks - (1 << steps)
    folded = 2 if outer else 0

    played = play(doubling(ranks, numel), lambda *_: 1.0)
    assert played.messages == inner * steps + 2 * outer
    assert played.elements == numel * played.messages
    assert steps + bool(folded) <= max(filter(None, played.done_s), default=0.0) <= steps + folded

    played = play(halving(ranks, numel), lambda *_: 1.0)
    assert played.messages == 2 * inner * steps + 2 * outer
    assert played.elements == 2 * numel * (ranks - 1)
    assert 2 * steps <= max(filter(None, played.done_s), default=0.0) <= 2 * steps + folded

    played = play(ring(ranks, numel), lambda *_: 1.0)
    assert played.messages == 2 * ranks * (ranks - 1)
    assert played.elements == 2 * numel * (ranks - 1)
    assert max(filter(None, played.done_s), default=0.0) == 2 * (ranks - 1)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 13])
def test_each_element_is_divided_once(ranks: int) -> None:
    for numel in (1, 7, 100_000):
        schedule = partial_allreduce(ranks, numel, 4)
        vectors = [
            RunningSum(torch.empty(numel), [torch.full((numel,), float(rank))], ranks, ranks, schedule[rank], rank) for rank in range(ranks)
        ]
        play(schedule, lambda *_: 1.0, vectors=vectors)
        for vector in vectors:
            assert torch.equal(vector.out, torch.full((numel,), ranks * (ranks - 1) / 2) / ranks)


def test_schedules_are_persistent_and_operations_are_consumed() -> None:
    schedule = partial_allreduce(4, 10, 4)
    assert schedule is partial_allreduce(4, 10, 4)
    starts = [0.0, 0.0, 1.0, 0.5]
    assert play(schedule, lambda *_: 1.0, starts=starts) == play(schedule, lambda *_: 1.0, starts=starts)
    passage = Passage(schedule[0])
    taken = []
    for peer, tag in ((1, 1), (1, 1), (2, 2), (2, 2)):
        passage.received(peer, tag)
        while (index := passage.take()) is not None:
            taken.append(index)
            passage.finished(index)
    assert passage.done and len(taken) == len(set(taken))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 11])
def test_what_is_lent_does_not_change_before_the_peer_has_it(way: str, ranks: int) -> None:
    """Whatever may change a lent span comes, in the graph of all ranks, after the peer's receive, or before the send."""
    schedule = WAYS[way](ranks, 64 * ranks)
    before = causes(schedule)
    for rank, program in enumerate(schedule):
        for index, sent in enumerate(program.operations):
            if not sent.lent:
                continue
            assert sent.peer is not None and sent.tag is not None and sent.span is not None
            received = (sent.peer, schedule[sent.peer].receives[rank, sent.tag])
            for other, change in enumerate(program.operations):
                if change.kind is OperationKind.COMPUTE and change.span is not None and overlap(change.span, sent.span):
                    assert (rank, other) in before[rank, index] or received in before[rank, other]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 11])
def test_a_copy_may_be_received_where_it_belongs(way: str, ranks: int) -> None:
    """When a message that is only copied arrives, all that the copy comes after has been done already."""
    schedule = WAYS[way](ranks, 64 * ranks)
    before = causes(schedule)
    for rank, program in enumerate(schedule):
        for copy in program.operations:
            if copy.action is Action.COPY and copy.source is not None:
                assert {(rank, earlier) for earlier in copy.after if earlier != copy.source} <= before[rank, copy.source]


def causes(schedule: Schedule) -> dict[tuple[int, int], frozenset[tuple[int, int]]]:
    """By rank and operation: all operations that have always fired before it."""
    sends = {(r, o.peer, o.tag): (r, i) for r, p in enumerate(schedule) for i, o in enumerate(p.operations) if o.kind is OperationKind.SEND}
    found: dict[tuple[int, int], frozenset[tuple[int, int]]] = {}

    def of(node: tuple[int, int]) -> frozenset[tuple[int, int]]:
        if node not in found:
            rank, index = node
            operation = schedule[rank].operations[index]
            direct = [(rank, earlier) for earlier in operation.after]
            if operation.kind is OperationKind.RECEIVE:
                direct = [sends[operation.peer, rank, operation.tag]]
            found[node] = frozenset(direct).union(*map(of, direct))
        return found[node]

    for rank, program in enumerate(schedule):
        for index in range(len(program.operations)):
            of((rank, index))
    return found


def overlap(one: ElementRange, other: ElementRange) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def test_a_message_of_another_schedule_is_told() -> None:
    with pytest.raises(KeyError):
        Passage(doubling(2, 1)[0]).received(peer=1, tag=99)


def test_programs_have_no_cycles() -> None:
    with pytest.raises(AssertionError, match="comes after"):
        RankProgram((Operation(OperationKind.NOP, after=(0,)),), done=0)
