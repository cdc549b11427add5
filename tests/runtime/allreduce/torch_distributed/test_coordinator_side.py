"""Who takes part in which round of a plain allreduce, from what the ranks say, in whatever order that comes."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.core.rank_log import EntryKind
from offbeat.runtime.allreduce.torch_distributed.coordinator_side import TorchGroup
from offbeat.types import WorkerId


class Seen:
    """A table of three ranks, and who was told to take part with nothing."""

    def __init__(self) -> None:
        self.absent: list[tuple[int, ...]] = []
        self.table = TorchGroup("127.0.0.1", lambda ranks: self.absent.append(tuple(sorted(ranks))))
        for rank in range(3):
            self.table.enter(rank, 0)

    def rounds(self) -> list[tuple[WorkerId, ...]]:
        """The ranks that arrived in each closed round."""
        found, arrived = [], []
        for entry in self.table.follow(0):
            if entry.kind is EntryKind.ARRIVE:
                arrived.append(entry.rank)
            if entry.closed:
                found.append(tuple(arrived))
                arrived = []
        return found


@pytest.fixture
def seen() -> Iterator[Seen]:
    seen = Seen()
    yield seen
    seen.table.close()


def test_word_of_the_next_round_may_come_first(seen: Seen) -> None:
    for rank in (0, 1, 0, 1, 2, 2):
        seen.table.arrive(rank)
    assert seen.rounds() == [(0, 1, 2), (0, 1, 2)] and seen.absent == [(), ()]


def test_who_has_nothing_to_compute_takes_part_with_nothing(seen: Seen) -> None:
    seen.table.arrive(0)
    seen.table.pause(2)
    assert seen.rounds() == []
    seen.table.arrive(1)
    assert seen.rounds() == [(0, 1)] and seen.absent == [(2,)]
    seen.table.arrive(1)
    seen.table.pause(0)
    assert seen.rounds() == [(0, 1), (1,)] and seen.absent == [(2,), (0, 2)], "rank 1 waited for nobody else"
    seen.table.pause(1)
    for rank in range(3):
        seen.table.resume(rank)
    for rank in (2, 1, 0):
        seen.table.arrive(rank)
    assert seen.rounds()[2:] == [(2, 1, 0)] and seen.absent[2:] == [()]


def test_one_that_has_come_to_its_end_is_not_told(seen: Seen) -> None:
    seen.table.leave(1, 1)
    assert not seen.table.present(1)
    seen.table.arrive(0)
    seen.table.arrive(2)
    assert seen.rounds() == [(0, 2)] and seen.absent == [()]


@given(st.data())
def test_any_order_of_the_same_words_makes_the_same_rounds(data: st.DataObject) -> None:
    """Each rank speaks in order, and does not speak of a round before the one before it is complete, but others' words may be late."""
    seen = Seen()
    left = dict.fromkeys(range(3), 4)
    while any(left.values()):
        # Nobody can be more than one round ahead of what has been said: its allreduce would not have come back.
        slowest = max(left.values())
        rank = data.draw(st.sampled_from([r for r, count in left.items() if count and slowest - count <= 1]))
        left[rank] -= 1
        seen.table.arrive(rank)
    assert [sorted(ranks) for ranks in seen.rounds()] == [[0, 1, 2]] * 4
    seen.table.close()


def test_a_rank_that_speaks_after_its_arrival_is_ahead_of_the_others_word(seen: Seen) -> None:
    """Its allreduce has come back, so that the round is over: what it says has to wait until that is known."""
    seen.table.arrive(0)
    assert [seen.table.waits(rank) for rank in range(3)] == [True, False, False]
    seen.table.arrive(1)
    seen.table.arrive(2)
    assert not any(seen.table.waits(rank) for rank in range(3))


def test_what_has_been_read_is_forgotten(seen: Seen) -> None:
    def entries() -> Collection[int]:
        return [entry.seq for entry in seen.table.follow(2)]

    assert entries() == [2]
    seen.table.arrive(0)
    assert entries() == [2, 3]
