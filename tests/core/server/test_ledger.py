"""The books: clocks, fates, folds and admissions, without membership and samples."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from offbeat.core.effects import Effect, Fold, Release, RuleChanged, Settle
from offbeat.core.events import Pushed
from offbeat.core.policy import Admit, Decision, Hold, ServerRule, View
from offbeat.core.server.ledger import Ledger
from offbeat.policies import ASP, BSP, SSP, Backup
from offbeat.types import Fate, WorkerId


def entered(policy: ServerRule, workers: int) -> Ledger:
    ledger = Ledger(policy)
    for worker in range(workers):
        ledger.enter(worker, 1, 0.0)
    return ledger


def push(ledger: Ledger, worker: int, version: int, now: float = 1.0, samples: int = 8, refusal: str | None = None) -> list[Effect]:
    return ledger.push(Pushed(worker, 1, version, samples, 1.0), now, refusal)


def test_weights_are_equal_where_somebody_cannot_count_its_samples() -> None:
    ledger = entered(BSP(), 2)
    push(ledger, 0, 0, samples=0)
    fold = push(ledger, 1, 0, samples=8)[0]
    assert isinstance(fold, Fold) and [part.weight for part in fold.parts] == [0.5, 0.5]


def test_a_refused_contribution_is_rejected_counts_as_an_iteration_and_its_worker_goes_on() -> None:
    ledger = entered(BSP(), 2)
    settle, release = push(ledger, 0, 0, refusal="not finite")
    assert isinstance(settle, Settle) and (settle.fate, settle.reason, settle.clock) == (Fate.REJECTED, "not finite", 1)
    assert isinstance(release, Release) and release.version == 0 and ledger.missing == 2


def test_who_returns_to_an_empty_job_stands_where_the_last_one_stood() -> None:
    """With a clock of 0, the others would stand still for as long as it takes the newcomer to catch up."""
    ledger = entered(SSP(staleness=0), 1)
    for version in range(5):
        push(ledger, 0, version)
    ledger.pause(0, 6.0)
    release = ledger.enter(1, 1, 7.0)[-1]
    assert isinstance(release, Release) and release.clock == 5
    assert ledger.slowest == 5


def test_after_all_have_paused_the_clocks_are_as_close_as_the_bound_demands() -> None:
    """Worker 0 pauses at clock 0, worker 1 goes on to 4 and pauses: whoever resumes first, 0 is not four iterations behind."""
    ledger = entered(SSP(staleness=0), 2)
    ledger.pause(0, 0.0)
    for version in range(4):
        push(ledger, 1, version)
    ledger.pause(1, 5.0)
    ledger.resume(0, 6.0)
    ledger.resume(1, 6.0)
    assert ledger.clock(0) == ledger.clock(1) == ledger.slowest == ledger.fastest == 4


def test_a_pause_releases_those_who_waited_for_the_one_that_pauses() -> None:
    ledger = entered(SSP(staleness=0), 2)
    assert [type(effect) for effect in push(ledger, 1, 0)] == [Fold, Settle]
    (release,) = ledger.pause(0, 2.0)
    assert isinstance(release, Release) and release.worker == 1


def test_times_of_pushes_are_kept_per_incarnation() -> None:
    ledger = entered(ASP(), 1)
    assert ledger.pushed_at(0) is None and ledger.interval(0) is None
    push(ledger, 0, 0, now=1.0)
    assert ledger.pushed_at(0) == 1.0 and ledger.interval(0) is None
    push(ledger, 0, 1, now=3.5)
    assert ledger.pushed_at(0) == 3.5 and ledger.interval(0) == 2.5
    ledger.leave(0, 4.0)
    ledger.enter(0, 2, 5.0)
    assert ledger.pushed_at(0) is None and ledger.interval(0) is None


def test_without_active_workers_the_clocks_read_zero() -> None:
    ledger = entered(ASP(), 1)
    push(ledger, 0, 0)
    ledger.leave(0, 2.0)
    assert ledger.slowest == ledger.fastest == 0 and not ledger.active


def test_the_slowest_worker_is_the_lowest_number_among_equals() -> None:
    ledger = entered(ASP(), 3)
    push(ledger, 0, 0)
    assert ledger.slowest_worker() == 1 and ledger.slowest == 0 and ledger.fastest == 1


def test_a_rule_that_admits_before_the_fate_is_our_mistake() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Hasty(BSP):
        def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
            return Admit("why not")

    ledger = entered(Hasty(), 2)
    with pytest.raises(AssertionError, match="worker 0 was admitted before its contribution had a fate"):
        push(ledger, 0, 0)


def test_pushing_without_having_been_admitted_is_our_mistake() -> None:
    ledger = entered(BSP(), 2)
    push(ledger, 0, 0)
    with pytest.raises(AssertionError, match="worker 0 pushed without having been admitted"):
        push(ledger, 0, 0)


def test_a_rule_that_keeps_time_is_asked_again_when_it_wanted() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(ASP):
        def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
            return Admit("now") if view.now >= 5.0 else Hold("not before 5")

        def wake_at(self, view: View) -> float | None:
            return 5.0 if view.now < 5.0 else None

    ledger = entered(Later(), 1)
    assert ledger.wake_at() == 5.0 and ledger.wake(4.0) == []
    (release,) = ledger.wake(5.0)
    assert isinstance(release, Release) and release.reason == "now" and ledger.wake_at() is None


def test_gradients_that_are_sums_are_added_up_whatever_their_samples() -> None:
    """And so that one process on the joined batch gets the same."""
    ledger = entered(BSP(), 2)
    for version, sums, weights in ((0, True, [1.0, 1.0]), (1, False, [0.75, 0.25])):
        ledger.push(Pushed(0, 1, version, 24, 1.0, sums=sums), 1.0)
        (fold,) = [effect for effect in ledger.push(Pushed(1, 1, version, 8, 1.0, sums=sums), 2.0) if isinstance(effect, Fold)]
        assert fold.sums == sums and [part.weight for part in fold.parts] == weights


class Relenting(ServerRule):
    """A rule that lets nobody go on until it becomes another one, at version 1."""

    def __init__(self) -> None:
        self.open = False

    def fold(self, view: View) -> Decision | None:
        if view.version == 1 and not self.open:
            self.open = True
            return Decision((), "for a test", becomes="asp")
        return Decision(tuple(view.pending.values()), "a test") if len(view.pending) > view.version else None

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return Admit("a test") if self.open or view.clock(worker) == 0 else Hold("a test")


def test_a_rule_that_becomes_another_says_so_and_is_asked_for_every_waiting_worker() -> None:
    ledger = entered(Relenting(), 3)
    push(ledger, 0, 0, refusal="not finite")
    assert list(ledger.waiting) == [0], "it is held, and nothing of it is left to be settled"
    fold, settle, changed, *released = push(ledger, 1, 0)
    assert isinstance(fold, Fold) and isinstance(settle, Settle)
    assert changed == RuleChanged(1, "asp", "for a test")
    assert [effect.worker for effect in released if isinstance(effect, Release)] == [1, 0]


def test_leads_count_from_a_change_of_the_rule_on() -> None:
    """Under the first rule worker 2 falls five iterations behind; under the other nobody waits until it has made up for them."""

    class Turning(ServerRule):
        def __init__(self) -> None:
            self.rule: ServerRule = Backup(b=1)

        def fold(self, view: View) -> Decision | None:
            if view.version == 5 and self.rule == Backup(b=1):
                self.rule = SSP(staleness=1)
                return Decision((), "for a test", becomes="ssp(staleness=1)")
            return self.rule.fold(view)

        def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
            return self.rule.admit(view, worker)

    ledger = entered(Turning(), 3)
    for version in range(5):
        assert not any(isinstance(effect, RuleChanged) for effect in push(ledger, 0, version))
        push(ledger, 1, version)
    assert list(ledger.waiting) == [0, 1], "it computes, and its lead is not known before it pushes"
    _, settle, *released = push(ledger, 2, 0)
    assert isinstance(settle, Settle) and settle.clock == 1
    assert sorted((effect.worker, effect.clock) for effect in released if isinstance(effect, Release)) == [(0, 5), (1, 5), (2, 5)]
    push(ledger, 0, 6)
    push(ledger, 0, 7)
    assert list(ledger.waiting) == [0] and ledger.clock(0) - ledger.slowest == 2
