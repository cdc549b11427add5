"""Kill every process of a job at once, at random moments, and resume it: ``python -m tests.faults.resuming --times 50 --seed 1``.

Under ``bsp`` the parameters and the optimizer's state at the end must be those of a job that was never killed, bit for bit; under each
rule the reports of the epochs must account for every index.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tests.faults.job import GONE, SCRIPTS, Ended, Job
from tests.support.same_state import same

from offbeat.journal.records import Record
from offbeat.runtime.job.checkpoint_folder import Checkpoint, CheckpointFolder

RESUMED = str(SCRIPTS / "resumed.py")
SIZE, BATCH, EPOCHS = 240, 4, 4
"""Of the script."""
DEADLINE_S = 120.0
Start = Callable[[Path, Sequence[str]], Job]


def kill_all(job: Job) -> None:
    """Send SIGKILL to every process of a job, the supervisor first, and see that each is gone."""
    processes = sorted(job.processes(), key=lambda process: process.pid != job.process.pid)
    for process in processes:
        with contextlib.suppress(*GONE):
            process.send_signal(signal.SIGKILL)
    assert job.process.wait(DEADLINE_S) == -signal.SIGKILL
    assert len(processes) >= 3, processes


def newest(folder: Path) -> Checkpoint | None:
    return CheckpointFolder(folder).newest()


def until_checkpoint(job: Job, folder: Path, above: int = 0) -> None:
    """Wait for a complete checkpoint of a version above this one."""
    job.wait("a checkpoint", lambda: (found := newest(folder)) is not None and found.version > above, DEADLINE_S)


def result(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def account(ended: Ended, first_epoch: int) -> None:
    """Every epoch from this one on is reported, with each index."""
    assert ended.status == 0, ended.err
    assert ended.tally().problems() == []
    reports = epoch_reports(ended.records)
    assert [epoch for epoch, _ in reports] == list(range(first_epoch, EPOCHS)), reports
    for epoch, report in reports:
        assert report["indices"] == SIZE, (epoch, report)
        assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == SIZE, (epoch, report)


def epoch_reports(records: Sequence[Record]) -> list[tuple[int, dict[str, Any]]]:
    return [(record["epoch"], record["report"]) for record in records if record["kind"] == "epoch_ended"]


def trial(start: Start, folder: Path, draw: random.Random, options: Sequence[str], undisturbed_s: float) -> tuple[int, int]:
    """Run a job, kill it at a random moment after its first checkpoint, and resume it until it ends; sometimes it is killed twice.

    Returns:
        The number of kills, and of versions that were lost.
    """
    checkpoints, kills, lost = folder / "checkpoints", 0, 0
    job = start(folder / "first", ["--checkpoint", str(checkpoints), *options])
    while True:
        found = newest(checkpoints)
        before = 0 if found is None else found.version
        with contextlib.suppress(AssertionError):  # the job may end before it makes one more checkpoint
            until_checkpoint(job, checkpoints, before)
        ends_at = time.monotonic() + draw.uniform(0.0, undisturbed_s)
        while time.monotonic() < ends_at and job.process.poll() is None:
            with contextlib.suppress(Exception):
                job.process.wait(max(0.0, ends_at - time.monotonic()))
        if job.process.poll() is not None or kills == 2 or len(list(job.processes())) < 3:  # its workers may have ended before it
            job.ended(DEADLINE_S)
            return kills, lost
        kill_all(job)
        kills += 1
        reached = max((record["version"] for record in job.records() if record["kind"] == "fold"), default=0)
        found = newest(checkpoints)
        assert found is not None
        lost += max(0, reached - found.version)
        job._nothing_left()
        job = start(folder / f"resumed {kills}", ["--resume", str(checkpoints), *options])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    draw, jobs = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as place:

        def start(folder: Path, options: Sequence[str]) -> Job:
            folder.mkdir(parents=True)
            job = Job(
                folder,
                [*options, "--slow", "any=0.01", RESUMED, "--result", str(folder.parent / "result.pt")],
            )
            jobs.append(job)
            return job

        common = ["--sync", "bsp", "--workers", str(args.workers), "--servers", str(args.servers)]
        began = time.monotonic()
        whole = start(Path(place) / "whole" / "first", common)
        whole.wait("a push", lambda: any(record["kind"] == "fold" for record in whole.records()))
        trained = time.monotonic()
        assert whole.ended(DEADLINE_S).status == 0
        undisturbed_s = time.monotonic() - trained
        print(f"undisturbed: {time.monotonic() - began:.1f} s, of which {undisturbed_s:.1f} s of training")
        expected, failures, kills, lost = result(Path(place) / "whole" / "result.pt"), 0, 0, 0
        for number in range(args.times):
            folder = Path(place) / f"trial {number}"
            try:
                some, versions = trial(start, folder, draw, [*common, "--every", f"{draw.choice((1, 5, 17))}v"], undisturbed_s)
                kills, lost = kills + some, lost + versions
                equal = same(result(folder / "result.pt"), expected)
                failures += not equal
                print(json.dumps({"trial": number, "kills": some, "lost": versions, "equal": equal}), flush=True)
            except AssertionError as error:
                failures += 1
                print(f"trial {number}: {error}", flush=True)
            finally:
                for job in jobs:
                    job.clean_up()
                jobs.clear()
    print(f"{args.times} jobs, {kills} times killed as a whole, {lost} versions computed anew, {failures} differ or failed")
    return 1 if failures or kills < args.times // 2 else 0


if __name__ == "__main__":
    sys.exit(main())
