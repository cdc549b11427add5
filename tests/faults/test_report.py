"""The report of a real job: while it runs, and after a worker was killed and the job has ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.faults.job import TRAIN, Job
from typer.testing import CliRunner

from offbeat.cli import app


def page(job: Job, out: Path) -> str:
    done = CliRunner().invoke(app, ["report", str(job.journal), "--html", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return out.read_text(encoding="utf-8")


def test_a_job_that_runs_and_one_that_has_ended(start: Callable[..., Job], enough: Path, tmp_path: Path) -> None:
    job = start("--workers", "3", "--sync", "bsp", "--slow", "2=0.2", "--kill", "1@12", TRAIN, "--until", str(enough))
    job.contribution(1, 2)  # the process that comes after the killed one
    growing = page(job, tmp_path / "growing.html")
    assert "has no end: the job goes on" in growing and "not finished" in growing
    ended = job.end(enough)
    assert ended.status == 0, ended.err
    whole = page(job, tmp_path / "whole.html")
    assert '<span class="pill good">finished</span>' in whole and "has no end" not in whole
    assert re.search(r"<h1>Worker 2 costs this job \d+ % of its time", whole)
    assert "Worker 1 died at" in whole and "Every index has one fate" in whole and "kill worker 1" in whole
    assert re.search(r"<dt>versions</dt><dd>offbeat \S+, torch \S+, python \S+</dd>", whole)
    done = CliRunner().invoke(app, ["report", str(job.journal), "--why", "wait"], catch_exceptions=False)
    found = re.search(r"^(\d+) of (\d+) waits ended with worker 2", done.output, re.MULTILINE)
    assert found is not None and int(found[1]) > 0.7 * int(found[2])
