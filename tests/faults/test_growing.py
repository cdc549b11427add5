"""A real job of one machine grows by commands that join it, and gives their workers back, however these commands end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.faults.job import QUICK, TRAIN, Job, Start, signalled
from tests.faults.resuming import account, kill_all, newest, until_checkpoint
from tests.tiers import marked

from offbeat.journal.worker_summary import NO_JOINER

pytestmark = [pytest.mark.timeout(480), pytest.mark.usefixtures("found_alone")]
Joins = Callable[..., "subprocess.Popen[str]"]
ENDED = "the command that had joined the job has ended"


@pytest.fixture
def joins() -> Iterator[Joins]:
    """Start a command that joins a job: ``joins(job, "--workers", "2")``."""
    begun: list[subprocess.Popen[str]] = []

    def begin(job: Job, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "offbeat.cli", "run", "--join", str(job.process.pid), *options]
        environment = {**os.environ, **QUICK}
        begun.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True))
        return begun[-1]

    yield begin
    for one in begun:
        one.kill()
        one.communicate()


@pytest.mark.parametrize("rule", marked(["bsp", "full", "ssp(staleness=3)", "dpsgd"], night=["bsp", "ssp(staleness=3)", "dpsgd"]))
def test_workers_join_die_and_leave_and_every_index_is_used_once(start: Start, joins: Joins, enough: Path, rule: str) -> None:
    job = start("--workers", "2..4", "--sync", rule, "--slow", "any=0.01", TRAIN, "--until", str(enough))
    job.began(2)
    assert set(job.workers()) == {0, 1} and job.record("state_changed", worker=3)["reason"] == NO_JOINER
    first = joins(job, "--workers", "2")
    job.contribution(2, 1)
    job.contribution(3, 1)
    signalled(job.workers()[2], signal.SIGKILL)
    job.contribution(2, 2)
    first.send_signal(signal.SIGTERM)
    for worker in (2, 3):
        assert job.record("process", number=worker, what="lost")["detail"] == ENDED
        assert job.record("state_changed", worker=worker, state="finished")["reason"] == "it was told to leave"
    assert first.wait(60) == 143 and first.stderr is not None
    lines = first.stderr.read().splitlines()
    assert lines[0].startswith("offbeat: workers 2 and 3 joined ") and lines[-1].endswith(": its workers have left"), lines
    job.goes_on()
    second = joins(job)
    job.contribution(2, 3)
    joined = job.workers()[2]
    signalled(psutil.Process(second.pid), signal.SIGKILL)
    joined.wait(60)
    job.goes_on()
    third = joins(job)
    job.contribution(2, 4)
    job.workers()[2].send_signal(signal.SIGTERM)
    assert third.wait(60) == 1 and third.stderr is not None, "it has no worker left"
    assert third.stderr.read().splitlines()[-1].endswith(": its workers have ended before the job")
    fourth = joins(job, "--workers", "2")
    job.contribution(2, 5)
    job.contribution(3, 2)
    ended = job.end(enough)
    assert fourth.wait(60) == 0
    ended.accounted()
    assert "worker 2 died (killed by SIGKILL): restarted (1 of 3)" in ended.out and "worker 3 died" not in ended.out


@pytest.mark.parametrize("rule", marked(["bsp", "full", "dpsgd"], night=["full", "dpsgd"]))
def test_a_job_that_has_grown_resumes_with_the_workers_that_it_had_begun_with(
    jobs: Start, joins: Joins, tmp_path: Path, enough: Path, rule: str
) -> None:
    folder, calm, script = tmp_path / "checkpoints", ("--slow", "any=0.02"), ("--until", str(enough))
    first = jobs("first", "--workers", "2..3", "--sync", rule, *calm, "--checkpoint", str(folder), "--every", "5v", script=script)
    first.began(2)
    joins(first)
    first.contribution(2, 1)
    until_checkpoint(first, folder, max(record["version"] for record in first.records() if record["kind"] == "fold"))
    kill_all(first)
    taken = newest(folder)
    assert taken is not None and (taken.manifest["least"], taken.manifest["workers"]) == (2, 3)
    second = jobs("second", "--resume", str(folder), *calm, script=script)
    second.began(2)
    assert set(second.workers()) == {0, 1} and second.record("state_changed", worker=2)["reason"] == NO_JOINER
    joiner = joins(second)
    second.record("settle", worker=2, fate="folded", after=second.record("joined", worker=2)["t"])
    enough.touch()
    account(second.ended(), dict(taken.manifest["optimizers"][0]["places"])[0]["epoch"], epochs=None)
    assert joiner.wait(60) == 0
