"""Sample leases: every position is dealt out, and accounted for with one fate."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import examples

from offbeat.core.leases import Lease, Leases
from offbeat.types import Fate


def dealt(size: int = 10) -> Leases:
    leases = Leases()
    leases.open(0, 0, size)
    return leases


def take(leases: Leases, worker: int, batch: int = 4) -> Lease:
    lease = leases.take(worker, 0, batch)
    assert lease is not None
    return lease


def test_a_report_accounts_for_every_position_with_its_reason() -> None:
    leases = dealt(12)
    a, b, c, d = (take(leases, worker, 3) for worker in range(4))
    for lease in (a, b, c):
        leases.submit((lease.id,))
    leases.settle((a.id,), Fate.FOLDED, "in")
    leases.settle((b.id,), Fate.DROPPED, "too late")
    leases.settle((c.id,), Fate.REJECTED, "not finite")
    assert not leases.accounted(0) and not leases.quiet(0)
    leases.give_back(d.worker)
    assert leases.quiet(0) and not leases.accounted(0)
    report = leases.end(0)
    assert report == {
        "indices": 12,
        "folded": 3,
        "dropped": 3,
        "rejected": 3,
        "skipped": 0,
        "unused": 3,
        "returned": 3,
        "exceptions": [
            {"start": 3, "stop": 6, "why": "dropped: too late"},
            {"start": 6, "stop": 9, "why": "rejected: not finite"},
            {"start": 9, "stop": 12, "why": "unused: no worker took it"},
        ],
    }
    assert leases.epoch(0) == 1 and leases.under_way() == []


def test_pools_are_apart() -> None:
    leases = dealt(4)
    leases.open(1, 0, 4)
    first = take(leases, 0)
    assert leases.take(0, 1, 2) is not None and leases.holds(0, 1) and leases.holds(0, 0)
    leases.give_back(0, pool=1)
    assert leases.valid(0, (first.id,)) and not leases.holds(0, 1) and leases.under_way() == [0, 1]


def test_a_pool_moves_on_to_the_announced_epoch_only_before_it_has_dealt_anything() -> None:
    leases = dealt(4)
    leases.open(0, 3, 4)
    assert leases.epoch(0) == 3, "a resumed job begins where its script says"
    take(leases, 0, 2)
    leases.open(0, 5, 4)
    assert leases.epoch(0) == 3


@examples(200)
@given(size=st.integers(1, 40), seed=st.integers(0, 2**16), workers=st.integers(1, 4))
def test_any_sequence_of_fates_and_deaths_adds_up(size: int, seed: int, workers: int) -> None:
    leases, rng, held = dealt(size), random.Random(seed), list[Lease]()
    folded: set[int] = set()
    for _ in range(60):
        lease = leases.take(rng.randrange(workers), 0, rng.randint(1, 5))
        if lease is not None:
            held.append(lease)
        if held and rng.random() < 0.7:
            done = held.pop(rng.randrange(len(held)))
            fate = rng.choice((Fate.FOLDED, Fate.FOLDED, Fate.DROPPED, Fate.REJECTED))
            leases.submit((done.id,))
            leases.settle((done.id,), fate, "so")
            folded |= set(range(done.start, done.stop)) if fate is Fate.FOLDED else set()
        elif held:
            dead = rng.choice(held).worker
            leases.give_back(dead)
            held = [lease for lease in held if lease.worker != dead]
    for worker in range(workers):
        leases.give_back(worker)
    report = leases.end(0)
    exceptions = [p for e in report["exceptions"] for p in range(e["start"], e["stop"])]
    assert sorted([*folded, *exceptions]) == list(range(size)) and report["folded"] == len(folded)
    assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == size


@examples(200)
@given(size=st.integers(0, 40), seed=st.integers(0, 2**16), workers=st.integers(1, 4))
def test_an_open_ended_pool_adds_up_whoever_finds_its_end(size: int, seed: int, workers: int) -> None:
    """A worker that is granted positions beyond the end says where it is before it pushes over what is left of them."""
    leases, rng, held = Leases(), random.Random(seed), list[Lease]()
    leases.open(0, 0, None)
    folded: list[int] = []
    for _ in range(400):
        lease = leases.take(rng.randrange(workers), 0, rng.randint(1, 5))
        if lease is not None:
            held.append(lease)
        if held and rng.random() < 0.8:
            done = held.pop(rng.randrange(len(held)))
            if done.stop > size:
                leases.bound(0, size)
            if done.start < size:
                assert leases.valid(done.worker, (done.id,))
                leases.submit((done.id,))
                leases.settle((done.id,), Fate.FOLDED, "so")
                folded += range(done.start, min(done.stop, size))
            else:
                assert not leases.valid(done.worker, (done.id,))
        elif held:
            dead = rng.choice(held).worker
            leases.give_back(dead)
            held = [lease for lease in held if lease.worker != dead]
    leases.bound(0, None)
    assert leases.accounted(0) and sorted(folded) == list(range(size))
    report = leases.end(0)
    assert (report["indices"], report["folded"], report["unused"], report["exceptions"]) == (size, size, 0, [])
    leases.open(0, 1, leases.size(0))
    assert leases.take(0, 0, 100) is not None, "the next epoch may have another length"


def test_an_open_ended_pool_that_everybody_leaves_early_reports_what_was_dealt() -> None:
    leases = Leases()
    leases.open(0, 0, None)
    first, _ = take(leases, 0), take(leases, 1)
    leases.submit((first.id,))
    leases.settle((first.id,), Fate.FOLDED, "so")
    assert not leases.accounted(0)
    leases.give_back(1)
    report = leases.end(0)
    assert (report["indices"], report["folded"], report["unused"]) == (8, 4, 4)


def test_the_first_word_of_a_stream_s_end_counts() -> None:
    leases = Leases()
    leases.open(0, 0, None)
    lease = take(leases, 0)
    leases.bound(0, 3)
    leases.bound(0, 2)
    leases.submit((lease.id,))
    leases.settle((lease.id,), Fate.FOLDED, "so")
    assert leases.accounted(0) and leases.end(0)["indices"] == 3


def test_an_epoch_goes_on_from_the_place_of_a_checkpoint() -> None:
    before = Leases()
    before.open(0, 2, 100)
    held, folded, pushed = (before.take(worker, 0, 10) for worker in (0, 1, 0))
    assert held is not None and folded is not None and pushed is not None
    before.submit((folded.id, pushed.id))
    before.settle((folded.id,), Fate.FOLDED, "")
    place = before.place(0)
    assert place == {"epoch": 2, "size": 100, "rest": [[0, 10], [20, 100]]}
    after = Leases()
    for _ in range(2):  # every worker says so
        after.open(0, 2, 100, rest=place["rest"])
    after.open(0, 2, 100)  # one that has loaded nothing
    dealt: list[int] = []
    while (lease := after.take(0, 0, 16)) is not None:
        dealt += range(lease.start, lease.stop)
        after.submit((lease.id,))
        after.settle((lease.id,), Fate.FOLDED, "")
    assert dealt == [*range(10), *range(20, 100)]
    assert after.accounted(0)
    report = after.end(0)
    assert (report["indices"], report["folded"], report["unused"]) == (90, 90, 0)
    after.open(0, 3, 100)
    assert after.place(0) == {"epoch": 3, "size": 100, "rest": [[0, 100]]}


@pytest.mark.parametrize("rest", [[[0, 0]], [[0, 10], [5, 20]], [[90, 101]], [[-1, 5]]])
def test_a_rest_that_cannot_be(rest: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="the rest of an epoch of 100 samples"):
        Leases().open(0, 0, 100, rest=rest)
