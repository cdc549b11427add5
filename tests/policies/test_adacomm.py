"""AdaComm: rounds as EnsembleSync's, with a period that falls with the loss, and settings that are refused."""

from __future__ import annotations

import math

from tests.core.hand import Hand
from tests.core.promises import AveragedAtBarrier
from tests.policies.test_ensemble import epoch, plans, play

from offbeat.core.effects import Release
from offbeat.core.events import Pushed
from offbeat.core.policy import Averaging
from offbeat.policies import AdaComm, EnsembleSync, rule
from offbeat.policies.adacomm import next_period
from offbeat.policies.rounds import INTERVAL

PROMISES = {AdaComm: AveragedAtBarrier}
REFUSED = [
    ("adacomm(steps=0)", r"adacomm\(steps=0\): steps must be a whole number, at least 1"),
    ("adacomm(overlap=1.5)", "overlap must be a fraction of the data, from 0 to 1"),
    ("adacomm(combine=trimmed_mean)", "combine.* mean, samples"),
    ("adacomm(momentum=drop)", "momentum.* keep, reset"),
    ("adacomm(outer_lr=0.0)", "more than 0"),
    ("adacomm(outer_momentum=1.0)", "from 0 to less than 1"),
]


def test_without_losses_it_is_ensemble_event_by_event() -> None:
    jobs = Hand(AdaComm(steps=3), 3), Hand(EnsembleSync(steps=3), 3)
    assert play(jobs[0]) == play(jobs[1])
    assert [getattr(said, "reason", "") for said in jobs[0].said] == [getattr(said, "reason", "") for said in jobs[1].said]


def test_the_period_falls_with_the_root_of_the_loss_and_halves_where_that_does_not() -> None:
    assert [next_period(ratio, 20, 20) for ratio in (0.9, 0.5, 0.25, 0.0)] == [19, 15, 10, 1]
    assert next_period(1.5, 20, 20) == 10 and next_period(0.9, 20, 19) == 10 and next_period(1.0, 1, 1) == 1


def test_the_period_adapts_at_each_epochs_end() -> None:
    job = Hand(AdaComm(steps=20, overlap=1.0), 1)
    periods = [plans(job.said)[0].steps]
    for number, loss in enumerate((2.0, 0.5, 0.5, 0.02, math.nan)):
        epoch(job, 0, number, loss=loss)
        periods.append(plans(job.said)[0].steps)
    assert periods == [20, 10, 5, 3, 2, 2], "2.0 / 2.0: half; 0.25: half again, sqrt gives 10; ...; a loss of nan says nothing"


def test_without_epochs_the_period_adapts_after_many_folds() -> None:
    job = Hand(AdaComm(steps=20), 1)
    for version in range(2 * INTERVAL):
        job(Pushed(0, 1, version, 8, 1.0, loss=1.0 if version < INTERVAL else 0.04, steps=20))
    steps = [e.plan.steps for e in job.said if isinstance(e, Release)]
    assert steps == [20] * INTERVAL + [10] * INTERVAL + [4]


def test_without_losses_the_period_stays() -> None:
    job = Hand(AdaComm(steps=20, overlap=1.0), 1)
    epoch(job, 0, 0)
    assert plans(job.said)[0].steps == 20


def test_the_spelling_leaves_out_what_is_as_by_default() -> None:
    for policy, spelling in (
        (AdaComm(), "adacomm(steps=10)"),
        (AdaComm(overlap=0.5, combine="median", momentum="reset"), "adacomm(steps=10, overlap=0.5, combine=median, momentum=reset)"),
    ):
        assert policy.spelling == spelling
        assert rule(spelling) == policy
    assert AdaComm().entry == "next_epoch" and AdaComm().uses_loss and AdaComm(overlap=0.25).split_overlap == 0.25
    assert AdaComm(combine="samples", outer_momentum=0.3).averaging == Averaging("mean", outer_momentum=0.3)
