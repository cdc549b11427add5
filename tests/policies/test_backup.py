"""A fixed number of backup workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import pytest
from tests.core.hand import Hand, names, only
from tests.core.promises import FreshOnly
from tests.policies.views import StillView, contribution

from offbeat.core.effects import Effect, Fold, Interrupt, Release, Settle
from offbeat.core.events import Abandoned, Event, Lost
from offbeat.core.policy import Contribution
from offbeat.errors import ConfigurationError
from offbeat.policies import Backup, rule
from offbeat.policies.fresh import lr_factor
from offbeat.types import Fate, WorkerId


class Spared(FreshOnly):
    """Nobody waits once n - b fresh gradients are in."""

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        super().step(event, effects)
        assert not self.ledger.waiting or self.computing() > self.rule.b, f"{list(self.ledger.waiting)} wait with enough gradients in"


PROMISES = {Backup: Spared}
REFUSED = [
    ("backup(lr_rule=linear)", "lr_rule must be one of constant, proportional, sqrt, table"),
    ("backup(lr_rule=table)", r"lr_rule=table, lr_table=\(\)\): lr_rule=table needs factors in lr_table"),
    ("backup(lr_table=(1.0,))", "lr_rule=table needs factors in lr_table"),
    ("backup(lr_rule=table, lr_table=(1.0, 0))", r"backup\(lr_table=0\): lr_table must be a number, above 0"),
    ("backup(lr_rule=table, lr_table=2)", "lr_table must be a tuple of factors"),
    ("backup(obsolete=drop)", "obsolete must be one of push_and_wait, pull_and_wait, push_and_interrupt"),
]


def test_before_a_fold_is_due_no_gradient_but_the_oldest_and_the_newest_is_looked_at() -> None:
    """With many workers nearly every push comes before the fold: what it costs must not grow with what waits."""
    read: list[WorkerId] = []

    class Noted(dict[WorkerId, Contribution]):
        def __getitem__(self, worker: WorkerId) -> Contribution:
            read.append(worker)
            return super().__getitem__(worker)

        def values(self) -> NoReturn:
            raise AssertionError("every gradient that waits was looked at")

    class Waiting(StillView):
        @property
        def pending(self) -> Noted:
            return Noted((c.worker, c) for c in self.pushed)

    view = Waiting(dict.fromkeys(map(WorkerId, range(9)), 1), pushed=tuple(contribution(WorkerId(worker)) for worker in range(7)))
    assert Backup(b=1).fold(view) is None
    assert read == [0, 6]


def test_backup_golden_history() -> None:
    """Three workers, one of them spare: two fresh gradients make a version, the third comes too late and starts afresh."""
    job = Hand(Backup(b=1), 3)
    assert job.push(2, 0) == []
    fold = only(Fold, job.push(0, 0))
    assert fold.version == 1 and [(p.worker, p.weight) for p in fold.parts] == [(0, 0.5), (2, 0.5)]
    effects = job.push(1, 0)
    assert names(effects) == ["Settle 1", "Release 1"]
    settle = only(Settle, effects)
    assert (settle.fate, settle.reason) == (Fate.DROPPED, "computed from an older version than 1") and only(Release, effects).version == 1
    assert job.push(1, 1) == []
    assert [p.worker for p in only(Fold, job.push(2, 1)).parts] == [1, 2]


def test_who_died_after_its_push_counts_among_the_first_and_in_n() -> None:
    """b=0 is a barrier, also then: worker 0 has pushed and died, and 1 is not outrun by it."""
    view = StillView({1: 0}, (contribution(0),))
    assert Backup(b=0).fold(view) is None
    decision = Backup(b=1).fold(view)
    assert decision is not None and [c.worker for c in decision.fold] == [0]


def test_more_spare_workers_than_workers_are_refused() -> None:
    Backup(b=3).check(4)
    with pytest.raises(ConfigurationError, match=r"backup\(b=4\) with 4 workers .* b must be at most 3"):
        Backup(b=4).check(4)
    with pytest.raises(ConfigurationError, match=r"backup\(b=-1\): b must be a whole number, at least 0"):
        Backup(b=-1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Backup(b=1), [1.0, 1.0]),
        (Backup(b=1, lr_rule="proportional"), [0.75, 2 / 3]),
        (Backup(b=1, lr_rule="table", lr_table=(0.1, 0.2, 0.5, 1.0)), [0.5, 0.2]),
    ],
    ids=["constant", "proportional", "table"],
)
def test_the_learning_rate_may_depend_on_k(policy: Backup, expected: list[float]) -> None:
    """Four workers, then three."""
    job = Hand(policy, 4)
    found = []
    for version in range(2):
        job.push(0, version)
        effects = job.push(1, version)
        if version == 0:
            effects = job.push(2, version)
            job(Lost(3, "killed"))
        found.append(only(Fold, effects).scale)
    assert found == pytest.approx(expected)


def test_a_table_serves_more_workers_than_it_has_factors_for_with_its_last() -> None:
    policy = Backup(b=0, lr_rule="table", lr_table=(0.1, 0.5))
    assert [lr_factor(policy, k, 4) for k in (1, 2, 3)] == [0.1, 0.5, 0.5]


def test_obsolete_work_is_broken_off_or_not_handed_in() -> None:
    """The third of three workers is told as soon as the first two are in; its answer costs it nothing."""
    for obsolete, at_once in (("push_and_interrupt", True), ("pull_and_wait", False)):
        job = Hand(rule(f"backup(b=1, obsolete={obsolete})"), 3)
        job.push(0, 0)
        effects = job.push(1, 0)
        interrupt = only(Interrupt, effects)
        assert (interrupt.worker, interrupt.version, interrupt.at_once) == (2, 1, at_once)
        assert names(job(Abandoned(2, 1, 0, 1.0))) == ["Release 2"]
    job = Hand(Backup(b=1), 2)
    assert names(job.push(0, 0)) == ["Fold", "Settle 0", "Release 0"], "with push_and_wait nobody is told anything"


def test_only_what_differs_is_spelled() -> None:
    policy = Backup(b=4, lr_rule="table", lr_table=(1, 0.5), obsolete="pull_and_wait")
    assert set(policy.spelling.removeprefix("backup(").removesuffix(")").split(", ")) == {
        "b=4", "lr_rule=table", "lr_table=(1", "0.5)", "obsolete=pull_and_wait",
    }  # fmt: skip
    assert rule(policy.spelling) == policy and rule("backup(lr_rule=table, lr_table=[1, 0.5], obsolete=pull_and_wait, b=4)") == policy
    assert hash(policy) == hash(rule(policy.spelling)) and Backup().spelling == "backup(b=1)"


def test_a_table_too_short_for_the_job_is_refused() -> None:
    policy = Backup(b=1, lr_rule="table", lr_table=(0.5, 1.0))
    policy.check(2)
    with pytest.raises(ConfigurationError, match="lr_table has 2 factors for 3 workers: give one for each k up to 3"):
        policy.check(3)
