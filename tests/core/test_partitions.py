"""Splits of the data: everything is somebody's, half is everybody's, and what the dead had goes to the living until they return."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.hand import Hand, names, only
from tests.tiers import examples

from offbeat.core.batch_sizes import Deal
from offbeat.core.effects import Effect, EpochEnded, Fold, Grant, NoMore, Paused, Release, Settle
from offbeat.core.events import Joined, LeaseWanted, Lost
from offbeat.core.leases import adds_up
from offbeat.core.partitions import Parts, Splits, shares, size_of
from offbeat.core.policy import Plan, View
from offbeat.policies import ASP
from offbeat.session import SplitProgress
from offbeat.types import WorkerId


def positions(parts: Parts) -> list[int]:
    return [position for start, stop in parts for position in range(start, stop)]


# Who has what.


def test_the_papers_two_workers() -> None:
    """Two sets of 37,500 that cover 50,000 share 25,000: half of the data."""
    splits = Splits(50_000, workers=2, overlap=0.5).among([0, 1])
    assert [size_of(parts) for parts in splits.values()] == [37_500, 37_500]
    assert len({*positions(splits[0])} & {*positions(splits[1])}) == 25_000
    assert {*positions(splits[0]), *positions(splits[1])} == set(range(50_000))


@examples(300)
@given(
    size=st.integers(0, 300),
    workers=st.integers(1, 12),
    overlap=st.floats(0.0, 1.0),
    living=st.sets(st.integers(0, 14), min_size=1, max_size=12),
)
def test_splits_cover_everything_whoever_is_there(size: int, workers: int, overlap: float, living: set[int]) -> None:
    splits = Splits(size, workers, overlap)
    among = splits.among(living)
    assert set(among) == living
    private: list[int] = []
    for parts in among.values():
        mine = positions(parts)
        assert mine == sorted(set(mine)), "in order, nothing twice"
        assert mine[: splits.common] == list(range(splits.common))
        assert all(start < stop for start, stop in parts)
        private += mine[splits.common :]
    assert sorted(private) == list(range(splits.common, size)), "what is not common is somebody's, and one's only"
    if living == set(range(workers)):
        sizes = [size_of(parts) for parts in among.values()]
        assert max(sizes) - min(sizes) <= 1


def test_what_the_dead_had_goes_round_robin_and_comes_back() -> None:
    splits = Splits(60, workers=6, overlap=0.0)
    assert splits.among([0, 3]) == {0: ((0, 20), (40, 50)), 3: ((20, 40), (50, 60))}
    assert splits.among([3, 9]) == {3: ((0, 10), (20, 40), (50, 60)), 9: ((10, 20), (40, 50))}
    assert splits.among(range(6))[3] == ((30, 40),), "its own again"


@examples(300)
@given(
    size=st.integers(0, 500),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    living=st.sets(st.integers(0, 5), min_size=1),
    whole=st.booleans(),
)
def test_shares_of_unequal_batches_cover_everything_with_equally_many_batches(
    size: int, sizes: list[int], living: set[int], whole: bool
) -> None:
    found = shares(size, living, max(2, sizes[0]) if whole else 1, sizes)
    covered = [position for worker in sorted(living) for position in positions(found[worker])]
    assert covered == list(range(size)), "everything, once, in order"
    batches = {worker: sizes[worker] if worker < len(sizes) else max(sizes) for worker in living}
    full = {worker: size_of(found[worker]) // batch for worker, batch in batches.items()}
    together = size // sum(batches.values())
    most = together + 1 + (size % sum(batches.values()) // min(batches.values()) if whole else 0)
    assert all(together <= count <= most for count in full.values())
    if size % sum(batches.values()) == 0:
        assert all(size_of(found[worker]) == together * batch for worker, batch in batches.items()), "whole batches only"


# Dealing them out.


@dataclass(frozen=True, kw_only=True)
class _Split(ASP):
    """A rule with splits of six tenths in common, that newcomers join at the next epoch and that remembers what it could see."""

    overlap: float | None = 0.6

    @property
    def split_overlap(self):  # type: ignore[no-untyped-def]
        return self.overlap

    @property
    def entry(self):  # type: ignore[no-untyped-def]
        return "next_epoch"

    def plan(self, view: View, worker: WorkerId) -> Plan:
        return Plan(steps=view.epoch + 1, batch=view.share(worker))


def do(job: Hand, worker: int, epoch: int = 0, incarnation: int = 1, *, size: int = 10, batch: int = 4) -> list[tuple[int, int]]:
    """Go through the rest of a worker's split, batch by batch, until it is told to wait; what it was dealt."""
    done = []
    while grants := [e for e in job.want(worker, epoch, size, batch, incarnation) if isinstance(e, Grant)]:
        (grant,) = grants
        done.append((grant.start, grant.stop))
        job.push(worker, job.job.version, incarnation, (grant.lease,))
    return done


def plans(effects: list[Effect]) -> dict[int, tuple[int, int | None]]:
    """Of the released workers: the epoch and their share, as the rule could see them."""
    return {e.worker: (e.plan.steps - 1, e.plan.batch) for e in effects if isinstance(e, Release)}


def test_each_worker_is_dealt_its_own_split_and_the_report_adds_up_over_all() -> None:
    job = Hand(_Split(), 2)
    first = only(Grant, job.want(1, size=10, batch=4))
    assert (first.start, first.stop, first.parts) == (0, 4, ((0, 6), (8, 10)))
    job.push(1, 0, leases=(first.lease,))
    assert do(job, 1) == [(4, 8)] and isinstance(job.said[-1], Paused), "worker 0's is its own, though nobody has begun it"
    assert do(job, 0) == [(0, 4), (4, 8)]
    report = only(EpochEnded, job.said).report
    assert report == {
        "indices": 16,
        "folded": 16,
        "dropped": 0,
        "rejected": 0,
        "skipped": 0,
        "unused": 0,
        "returned": 0,
        "exceptions": [],
        "splits": [{"worker": 0, "indices": 8, "parts": ((0, 8),)}, {"worker": 1, "indices": 8, "parts": ((0, 6), (8, 10))}],
    }


def test_the_rule_hears_of_the_epoch_and_of_each_share() -> None:
    job = Hand(_Split(), 2)
    assert plans(job.said) == {0: (0, None), 1: (0, None)}, "the size is not known before the first asks"
    do(job, 0)
    assert plans(job.said)[0] == (0, 8)
    do(job, 1)
    job(Lost(0, "killed"))
    do(job, 1, 1)
    _, ended = (effect for effect in job.said if isinstance(effect, EpochEnded))
    assert ended.report["splits"] == [{"worker": 1, "indices": 10, "parts": ((0, 10),)}], "0 was gone before the first had asked"
    assert plans(job.said)[1] == (2, 10)


def test_what_a_dead_worker_leaves_undone_stays_so_until_the_next_epoch() -> None:
    job = Hand(_Split(), 2)
    held = only(Grant, job.want(0, size=10, batch=2))
    pending = only(Grant, job.want(0, size=10, batch=2))
    job.push(0, 0, leases=(pending.lease,))
    do(job, 1)
    effects = job(Lost(0, "killed"))
    report = only(EpochEnded, effects).report
    assert (report["indices"], report["folded"], report["unused"], report["returned"]) == (16, 10, 6, 0)
    assert report["exceptions"] == [
        {"worker": 0, "start": held.start, "stop": held.stop, "why": "unused: its worker died or left before"},
        {"worker": 0, "start": 4, "stop": 8, "why": "unused: its worker died or left before"},
    ]
    assert plans(effects) == {1: (1, 10)}, "the living have all of it now"
    assert sum(stop - start for start, stop in do(job, 1, 1)) == 10


def test_who_returns_waits_for_the_next_epoch_and_has_its_own_part_again() -> None:
    job = Hand(_Split(), 2)
    do(job, 0)
    job(Lost(0, "killed"))
    assert names(job(Joined(0))) == ["StateChanged 0", "GoesOn 0"], "it is outside"
    do(job, 1)
    effects = [e for e in job.said if isinstance(e, EpochEnded | Release)][-3:]
    assert [names([e]) for e in effects] == [["EpochEnded"], ["Release 1"], ["Release 0"]]
    assert plans(list(effects)) == {1: (1, 8), 0: (1, 8)}
    assert only(NoMore, job.want(0, 0, 10, incarnation=2)).refreshed, "fast forward"
    assert names(job.want(0, 1, 10, incarnation=2)) == ["Paused 0"], "it begins no epoch alone"
    assert {e.worker: e.parts for e in job.want(1, 1, 10) if isinstance(e, Grant)}[0] == ((0, 8),)


def test_who_returns_when_nobody_is_left_begins_the_next_epoch_at_once() -> None:
    job = Hand(_Split(), 2)
    job.want(0, size=10)
    job(Lost(1, "killed"))
    job(Lost(0, "killed"))
    assert "Release 0" in names(job(Joined(0)))
    effects = job.want(0, 0, 10, incarnation=2)
    assert only(EpochEnded, effects).report["unused"] == 16
    assert only(Grant, job.want(0, 1, 10, incarnation=2)).parts == ((0, 10),)


def test_the_returning_do_not_wait_for_those_who_die_meanwhile() -> None:
    job = Hand(_Split(), 2)
    job.want(0, size=10)
    job.want(1, size=10)
    job(Lost(0, "killed"))
    job(Joined(0))
    assert "Release 0" in names(job(Lost(1, "killed"))), "nobody else would ever end the epoch"


def test_an_epoch_left_early_by_its_owner_is_unused_by_others() -> None:
    job = Hand(_Split(), 2)
    grant = only(Grant, job.want(0, size=10))
    job.finish(0, size=10)
    do(job, 1)
    report = only(EpochEnded, job.said).report
    assert report["exceptions"][0] == {"worker": 0, "start": grant.start, "stop": grant.stop, "why": "unused: no worker took it"}
    assert (report["unused"], report["returned"]) == (8, 2)


def test_an_epoch_does_not_end_while_local_steps_are_not_pushed() -> None:
    """Worker 0 has made three local steps when it is told that there is no more; worker 1 waits for the end."""
    job = Hand(_Split(), 2)
    held = tuple(only(Grant, job.want(0, size=10, batch=3)).lease for _ in range(3))
    do(job, 1)
    assert isinstance(job.said[-1], Paused)
    answer = only(NoMore, job.want(0, size=10, batch=3))
    assert not answer.refreshed
    effects = job.push(0, 2, leases=held)
    assert only(Settle, effects).samples == 8 and only(Fold, effects).version == 3
    assert names(effects)[-2:] == ["EpochEnded", "Release 1"]
    assert only(EpochEnded, effects).report["folded"] == 16


def test_one_pool_for_all_is_no_split() -> None:
    job = Hand(_Split(overlap=None), 2)
    assert only(Grant, job.want(0)).parts == () and plans(job.said)[0] == (0, None)
    assert "splits" not in only(EpochEnded, job.job.close(9.0, "over")).report


# How far a worker is.


@pytest.mark.parametrize(("share", "batch", "per_epoch"), [(37_500, 128, 10), (20, 2, 10), (10, 3, 4), (5, 8, 3)])
def test_every_worker_pushes_at_the_same_fractions(share: int, batch: int, per_epoch: int) -> None:
    progress, pushes = SplitProgress(), 0
    for start in range(0, share, batch):
        progress.deal(((0, share),), min(batch, share - start), batch)
        assert progress.batches == -(-share // batch)
        progress.done += 1
        pushes += Plan(per_epoch=per_epoch).due(1, progress.done, progress.batches)
    assert progress.done == progress.batches
    assert pushes == min(per_epoch, progress.done)


def test_a_batch_size_that_changes_in_an_epoch_changes_what_is_left() -> None:
    progress = SplitProgress()
    progress.deal(((0, 10), (20, 30)), 4, batch=4)
    assert progress.batches == 5
    progress.deal(((0, 10), (20, 30)), 8, batch=8)
    assert progress.batches == 3
    progress.deal((), 8, batch=8)
    assert SplitProgress().batches is None


def shared(job: Hand, worker: int, epoch: int = 0, incarnation: int = 1) -> list[tuple[int, int]]:
    """Take and push all that the worker is dealt of its equal share of ten positions, in batches of three."""
    done = []
    while grants := [e for e in job(LeaseWanted(worker, incarnation, 0, epoch, 10, 3, None, Deal(unit=1))) if isinstance(e, Grant)]:
        done.append((grants[0].parts[0][0] + grants[0].start, grants[0].parts[0][0] + grants[0].stop))
        job.push(worker, job.job.version, incarnation, (grants[0].lease,))
    return done


def test_equal_shares_go_on_with_the_next_process_of_a_dead_worker() -> None:
    """They are for one epoch: the next one is shared among those that are there then."""
    job = Hand(ASP(), 3)
    assert shared(job, 0) == [(0, 3)]
    held = only(Grant, job(LeaseWanted(2, 1, 0, 0, 10, 3, None, Deal(unit=1))))
    assert (held.start, held.stop, held.parts) == (0, 3, ((6, 10),))
    job(Joined(2))
    assert shared(job, 2, incarnation=2) == [(6, 9), (9, 10)] and shared(job, 1) == [(3, 6)]
    report = only(EpochEnded, job.said).report
    assert (report["indices"], report["folded"], report["unused"], report["returned"]) == (10, 10, 0, 3) and adds_up(report)
    job(Lost(1, "gone", None))
    assert shared(job, 0, 1) == [(0, 3), (3, 5)] and shared(job, 2, 1, incarnation=2) == [(5, 8), (8, 10)], "decided anew before the first"


def test_what_a_dead_worker_leaves_of_its_equal_share_is_unused() -> None:
    job = Hand(ASP(), 2)
    shared(job, 0)
    job(LeaseWanted(1, 1, 0, 0, 10, 3, None, Deal(unit=1)))
    job(Lost(1, "gone", None))
    report = only(EpochEnded, job.said).report
    assert (report["folded"], report["unused"]) == (5, 5) and adds_up(report)
    assert {e["why"] for e in report["exceptions"]} == {"unused: its worker died or left before"}


@examples(200)
@given(st.integers(0, 100), st.sets(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 9))
def test_shares_are_equal_up_to_a_unit_and_cover_every_position_once(size: int, living: set[int], unit: int) -> None:
    found = shares(size, [WorkerId(worker) for worker in living], unit)
    sizes = [size_of(parts) for parts in found.values()]
    assert [at for worker in sorted(found) for part in found[worker] for at in range(*part)] == list(range(size))
    assert max(sizes) - min(sizes) <= unit + size % unit
