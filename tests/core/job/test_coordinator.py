"""One job through its one entrance: start, deaths and returns, epochs and their ends. Each event is carried by hand."""

from __future__ import annotations

import pytest
from tests.core.hand import Hand, names, only

from offbeat.core.effects import EpochEnded, Fence, Fold, Grant, Initialise, NoMore, Paused, Release, Settle, StateChanged
from offbeat.core.events import Abandoned, Heard, Initialised, Joined, LeaseWanted, Left, Lost, PullWanted
from offbeat.policies import ASP, BSP, SSP, Backup, EnsembleSync
from offbeat.types import Fate, WorkerState

# The start.


def test_nobody_computes_before_everybody_has_joined_or_is_lost() -> None:
    job = Hand(BSP(), 3, begun=False)
    assert names(job(Joined(1))) == ["StateChanged 1"]
    assert names(job(Joined(2))) == ["StateChanged 2"]
    assert names(job(Lost(0, "its process has ended"))) == ["StateChanged 0", "Initialise 1"]
    assert names(job(Initialised(1))) == ["Release 1", "Release 2"]
    assert job.job.start.begun and job.job.version == 0


def test_another_initialises_when_the_first_dies_and_only_its_word_counts() -> None:
    job = Hand(BSP(), 2, begun=False)
    job(Joined(0))
    assert only(Initialise, job(Joined(1))).worker == 0
    assert only(Initialise, job(Lost(0, "gone", 1))).worker == 1
    assert job(Initialised(0)) == [] and not job.job.start.begun
    assert names(job(Initialised(1))) == ["Release 1"]


def test_an_only_worker_that_restarts_before_it_has_initialised_is_asked_again() -> None:
    job = Hand(BSP(), 1, begun=False)
    job(Joined(0))
    job(Lost(0, "gone", 1))
    assert only(Initialise, job(Joined(0))).worker == 0
    assert names(job(Initialised(0))) == ["Release 0"]


def test_a_restart_takes_the_place_of_the_initialiser_even_if_its_end_was_not_seen() -> None:
    job = Hand(BSP(), 1, begun=False)
    job(Joined(0))
    assert names(job(Joined(0))) == ["StateChanged 0", "StateChanged 0", "Initialise 0"]


def test_messages_before_the_start_do_no_harm() -> None:
    job = Hand(BSP(), 2, begun=False)
    job(Joined(0))
    assert job(PullWanted(0, 1)) == [] and job(Heard(1, 1)) == [] and job(Heard(5, 1)) == []
    assert only(Settle, job.push(0, 0)).fate is Fate.REJECTED
    assert only(Initialise, job(Joined(1))).worker == 0, "worker 5 was heard of, but nobody waits for it"


def test_a_late_joiner_takes_part_at_the_slowest_clock_with_the_newest_version() -> None:
    job = Hand(SSP(staleness=1), 2)
    job.push(0, 0)
    job.push(1, 1)
    release = only(Release, job(Joined(2)))
    assert (release.worker, release.version, release.clock, release.incarnation) == (2, 2, 1, 1)


# Deaths and returns.


def test_a_death_releases_those_who_waited_in_the_same_breath() -> None:
    job = Hand(BSP(), 3)
    job.push(0, 0)
    job.push(1, 0)
    assert names(job(Lost(2, "killed"))) == ["StateChanged 2", "Fold", "Settle 0", "Settle 1", "Release 0", "Release 1"]
    assert job(Lost(2, "its connection has closed")) == [], "one death"


def test_a_restart_drops_what_the_predecessor_has_pending() -> None:
    job = Hand(BSP(), 2)
    job.push(0, 0)
    effects = job(Joined(0))
    assert [e.state for e in effects if isinstance(e, StateChanged)] == [WorkerState.DEAD, WorkerState.ALIVE]
    settle = only(Settle, effects)
    assert (settle.worker, settle.incarnation, settle.fate) == (0, 1, Fate.DROPPED)
    assert only(Release, effects).incarnation == 2
    job.push(1, 0)
    fold = only(Fold, job.push(0, 0, incarnation=2))
    assert {(part.worker, part.incarnation) for part in fold.parts} == {(0, 2), (1, 1)}


def test_the_lost_connection_of_a_replaced_process_does_not_kill_its_successor() -> None:
    job = Hand(BSP(), 1)
    job(Joined(0))
    assert job(Lost(0, "its connection has closed", 1)) == []
    assert job.job.membership[0].state is WorkerState.ALIVE


def test_a_process_that_wakes_up_after_its_death_is_rejected_fenced_once_and_welcome_again() -> None:
    job = Hand(BSP(), 2, timeout_s=10.0)
    job.push(1, 0)
    job.now = 8.0
    job(Heard(1, 1))
    wake = job.job.wake_at()
    assert wake is not None and names(job.job.wake(wake)) == ["StateChanged 0", "Fold", "Settle 1", "Release 1"]
    job.now = wake
    effects = job.push(0, 0)
    assert names(effects) == ["StateChanged 0", "Fence 0", "Settle 0"]
    assert only(Settle, effects).fate is Fate.REJECTED and only(Fence, effects).incarnation == 1
    assert job(Heard(0, 1)) == [] and not job.job.over, "told once; it may still come"
    release = only(Release, job(Joined(0)))
    assert (release.incarnation, release.version) == (2, 1)
    assert only(Settle, job.push(0, 0, incarnation=1)).fate is Fate.REJECTED, "what it had sent before is still fenced"


def test_who_is_told_to_rejoin_and_never_does_is_dead_in_the_end() -> None:
    job = Hand(BSP(), 1, timeout_s=10.0)
    wake = job.job.wake_at()
    assert wake is not None
    job.job.wake(wake)
    job.now = wake
    job(Heard(0, 1))
    assert not job.job.over
    wake = job.job.wake_at()
    assert wake is not None and only(StateChanged, job.job.wake(wake)).state is WorkerState.DEAD
    assert (job.job.over, job.job.wake_at()) == (True, None)


def test_a_finished_worker_is_not_waited_for_and_what_it_pushed_counts() -> None:
    job = Hand(BSP(), 2)
    job.push(0, 0)
    assert names(job(Left(1, 1))) == ["StateChanged 1", "Fold", "Settle 0", "Release 0"]
    assert not job.job.over
    assert (only(StateChanged, job(Left(0, 1))).state, job.job.over) == (WorkerState.FINISHED, True)
    assert job(Lost(0, "its connection has closed", 1)) == []


# Contributions.


def test_a_gradient_that_is_not_finite_is_rejected_by_name_and_its_worker_tries_again() -> None:
    job = Hand(BSP(), 2)
    effects = job.push(0, 0, nonfinite="layer.bias")
    assert only(Settle, effects).reason == "gradient not finite in layer.bias" and only(Release, effects).worker == 0
    job.push(1, 0)
    assert len(only(Fold, job.push(0, 0)).parts) == 2


def test_a_second_push_before_the_admission_is_rejected() -> None:
    job = Hand(BSP(), 2)
    job.push(0, 0)
    assert only(Settle, job.push(0, 0)).reason == "pushed without having been admitted"
    assert len(only(Fold, job.push(1, 0)).parts) == 2


def test_a_pull_brings_the_newest_version_but_not_to_one_who_waits_for_the_barrier() -> None:
    job = Hand(BSP(), 2)
    assert only(Release, job(PullWanted(0, 1))).version == 0
    job.push(0, 0)
    assert job(PullWanted(0, 1)) == [], "it would go on before its contribution has a fate"
    assert sorted(names(job.push(1, 0))[-2:]) == ["Release 0", "Release 1"]


def test_who_waits_outside_until_the_next_epoch_is_not_listened_to_before() -> None:
    """No well-behaved worker says anything then; what another one says must not bring down the job."""
    job = Hand(EnsembleSync(steps=1), 1)
    lease = only(Grant, job.want(0)).lease
    assert names(job(Joined(1))) == ["StateChanged 1"]
    assert job(PullWanted(1, 1)) == [] and job.want(1) == [] and job.finish(1) == [] and job(Abandoned(1, 1, 0, 1.0)) == []
    assert only(Settle, job.push(1, 0)).reason == "pushed without having been admitted"
    job.push(0, 0, leases=(lease,))
    effects = job.finish(0)
    assert only(EpochEnded, effects).workers == (0,) and names(effects)[-2:] == ["Release 0", "Release 1"]


# Samples.


def test_an_epoch_ends_when_every_position_is_settled_and_brings_the_newest_version() -> None:
    job = Hand(ASP(), 2)
    first, second, third = (only(Grant, job.want(worker)) for worker in (0, 1, 0))
    assert [(g.lease, g.start, g.stop) for g in (first, second, third)] == [(0, 0, 2), (1, 2, 4), (2, 4, 6)]
    job.push(1, 0, leases=(1,))
    assert names(job.want(1)) == ["Paused 1"], "nothing is left to deal, but worker 0 may die"
    job.push(0, 1, leases=(0,))
    effects = job.push(0, 2, leases=(2,))
    assert names(effects) == ["Fold", "Settle 0", "Release 0", "EpochEnded", "Release 1"]
    ended = only(EpochEnded, effects)
    assert ended.workers == (1,) and ended.report["folded"] == 6 and ended.report["exceptions"] == []
    late = job.want(0)
    assert only(NoMore, late).refreshed and only(Release, late).version == 3


def test_samples_of_the_dead_find_an_idle_worker_and_the_newest_version_comes_with_them() -> None:
    """Else it would compute on parameters older than a barrier allows: worker 1 has been idle since version 1."""
    job = Hand(BSP(), 2)
    for worker in (0, 1, 0, 0):
        job.want(worker, size=8)
    job.push(0, 0, leases=(0,))
    job.push(1, 0, leases=(1,))
    assert names(job.want(1, size=8)) == ["Paused 1"]
    assert only(Fold, job.push(0, 1, leases=(2,))).version == 2
    effects = job(Lost(0, "killed"))
    grant = only(Grant, effects)
    assert (grant.worker, grant.start, grant.stop, grant.refreshed) == (1, 6, 8, True)
    assert only(Release, effects).version == 2
    assert only(Fold, job.push(1, 2, leases=(grant.lease,))).parts[0].staleness == 0


def test_the_dead_holder_of_the_last_samples_does_not_hold_up_the_epoch() -> None:
    job = Hand(ASP(), 2)
    job.want(0, batch=3)
    job.want(1, batch=3)
    job.push(0, 0, leases=(0,))
    assert names(job.want(0)) == ["Paused 0"]
    effects = job(Lost(1, "killed"))
    grant = only(Grant, effects)
    assert (grant.worker, grant.start, grant.stop, grant.refreshed) == (0, 3, 5, True)
    assert only(Release, effects).version == 1
    job.push(0, 1, leases=(grant.lease,))
    rest = only(Grant, job.want(0))
    assert (rest.start, rest.stop) == (5, 6)
    job.push(0, 2, leases=(rest.lease,))
    report = only(EpochEnded, job.finish(0)).report
    assert report["folded"] == 6 and report["returned"] == 3


def test_a_pending_contribution_of_the_dead_keeps_its_samples_until_its_successor_comes() -> None:
    job = Hand(BSP(), 2)
    job.want(0, batch=3)
    job.want(1, batch=3)
    job.push(0, 0, leases=(0,))
    job(Lost(0, "killed"))
    assert only(Settle, job(Joined(0))).fate is Fate.DROPPED
    again = only(Grant, job.want(0, batch=3, incarnation=2))
    assert (again.start, again.stop) == (0, 3)
    job.push(0, 0, incarnation=2, leases=(again.lease,))
    job.push(1, 0, leases=(1,))
    report = only(EpochEnded, job.finish(0, incarnation=2)).report
    assert (report["folded"], report["dropped"], report["returned"]) == (6, 0, 3)


def test_an_early_break_gives_the_rest_back_and_others_use_it() -> None:
    job = Hand(ASP(), 2)
    job.want(0)
    job.want(0)
    assert names(job.finish(0)) == ["Paused 0"], "its leases are free again; worker 1 has not said that it wants none"
    taken = [only(Grant, job.want(1)) for _ in range(3)]
    assert sorted((g.start, g.stop) for g in taken) == [(0, 2), (2, 4), (4, 6)]
    effects = job.finish(1)
    assert only(EpochEnded, effects).report["unused"] == 6, "worker 1 breaks out too"
    assert names(effects) == ["Paused 1", "EpochEnded", "Release 0", "Release 1"]


def test_samples_given_back_and_pushed_all_the_same_are_rejected() -> None:
    job = Hand(ASP(), 2)
    grant = only(Grant, job.want(0))
    job.finish(0)
    settle = only(Settle, job.push(0, 0, leases=(grant.lease,)))
    assert (settle.fate, settle.reason) == (Fate.REJECTED, "its samples have gone to another worker")


def test_a_worker_that_prefetches_is_told_to_use_up_what_it_holds() -> None:
    job = Hand(ASP(), 1)
    for _ in range(3):
        job.want(0)
    answer = only(NoMore, job.want(0))
    assert not answer.refreshed and "already holds" in answer.reason
    for lease in range(3):
        job.push(0, lease, leases=(lease,))
    assert only(EpochEnded, job.finish(0)).report["folded"] == 6


def test_the_rule_does_not_wait_for_the_idle() -> None:
    job = Hand(BSP(), 2)
    for worker in (0, 1, 0):
        job.want(worker)
    job.push(0, 0, leases=(0,))
    job.push(1, 0, leases=(1,))
    assert names(job.want(1)) == ["Paused 1"]
    assert names(job.push(0, 1, leases=(2,))) == ["Fold", "Settle 0", "Release 0", "EpochEnded", "Release 1"]


def test_a_pause_is_said_before_what_follows_from_it() -> None:
    """Worker 0 stands at the barrier: as worker 1 pauses, nobody is missing any more."""
    job = Hand(BSP(), 2)
    job.want(0)
    job.want(1)
    job.push(0, 0, leases=(0,))
    effects = job.finish(1)
    assert names(effects) == ["Paused 1", "Fold", "Settle 0", "Release 0"]
    paused = only(Paused, effects)
    assert (paused.incarnation, paused.pool, paused.epoch, paused.reason) == (1, 0, 0, "waits for the end of epoch 0")


def test_who_asks_for_the_next_epoch_too_early_waits_for_the_end_of_this_one() -> None:
    """It hears that the earlier epoch has ended, and asks again."""
    job = Hand(ASP(), 2)
    job.want(0)
    assert only(Paused, job.want(0, epoch=1)).epoch == 0, "what it held is free for worker 1"
    for version in range(3):
        job.push(1, version, leases=(only(Grant, job.want(1)).lease,))
    ended = only(EpochEnded, job.said)
    assert (ended.epoch, ended.workers, ended.report["returned"]) == (0, (0,), 2)
    assert only(Grant, job.want(0, epoch=1)).epoch == 1


def test_a_newcomer_hears_of_every_epoch_that_is_over() -> None:
    job = Hand(ASP(), 1)
    for epoch in range(2):
        job.want(0, epoch, batch=6)
        job.push(0, epoch, leases=(epoch,))
        job.finish(0, epoch)
    job(Joined(1))
    assert not only(NoMore, job.want(1, 0)).refreshed, "long over: more such answers will follow"
    assert only(NoMore, job.want(1, 1)).refreshed
    assert only(Paused, job.want(1, 2)).epoch == 2, "worker 0 is to begin it"
    assert [grant.worker for grant in job.want(0, 2) if isinstance(grant, Grant)] == [0, 1]
    assert only(Grant, job.want(1, 2)).epoch == 2


@pytest.mark.parametrize("end", ["script", "notice", "death"])
def test_a_newcomer_begins_no_epoch_that_the_scripts_before_it_have_not(end: str) -> None:
    """Its script may count epochs from an old checkpoint. Where the others died or were told to leave, it goes on in their place."""
    job = Hand(ASP(), 1)
    job.want(0, batch=6)
    job.push(0, 0, leases=(0,))
    job.finish(0)
    job(Joined(1))
    job.want(1, 1)
    effects = job(Lost(0, "killed", 1) if end == "death" else Left(0, 1, noticed=end == "notice"))
    if end == "script":
        assert "have ended before epoch 1" in only(NoMore, effects).reason
        assert only(NoMore, job.want(1, 1)).epoch == 1, "nor when it asks again"
        job(Lost(0, "exited with status 3"))
        assert only(Grant, job.want(1, 1)).epoch == 1, "its script has failed after all, and it goes on in its place"
    else:
        assert only(Grant, effects).epoch == 1


def test_a_newcomer_does_not_go_on_alone_in_an_optimizer_that_the_scripts_have_closed() -> None:
    """Its loops pass without a batch: the others evaluate, or make another optimizer, for which they need its script."""
    job = Hand(ASP(), 1)
    job.want(0, batch=6)
    job.push(0, 0, leases=(0,))
    job.finish(0)
    job(Joined(1))
    job.want(1, 1)
    told = only(NoMore, job(Left(0, 1, exits=False)))
    assert "have closed the optimizer before epoch 1" in told.reason and not told.over
    assert only(EpochEnded, job.finish(1, 1)).report["unused"] == 6
    assert not only(NoMore, job.want(1, 2)).over
    job(Left(0, 1))
    assert only(NoMore, job.want(1, 2)).over, "its process has ended"


@pytest.mark.parametrize("end", ["script", "notice", "death"])
@pytest.mark.parametrize("idle", [False, True])
def test_a_newcomer_does_not_go_on_alone_in_an_epoch_whose_loop_the_scripts_have_left(end: str, idle: bool) -> None:
    """Scripts that count their steps over a sampler without an end leave its loop in mid-epoch; the newcomer's count began later."""
    job = Hand(ASP(), 1)
    job.want(0, batch=2)
    job.push(0, 0, leases=(0,))
    job.want(0, batch=4 if idle else 2)
    job(Joined(1))
    if idle:
        assert only(Paused, job.want(1)), "all other samples are held"
    else:
        job.push(1, 1, leases=(only(Grant, job.want(1)).lease,))
    effects = job(Lost(0, "killed", 1) if end == "death" else Left(0, 1, noticed=end == "notice"))
    if not idle:
        effects = job.want(1)
    if end == "script":
        assert "have ended in epoch 0" in only(NoMore, effects).reason
        assert only(NoMore, effects).over
        job(Left(1, 1))
        report = only(EpochEnded, job.job.close(9.0, "all have ended")).report
        assert (report["unused"], report["returned"]) == (6 - report["folded"], 4 if idle else 2)
    else:
        assert not only(Grant, effects).refreshed or idle, "it goes on in the other's place"


def test_an_epoch_goes_on_from_a_checkpoint() -> None:
    job = Hand(ASP(), 1)
    job(LeaseWanted(0, 1, 0, 3, 10, 4, rest=[[0, 2], [8, 10]]))
    grant = only(Grant, job.said)
    assert (grant.epoch, grant.start, grant.stop) == (3, 0, 2)
    assert job.job.epochs.places() == {0: {"epoch": 3, "size": 10, "rest": [[0, 2], [8, 10]]}}


def test_pools_end_their_epochs_apart() -> None:
    job = Hand(ASP(), 1)
    train, valid = only(Grant, job.want(0, size=2)), only(Grant, job.want(0, size=2, pool=1))
    job.push(0, 0, leases=(train.lease,))
    assert only(EpochEnded, job.finish(0, size=2)).pool == 0
    job.push(0, 1, leases=(valid.lease,))
    assert only(EpochEnded, job.finish(0, size=2, pool=1)).pool == 1


def test_what_the_rule_drops_is_an_exception_of_the_epoch() -> None:
    job = Hand(Backup(b=1), 2)
    job.want(0, batch=3)
    job.want(1, batch=3)
    job.push(0, 0, leases=(0,))
    assert only(Settle, job.push(1, 0, leases=(1,))).fate is Fate.DROPPED
    report = only(EpochEnded, job.finish(0)).report
    assert (report["folded"], report["dropped"]) == (3, 3)
    assert report["exceptions"] == [{"start": 3, "stop": 6, "why": "dropped: computed from an older version than 1"}]


def test_closing_gives_every_push_a_fate_and_every_epoch_a_report() -> None:
    job = Hand(BSP(), 2)
    job.want(0)
    job.want(1)
    job.push(0, 0, leases=(0,))
    effects = job.job.close(9.0, "interrupted")
    assert only(Settle, effects).reason == "interrupted"
    report = only(EpochEnded, effects).report
    assert (report["folded"], report["dropped"], report["unused"]) == (0, 2, 4)
