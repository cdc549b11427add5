"""Every process of a job is killed at once, or told to leave, and the job is resumed; its script says nothing about checkpoints."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from tests.faults.job import GONE, Start, signalled
from tests.faults.resuming import EPOCHS, SIZE, account, epoch_reports, kill_all, newest, result, until_checkpoint
from tests.support.same_state import same
from tests.tiers import marked

RULES = ["bsp", "ssp(staleness=2)", "ensemble", "majority", "dpsgd"]
SPLITS = {"ensemble"}
CALM = ("--slow", "any=0.03")
"""The job goes on for some seconds after the checkpoint that a test waits for, so that it is there when the test kills it."""


@pytest.mark.parametrize("sync", marked(RULES, night=RULES[1:]))
def test_a_job_that_was_killed_as_a_whole_goes_on(jobs: Start, tmp_path: Path, sync: str) -> None:
    folder, file = tmp_path / "checkpoints", tmp_path / "result.pt"
    options = ("--checkpoint", str(folder), "--auto-resume", "--every", "1v" if sync in SPLITS else "7v")
    first = jobs("first", "--sync", sync, *CALM, *options)
    until_checkpoint(first, folder, 1 if sync in SPLITS else 30)
    kill_all(first)
    taken = newest(folder)
    assert taken is not None
    place = dict(taken.manifest["optimizers"][0]["places"])[0]
    ended = jobs("second", *options, script=("--result", str(file))).ended()
    if sync in SPLITS:
        reports = [report for _, report in epoch_reports(ended.records)]
        assert all(report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == report["indices"] for report in reports)
    else:
        account(ended, place["epoch"])
    assert ended.records[0]["resumed"] == taken.version
    if sync == "bsp":
        whole = tmp_path / "whole.pt"
        assert jobs("whole", "--sync", sync, script=("--result", str(whole))).ended().status == 0
        assert same(result(file), result(whole)), "bit for bit"


def test_it_goes_on_with_other_numbers_of_workers_and_servers(jobs: Start, tmp_path: Path) -> None:
    """Four workers and two servers, then three workers and one server, then two servers again."""
    folder, calm = tmp_path / "checkpoints", ("--slow", "any=0.08")  # 60 and 80 versions, which the test stops half way
    first = jobs("first", "--workers", "4", "--servers", "2", *calm, "--checkpoint", str(folder), "--every", "5v")
    until_checkpoint(first, folder, 15)
    kill_all(first)
    second = jobs("second", "--workers", "3", "--servers", "1", *calm, "--resume", str(folder), "--every", "5v")
    taken = newest(folder)
    assert taken is not None
    until_checkpoint(second, folder, taken.version)
    kill_all(second)
    taken = newest(folder)
    assert taken is not None and taken.manifest["workers"] == 3
    ended = jobs("third", "--servers", "2", "--resume", str(folder)).ended()
    account(ended, dict(taken.manifest["optimizers"][0]["places"])[0]["epoch"])
    assert all(report["folded"] == SIZE for _, report in epoch_reports(ended.records))


TOLD = [
    ("loaders", signal.SIGTERM, "bsp", (), ("--loaders", "2")),
    ("supervisor", signal.SIGTERM, "bsp", (), ()),
    ("ranks", signal.SIGUSR1, "majority", (), ()),
    ("ctrl-c", signal.SIGINT, "asp", (), ("--loaders", "1")),
    ("preload", signal.SIGHUP, "dpsgd", ("--preload", "torch"), ()),
    ("standby", signal.SIGTERM, "bsp", ("--replicas", "1", "--servers", "2"), ()),
]


@pytest.mark.parametrize(("which", "number", "sync", "options", "script"), marked(TOLD, night=TOLD[1:]))
def test_a_job_that_is_told_to_leave_makes_a_last_checkpoint(
    jobs: Start, tmp_path: Path, which: str, number: signal.Signals, sync: str, options: tuple[str, ...], script: tuple[str, ...]
) -> None:
    """The signal comes to every process at once, as clusters send it, or to the supervisor alone."""
    folder = tmp_path / "checkpoints"
    every = ("--checkpoint", str(folder), "--every", "3600", "--sync", sync, *options)
    job = jobs("first", *CALM, *every, script=("--epochs", "1000", *script))
    job.wait("folds", lambda: job.folds() > 5)
    assert newest(folder) is None
    told = [process for process in job.processes() if which != "supervisor" or process.pid == job.process.pid]
    for process in told:
        with contextlib.suppress(*GONE):
            process.send_signal(number)
    ended = job.ended()
    assert ended.status == 128 + number and ended.last_line == f"offbeat: stopped by {number.name}", ended.err
    taken = newest(folder)
    assert taken is not None and taken.manifest["missing"] == [], ended.err
    assert "making a last checkpoint" in ended.err + ended.out
    left = {record["worker"] for record in ended.records if record["kind"] == "left"}
    assert left == {0, 1} and "Traceback" not in ended.err
    assert len(told) == 1 if which == "supervisor" else len(told) >= 4


@pytest.mark.parametrize("sync", marked(["bsp", "majority"], night=["bsp"]))
def test_a_finished_job_leaves_its_state_and_goes_on_from_it_where_more_is_asked_for(jobs: Start, tmp_path: Path, sync: str) -> None:
    folder = tmp_path / "checkpoints"
    first = jobs("first", "--sync", sync, "--checkpoint", str(folder), script=("--epochs", "1")).ended()
    assert first.status == 0, first.err
    taken = newest(folder)
    assert taken is not None and taken.manifest["finished"] and taken.manifest["missing"] == []
    assert max(record["version"] for record in first.records if record["kind"] == "fold") == taken.version
    second = jobs("second", "--resume", str(folder), script=("--epochs", "1")).ended()
    assert second.status == 0 and not [record for record in second.records if record["kind"] == "fold"], second.err
    assert f"going on from {taken.path}, version {taken.version}: the job had finished there" in second.err
    third = jobs("third", "--resume", str(folder), script=("--epochs", "2", "--lr", "0.5")).ended()
    assert third.status == 0 and [epoch for epoch, _ in epoch_reports(third.records)] == [1], third.err
    assert "is used (script: 0.5; set optimizer.param_groups[0]" in third.err + third.out


def test_where_no_server_can_go_on_the_death_of_one_ends_the_job_and_it_goes_on_by_resume(jobs: Start, tmp_path: Path) -> None:
    """Another model is refused before that."""
    folder = tmp_path / "checkpoints"
    first = jobs("first", *CALM, "--checkpoint", str(folder), "--every", "5v", "--max-restarts", "0")
    until_checkpoint(first, folder, 20)
    signalled(first.servers()[0], signal.SIGKILL)
    ended = first.ended()
    assert ended.status == 1
    assert ended.last_line.endswith(f"(--max-restarts is 0); offbeat run --resume {folder} goes on from the newest checkpoint")
    taken = newest(folder)
    assert taken is not None
    other = jobs("model", "--resume", str(folder), script=("--hidden", "9")).ended()
    assert other.status != 0
    assert "the checkpoint is of another model than the script's" in other.last_line and "(8, 4)" in other.last_line, other.err
    account(jobs("second", "--resume", str(folder)).ended(), dict(taken.manifest["optimizers"][0]["places"])[0]["epoch"])


def test_epochs_of_the_script() -> None:
    assert EPOCHS * SIZE // 4 // 2 == 120, "versions of two workers in step: the tests above count on them"
