"""The books of rounds: fates, weights, releases and reasons; one that decides, and one that follows it event by event."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from hypothesis import assume, given
from hypothesis import strategies as st
from tests.core.drawn import FAULTS, schedules
from tests.core.hand import Hand, names, only
from tests.core.scripts import Schedule
from tests.core.world import World
from tests.tiers import examples

from offbeat.core.effects import Effect, EpochEnded, Fold, Grant, Release, Settle, StateChanged, Undone
from offbeat.core.events import Folded, Initialised, Joined, LeaseWanted, Left, Lost, Pushed, Voided, Withdrawn
from offbeat.core.job.coordinator import Coordinator
from offbeat.policies import rule
from offbeat.types import Fate, WorkerState

USURPED = "a new process has taken its place"
NO_USURPERS = tuple(fault for fault in FAULTS if fault != "usurp")


def hand(spelling: str, ranks: int) -> Hand:
    return Hand(rule(spelling), ranks)


def reasons(effects: list[Effect]) -> set[str]:
    return {str(getattr(effect, "reason", "")) for effect in effects}


def test_a_round_in_words() -> None:
    job = hand("quorum(q=2)", 3)
    assert job.push(0, 0) == []
    effects = job.push(2, 0)
    assert names(effects) == ["Fold", "Settle 0", "Settle 2", "Release 0", "Release 2"]
    assert reasons(effects) == {"round 0, closed by rank 2: 2 gradients of 3 ranks"}
    fold = only(Fold, effects)
    assert fold.divisor == 3 and [(part.worker, part.weight, part.staleness) for part in fold.parts] == [(0, 1 / 3, 0), (2, 1 / 3, 0)]


def test_a_late_gradient_has_one_fate_and_that_is_its_round() -> None:
    job = hand("quorum(q=2)", 3)
    job.push(0, 0)
    job.push(2, 0)
    release = only(Release, job.push(1, 0))
    assert (release.version, release.reason) == (1, "late: its gradient is carried into round 1")
    job.push(0, 1)
    effects = job.push(1, 1)
    fold = only(Fold, effects)
    assert [(part.worker, part.clock, part.staleness) for part in fold.parts] == [(0, 2, 0), (1, 1, 1), (1, 2, 0)]
    assert sum(part.weight for part in fold.parts) == 1.0, "of three; and there might be six"
    fates = [(effect.worker, effect.clock, effect.fate) for effect in job.said if isinstance(effect, Settle)]
    assert len(set(fates)) == len(fates) == 5 and {fate for *_, fate in fates} == {Fate.FOLDED}


def test_late_where_somebody_waits_closes_the_round_and_goes_on_with_it() -> None:
    job = hand("quorum(q=2)", 3)
    job.push(0, 0)
    job.push(2, 0)
    job.push(0, 1)
    effects = job.push(1, 0)
    assert names(effects) == ["Fold", "Settle 0", "Settle 1", "Release 0", "Release 1"]
    assert isinstance(effects[-1], Release) and effects[-1].version == 2
    assert effects[-1].reason == "late: its gradient is in round 1, which closed with it"


def test_what_must_not_be_used_is_rejected_and_its_rank_waits_with_the_others() -> None:
    job = hand("full", 2)
    assert only(Settle, job.push(0, 0, nonfinite="bias")).fate is Fate.REJECTED
    effects = job.push(1, 0)
    fold = only(Fold, effects)
    assert [part.worker for part in fold.parts] == [1] and fold.parts[0].weight == 0.5
    assert names(effects)[-2:] == ["Release 0", "Release 1"]
    job.push(0, 1, nonfinite="bias")
    empty = only(Fold, job.push(1, 1, nonfinite="bias"))
    assert empty.parts == () and empty.reason == "round 1, closed by rank 1: 0 gradients of 2 ranks"


def test_the_dead_are_not_waited_for_and_not_counted() -> None:
    job = hand("full", 3)
    job.push(0, 0)
    job.push(1, 0)
    fold = only(Fold, job(Lost(2, "gone")))
    assert fold.divisor == 2 and fold.reason == "round 0, closed without rank 2, which has left: 2 gradients of 2 ranks"


def test_who_returns_has_the_newest_version_and_its_old_gradient_is_dropped() -> None:
    job = hand("all_of(m=3)", 3)
    job.push(0, 0)
    job(Lost(0, "gone"))
    effects = job(Joined(0))
    settle = only(Settle, effects)
    assert settle.fate is Fate.DROPPED and settle.incarnation == 1 and "contributes anew" in settle.reason
    assert only(Release, effects).incarnation == 2


def test_more_ranks_than_there_was_room_for() -> None:
    job = hand("full", 2)
    job(Joined(40))
    job.push(0, 0)
    job.push(1, 0)
    fold = only(Fold, job.push(40, 0))
    assert [part.worker for part in fold.parts] == [0, 1, 40] and fold.divisor == 3


def test_at_an_epochs_end_nothing_stays_behind() -> None:
    job = hand("solo", 2)
    leases = []
    for worker in range(2):
        leases.append(job.want(worker, size=4)[0].lease)  # type: ignore[union-attr]
    job.push(0, 0, leases=(leases[0],))
    assert only(Release, job.push(1, 0, leases=(leases[1],))).reason.startswith("late")
    assert names(job.want(0, size=4)) == ["Paused 0"]
    effects = job.want(1, size=4)
    fold = only(Fold, effects)
    assert fold.reason == "round 1, closed as rank 1 has paused: 1 gradient of 2 ranks" and fold.parts[0].staleness == 1
    ended = only(EpochEnded, effects)
    assert ended.report["folded"] == 4
    assert {effect.version for effect in effects if isinstance(effect, Release)} == {2}


def test_what_nobody_is_there_to_fold_is_dropped_with_the_job() -> None:
    job = hand("solo", 2)
    job.push(0, 0)
    job.push(1, 0)
    job(Left(0, 1))
    assert not any(isinstance(effect, Fold) for effect in job(Left(1, 1)))
    settle = only(Settle, job.job.close(9.0, "the job has ended"))
    assert (settle.worker, settle.fate) == (1, Fate.DROPPED)


def test_a_limited_round_closes_when_the_slow_rank_has_caught_up() -> None:
    job = hand("solo(staleness=1)", 2)
    job.push(0, 0)
    assert job.push(0, 1) == [], "rank 1 still computes from version 0"
    effects = job.push(1, 0)
    assert [part.staleness for part in only(Fold, effects).parts] == [0, 1]


def _deaths(effects: Sequence[Effect]) -> int:
    return sum(isinstance(effect, StateChanged) and effect.state is WorkerState.DEAD for effect in effects)


def followed(world: World) -> list[list[Effect]]:
    """The same job told by somebody else: the events in their order, and after each the rounds that it has closed."""
    schedule = world.schedule
    job, told = Coordinator(schedule.policy, schedule.workers, schedule.timeout_s, follows=True), []
    for now, event, effects in world.log[:-1]:
        said = job.wake(now) if event is None else job.on(event, now)
        for effect in effects:
            if isinstance(effect, Fold):
                said += job.on(Folded(effect.version, (), 0.0, 0.0), now)
        told.append(said)
    told.append(job.close(world.log[-1][0], "the job is over"))
    return told


def test_who_follows_writes_the_same_books() -> None:
    """Every fold and fate, event by event, and nobody is left waiting. It may learn a little later what a rank can go on with.

    A process that joins in place of one that is not known to be dead is two events for the ranks, and is to be two for who follows.
    """

    @examples(200)
    @given(st.sampled_from(("solo", "majority", "all_of", "quorum", "full")).flatmap(partial(schedules, faults=NO_USURPERS)))
    def check(schedule: Schedule) -> None:
        world = World(schedule).run()
        # Two restarts of one worker may start its second process while the first lives: that usurps too.
        assume(not any(getattr(effect, "reason", "") == USURPED for _, _, effects in world.log for effect in effects))
        # Two that are found silent at one instant are two events for the ranks as well, and one here.
        assume(not any(event is None and _deaths(effects) > 1 for _, event, effects in world.log))
        for (_, event, effects), told in zip(world.log, followed(world), strict=True):
            assert _decisions(effects) == _decisions(told), f"after {event}"
            assert {effect.worker for effect in effects if isinstance(effect, Release)} == {
                e.worker for e in told if isinstance(e, Release)
            }

    check()


def _decisions(effects: Sequence[Effect]) -> list[str]:
    return sorted(str(effect._replace(reason="")) for effect in effects if isinstance(effect, Fold | Settle))


def test_a_thousand_ranks() -> None:
    job, draw = hand("majority", 1000), random.Random(0)
    computing = dict.fromkeys(range(1000), 0)
    for _ in range(3000):
        worker = draw.choice(list(computing))
        effects = job.push(worker, computing.pop(worker))
        computing |= {effect.worker: effect.version for effect in effects if isinstance(effect, Release)}
        if not computing:
            break
    assert computing and job.job.version > 0


class Following:
    """A job across hosts, as its coordinator hears of it."""

    def __init__(self, ranks: int) -> None:
        self.job = Coordinator(rule("full"), ranks, follows=True)
        for rank in range(ranks):
            self.job.on(Joined(rank), 0.0)
        self.job.on(Initialised(0), 0.0)

    def take(self, rank: int) -> int:
        """Which samples it gets: the first of them."""
        return only(Grant, self.job.on(LeaseWanted(rank, 1, 0, 0, 12, 4), 0.1)).start

    def push(self, rank: int, *leases: int) -> None:
        self.job.on(Pushed(rank, 1, 0, 4, 0.1, leases=leases), 0.2)

    def folded(self, version: int) -> list[Effect]:
        return self.job.on(Folded(version, (), 0.0, 0.0), 0.3)


def test_what_was_pending_and_went_with_its_host_is_dropped_and_its_samples_come_back() -> None:
    following = Following(3)
    leases = [only(Grant, following.job.on(LeaseWanted(rank, 1, 0, 0, 12, 4), 0.1)).lease for rank in range(2)]
    following.push(0, leases[0])
    following.push(1, leases[1])
    following.job.on(Lost(1, "killed", 1), 0.2)
    settle = only(Settle, following.job.on(Withdrawn(1, 0), 0.2))
    assert (settle.worker, settle.fate, settle.reason) == (1, Fate.DROPPED, "it went with its host before round 0 was summed")
    assert following.job.on(Withdrawn(1, 0), 0.2) == [], "one entry for each buffer, of which the second finds nothing"
    assert [following.take(2), following.take(2)] == [4, 8] or [following.take(2)] == [4]
    following.push(2)
    fold = only(Fold, following.folded(1))
    assert [part.worker for part in fold.parts] == [0, 2] and fold.divisor == 2


def test_a_rank_whose_gradient_went_with_its_host_comes_back_before_the_round_closes() -> None:
    following = Following(2)
    following.push(1)
    following.job.on(Lost(1, "killed", 1), 0.2)
    assert only(Settle, following.job.on(Withdrawn(1, 0), 0.2)).fate is Fate.DROPPED
    effects = following.job.on(Joined(1), 0.3)
    assert only(Release, effects).incarnation == 2
    assert not [effect for effect in effects if isinstance(effect, Settle)], "its gradient has its fate"


def test_what_was_folded_into_a_void_round_is_undone_and_counts_as_rejected() -> None:
    following = Following(2)
    following.push(0)
    following.push(1)
    following.folded(1)
    undone = following.job.on(Voided(0), 0.4)
    assert [(effect.worker, effect.version, effect.fate) for effect in undone if isinstance(effect, Undone)] == [
        (0, 1, Fate.REJECTED),
        (1, 1, Fate.REJECTED),
    ]
    assert following.job.on(Voided(0), 0.4) == [], "the other rank says so too"


def test_what_was_folded_and_went_with_its_host_is_undone() -> None:
    following = Following(2)
    following.push(0)
    following.push(1)
    following.folded(1)
    following.job.on(Lost(1, "killed", 1), 0.4)
    assert following.job.on(Withdrawn(1, 0), 0.4) == [Undone(1, 1, 1, 1, 4, "it went with its host before round 0 was summed")]
    assert following.job.on(Withdrawn(1, 0), 0.4) == []
