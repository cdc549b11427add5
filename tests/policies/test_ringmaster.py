"""Asynchronous steps with a bound on the staleness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.core.hand import Hand, names, only
from tests.core.promises import Asynchronous

from offbeat.core.effects import Fold, Release, Settle
from offbeat.core.events import Lost, Pushed
from offbeat.policies import ASP, Ringmaster
from offbeat.types import Fate


class Capped(Asynchronous):
    """The same, and nothing that is folded is as stale as the threshold."""

    drops = True

    @staticmethod
    def most_stale(rule: Any, workers: int) -> int:
        threshold: int = rule.threshold
        return threshold - 1

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        super().fold(effect, pushes)
        assert effect.parts[0].staleness < self.rule.threshold


PROMISES = {Ringmaster: Capped}
REFUSED = [(f"ringmaster(threshold={threshold})", "threshold must be a whole number, at least 1") for threshold in (0, -1, True, 2.5)]


def test_ringmaster_golden_history() -> None:
    """Worker 0 is three times as fast: with a threshold of 2 the slow one's first gradient, 3 versions old, is dropped."""
    job = Hand(Ringmaster(threshold=2), 2)
    for version in range(3):
        assert names(job.push(0, version)) == ["Fold", "Settle 0", "Release 0"]
    effects = job.push(1, 0)
    settle = only(Settle, effects)
    assert (settle.fate, settle.reason) == (Fate.DROPPED, "its staleness of 3 is not below 2") and only(Release, effects).version == 3
    fold = only(Fold, job.push(0, 3))
    assert fold.parts[0].staleness == 0
    fold = only(Fold, job.push(1, 3))
    assert fold.parts[0].staleness == 1 and fold.reason == "its staleness of 1 is below 2"


def test_beyond_any_staleness_it_is_asp() -> None:
    ringmaster, asp = Hand(Ringmaster(threshold=100), 2), Hand(ASP(), 2)
    for worker, version in ((0, 0), (0, 1), (1, 0), (1, 3), (0, 2)):
        fold, same = only(Fold, ringmaster.push(worker, version)), only(Fold, asp.push(worker, version))
        assert (fold.version, fold.parts, fold.scale) == (same.version, same.parts, same.scale)


def test_the_death_of_one_worker_holds_up_nobody() -> None:
    job = Hand(Ringmaster(threshold=1), 2)
    job(Lost(1, "killed"))
    assert only(Fold, job.push(0, 0)).version == 1
