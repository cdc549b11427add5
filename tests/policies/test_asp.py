"""Nobody waits."""

from __future__ import annotations

import pytest
from tests.core.hand import Hand, names, only
from tests.core.promises import Asynchronous
from tests.policies.views import StillView, contribution

from offbeat.core.effects import Fold, Release
from offbeat.core.policy import Admit
from offbeat.policies import ASP
from offbeat.policies.asp import Discount

PROMISES = {ASP: Asynchronous}
REFUSED = [("asp(discount=half)", r"asp\(discount='half'\): discount must be one of none, inverse, sqrt")]


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


def test_asp_folds_one_at_a_time_and_admits_everybody() -> None:
    view = StillView({0: 9, 1: 0}, (contribution(0), contribution(1)))
    decision = ASP().fold(view)
    assert decision is not None and [c.worker for c in decision.fold] == [0]
    assert ASP().admit(view, 0) == Admit("nobody waits")
