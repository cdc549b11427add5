"""A server dies in a job that makes checkpoints, or goes on from one: the job goes on, and so does a later job from each checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.faults.job import Ended, Job, Start, orders_to_die
from tests.faults.resuming import DEADLINE_S, account, epoch_reports, result, until_checkpoint
from tests.support.same_state import same
from tests.tiers import marked

from offbeat.runtime.job.checkpoint_folder import Checkpoint, CheckpointFolder, sound_manifest

SLOW = ("--slow", "any=0.04")
"""The job goes on for some seconds after the checkpoint that a test waits for, so that a server can die then."""


@pytest.fixture
def jobs(jobs: Start, tmp_path: Path) -> Start:
    """Start jobs of one test with two servers, each with a folder of its own, where it writes what it has at its end."""

    def begin(name: str, *options: str, models: str = "1", environment: Mapping[str, str] | None = None) -> Job:
        own = ("--models", models, "--result", str(tmp_path / name / "result.pt"))
        return jobs(name, "--servers", "2", "--max-restarts", "9", *options, script=own, environment=environment)

    return begin


def undisturbed(jobs: Start, tmp_path: Path, models: str = "1") -> Any:
    """What a job of so many models has at its end that makes no checkpoints, and in which nobody dies."""
    account(jobs("calm", models=models).ended(DEADLINE_S), 0)
    return result(tmp_path / "calm" / "result.pt")


def complete(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder, the oldest first; nothing else is in it."""
    found = [Checkpoint(path, sound_manifest(path)) for _, path in reversed(CheckpointFolder(folder).versions())]
    assert sorted(os.listdir(folder)) == [checkpoint.path.name for checkpoint in found], "only complete checkpoints are left"
    return found


def restarts(ended: Ended, role: str, what: str = "restarted") -> list[float]:
    return [r["t"] for r in ended.records if r["kind"] == "process" and r["role"] == role and r["what"] == what]


CASES = [
    ("bsp", "2", 0, 0, "whole", "1-told"),
    ("bsp", "1", 0, 0, "whole", "1-told"),
    ("bsp", "1", 1, 1, "filed", "0-whole"),
    ("ssp(staleness=1)", "2", 1, 1, "filed", "0-whole"),
]
"""Of both ways in which a server goes on: without replicas, and with them."""


@pytest.mark.parametrize(("sync", "models", "replicas", "victim", "phase", "then"), marked(CASES, night=CASES[1:]))
def test_a_death_in_each_phase_of_a_checkpoint(
    jobs: Start, tmp_path: Path, sync: str, models: str, replicas: int, victim: int, phase: str, then: str
) -> None:
    """A job then goes on from a later checkpoint, and each server dies as well, the second one when that checkpoint is gone."""
    how, what = [("it goes on in a new process (1 of 9)", "restarted"), ("its standby leads from now on (term 2)", "taken over")][replicas]
    more = ("--replicas", str(replicas), "--sync", sync)
    folder, orders = tmp_path / "checkpoints", tmp_path / "orders"
    environment = orders_to_die(orders)
    job = jobs("first", *SLOW, *more, "--checkpoint", str(folder), "--every", "5v", "--keep", "99", models=models, environment=environment)
    until_checkpoint(job, folder)
    (orders / f"{victim}-{phase}").touch()
    ended = job.ended(DEADLINE_S)
    account(ended, 0)
    whole = undisturbed(jobs, tmp_path, models) if sync == "bsp" else None
    assert not os.listdir(orders) and f"server {victim} killed by SIGKILL: {how}" in ended.out
    [at] = restarts(ended, "server", what)
    assert not restarts(ended, "worker")
    assert whole is None or same(result(tmp_path / "first" / "result.pt"), whole), "bit for bit"

    made, reported = complete(folder), [r for r in ended.records if r["kind"] == "checkpoint"]
    assert [r["version"] for r in reported] == [checkpoint.version for checkpoint in made], "each is reported, and once"
    assert not any(r["missing"] for r in reported)
    after = [r["version"] for r in reported if r["t"] > at]
    going = next(r["version"] for r in ended.records if r["kind"] == "fold" and r["t"] > at)
    assert after[0] <= going + 5, f"one that was cut off is made again at once, and not {after[0] - going} versions after the return"

    began = folder / f"version-{after[0]:08d}"
    for checkpoint in made:
        if checkpoint.version > after[0]:
            shutil.rmtree(checkpoint.path)
    (orders / then).touch()
    second = jobs("second", *SLOW, *more, "--resume", str(folder), "--every", "2v", "--keep", "1", models=models, environment=environment)
    second.wait("the removal", lambda: not began.exists())
    (orders / f"{1 - int(then[0])}-told").touch()
    ended = second.ended(DEADLINE_S)
    assert not os.listdir(orders), ended.err
    account(ended, epoch_reports(ended.records)[0][0])
    assert ended.records[0]["resumed"] == after[0]
    assert len(restarts(ended, "server", what)) == 2 and not restarts(ended, "worker")
    assert whole is None or same(result(tmp_path / "second" / "result.pt"), whole), "bit for bit"


def test_a_last_checkpoint_is_made_although_a_server_dies(jobs: Start, tmp_path: Path) -> None:
    folder, orders = tmp_path / "checkpoints", tmp_path / "orders"
    job = jobs("first", "--slow", "any=0.1", "--checkpoint", str(folder), "--every", "3600", environment=orders_to_die(orders))
    job.wait("a fold", lambda: job.folds() > 5)
    (orders / "0-files").touch()
    job.process.send_signal(signal.SIGTERM)
    ended = job.ended(DEADLINE_S)
    assert ended.status == 128 + signal.SIGTERM and not os.listdir(orders)
    [made] = complete(folder)
    assert made.manifest["missing"] == []
