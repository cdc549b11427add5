"""Workers that average fragments, as real processes on two servers: the others go on when one is killed or frozen, and it comes back."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.faults.job import TRAIN, Start, signalled
from tests.faults.test_workers import CALM


@pytest.mark.parametrize("sync", ["diloco(steps=4, delay=1, alpha=0.5)", "decoupled(steps=4, quorum=2, delay=1)"])
def test_a_killed_worker_holds_nobody_up_and_comes_back(start: Start, enough: Path, tmp_path: Path, sync: str) -> None:
    timeout_s, back = 10.0, tmp_path / "back"
    script = (TRAIN, "--until", str(enough), "--back-with", str(back))
    job = start("--workers", "3", "--servers", "2", "--timeout", str(timeout_s), "--sync", sync, *CALM, *script)
    job.began(3)
    signalled(job.workers()[2], signal.SIGKILL)
    died = job.record("state_changed", worker=2, state="dead", incarnation=1)
    assert job.record("process", number=2, role="worker", what="exited")["detail"] == "killed by SIGKILL"
    for shard in (0, 1):
        job.record("fold", after=died["t"], shard=shard)
    back.touch()
    job.contribution(2, 2)
    ended = job.end(enough)
    ended.accounted()
    folds = [record for record in ended.records if record["kind"] == "fold"]
    without = [fold for fold in folds if fold["t"] > died["t"] and 2 not in {part["worker"] for part in fold["parts"]}]
    assert {fold["shard"] for fold in without} == {0, 1}, "the others have waited for the dead"
    assert without[0]["t"] - died["t"] < timeout_s / 2
    assert {part["incarnation"] for fold in folds for part in fold["parts"] if part["worker"] == 2} == {1, 2}


def test_under_decoupled_a_frozen_worker_is_not_missed(start: Start, enough: Path) -> None:
    """While it counts as alive, fragments are folded without it, again and again; when it wakes up it goes on as if nothing had been.

    Only the end of an epoch waits for the samples that it has, so the epoch is long.
    """
    samples = 8000
    sync = ("--sync", "decoupled(steps=4, quorum=1, grace=0.1, delay=1)")
    script = (TRAIN, "--until", str(enough), "--samples", str(samples))
    job = start("--workers", "3", "--servers", "2", "--timeout", "100", *sync, *CALM, *script)
    job.began(3)

    def with_it() -> list[bool]:
        """Of each of the last eight folds: whether worker 1 has a part in it."""
        folds = [record for record in job.records() if record["kind"] == "fold"]
        return [any(part["worker"] == 1 for part in fold["parts"]) for fold in folds[-8:]]

    frozen = job.workers()[1]
    signalled(frozen, signal.SIGSTOP)
    job.wait("folds without it", lambda: not any(with_it()))
    signalled(frozen, signal.SIGCONT)
    job.wait("a fold with it", lambda: any(with_it()))
    ended = job.end(enough)
    ended.accounted(samples)
    assert not [record for record in ended.records if record["kind"] == "state_changed" and record["state"] == "dead"]
