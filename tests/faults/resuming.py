"""What tests of jobs that are killed as a whole, and resumed, have in common."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.faults.job import GONE, SCRIPTS, Ended, Job

from offbeat.journal.records import Record
from offbeat.runtime.job.checkpoint_folder import Checkpoint, CheckpointFolder

RESUMED = str(SCRIPTS / "resumed.py")
SIZE, EPOCHS = 240, 4
"""Of the script."""
DEADLINE_S = 120.0


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


def account(ended: Ended, first_epoch: int, epochs: int | None = EPOCHS) -> None:
    """Every epoch from this one on is reported, with each index. ``epochs``: of the script; None: as many as the test has let it make."""
    assert ended.status == 0, ended.err
    assert ended.tally().problems() == []
    reports = epoch_reports(ended.records)
    assert [epoch for epoch, _ in reports] == list(range(first_epoch, epochs or first_epoch + max(1, len(reports)))), reports
    for epoch, report in reports:
        assert report["indices"] == SIZE, (epoch, report)
        assert report["folded"] + report["dropped"] + report["rejected"] + report["unused"] == SIZE, (epoch, report)


def epoch_reports(records: Sequence[Record]) -> list[tuple[int, dict[str, Any]]]:
    return [(record["epoch"], record["report"]) for record in records if record["kind"] == "epoch_ended"]
