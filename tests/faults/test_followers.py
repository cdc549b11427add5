"""Curves of a real job, whose worker, server and writer are killed: no version is missing, and the job does not notice the writer, also
while it stands still."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from tests.faults.job import GONE, SCRIPTS, Job, Start

LOGGED = str(SCRIPTS / "logged.py")


def writers(job: Job) -> list[psutil.Process]:
    found = []
    for process in job.processes():
        with contextlib.suppress(*GONE):
            found += [process] if "offbeat.view.log_to" in " ".join(process.cmdline()) else []
    return found


@pytest.mark.parametrize(
    "options", [pytest.param((), id="alone"), pytest.param(("--replicas", "1"), marks=pytest.mark.night, id="replicas")]
)
def test_no_death_ends_a_curve(start: Start, enough: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed")
    folder = tmp_path / "runs"
    job = start("--workers", "2", "--slow", "any=0.01", *options, "--log-to", f"tensorboard:{folder}", LOGGED, str(enough))
    job.contribution(1, 1)
    job.goes_on(20)
    (writer,) = job.wait("the writer", lambda: writers(job))
    writer.kill()
    job.wait("another writer", lambda: [one for one in writers(job) if one.pid != writer.pid])
    job.workers()[1].kill()
    job.contribution(1, 2)
    job.servers()[0].kill()
    job.goes_on(20)
    (writer,) = job.wait("the writer", lambda: writers(job))
    job.wait("its file", lambda: list(folder.glob(f"events*.{writer.pid}.*")))
    writer.send_signal(signal.SIGSTOP)  # one that never goes on: test_dashboard.py
    job.goes_on(20)
    writer.send_signal(signal.SIGCONT)
    ended = job.end(enough)
    assert ended.status == 0, ended.err
    assert "is not complete" not in ended.out and "lacks" not in ended.out, ended.out
    run = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    run.Reload()
    logged = {record["version"] for record in ended.records if record["kind"] == "metrics"}
    assert logged - {scalar.step for scalar in run.Scalars("steps")} == set()
    pushed = {record["version"] for record in ended.records if record["kind"] == "pushed" and record["loss"] is not None}
    assert pushed - {scalar.step for scalar in run.Scalars("loss")} == set()
