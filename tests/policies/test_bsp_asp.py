"""The two ends: a barrier, and nobody waits."""

from __future__ import annotations

import pytest
from tests.core.hand import Hand, names, only
from tests.policies.views import StillView, contribution

from offbeat.core.effects import Fold, Release
from offbeat.core.policy import Admit, Hold
from offbeat.errors import ConfigurationError
from offbeat.policies import ASP, BSP
from offbeat.policies.asp import Discount


def test_bsp_golden_history() -> None:
    """Two rounds of three workers: one version each, made by the last to arrive, whoever that is."""
    job = Hand(BSP(), 3)
    assert job.push(2, 0) == [] and job.push(0, 0) == []
    assert names(job.push(1, 0)) == ["Fold", "Settle 2", "Settle 0", "Settle 1", "Release 1", "Release 2", "Release 0"]
    assert job.push(1, 1) == [] and job.push(2, 1) == []
    fold = only(Fold, job.push(0, 1))
    assert fold.version == 2 and [(p.worker, p.clock, p.staleness) for p in fold.parts] == [(1, 2, 0), (2, 2, 0), (0, 2, 0)]
    assert fold.reason == "all 3 active workers have pushed"


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


def test_asp_golden_history() -> None:
    """Worker 0 is three times as fast: each push is a version, and worker 1's first is 3 versions old when it comes."""
    job = Hand(ASP(), 2)
    for version in range(3):
        assert names(job.push(0, version)) == ["Fold", "Settle 0", "Release 0"]
    effects = job.push(1, 0)
    assert only(Fold, effects).parts[0].staleness == 3 and only(Release, effects).version == 4
    assert only(Fold, job.push(0, 3)).parts[0].staleness == 1


@pytest.mark.parametrize(("discount", "scale"), [("none", 1.0), ("inverse", 0.25), ("sqrt", 0.5)])
def test_asp_may_discount_what_is_stale(discount: Discount, scale: float) -> None:
    job = Hand(ASP(discount=discount), 2)
    assert [only(Fold, job.push(0, version)).scale for version in range(3)] == [1.0, 1.0, 1.0]
    assert only(Fold, job.push(1, 0)).scale == pytest.approx(scale)


def test_asp_refuses_a_discount_that_it_does_not_know() -> None:
    with pytest.raises(ConfigurationError, match=r"asp\(discount='half'\): discount must be one of none, inverse, sqrt"):
        ASP(discount="half")  # type: ignore[arg-type]


def test_asp_folds_one_at_a_time_and_admits_everybody() -> None:
    view = StillView({0: 9, 1: 0}, (contribution(0), contribution(1)))
    decision = ASP().fold(view)
    assert decision is not None and [c.worker for c in decision.fold] == [0]
    assert ASP().admit(view, 0) == Admit("nobody waits")
