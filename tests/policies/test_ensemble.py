"""EnsembleSync: rounds that the dead do not hold up, plans with batches that add up to the budget, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.core.hand import Hand, names, only
from tests.core.promises import AveragedAtBarrier
from tests.policies.views import StillView, contribution

from offbeat.core.effects import Effect, EpochEnded, Fold, Grant, NoMore, Release, Settle
from offbeat.core.events import Joined, Left, Lost, Pushed
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.policy import Averaging, Plan
from offbeat.errors import ConfigurationError
from offbeat.policies import BSP, EnsembleSync, rule
from offbeat.types import Fate

PROMISES = {EnsembleSync: AveragedAtBarrier}
REFUSED = [
    ("ensemble(steps=0)", "steps must be a whole number, at least 1"),
    ("ensemble(steps=None)", "steps must be a whole number"),
    ("ensemble(steps=2.5)", "steps must be a whole number"),
    ("ensemble(per_epoch=0, overlap=0.5)", "per_epoch must be a whole number, at least 1"),
    ("ensemble(per_epoch=10)", r"per_epoch=10\): per_epoch needs splits of the data; set overlap= too .* or steps= instead"),
    ("ensemble(overlap=1.5)", r"overlap=1.5\): overlap must be a fraction of the data, from 0 to 1"),
    ("ensemble(overlap=-0.1)", "from 0 to 1"),
    ("ensemble(overlap=half)", "overlap='half'"),
    ("ensemble(budget=0)", "budget must be a whole number, at least 1"),
    ("ensemble(budget=100, granularity=8)", "budget must be a multiple of the granularity"),
    ("ensemble(batch_max=10, batch_min=12)", "the least batch is 12"),
    ("ensemble(reallocate=affine, per_epoch=10, overlap=0.5)", "needs budget="),
    ("ensemble(reallocate=affine, budget=64)", "needs per_epoch=: .* would make a slow worker slower still"),
    ("ensemble(reallocate=linear)", "reallocate must be one of none, affine, inverse"),
    ("ensemble(combine=sum)", "combine must be one of mean, samples, median, trimmed_mean"),
    ("ensemble(momentum=drop)", "momentum must be one of keep, reset, average"),
    ("ensemble(returning=3)", "returning must be one of remembered, least"),
    ("ensemble(trim=0.5, combine=trimmed_mean)", "from 0 to less than 0.5"),
    ("ensemble(trim=-0.1)", "from 0 to less than 0.5"),
    ("ensemble(outer_lr=0.0)", "more than 0"),
    ("ensemble(outer_lr=inf)", "more than 0"),
    ("ensemble(outer_momentum=1.0)", "from 0 to less than 1"),
    ("ensemble(hysteresis=nan)", "a relative change"),
]

# Rounds.


def play(job: Hand) -> list[dict[str, Any]]:
    """What a job says of some pushes, a death and an end, without its reasons."""
    for worker in (2, 0, 1, 1, 2):
        job.push(worker, job.job.version)
    job(Lost(0, "killed"))
    job.push(1, job.job.version)
    job(Left(2, 1))
    return [{**e._asdict(), "kind": type(e), "reason": ""} for e in job.said]


def test_a_step_each_is_bsp_event_by_event() -> None:
    assert play(Hand(EnsembleSync(steps=1), 3)) == play(Hand(BSP(), 3))


def test_all_weigh_the_same_or_by_samples() -> None:
    pushed = (contribution(0), contribution(1)._replace(samples=24))
    view = StillView({0: 1, 1: 1}, pushed)
    for combine, weights in (("mean", (0.5, 0.5)), ("median", (0.5, 0.5)), ("samples", None)):
        decision = EnsembleSync(combine=combine).start().fold(view)
        assert decision is not None and decision.weights == weights
    job = Hand(EnsembleSync(combine="samples"), 2)
    job.push(0, 0)
    fold = only(Fold, job(Pushed(1, 1, 0, 24, 1.0, steps=10)))
    assert [part.weight for part in fold.parts] == [0.25, 0.75]


def test_how_parameters_are_exchanged() -> None:
    assert EnsembleSync().averaging == EnsembleSync(combine="samples").averaging == Averaging()
    diloco = EnsembleSync(steps=500, outer_lr=0.7, outer_momentum=0.9, momentum="keep")
    assert diloco.averaging == Averaging(outer_lr=0.7, outer_momentum=0.9)
    assert EnsembleSync(combine="trimmed_mean", trim=0.25, momentum="reset").averaging == Averaging("trimmed_mean", 0.25, momentum="reset")
    assert EnsembleSync(combine="median").averaging == Averaging("median")


# Crash schedules (SPEC 9.6).


def test_one_that_reports_and_dies_counts_and_nobody_is_released_early() -> None:
    """As many reports as living workers, and yet worker 1 is still computing: the paper's condition would let go."""
    job = Hand(EnsembleSync(), 2)
    job.push(0, 0)
    assert names(job(Lost(0, "killed"))) == ["StateChanged 0"]
    fold = only(Fold, job.push(1, 0))
    assert [(part.worker, part.weight) for part in fold.parts] == [(0, 0.5), (1, 0.5)]


def test_one_that_dies_before_its_report_is_not_waited_for() -> None:
    job = Hand(EnsembleSync(), 2)
    job.push(0, 0)
    effects = job(Lost(1, "killed"))
    assert names(effects) == ["StateChanged 1", "Fold", "Settle 0", "Release 0"]
    assert [part.weight for part in only(Fold, effects).parts] == [1.0]


def test_when_both_die_the_last_report_is_kept_and_whoever_comes_goes_on_from_it() -> None:
    job = Hand(EnsembleSync(), 2)
    job.push(0, 0)
    job(Lost(0, "killed"))
    assert only(Fold, job(Lost(1, "killed"))).version == 1
    assert only(Release, job(Joined(1))).version == 1, "nobody else is there to wait for"
    assert only(Fold, job.push(1, 1, incarnation=2)).version == 2


def test_one_whose_report_is_refused_is_not_waited_for_and_goes_on_with_the_mean_of_the_others() -> None:
    job = Hand(EnsembleSync(), 3)
    job.push(0, 0)
    assert names(job.push(1, 0, nonfinite="weight")) == ["Settle 1"]
    effects = job.push(2, 0)
    assert [(part.worker, part.weight) for part in only(Fold, effects).parts] == [(0, 0.5), (2, 0.5)]
    assert sorted((e.worker, e.version) for e in effects if isinstance(e, Release)) == [(0, 1), (1, 1), (2, 1)]
    job.push(2, 1)
    job.push(0, 1)
    assert names(job.push(1, 1, nonfinite="weight"))[:2] == ["Settle 1", "Fold"], "it may be the last to come, too"


def test_all_begin_again_where_every_report_is_refused() -> None:
    job = Hand(EnsembleSync(), 3)
    job.push(0, 0, nonfinite="weight")
    job(Lost(2, "killed"))
    effects = job.push(1, 0, nonfinite="weight")
    assert sorted((e.worker, e.version) for e in effects if isinstance(e, Release)) == [(0, 0), (1, 0)]
    job.push(0, 0)
    assert only(Fold, job.push(1, 0)).version == 1
    job.push(0, 1, nonfinite="weight")
    assert names(job(Lost(1, "killed"))) == ["StateChanged 1", "Release 0"], "nobody is left to wait for"


def epoch(job: Hand, worker: int, number: int, incarnation: int = 1, **times: float) -> None:
    """One worker's whole epoch of 8 samples, in one push, if it is dealt any."""
    while grants := [e for e in job.want(worker, number, 8, 8, incarnation) if isinstance(e, Grant)]:
        lease, size = grants[0].lease, grants[0].stop - grants[0].start
        job(Pushed(worker, incarnation, job.job.version, size, times.get("compute_s", 1.0), (lease,), steps=1, loss=times.get("loss")))


def test_one_that_returns_in_an_epoch_goes_on_with_the_next() -> None:
    job = Hand(EnsembleSync(overlap=0.0), 2)
    first = only(Grant, job.want(0, 0, 8, 8))
    job(Lost(1, "killed"))
    assert names(job(Joined(1))) == ["StateChanged 1"]
    stale = job.push(1, 0, incarnation=1)
    assert only(Settle, stale).fate is Fate.REJECTED
    assert only(Fold, job.push(0, 0, leases=(first.lease,))).version == 1, "who is outside is not waited for"
    job.want(0, 0, 8, 8)
    released = [(e.worker, e.version) for e in job.said if isinstance(e, Release)][-2:]
    assert sorted(released) == [(0, 1), (1, 1)]
    assert isinstance(job.want(1, 0, 8, 8, incarnation=2)[0], NoMore)
    assert names(job.want(1, 1, 8, 8, incarnation=2)) == ["Paused 1"], "it begins no epoch alone"
    assert {e.worker: e.parts for e in job.want(0, 1, 8, 8) if isinstance(e, Grant)} == {0: ((0, 4),), 1: ((4, 8),)}


def test_one_that_returns_in_the_last_epoch_comes_to_the_end_of_its_script() -> None:
    job = Hand(EnsembleSync(overlap=0.0), 2)
    job.want(0, 0, 8, 8)
    job(Lost(1, "killed"))
    job(Joined(1))
    job.push(0, 0, leases=(0,))
    job.want(0, 0, 8, 8)
    assert any(isinstance(e, EpochEnded) for e in job.said)
    assert only(NoMore, job.want(1, 0, 8, 8, incarnation=2)).refreshed, "the one epoch is over"
    job(Left(0, 1))
    job(Left(1, 2))
    assert job.job.over


def test_one_that_returns_when_the_others_have_finished_is_let_in() -> None:
    job = Hand(EnsembleSync(overlap=0.0), 2)
    job.want(0, 0, 8, 8)
    job(Lost(1, "killed"))
    job(Joined(1))
    assert "Release 1" in names(job(Left(0, 1)))


def test_flapping_costs_nothing_but_the_flapping_workers_own_work() -> None:
    job = Hand(EnsembleSync(overlap=0.0), 2)
    for number in range(4):
        job(Lost(1, "killed"))
        job(Joined(1))
        epoch(job, 0, number)
        job(Lost(1, "killed"))
        job(Joined(1))
    reports = [e.report for e in job.said if isinstance(e, EpochEnded)]
    assert len(reports) == 4 and job.job.version == 4
    assert all(r["folded"] + r["unused"] == r["indices"] for r in reports)
    assert all(r["folded"] >= 4 for r in reports), "what worker 0 had"


# Plans and batches.


def plans(effects: list[Effect]) -> dict[int, Plan]:
    return {e.worker: e.plan for e in effects if isinstance(e, Release)}


def test_plans_say_how_many_steps_or_which_fractions() -> None:
    assert set(plans(Hand(EnsembleSync(steps=7), 2).said).values()) == {Plan(7)}
    assert set(plans(Hand(EnsembleSync(per_epoch=10, overlap=0.5), 2).said).values()) == {Plan(10, per_epoch=10)}


def test_the_budget_is_shared_evenly_from_the_first_release_on() -> None:
    assert [p.batch for p in plans(Hand(EnsembleSync(budget=256), 3).said).values()] == [86, 85, 85]


def test_where_samples_are_not_dealt_the_budget_follows_the_living() -> None:
    job = Hand(EnsembleSync(budget=96), 3)
    job(Lost(2, "killed"))
    job.push(0, 0)
    job.push(1, 0)
    assert [p.batch for p in plans(job.said).values()][:2] == [48, 48]
    job(Joined(2))
    for worker in range(3):
        job.push(worker, 1, incarnation=1 + (worker == 2))
    assert {p.batch for p in plans(job.said).values()} == {32}


@pytest.mark.parametrize("model", ["inverse", "affine"])
def test_the_slow_have_more_at_the_next_epoch_the_dead_nothing_and_the_returned_their_own(model: str) -> None:
    job = Hand(EnsembleSync(per_epoch=1, overlap=0.0, budget=40, reallocate=model), 2)
    assert [p.batch for p in plans(job.said).values()] == [20, 20]
    epoch(job, 0, 0, compute_s=1.0)
    epoch(job, 1, 0, compute_s=3.0)
    assert [plans(job.said)[w].batch for w in (0, 1)] == [10, 30]
    job(Lost(1, "killed"))
    epoch(job, 0, 1, compute_s=1.0)
    assert plans(job.said)[0].batch == 40
    grant = only(Grant, job.want(0, 2, 8, 8))
    job(Joined(1))
    job(Pushed(0, 1, 2, 8, 1.0, (grant.lease,)))
    job.want(0, 2, 8, 8)
    assert [plans(job.said)[w].batch for w in (0, 1)] == [10, 30]


def test_who_comes_between_two_epochs_takes_part_at_once_and_the_others_make_room_when_next_admitted() -> None:
    job = Hand(EnsembleSync(steps=1, overlap=0.0, budget=40), 2)
    job.want(0, 0, 8, 8)
    job(Lost(1, "killed"))
    job.push(0, 0, leases=(0,))
    job.want(0, 0, 8, 8)
    assert plans(job.said)[0].batch == 40
    assert plans(job(Joined(1)))[1].batch == 20
    leases = [only(Grant, job.want(w, 1, 8, 2, 1 + w)) for w in (0, 1)]
    assert [grant.parts for grant in leases] == [((0, 4),), ((4, 8),)]
    job.push(1, 1, 2, (leases[1].lease,))
    assert {p.batch for p in plans(job.push(0, 1, leases=(leases[0].lease,))).values()} == {20}


def test_batches_stay_within_an_epoch() -> None:
    job = Hand(EnsembleSync(per_epoch=2, overlap=0.0, budget=40, reallocate="inverse"), 2)
    first = [only(Grant, job.want(worker, 0, 8, 2)).lease for worker in (0, 1)]
    job(Pushed(0, 1, 0, 2, 1.0, (first[0],)))
    effects = job(Pushed(1, 1, 0, 2, 3.0, (first[1],)))
    assert [p.batch for p in plans(effects).values()] == [20, 20]
    assert [p.batch for p in plans(job(Lost(1, "killed"))).values()] == []


def test_waiting_does_not_count() -> None:
    """Both are admitted at the same times, whoever was first: only their own seconds tell them apart."""
    job = Hand(EnsembleSync(per_epoch=1, overlap=1.0, budget=30, reallocate="inverse"), 2)
    leases = [only(Grant, job.want(worker, 0, 8, 8)).lease for worker in (0, 1)]
    job(Pushed(0, 1, 0, 8, 1.0, (leases[0],)))
    job.now += 1000.0
    job(Pushed(1, 1, 0, 8, 2.0, (leases[1],)))
    job.want(0, 0, 8, 8)
    job.want(1, 0, 8, 8)
    assert [plans(job.said)[w].batch for w in (0, 1)] == [10, 20]


# Settings.


def test_the_spelling_leaves_out_what_is_as_by_default() -> None:
    for policy, spelling in (
        (EnsembleSync(), "ensemble(steps=10)"),
        (EnsembleSync(steps=500, outer_lr=0.7, outer_momentum=0.9), "ensemble(steps=500, outer_lr=0.7, outer_momentum=0.9)"),
        (EnsembleSync(per_epoch=10, overlap=0.5, combine="median"), "ensemble(per_epoch=10, overlap=0.5, combine=median)"),
        (EnsembleSync(batch_max=8, budget=16), "ensemble(steps=10, budget=16, batch_max=8)"),
    ):
        assert policy.spelling == spelling
        assert rule(spelling) == policy
    assert EnsembleSync().entry == "next_epoch" and not EnsembleSync().lockstep and not EnsembleSync().uses_loss


def test_a_budget_that_the_workers_cannot_share_is_refused_before_anything_starts() -> None:
    for policy, workers, message in (
        (EnsembleSync(budget=3), 4, r"budget=3\) is not enough for 4 workers with batches of at least 1: give 4 or more"),
        (EnsembleSync(budget=64, granularity=8, batch_min=12), 5, "at least 16: give 80 or more, or use fewer workers"),
        (EnsembleSync(budget=64, batch_max=15), 4, r"budget=64\) is more than 4 workers may take with batch_max=15"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Coordinator(policy, workers)
    Coordinator(replace(EnsembleSync(budget=64), batch_max=16), 4)
