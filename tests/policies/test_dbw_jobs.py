"""Dynamic backup workers in jobs where workers come and go, what becomes of obsolete work, the learning rate, and settings."""

from __future__ import annotations

import numpy as np
import pytest
from tests.core.hand import Hand, only
from tests.policies.race import Race, norms, shifted, steady
from tests.policies.views import StillView, contribution

from offbeat.core.effects import Fold
from offbeat.core.events import Joined, Lost, Pushed
from offbeat.errors import ConfigurationError
from offbeat.policies import BDBW, DBW, rule
from offbeat.policies.dbw_run import Run
from offbeat.types import Fate

REFUSED = [
    ("dbw(gamma=0)", r"dbw\(gamma=0\): gamma must be a number, above 0 and at most 1"),
    ("b_dbw(gamma=1.5)", r"b_dbw\(gamma=1.5\): gamma must be a number, above 0 and at most 1"),
    ("dbw(optimism=2)", "optimism must be a number, at least 0 and at most 1"),
    ("dbw(beta=0.9)", "beta must be a number, at least 1"),
    ("dbw(beta=high)", "beta must be a number, at least 1"),
    ("dbw(k_min=0)", "k_min must be a whole number, at least 1"),
    ("dbw(warm_up=0)", "warm_up must be a whole number, at least 1"),
    ("dbw(history=0)", "history must be a whole number, at least 1"),
    ("dbw(censored=1)", "censored must be True or False"),
    ("dbw(smoothness=rough)", "smoothness must be a number above 0, auto or None"),
    ("dbw(smoothness=-1)", "smoothness must be a number, above 0"),
    ("dbw(momentum=1)", "momentum must be less than 1"),
    ("dbw(momentum=-0.1)", "momentum must be a number, at least 0"),
    ("b_dbw(history=3)", "b_dbw has no setting 'history'"),
    ("dbw(obsolete=push)", "obsolete must be one of push_and_wait, pull_and_wait, push_and_interrupt"),
    ("dbw(lr_rule=linear)", "lr_rule must be one of constant, proportional, sqrt, table"),
]

# Who comes and goes.


def test_n_follows_the_living_and_who_returns_is_waited_for_again() -> None:
    race = Race(DBW(k_min=4, warm_up=2), 4, shifted(0.2, 0), norms(1.0, 0.0)).run(3)
    race(Lost(3, "killed"))
    race.run(6)
    race(Joined(3))
    race.run(9)
    assert race.chosen == [4, 4, 4, 3, 3, 3, 4, 4, 4]
    reasons = [fold.reason for fold in race.folds]
    assert reasons[1:4] == ["k=4 of 4: warm-up", "k=4 of 4: best gain per second", "k=3 of 3: best gain per second"]


def test_in_the_warm_up_nobody_waits_for_the_dead() -> None:
    job = Hand(DBW(warm_up=2), 8)
    job.push(0, 0)
    for worker in range(2, 8):
        job(Lost(worker, "killed"))
    assert only(Fold, job.push(1, 0)).reason == "k=2 of 2: warm-up"


def test_one_who_dies_after_its_push_counts_as_in_bsp() -> None:
    job = Hand(BDBW(), 3)
    job.push(0, 0)
    job(Lost(0, "killed"))
    job.push(1, 0)
    assert [p.worker for p in only(Fold, job.push(2, 0)).parts] == [0, 1, 2]


def test_the_death_of_the_last_one_awaited_folds_what_is_there() -> None:
    race = Race(BDBW(k_min=4), 4, steady(1.0, 1.0, 1.0, 9.0)).run(10)
    for worker in range(2):
        race(Pushed(worker, 1, 10, 8, 1.0))
    assert len(race.folds) == 10
    race(Lost(3, "killed"))
    race(Lost(2, "killed"))
    assert len(race.folds) == 11 and race.folds[-1].reason == "k=2 of 2: most gradients per second"


def test_a_round_in_which_an_epoch_has_ended_is_not_measured() -> None:
    """Version 1 has waited for an epoch to end, one worker longer than the other: k is as if it had not."""

    def play(epoch: int) -> str:
        run = BDBW(warm_up=1).start()
        view = StillView({0: 1, 1: 1}, now=0.0)
        assert run.fold(view) is None
        view.pushed = tuple(contribution(w)._replace(arrived=a) for w, a in ((0, 1.0), (1, 1.5)))
        view.now = 1.5
        assert run.fold(view) is not None
        view.version, view.pushed = 1, ()
        assert run.fold(view) is None
        view.pushed = tuple(contribution(w, 1)._replace(arrived=a) for w, a in ((0, 101.0), (1, 400.0)))
        view.now, view.epoch = 400.0, epoch
        assert run.fold(view) is not None
        view.version = 2
        view.pushed = (contribution(0, 2)._replace(arrived=401.0),)
        decision = run.fold(view)
        return "both" if decision is None else decision.reason

    assert play(epoch=0) == "k=1 of 2: most gradients per second"
    assert play(epoch=1) == "both", "1 s and 1.5 s: two are more per second than one"


# What workers do with obsolete work, and the learning rate.


def test_interrupted_workers_all_begin_together() -> None:
    race = Race(BDBW(obsolete="push_and_interrupt"), 4, steady(1.0, 1.0, 1.0, 9.0)).run(50)
    assert race.chosen[-1] == 3 and race.fates[Fate.DROPPED] == 0
    gaps = np.diff(race.folded_at[10:])
    assert gaps == pytest.approx(np.ones(len(gaps)))


def test_pulling_workers_finish_and_are_not_counted() -> None:
    race = Race(BDBW(obsolete="pull_and_wait"), 4, steady(1.0, 1.0, 1.0, 9.0)).run(50)
    assert race.chosen[-1] == 3 and race.fates[Fate.DROPPED] == 0 and race.fates[Fate.FOLDED] == sum(race.chosen)


@pytest.mark.parametrize("obsolete", ["push_and_wait", "pull_and_wait", "push_and_interrupt"])
def test_the_books_balance_whatever_becomes_of_obsolete_work(obsolete: str) -> None:
    race = Race(rule(f"dbw(obsolete={obsolete})"), 6, shifted(1.0, 0), norms(1.0, 2.0), measured_after=0.1).run(100)
    assert race.fates[Fate.FOLDED] == sum(race.chosen)
    assert (race.fates[Fate.DROPPED] > 0) is (obsolete == "push_and_wait")


def test_the_learning_rate_follows_k() -> None:
    law, measure = steady(1.0, 1.0, 1.0, 9.0), norms(1.0, 0.5)
    for policy, expected in (
        (DBW(), {3: 1.0, 4: 1.0}),
        (DBW(lr_rule="proportional"), {3: 0.75, 4: 1.0}),
        (DBW(lr_rule="table", lr_table=(0.1, 0.2, 0.5, 0.9)), {3: 0.5, 4: 0.9}),
    ):
        race = Race(policy, 4, law, measure).run(20)
        assert {len(fold.parts): fold.scale for fold in race.folds} == expected


def test_late_gradients_may_be_measured_too() -> None:
    """Waiting for one, the others are seen only in the warm-up; what is late says that the second comes soon after the first."""
    runs = [BDBW(warm_up=1, censored=censored).start() for censored in (False, True)]
    found = []
    for run in runs:
        assert isinstance(run, Run)
        view = StillView({0: 1, 1: 1}, now=0.0)
        assert run.fold(view) is None
        view.pushed = tuple(contribution(w)._replace(arrived=a) for w, a in ((0, 1.0), (1, 10.0)))
        view.now = 10.0
        assert run.fold(view) is not None
        view.version, view.pushed = 1, (contribution(0, 1)._replace(arrived=11.0),)
        view.now = 11.0
        assert run.fold(view) is not None
        view.version, view.pushed, view.now = 2, (contribution(1, 1)._replace(arrived=11.5),), 11.5
        late = run.fold(view)
        assert late is not None and late.drop
        found.append(run._times.estimate(2, most=2, optimism=0.5).tolist())
    assert found == [[1.0, pytest.approx(10.0, rel=0.02)], [1.0, pytest.approx((10.0 * 0.98 + 1.5) / 1.98, rel=0.02)]]


# Settings.


def test_a_rule_asks_for_the_norms_that_it_reads() -> None:
    assert DBW(smoothness="auto").measures == "differences" and DBW().measures == "norms" and BDBW().measures == "nothing"


def test_more_gradients_than_workers_are_refused() -> None:
    DBW(k_min=4).check(4)
    with pytest.raises(ConfigurationError, match=r"dbw\(k_min=5\) with 4 workers .* k_min must be at most 4"):
        DBW(k_min=5).check(4)
