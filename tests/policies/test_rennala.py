"""A batch of gradients of one version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.core.hand import Hand, names, only
from tests.core.promises import Promises, fresh

from offbeat.core.effects import Effect, Fold, Release, Settle
from offbeat.core.events import Event, Lost, Pushed
from offbeat.policies import Rennala
from offbeat.types import Fate


class Batched(Promises):
    """Fresh gradients, as many as the rule says unless nobody computes, and nobody waits."""

    drops = True

    @staticmethod
    def most_stale(rule: Any, workers: int) -> int:
        return 0

    def fold(self, effect: Fold, pushes: Sequence[Pushed]) -> None:
        fresh(effect)
        short = effect.reason.endswith("nobody computes")
        assert len(effect.parts) < self.rule.batch if short else len(effect.parts) == self.rule.batch

    def step(self, event: Event | None, effects: Sequence[Effect]) -> None:
        assert not self.ledger.waiting, f"worker {min(self.ledger.waiting)} waits"
        assert len(self.ledger.gathered) < self.rule.batch


PROMISES = {Rennala: Batched}
REFUSED = [(f"rennala(batch={batch})", r"rennala\(batch=.*\): batch must be a whole number, at least 1") for batch in (0, -1, True, 2.0)]


def test_rennala_golden_history() -> None:
    """Two workers, batches of three: the fast one gives two gradients of version 0, and the slow one's completes the batch."""
    job = Hand(Rennala(batch=3), 2)
    for _ in range(2):
        effects = job.push(0, 0)
        assert names(effects) == ["Gather 0", "Release 0"] and only(Release, effects).version == 0
    fold = only(Fold, job.push(1, 0))
    assert fold.version == 1 and [(p.worker, p.clock, p.staleness) for p in fold.parts] == [(0, 1, 0), (0, 2, 0), (1, 1, 0)]
    assert fold.reason == "3 gradients of version 0 are in" and sum(p.weight for p in fold.parts) == pytest.approx(1.0)
    # The fast one has begun its third at version 0: that comes too late.
    effects = job.push(0, 0)
    settle = only(Settle, effects)
    assert (settle.fate, settle.reason) == (Fate.DROPPED, "computed from an older version than 1") and only(Release, effects).version == 1


def test_what_the_dead_have_handed_in_counts_and_the_last_to_go_leaves_nothing_behind() -> None:
    job = Hand(Rennala(batch=3), 2)
    job.push(0, 0)
    assert "Fold" not in names(job(Lost(0, "killed")))
    job.push(1, 0)
    fold = only(Fold, job(Lost(1, "killed")))
    assert [p.worker for p in fold.parts] == [0, 1] and fold.reason == "2 gradients of version 0 are in, and nobody computes"
