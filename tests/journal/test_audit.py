"""The audit: true books are passed, and each kind of mistake in them is found."""

from __future__ import annotations

import pytest
from tests.journal.records import (
    END,
    JOB,
    Record,
    abandoned,
    fold,
    gather,
    part,
    paused,
    publish,
    push,
    release,
    round_of_two,
    settle,
    two_shards,
)

from offbeat.journal.audit import LISTED
from offbeat.journal.summary import Tally


@pytest.mark.parametrize(
    ("place", "entries", "told"),
    [
        (10, [push(2.9, 1, 1)], "worker 1, incarnation 1: its push at 2.9 s has no fate"),
        (8, [settle(2.0, 1, 1)], "clock 1 has a second fate, folded, at 2.0 s"),
        (8, [settle(2.0, 1, 2, "dropped")], "clock 2 is dropped at 2.0 s but was never pushed"),
        (8, [fold(2.0, 2, (1, 7, 1.0, 0))], "clock 7 is part of version 2 but has no fate 'folded'"),
        (8, [fold(2.0, 2, (1, 1, 0.5, 0))], "the weights of its 1 parts add up to 0.5"),
        (8, [fold(2.0, 3)], "version 3 follows version 1"),
        (10, [push(2.9, 0, 1), settle(2.9, 0, 2, "folded", 2)], "clock 2 is folded into version 2, which lacks it"),
        (10, [push(2.9, 0, 1), fold(2.9, 2, (0, 2, 1.0, 4)), settle(2.9, 0, 2, version=2)], "with staleness 4, it should be 0"),
        (10, [push(2.9, 0, 1), fold(2.9, 2, (0, 2, 1.0, 0)), settle(2.9, 0, 2, version=3)], "its fate names version 3"),
        (10, [push(2.9, 0, 1), settle(2.9, 0, 2, "dropped", samples=9)], "pushed with 8 samples and settled with 9"),
        (10, [release(0.5, 0)], "time runs backwards"),
        (11, [release(9.5, 0)], "release at 9.5 s comes after the end"),
    ],
)
def test_each_kind_of_mistake_is_found(place: int, entries: list[Record], told: str) -> None:
    records = round_of_two()
    problems = Tally.of([*records[:place], *entries, *records[place:]]).problems()
    assert any(told in problem for problem in problems), problems


def test_the_order_of_fold_and_fates_does_not_matter() -> None:
    records = round_of_two()
    records[5:8] = [records[6], records[5], records[7]]
    assert Tally.of(records).problems() == []


def test_what_is_open_is_no_problem_before_the_end() -> None:
    assert Tally.of(round_of_two()[:5]).problems() == []


def test_many_problems_are_counted_rather_than_listed() -> None:
    wrong = [settle(3.0, 0, clock, "dropped") for clock in range(2, 2 + LISTED + 7)]
    assert Tally.of([JOB, *wrong]).problems()[-1] == "and 7 more"


def test_a_fenced_push_is_rejected_with_a_clock_of_its_own() -> None:
    records = round_of_two()
    fenced = [entry for t in (2.6, 2.7) for entry in (push(t, 1), settle(t, 1, 0, "rejected"))]
    tally = Tally.of([*records[:-1], *fenced, END])
    assert tally.problems() == []
    assert tally.summary()["per_worker"][1]["fates"]["rejected"] == 2


# What is gathered.


def superstep() -> list[Record]:
    """Worker 0 pushes twice and worker 1 once; all three are one fold at the barrier."""
    return [
        JOB,
        release(1.0, 0),
        release(1.0, 1),
        push(1.5, 0),
        gather(1.5, 0, 1),
        release(1.5, 0, 0, 1),
        push(2.0, 0),
        gather(2.0, 0, 2),
        push(3.0, 1, compute_s=2.0),
        gather(3.0, 1, 1),
        fold(3.0, 1, *(part(worker, clock, 1 / 3, gathered=8.0) for worker, clock in ((0, 1), (0, 2), (1, 1)))),
        *(settle(3.0, worker, clock) for worker, clock in ((0, 1), (0, 2), (1, 1))),
        release(3.0, 0, 1, 2),
        release(3.0, 1, 1, 1),
        END,
    ]


def test_a_worker_may_have_many_pushes_without_a_fate() -> None:
    tally = Tally.of(superstep())
    assert tally.problems() == []
    assert tally.summary()["fates"]["folded"] == 3


def test_hundreds_may_be_open_and_their_fates_come_in_any_order() -> None:
    clocks = range(1, 501)
    records = [JOB, release(1.0, 0)]
    for clock in clocks:
        records += [push(1.0 + clock, 0, samples=clock), gather(1.0 + clock, 0, clock), release(1.0 + clock, 0, 0, clock)]
    records += [settle(600.0, 0, clock, "dropped", 0, samples=clock) for clock in reversed(clocks)]
    assert Tally.of([*records, END | {"t": 600.0}]).problems() == []
    assert Tally.of([*records, settle(600.0, 0, 7, "dropped", 0)]).problems() == [
        "worker 0, incarnation 1: clock 7 has a second fate, dropped, at 600.0 s"
    ]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({4: None}, "clock 1 is part of version 1 as gathered with factor 8.0; it was with 0.0"),
        ({4: gather(1.5, 0, 1, 4.0)}, "as gathered with factor 8.0; it was with 4.0"),
        ({7: gather(2.0, 0, 1)}, "clock 1 is gathered for a second time at 2.0 s"),
        ({7: gather(2.0, 0, 5)}, "clock 5 is gathered at 2.0 s but is not there"),
        ({10: fold(3.0, 1, part(0, 1, 0.5, gathered=8.0), part(1, 1, 0.5, gathered=8.0))}, "not what was gathered at clock 2"),
        (
            {10: fold(3.0, 1, part(0, 1, 0.5, gathered=8.0), part(0, 2, 0.25, gathered=8.0), part(1, 1, 0.25, gathered=8.0))},
            "the one sum of worker 0 to its weights by factors from 0.03125 to 0.0625",
        ),
        ({11: None}, "worker 0, incarnation 1: its push at 1.5 s has no fate"),
        ({12: settle(3.0, 0, 2, samples=9)}, "clock 2 was pushed with 8 samples and settled with 9"),
        ({10: superstep()[10] | {"scale": 0.0}}, "version 1: its learning rate is multiplied by 0.0"),
        ({10: superstep()[10] | {"scale": "inf"}}, "version 1: its learning rate is multiplied by inf"),
    ],
)
def test_mistakes_with_sums_are_found(change: dict[int, Record | None], told: str) -> None:
    changed = [change.get(place, record) for place, record in enumerate(superstep())]
    problems = Tally.of([record for record in changed if record is not None]).problems()
    assert any(told in problem for problem in problems), problems


# Shard scope.


def test_a_push_has_a_fate_at_each_shard_and_each_shard_versions_of_its_own() -> None:
    assert Tally.of(two_shards()).problems() == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({5: None}, "worker 0, incarnation 1: its push at 2.0 s has no fate at shard 0"),
        ({13: None}, "worker 0, incarnation 1: its push at 2.0 s has no fate at shard 1"),
        ({13: settle(5.0, 0, 1, "dropped", 0, shard=0)}, "clock 1 at shard 0 has a second fate, dropped, at 5.0 s"),
        ({9: fold(5.0, 3, (0, 2, 1.0, 1), shard=0)}, "version 3 at shard 0 follows version 1"),
        ({9: fold(5.0, 2, (0, 2, 1.0, 1), shard=0)}, "clock 2 at shard 0 is part of version 2 with staleness 1, it should be 0"),
        ({15: fold(6.0, 1, (1, 1, 0.5, 0), (0, 2, 0.5, -1), shard=1)}, "clock 2 at shard 1 is part of version 1 with staleness -1"),
        ({15: fold(6.0, 1, (1, 1, 0.5, 0), (0, 2, 0.25, 0), shard=1)}, "version 1 at shard 1: the weights of its 2 parts add up to 0.75"),
        ({16: settle(6.0, 1, 1, version=2, shard=1)}, "clock 1 at shard 1 is part of version 1, its fate names version 2"),
        ({18: publish(6.0, 1, 2)}, "version 2 at shard 1 is published, which is at version 1"),
        ({7: None}, "clock 1 at shard 1"),
    ],
)
def test_mistakes_at_single_shards_are_found(change: dict[int, Record | None], told: str) -> None:
    changed = [change.get(place, record) for place, record in enumerate(two_shards())]
    problems = Tally.of([record for record in changed if record is not None]).problems()
    assert any(told in problem for problem in problems), problems


def test_what_arrives_of_a_push_after_its_worker_has_died_is_fenced_there_alone() -> None:
    late = [push(7.0, 1, 1, shard=0, held=[1, 1]), settle(7.0, 1, 2, "dropped", 2, shard=0)]
    fenced = [push(7.5, 1, 1, shard=1, held=[1, 1]), settle(7.5, 1, 0, "rejected", 1, shard=1)]
    tally = Tally.of([*two_shards()[:-1], *late, *fenced, END])
    assert tally.problems() == []
    assert tally.summary()["per_worker"][1]["pushes"] == 2


# Clocks.


def test_an_abandoned_computation_has_no_fate_and_no_clock() -> None:
    again = [abandoned(3.0, 0, 1), release(3.0, 0, 2, 1), push(3.5, 0, 2), settle(3.5, 0, 2, "dropped", 2)]
    assert Tally.of([*round_of_two()[:-1], *again, END]).problems() == []


def test_a_clock_may_be_set_forward_while_its_worker_pauses_and_not_otherwise() -> None:
    forward = [push(4.0, 0, 1), settle(4.0, 0, 9, "dropped"), push(4.5, 1, 1), settle(4.5, 1, 2, "dropped")]
    assert Tally.of([*round_of_two()[:-1], paused(3.0, 0), *forward, END]).problems() == []
    assert "clock 9 is dropped at 4.0 s but was never pushed" in Tally.of([*round_of_two()[:-1], *forward, END]).problems()[0]


def test_a_server_that_is_restarted_goes_on_from_its_last_version() -> None:
    restarted = {"kind": "process", "t": 3.0, "role": "server", "number": 0, "what": "restarted", "detail": ""}
    for version, found in ((2, []), (1, ["version 1 follows version 1"])):
        next_one = [push(3.5, 0, 1), fold(3.5, version, (0, 2, 1.0, version - 2)), settle(3.5, 0, 2, "folded", version)]
        problems = Tally.of([*round_of_two()[:-1], restarted, *next_one, END]).problems()
        assert problems[: len(found)] == found and bool(problems) == bool(found), problems
