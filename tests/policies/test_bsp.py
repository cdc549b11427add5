"""A barrier: one version of everybody's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.core.hand import Hand, names, only
from tests.core.promises import Promises, by_samples, fresh
from tests.policies.views import StillView, contribution

from offbeat.core.effects import Effect, Fold
from offbeat.core.events import Event, Pushed
from offbeat.core.policy import Hold
from offbeat.policies import BSP


class Barrier(Promises):
    """Fold when everybody who computes has pushed."""

    @staticmethod
    def most_stale(rule: Any, workers: int) -> int:
        return 0

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        fresh(effect)
        by_samples(effect, pushes)

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        for worker in self.ledger.waiting:
            assert worker in self.ledger.pending and self.computing(), f"worker {worker} waits at an open barrier"


PROMISES = {BSP: Barrier}


def test_bsp_golden_history() -> None:
    """Two rounds of three workers: one version each, made by the last to arrive, whoever that is."""
    job = Hand(BSP(), 3)
    assert job.push(2, 0) == [] and job.push(0, 0) == []
    assert names(job.push(1, 0)) == ["Fold", "Settle 2", "Settle 0", "Settle 1", "Release 1", "Release 2", "Release 0"]
    assert job.push(1, 1) == [] and job.push(2, 1) == []
    fold = only(Fold, job.push(0, 1))
    assert fold.version == 2 and [(p.worker, p.clock, p.staleness) for p in fold.parts] == [(0, 2, 0), (1, 2, 0), (2, 2, 0)]
    assert fold.reason == "all 3 active workers have pushed"


def test_gradients_are_added_up_by_batch_whoever_has_which_and_whoever_comes_first() -> None:
    job = Hand(BSP(), 3)
    for worker in (1, 2, 0):
        job.want(worker)
    assert job.push(2, 0, leases=(1,)) == [] and job.push(0, 0, leases=(2,)) == []
    assert [part.worker for part in only(Fold, job.push(1, 0, leases=(0,))).parts] == [1, 2, 0]


def test_bsp_counts_who_not_how_many() -> None:
    """Worker 0 pushes and dies, 2 pushes: as many pushes as living workers, and yet 1 is still computing."""
    view = StillView({1: 0, 2: 1}, (contribution(0), contribution(2)))
    assert BSP().fold(view) is None
    assert BSP().admit(view, 2) == Hold("barrier: 1 of 2 active workers are still computing")
    decision = BSP().fold(StillView({1: 1, 2: 1}, (contribution(0), contribution(2), contribution(1))))
    assert decision is not None and [c.worker for c in decision.fold] == [0, 2, 1]


def test_bsp_has_nothing_to_do_without_pushes_and_folds_the_last_words_of_an_empty_job() -> None:
    assert BSP().fold(StillView({})) is None
    decision = BSP().fold(StillView({}, (contribution(0),)))
    assert decision is not None and len(decision.fold) == 1
