"""What follows from the reports for a new view."""

from __future__ import annotations

from offbeat.core.allreduce.commands import Transfer
from offbeat.core.allreduce.view_change import ViewChange

HOST_OF = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}


def reported(**held: list[int]) -> ViewChange:
    """Nobody has had more than he holds. The ranks' names are r0, r1, ..."""
    change = ViewChange(7, HOST_OF, floor=0)
    for rank, host in HOST_OF.items():
        change.report(rank, host, 0, held.get(f"r{rank}", []), [2] * 10)
    assert not change.missing
    return change


def test_who_has_a_result_tells_all_of_its_host_and_one_of_each_other() -> None:
    change = reported(r1=[0])
    assert change.is_held(0) and change.lacking(0) == [0, 2, 3, 4]
    assert change.handed(0, HOST_OF) == [Transfer(1, 7, 0, (0, 2, 3))]


def test_each_host_that_has_a_result_sees_to_itself() -> None:
    change = reported(r0=[0], r4=[0])
    assert change.handed(0, HOST_OF) == [Transfer(0, 7, 0, (1, 2)), Transfer(4, 7, 0, (3,))]


def test_what_has_been_had_is_not_lacking() -> None:
    change = ViewChange(7, [0, 1], floor=0)
    change.report(0, "a", 3, [], [])
    change.report(1, "b", 2, [2], [])
    assert change.lacking(2) == change.lacking(1) == [] and change.lacking(3) == [0, 1]
    assert not change.is_held(1)


def test_a_host_is_without_memory_if_nobody_there_has_it() -> None:
    change = ViewChange(7, HOST_OF, floor=0)
    for rank, host in HOST_OF.items():
        change.report(rank, host, 0, [], None if rank != 1 else [])
    assert change.without_memory(HOST_OF) == {"b"}


def test_a_buffer_that_was_written_since_is_written_over() -> None:
    change = reported()
    assert change.written_over("a", 1, 0, writes=1)
    assert not change.written_over("a", 1, 0, writes=2) and not change.written_over("a", 1, 0, writes=3)
    assert not change.written_over("gone", 1, 0, writes=1)
