"""Barriers by hand: who is waited for, who counts as come, what a restarted worker is told. ``test_schedules`` draws more."""

from __future__ import annotations

import pytest
from tests.core.hand import Hand, names, only

from offbeat.core.effects import BARRIER, BarrierPassed, Effect, Fold, GoesOn, JobOver, Paused, Release, Settle, StateChanged
from offbeat.core.events import BarrierWanted, Joined, Left, Lost
from offbeat.policies import rule
from offbeat.types import WorkerState

OVER = "the scripts of the job's first workers have ended"


def come(job: Hand, worker: int, number: int | None = 0, incarnation: int = 1) -> list[Effect]:
    return job(BarrierWanted(worker, incarnation, number))


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp(staleness=1)", "majority", "full", "dpsgd"])
def test_all_meet_and_go_on_with_one_version(sync: str) -> None:
    job = Hand(rule(sync), 3)
    assert names(come(job, 2))[0] == "Paused 2" and only(Paused, job.said).pool == BARRIER
    for worker in (0, 1):  # the rule does not wait for worker 2 meanwhile
        job.push(worker, 0)
    assert not any(isinstance(effect, BarrierPassed) for effect in [*job.said, *come(job, 0)])
    effects = come(job, 1)
    passed = only(BarrierPassed, effects)
    assert passed.workers == (0, 1, 2) and passed.number == 0 and not passed.past
    releases = [effect for effect in effects if isinstance(effect, Release)]
    assert [effect.worker for effect in releases] == [0, 1, 2] and {effect.version for effect in releases} == {passed.version}
    assert effects.index(passed) < effects.index(releases[0])
    assert not job.job.ledger.unsettled, "open pushes are settled first"


@pytest.mark.parametrize("sync", ["rennala(batch=8)", "backup(b=1)", "solo", "majority"])
def test_what_is_kept_for_later_is_settled_first(sync: str) -> None:
    job = Hand(rule(sync), 3)
    for worker in range(3):
        job.push(worker, 0)
    for worker in range(3):
        effects = come(job, worker)
    order = [type(effect) for effect in job.said if isinstance(effect, Settle | BarrierPassed)]
    assert order.count(Settle) == 3 and order[-1] is BarrierPassed
    assert only(BarrierPassed, effects).version == job.job.version


@pytest.mark.parametrize("end", [Lost(1, "killed"), Left(1, 1), Left(1, 1, noticed=True)], ids=["killed", "ended", "told to leave"])
def test_who_is_gone_counts_as_come(end: Lost | Left) -> None:
    job = Hand(rule("bsp"), 3)
    come(job, 0)
    come(job, 2)
    assert only(BarrierPassed, job(end)).workers == (0, 2)


def test_who_dies_in_the_barrier_is_not_in_it() -> None:
    job = Hand(rule("bsp"), 3)
    come(job, 0)
    come(job, 1)
    assert not any(isinstance(effect, BarrierPassed) for effect in job(Lost(1, "killed")))
    assert only(BarrierPassed, come(job, 2)).workers == (0, 2)


def test_a_worker_that_was_thought_dead_asks_again_and_is_late() -> None:
    job = Hand(rule("bsp"), 2)
    come(job, 1)
    job(Lost(1, "silent", 1))
    come(job, 0)
    job(Joined(1))
    effects = come(job, 1, incarnation=2)
    late = only(BarrierPassed, effects)
    assert late.past and late.workers == (1,) and names(effects) == ["BarrierPassed", "Release 1"]


def test_a_restarted_worker_comes_to_the_next_one() -> None:
    job = Hand(rule("asp"), 2)
    for number in range(3):
        come(job, 0, number)
        come(job, 1, number)
    job(Lost(1, "killed"))
    job.push(0, 0)
    job(Joined(1))
    assert come(job, 1, None, incarnation=2)[0] == Paused(1, 2, BARRIER, 3, "waits at barrier 3")
    assert only(BarrierPassed, come(job, 0, 3)).workers == (0, 1)


@pytest.mark.parametrize("steps", [1, 2])
def test_who_goes_on_past_the_place_of_a_barrier_does_not_come_to_it(steps: int) -> None:
    """Worker 2 comes back while worker 0 waits. It goes on as worker 1, which has made as many steps as 0, or one less."""
    job = Hand(rule("asp"), 3)
    job(Lost(2, "killed"))
    for version in range(2):
        job.push(0, version)
    for version in range(steps):
        job.push(1, version)
    come(job, 0)
    assert only(GoesOn, job(Joined(2))).steps == steps
    if steps < 2:
        job.push(1, 0)
    passed = [effect for effect in come(job, 1) if isinstance(effect, BarrierPassed)]
    assert bool(passed) == (steps == 2), "worker 2 comes to this barrier if it has not passed its place"


def test_an_epoch_that_only_the_others_can_end_keeps_nobody_in_a_barrier() -> None:
    job = Hand(rule("asp"), 2)
    job.want(0)
    job.want(1, size=6, batch=4)
    job.push(1, 0, leases=(1,))
    assert names(job.want(1)) == ["Paused 1"], "worker 0 holds samples, and comes to a barrier in the middle of its epoch"
    assert only(BarrierPassed, come(job, 0)).workers == (0,)


def test_steps_go_on_where_a_worker_was_or_where_the_slowest_is() -> None:
    job = Hand(rule("asp"), 3)
    for worker, steps in ((0, 5), (1, 3), (2, 4)):
        for _ in range(steps):
            job.push(worker, 0)
    job(Lost(0, "killed"))
    assert only(GoesOn, job(Joined(0))) == GoesOn(0, 2, 5, restarted=True), "its own, which are more"
    job(Lost(1, "killed"))
    assert only(GoesOn, job(Joined(1))).steps == 4, "those of worker 2, the slowest of the others"


def test_without_a_sampler_the_job_ends_with_its_first_workers() -> None:
    job = Hand(rule("bsp"), 3)
    job(Lost(1, "killed"))
    job(Joined(1))
    assert not any(isinstance(effect, JobOver) for effect in job(Left(0, 1))), "worker 2 goes on"
    effects = job(Left(2, 1))
    assert only(JobOver, effects) == JobOver(1, 2, OVER)
    job(Lost(1, "killed"))
    assert only(JobOver, job(Joined(1))).incarnation == 3, "one that comes still later is told at once"


def test_who_comes_back_to_a_closed_optimizer_is_told_of_the_end_when_the_processes_have_ended() -> None:
    job = Hand(rule("bsp"), 2)
    job(Lost(1, "killed"))
    job(Left(0, 1, exits=False))
    assert not any(isinstance(effect, JobOver) for effect in job(Joined(1))), "another optimizer may come"
    assert only(JobOver, job(Left(0, 1))) == JobOver(1, 2, OVER)


def test_who_has_closed_an_optimizer_and_dies_is_dead() -> None:
    job = Hand(rule("bsp"), 2)
    job(Left(1, 1, exits=False))
    assert not job(Lost(1, "its connection has closed", 1)), "which closing does"
    assert only(StateChanged, job(Lost(1, "killed by SIGKILL"))).state is WorkerState.DEAD
    assert not job(Lost(1, "killed by SIGKILL")), "once"
    job(Joined(1))
    job.push(0, 0)
    assert only(Fold, job.push(1, 0, incarnation=2)).version == 1


def test_a_job_whose_first_workers_have_all_died_goes_on() -> None:
    job = Hand(rule("bsp"), 2)
    for worker in range(2):
        job(Lost(worker, "killed"))
        job(Joined(worker))
    assert not any(isinstance(effect, JobOver) for effect in job(Left(0, 2)))
    assert any(isinstance(effect, Fold) for effect in job.push(1, 0, incarnation=2))


def test_with_a_sampler_the_epochs_say_it() -> None:
    job = Hand(rule("bsp"), 2)
    job.want(0)
    job(Lost(1, "killed"))
    job(Joined(1))
    job.push(0, 0, leases=(0,))
    effects = job(Left(0, 1))
    assert not any(isinstance(effect, JobOver) for effect in effects)
