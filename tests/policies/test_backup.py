"""A fixed number of backup workers."""

from __future__ import annotations

import pytest
from tests.policies.views import StillView, contribution
from tests.protocol.hand import Hand, names, only

from offbeat.errors import ConfigurationError
from offbeat.policies import Backup
from offbeat.protocol.effects import Fold, Release, Settle
from offbeat.protocol.events import Lost
from offbeat.types import Fate


def test_backup_golden_history() -> None:
    """Three workers, one of them spare: two fresh gradients make a version, the third comes too late and starts afresh."""
    job = Hand(Backup(b=1), 3)
    assert job.push(2, 0) == []
    fold = only(Fold, job.push(0, 0))
    assert fold.version == 1 and [(p.worker, p.weight) for p in fold.parts] == [(2, 0.5), (0, 0.5)]
    effects = job.push(1, 0)
    assert names(effects) == ["Settle 1", "Release 1"]
    settle = only(Settle, effects)
    assert (settle.fate, settle.reason) == (Fate.DROPPED, "computed from an older version than 1") and only(Release, effects).version == 1
    assert job.push(1, 1) == []
    assert [p.worker for p in only(Fold, job.push(2, 1)).parts] == [1, 2]


def test_k_follows_the_living() -> None:
    """k = 4 - 1; after one death it is 2, after two it is 1."""
    job = Hand(Backup(b=1), 4)
    job.push(0, 0)
    assert names(job(Lost(3, "killed"))) == ["StateChanged 3"]
    assert len(only(Fold, job.push(1, 0)).parts) == 2
    job(Lost(2, "killed"))
    assert len(only(Fold, job.push(0, 1)).parts) == 1


def test_who_died_after_its_push_counts_among_the_first_and_in_n() -> None:
    """b=0 is a barrier, also then: worker 0 has pushed and died, and 1 is not outrun by it."""
    view = StillView({1: 0}, (contribution(0),))
    assert Backup(b=0).fold(view) is None
    decision = Backup(b=1).fold(view)
    assert decision is not None and [c.worker for c in decision.fold] == [0]


def test_one_gradient_makes_a_version_however_few_are_left() -> None:
    decision = Backup(b=3).fold(StillView({0: 1, 1: 0}, (contribution(0),)))
    assert decision is not None and len(decision.fold) == 1
    assert Backup(b=3).fold(StillView({0: 0, 1: 0})) is None


def test_more_spare_workers_than_workers_are_refused() -> None:
    Backup(b=3).check(4)
    with pytest.raises(ConfigurationError, match=r"backup\(b=4\) with 4 workers .* b must be at most 3"):
        Backup(b=4).check(4)
    with pytest.raises(ConfigurationError, match=r"backup\(b=-1\): b must be a whole number, at least 0"):
        Backup(b=-1)
