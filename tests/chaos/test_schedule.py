"""The schedule of faults: a function of its seed, with the shares and times that were asked for."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.chaos.schedule import DEFAULT_KINDS, DUTY, GROUPS, KINDS, LONG, SHORT, SLOW, TARGETS, chances, planned, schedule

SOME_KINDS = st.lists(st.sampled_from(KINDS), min_size=1, unique=True)
SOME_TARGETS = st.lists(st.sampled_from(TARGETS), min_size=1, unique=True)
PLANNED = ["kill:worker", "stop:server", "disk:journal"]
SEEDS = st.integers(0, 2**32)


@examples(200)
@given(SEEDS, SOME_KINDS, SOME_TARGETS, st.floats(0.1, 100.0), st.floats(0.1, 60.0))
def test_the_same_seed_gives_the_same_faults(seed: int, kinds: list[str], targets: list[str], mtbf_s: float, timeout_s: float) -> None:
    of = chances(kinds, targets)
    assert sum(of.values()) == pytest.approx(1.0)
    first = list(schedule(seed, mtbf_s=mtbf_s, timeout_s=timeout_s, of=of, count=20))
    assert first == list(islice(schedule(seed, mtbf_s=mtbf_s, timeout_s=timeout_s, of=of), 20))
    assert [fault.number for fault in first] == list(range(20))
    assert all(a.at_s <= b.at_s for a, b in pairwise(first))
    for fault in first:
        assert fault.kind in kinds and fault.name in of
        assert fault.target in targets or (fault.kind, fault.target) in (("cut", "link"), ("disk", "journal"))
        low, high = SLOW if fault.kind in ("slow", "disk") else (SHORT[0], LONG[1])
        assert low * timeout_s <= fault.seconds <= high * timeout_s
        assert DUTY[0] <= fault.duty <= DUTY[1] and 0.0 <= fault.pick < 1.0


@examples(50)
@given(SEEDS, SEEDS)
def test_other_kinds_in_a_schedule_do_not_move_its_times(seed: int, other: int) -> None:
    of, all_of = chances(["kill"], ["worker"]), chances(KINDS, TARGETS)
    first = [fault.at_s for fault in schedule(seed, mtbf_s=5.0, timeout_s=2.0, of=of, count=10)]
    assert first == [fault.at_s for fault in schedule(seed, mtbf_s=5.0, timeout_s=2.0, of=all_of, count=10)]
    if seed != other:
        assert first != [fault.at_s for fault in schedule(other, mtbf_s=5.0, timeout_s=2.0, of=of, count=10)]


def test_a_seed_gives_what_it_gave_in_earlier_versions() -> None:
    """Results of benchmarks name seeds."""
    of = chances(["kill", "stop", "term", "cut"], ["worker", "server"])
    drawn = [(fault.name, round(fault.at_s, 3), round(fault.pick, 3)) for fault in schedule(7, mtbf_s=5.0, timeout_s=2.0, of=of, count=4)]
    assert drawn == [
        ("kill:worker", 1.957, 0.366),
        ("term:worker", 2.255, 0.091),
        ("stop:worker", 5.018, 0.948),
        ("term:worker", 9.321, 0.29),
    ]
    plan = {"kill:worker": 2, "disk:journal": 1, "slow:worker": 1}
    faults = planned(7, mtbf_s=5.0, timeout_s=2.0, plan=plan)
    assert [(fault.name, round(fault.at_s, 3), round(fault.seconds, 3)) for fault in faults] == [
        ("slow:worker", 1.449, 2.522),
        ("kill:worker", 7.314, 2.509),
        ("kill:worker", 10.718, 2.668),
        ("disk:journal", 13.019, 2.19),
    ]


def test_means_and_shares_are_those_that_were_asked_for() -> None:
    of = chances(KINDS, TARGETS)
    faults = list(schedule(7, mtbf_s=5.0, timeout_s=2.0, of=of, count=20_000))
    assert faults[-1].at_s / len(faults) == pytest.approx(5.0, rel=0.03)
    groups = {"worker": 0, "server": 0, "freeze": 0, "cut": 0, "other": 0}
    for fault in faults:
        dies = fault.target if fault.target in ("worker", "server") else "other"
        groups["cut" if fault.kind == "cut" else "freeze" if fault.kind in ("stop", "slow") else dies] += 1
    for name, share in GROUPS.items():
        assert groups[name] / len(faults) == pytest.approx(share / 100.0, abs=0.015), name
    stops = [fault.seconds for fault in faults if fault.kind == "stop"]
    assert sum(seconds < 2.0 for seconds in stops) / len(stops) == pytest.approx(0.5, abs=0.05)


@examples(100)
@given(SEEDS, st.dictionaries(st.sampled_from(PLANNED), st.integers(1, 9)))
def test_a_plan_has_exactly_its_faults_and_what_ends_the_journal_comes_last(seed: int, plan: dict[str, int]) -> None:
    faults = list(planned(seed, mtbf_s=2.0, timeout_s=1.0, plan=plan))
    assert faults == list(planned(seed, mtbf_s=2.0, timeout_s=1.0, plan=plan))
    assert Counter(fault.name for fault in faults) == plan
    assert all(a.at_s <= b.at_s and b.number == a.number + 1 for a, b in pairwise(faults))
    assert all(fault.at_s <= 2.0 * len(faults) for fault in faults)
    ends = [fault.target == "journal" for fault in faults]
    assert ends == sorted(ends)


def test_by_default_only_workers_are_hit_and_all_of_them_may_return() -> None:
    assert set(chances(DEFAULT_KINDS, ["worker"])) == {"kill:worker", "stop:worker", "slow:worker"}
