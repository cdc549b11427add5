"""Pushes are told apart, and their clocks found, from what a journal says of them."""

from __future__ import annotations

import pytest
from tests.journal.records import Record, push

from offbeat.journal.arrivals import JournalArrivals, JournalPush, Sender


def arrival(version: int, shard: int, worker: int = 0, incarnation: int = 1) -> Record:
    return push(1.0, worker, version, incarnation=incarnation, shard=shard, held=[version, version])


def test_the_arrivals_of_one_push_are_one_push_in_whatever_order_they_come() -> None:
    arrivals = JournalArrivals()
    first, second = arrivals.of(arrival(0, 1)), arrivals.of(arrival(1, 0))
    assert arrivals.of(arrival(0, 0)) is first
    assert arrivals.of(arrival(1, 1)) is second
    assert (first.arrived, second.arrived, first.absent) == (2, 2, frozenset())


def test_another_worker_incarnation_or_repeated_version_is_another_push() -> None:
    arrivals = JournalArrivals()
    assert [arrivals.begins(arrival(0, 0, *who)) for who in ((0, 1), (1, 1), (0, 2))] == [True, True, True]
    # The first to be sent with a version is the first to arrive at each shard.
    assert [arrivals.begins(arrival(0, shard)) for shard in (0, 1, 1)] == [True, False, False]


def test_in_job_scope_each_record_is_a_push() -> None:
    arrivals = JournalArrivals()
    assert [arrivals.begins(push(1.0, 0)) for _ in range(2)] == [True, True]


def sender(*clocks: int | None) -> tuple[Sender, list[JournalPush]]:
    """A sender that pushes; None stands for a pause in which its clock may have been set forward."""
    found, pushes = Sender(), []
    for clock in clocks:
        if clock is None:
            found.paused()
        else:
            pushes.append(JournalPush(1.0, 0, 8, arrived=1))
            found.pushed(pushes[-1], None)
            assert pushes[-1].clock == clock
    return found, pushes


def test_clocks_count_up_from_the_release() -> None:
    found, pushes = sender(1, 2)
    found.released(6)
    found.pushed(after := JournalPush(2.0, 0, 8, arrived=1), None)
    assert [push.clock for push in (*pushes, after)] == [1, 2, 7]
    assert found.find(2, None) is pushes[1]
    assert found.find(3, None) is None
    found.settle(pushes[1], None, fenced=False)
    assert found.find(2, None) is None


def test_after_a_pause_the_clock_is_told_by_the_first_fate() -> None:
    found, (before, first, second) = sender(1, None, 2, 3)
    assert found.find(9, None) is first, "of the two the older one, by 7 further than it would have been"
    assert (before.clock, first.clock, second.clock, found.clock) == (1, 9, 10, 10)
    assert found.find(11, None) is None, "now it is certain"
    assert found.find(10, None) is second


def test_a_release_between_keeps_what_it_says_apart() -> None:
    found, (first,) = sender(None, 1)
    found.released(5)
    found.pushed(after := JournalPush(2.0, 0, 8, arrived=1), None)
    assert (found.find(3, None), first.clock, after.clock) == (first, 3, 6)


def test_a_fenced_push_uses_up_no_clock() -> None:
    found, (_, fenced) = sender(1, 2)
    assert found.find(0, None) is fenced
    found.settle(fenced, None, fenced=True)
    assert found.clock == 1
    found.pushed(after := JournalPush(2.0, 0, 8, arrived=1), None)
    assert after.clock == 2


@pytest.mark.parametrize("fenced_at", [0, 1])
def test_a_push_may_be_fenced_at_one_shard_alone(fenced_at: int) -> None:
    found, push = Sender(), JournalPush(1.0, 0, 8, (0, 0))
    for shard in (0, 1):
        found.pushed(push, shard)
        if shard == fenced_at:
            found.settle(push, shard, fenced=True)
    assert found.find(1, 1 - fenced_at) is push
    assert found.find(1, fenced_at) is None
    assert found.clock == 1
